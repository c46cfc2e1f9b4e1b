"""Sessions that give their cache's memory back between calls."""

import os

import pytest
import torch

from attn_ops import AttentionSpec, PagedKVCache
from tests.kit.models import build_model
from tests.kit.sessions import captured, make_session


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="Linux says what is resident")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_memory_goes_back_and_comes_zero_at_its_address(layout):
    spec = AttentionSpec(4, 2, 64, torch.float32)
    cache = PagedKVCache([spec] * 3, num_tokens=2**15, can_sleep=True, cache_layout=layout)
    plain = PagedKVCache([spec], num_tokens=64, cache_layout=layout).tensors[0]
    addresses = [tensor.data_ptr() for tensor in cache.tensors]
    assert all(address % 512 == 0 for address in addresses)
    assert cache.tensors[0].shape[1:] == plain.shape[1:]
    assert cache.tensors[0].stride()[1:] == plain.stride()[1:]
    assert len({tensor.untyped_storage().data_ptr() for tensor in cache.tensors}) == 3
    for tensor in cache.tensors:
        assert not tensor.any()
        tensor.fill_(1.0)
    full = resident_bytes()
    cache.sleep()
    cache.sleep()
    assert full - resident_bytes() > 0.9 * cache.num_bytes
    cache.wake()
    assert [tensor.data_ptr() for tensor in cache.tensors] == addresses
    assert not any(tensor.any() for tensor in cache.tensors)


@pytest.mark.parametrize("make", [make_session, captured])
def test_tokens_are_right_in_every_round(make):
    model, prompts = build_model("llama"), [[5, 9, 3], [7] * 20, [1]]
    wanted = make(model).generate(prompts, 8)
    session = make(model, can_sleep=True, share_prefixes=True)
    for _ in range(5):
        assert session.generate(prompts, 8) == wanted
        session.sleep()
        for call in (lambda: session.generate(prompts, 8), session.warm_up):
            with pytest.raises(RuntimeError, match=r"the session sleeps; wake\(\) comes"):
                call()
        session.wake()


def test_what_is_refused():
    model = build_model("llama")
    with pytest.raises(ValueError, match="can_sleep must be True for a cache that sleeps"):
        make_session(model).sleep()
    session = make_session(model, can_sleep=True)
    session.add([1, 2], 4)
    with pytest.raises(ValueError, match="session must have nothing unfinished, got 1"):
        session.sleep()
