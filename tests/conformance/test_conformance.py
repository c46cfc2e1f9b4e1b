"""Every backend x what it declares, against the float64 oracle; the rest must be refused.

On a CPU the backends that run there (TRITON interpreted); marked `gpu`, all of them on CUDA.
"""

import functools

import pytest
import torch

from attn_ops import AttentionSpec, attention, attention_with_lse, backend_names, get_backend

from .features import FEATURES, LENGTHS, make_case

HEADS = {"mha": (2, 2), "gqa": (8, 2), "mqa": (4, 1)}


def places() -> list:
    """(backend, device) for every backend and device type that it declares."""
    found = []
    for name in backend_names():
        for device in get_backend(name).support.devices:
            marks = [pytest.mark.gpu] if device == "cuda" else []
            found.append(pytest.param(name, device, marks=marks, id=f"{name}-{device}"))
    return found


on_every_place = pytest.mark.parametrize(("name", "device"), places())


def head_size_of(support) -> int:
    """A size that the backend takes; small where the interpreter has to run it."""
    return 64 if not support.head_sizes or 64 in support.head_sizes else support.head_sizes[0]


def block_size_of(support) -> int:
    return 16 if not support.block_sizes or 16 in support.block_sizes else support.block_sizes[0]


@functools.cache
def compiled_attention():
    return torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)


def usable(name: str):
    backend = get_backend(name)
    missing = backend.unavailable()
    assert missing is None, f"{name} must run here for its conformance to be tested: {missing}"
    return backend


@on_every_place
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("batch", LENGTHS)
def test_features(name, device, feature, batch):
    """Every dtype, eager and compiled, on ragged batches; undeclared features are refused."""
    backend, asked = usable(name), FEATURES[feature]
    support = backend.support
    for dtype in support.dtypes:
        spec = AttentionSpec(4, 2, head_size_of(support), dtype, **asked.spec)
        arguments = (backend, spec, LENGTHS[batch], asked, block_size_of(support))
        if not asked.declared(support):
            with pytest.raises(ValueError, match=rf"({asked.refusal}).*supported"):
                make_case(*arguments, device=device)
            continue
        case = make_case(*arguments, device=device)
        case.check(attention(case.q, case.kv_cache, case.meta, case.scale, **case.options))
        if dtype == support.dtypes[0]:
            torch._dynamo.reset()
            attend = compiled_attention()
            case.check(attend(case.q, case.kv_cache, case.meta, case.scale, **case.options))


@on_every_place
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_log_sum_exp(name, device, feature, batch):
    backend, asked = usable(name), FEATURES[feature]
    support = backend.support
    if not asked.declared(support):
        feature, asked = "plain", FEATURES["plain"]
    spec = AttentionSpec(4, 2, head_size_of(support), support.dtypes[0], **asked.spec)
    case = make_case(backend, spec, LENGTHS[batch], asked, block_size_of(support), device=device)
    arguments = (case.q, case.kv_cache, case.meta, case.scale)
    if not support.lse:
        with pytest.raises(ValueError, match=f"{name} cannot return the log-sum-exp"):
            attention_with_lse(*arguments, **case.options)
        return
    case.check(*attention_with_lse(*arguments, **case.options))


@on_every_place
@pytest.mark.parametrize("heads", HEADS)
def test_groups(name, device, heads):
    backend = usable(name)
    support = backend.support
    spec = AttentionSpec(*HEADS[heads], head_size_of(support), support.dtypes[0])
    for batch in ("decode", "mixed"):
        case = make_case(
            backend, spec, LENGTHS[batch], FEATURES["plain"], block_size_of(support), device=device
        )
        case.check(attention(case.q, case.kv_cache, case.meta, case.scale))


@on_every_place
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 192, 256])
def test_head_sizes(name, device, head_size):
    backend = usable(name)
    support = backend.support
    spec = AttentionSpec(2, 1, head_size, support.dtypes[0])
    for batch in ("decode", "uniform"):
        arguments = (backend, spec, LENGTHS[batch], FEATURES["plain"], block_size_of(support))
        if support.head_sizes and head_size not in support.head_sizes:
            with pytest.raises(ValueError, match=r"head_size must be supported, got .*supported: "):
                make_case(*arguments, device=device)
            continue
        case = make_case(*arguments, device=device)
        case.check(attention(case.q, case.kv_cache, case.meta, case.scale))


@on_every_place
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes(name, device, block_size):
    backend = usable(name)
    support = backend.support
    spec = AttentionSpec(2, 1, head_size_of(support), support.dtypes[0])
    for batch in ("decode", "mixed"):
        arguments = (backend, spec, LENGTHS[batch], FEATURES["plain"], block_size)
        if support.block_sizes and block_size not in support.block_sizes:
            with pytest.raises(
                ValueError, match=r"block_size must be supported, got .*supported: "
            ):
                make_case(*arguments, device=device)
            continue
        case = make_case(*arguments, device=device)
        case.check(attention(case.q, case.kv_cache, case.meta, case.scale))


@on_every_place
def test_no_tokens(name, device):
    """A batch without requests, and one whose requests have no query tokens."""
    backend = usable(name)
    support = backend.support
    spec = AttentionSpec(4, 2, head_size_of(support), support.dtypes[0])
    for lengths in (([], []), ([0, 0], [5, 0])):
        case = make_case(
            backend, spec, lengths, FEATURES["plain"], block_size_of(support), device=device
        )
        case.check(attention(case.q, case.kv_cache, case.meta, case.scale))
