"""Blocks of layers with a window: the figures of docs/sessions.md."""

import dataclasses
import types

import pytest
import torch

from attn_ops import AttentionSpec
from graphs.cache_size import Windows
from graphs.options import SessionOptions

GIB = 2**30
MODELS = {  # layers, every so many of which see all keys; heads, KV heads, head size; window
    "gemma-3-12b": (48, 6, 16, 8, 256, 1024),
    "gpt-oss-120b": (36, 2, 64, 8, 64, 128),
}


def windows_of(name: str, options: SessionOptions, *, takes_windows: bool = True) -> Windows:
    layers, every, *heads, window = MODELS[name]
    specs = [
        AttentionSpec(*heads, torch.bfloat16, sliding_window=window if (i + 1) % every else None)
        for i in range(layers)
    ]
    config = types.SimpleNamespace(_attn_implementation="attn_ops")
    config.get_text_config = lambda: config
    model = types.SimpleNamespace(config=config)
    return Windows.of(specs, options, model, types.SimpleNamespace(takes_windows=takes_windows))


@pytest.mark.parametrize(
    ("name", "same", "own"), [("gemma-3-12b", 768, 152), ("gpt-oss-120b", 144, 73)]
)
def test_bytes_of_64_requests(name, same, own):
    options = SessionOptions(max_batch_size=64, max_tokens=32_768)
    num_blocks = options.num_cache_tokens // options.block_size + 1
    found = windows_of(name, options)
    assert round(found.num_bytes(num_blocks) / GIB) == own
    assert round(num_blocks * (found.bytes_whole + found.bytes_window) / GIB) == same


def test_tokens_in_80_gib():
    options = SessionOptions(max_batch_size=64, max_tokens=32_768)
    found = windows_of("gemma-3-12b", options)
    one_kind = windows_of("gemma-3-12b", options, takes_windows=False)
    assert found.fitting(80 * GIB) * options.block_size == 921_520
    assert one_kind.fitting(80 * GIB) * options.block_size == 218_448
    for number in (2, 500, 10_000):
        assert found.num_bytes(found.fitting(number * GIB // 10)) <= number * GIB // 10


def test_prefixes_leave_room_for_layers_that_see_all_keys():
    """As many blocks of windows as leave every request its longest; at least those of a batch."""
    options = SessionOptions(max_batch_size=64, max_tokens=32_768)
    batch = windows_of("gemma-3-12b", options)
    found = windows_of("gemma-3-12b", dataclasses.replace(options, share_prefixes=True))
    wanted = options.num_cache_tokens // options.block_size + 1
    assert (batch.num_blocks, found.num_blocks) == (batch.least_blocks, 8 * batch.least_blocks)
    assert batch.within(80 * GIB, wanted) is batch
    numbers = []
    for size in (80, 140, 170, 400, 1000):
        given = found.within(size * GIB, wanted)
        assert given.within(size * GIB, wanted) is given
        assert given.num_bytes(given.fitting(size * GIB)) <= size * GIB
        numbers.append((given.num_blocks, given.fitting(size * GIB) >= wanted))
    assert [room for _, room in numbers] == [False, False, True, True, True]
    in_80_gib = found.within(80 * GIB, wanted).fitting(80 * GIB)
    assert in_80_gib * options.block_size == 921_520
    assert numbers[0][0] == batch.least_blocks
    assert numbers[0][0] < numbers[2][0] < numbers[4][0] == found.num_blocks
