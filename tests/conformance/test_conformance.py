"""Every backend x what it declares, against the float64 oracle; the rest must be refused.

On a CPU the backends that run there (TRITON interpreted); marked `gpu`, all of them on CUDA.
"""

import pytest
import torch

from attn_ops import (
    AttentionSpec,
    attention,
    attention_with_lse,
    backend_names,
    get_backend,
    varlen_attention,
    varlen_metadata,
    write_kv,
)
from tests.conformance.features import (
    CROSS,
    FEATURES,
    LENGTHS,
    TOLERANCE,
    UNIFORM,
    chunked_oracle,
    make_case,
)

OPTIONAL = ("VARLEN",)
"""Not to be had on the torch of the GPU machine (2.11); the skip says why."""

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


def compiled_attention():
    return torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)


def usable(name: str):
    backend = get_backend(name)
    missing = backend.unavailable()
    if name in OPTIONAL and missing is not None:
        pytest.skip(missing)
    assert missing is None, f"{name} must run here for its conformance to be tested: {missing}"
    return backend


@on_every_place
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("batch", LENGTHS)
def test_features(name, device, feature, batch):
    """Every dtype on ragged batches; undeclared features are refused."""
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


@on_every_place
@pytest.mark.parametrize("feature", FEATURES)
def test_compiled_features(name, device, feature, num_graphs):
    """One graph for all ragged batches."""
    backend, asked = usable(name), FEATURES[feature]
    support = backend.support
    if not asked.declared(support):
        pytest.skip(f"{name} does not declare {feature}: it is refused by test_features")
    spec = AttentionSpec(4, 2, head_size_of(support), support.dtypes[0], **asked.spec)
    before, attend = num_graphs(), compiled_attention()
    for lengths in LENGTHS.values():
        case = make_case(backend, spec, lengths, asked, block_size_of(support), device=device)
        case.check(attend(case.q, case.kv_cache, case.meta, case.scale, **case.options))
    assert num_graphs() - before == 1


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
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 192, 256, 512])
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


def plain_spec(support, **geometry) -> AttentionSpec:
    return AttentionSpec(4, 2, head_size_of(support), support.dtypes[0], **geometry)


@on_every_place
@pytest.mark.parametrize("length", UNIFORM)
def test_uniform_queries(name, device, length):
    """Drafts to verify, 2 to 8 rows a request."""
    backend = usable(name)
    support = backend.support
    block_size = block_size_of(support)
    case = make_case(
        backend, plain_spec(support), UNIFORM[length], FEATURES["plain"], block_size, device=device
    )
    case.check(attention(case.q, case.kv_cache, case.meta, case.scale))


@on_every_place
@pytest.mark.parametrize("batch", CROSS)
def test_cross_attention(name, device, batch):
    """Non-causal over cached keys of an encoder, more or fewer than the rows."""
    backend = usable(name)
    support = backend.support
    if not support.non_causal:
        with pytest.raises(ValueError, match=r"causal must be True.*supported"):
            make_case(
                backend, plain_spec(support, causal=False), CROSS[batch], FEATURES["plain"],
                block_size_of(support), device=device,
            )  # fmt: skip
        return
    case = make_case(
        backend, plain_spec(support, causal=False), CROSS[batch], FEATURES["plain"],
        block_size_of(support), device=device,
    )  # fmt: skip
    case.check(attention(case.q, case.kv_cache, case.meta, case.scale))


@on_every_place
@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_heads_before_tokens(name, device, batch, kv_cache_dtype):
    """A cache in HND order: the same shape, other strides."""
    backend = usable(name)
    support = backend.support
    feature = "plain" if kv_cache_dtype == "auto" else kv_cache_dtype
    if kv_cache_dtype not in support.kv_cache_dtypes:
        feature = "plain"
    spec = plain_spec(support, **FEATURES[feature].spec)
    case = make_case(
        backend, spec, LENGTHS[batch], FEATURES[feature], block_size_of(support), device=device,
        cache_layout="HND",
    )  # fmt: skip
    assert case.kv_cache.stride(3) > case.kv_cache.stride(2)
    case.check(attention(case.q, case.kv_cache, case.meta, case.scale, **case.options))


@on_every_place
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_chunked_local_attention(name, device, batch):
    backend = usable(name)
    support = backend.support
    block_size = block_size_of(support)
    chunk = 2 * block_size
    spec = plain_spec(support, attention_chunk_size=chunk)
    case = make_case(backend, spec, LENGTHS[batch], FEATURES["plain"], block_size, device=device)
    out = attention(
        case.q, case.kv_cache, case.meta, case.scale, attention_chunk_size=chunk
    ).cpu().double()  # fmt: skip
    want = chunked_oracle(case, chunk)
    assert (out - want).norm() <= TOLERANCE[spec.dtype] * want.norm()
    with pytest.raises(ValueError, match="attention_chunk_size must be that of a spec"):
        attention(case.q, case.kv_cache, case.meta, case.scale, attention_chunk_size=chunk + 1)


@on_every_place
@pytest.mark.parametrize("feature", ["plain", "sinks"])
def test_cascade(name, device, feature):
    """Two blocks that every request begins with are attended to once, then merged."""
    backend, asked = usable(name), FEATURES[feature]
    support = backend.support
    block_size = block_size_of(support)
    first = 2 * block_size
    lengths = ([1, 1, 9, 4], [first + 1, first + 33, first + 9, first + 40])
    if not asked.declared(support):
        asked = FEATURES["plain"]
    arguments = (backend, plain_spec(support, **asked.spec), lengths, asked, block_size)
    if not (support.non_causal and support.lse):
        with pytest.raises(ValueError, match="common_prefix_len must be 0"):
            make_case(*arguments, device=device, shared_prefix=2)
        return
    case = make_case(*arguments, device=device, shared_prefix=2)
    assert case.meta.views.cascade is not None
    out, lse = attention_with_lse(case.q, case.kv_cache, case.meta, case.scale, **case.options)
    case.check(out, lse, least=1e-6)  # merged by float32 weights, float64 too
    out = attention(case.q, case.kv_cache, case.meta, case.scale, **case.options)
    case.check(out, least=1e-6)


@on_every_place
def test_narrow_values(name, device):
    """Values narrower than keys: stored padded, read back as their own columns."""
    backend = usable(name)
    support = backend.support
    spec = plain_spec(support)
    case = make_case(
        backend, spec, LENGTHS["prefill"], FEATURES["plain"], block_size_of(support), device=device
    )
    rows, narrow = case.meta.common.slot_mapping.shape[0], spec.head_size // 2
    k = torch.randn(rows, 2, spec.head_size, dtype=torch.float32).to(spec.dtype).to(device)
    v = torch.randn(rows, 2, narrow, dtype=torch.float32).to(spec.dtype).to(device)
    with pytest.raises(ValueError, match="v must have shape"):
        write_kv(k, v, case.kv_cache, case.meta)
    for wrong in (narrow + 1, 0, spec.head_size + 1):
        with pytest.raises(ValueError, match=r"v must have shape|v_head_size must be from 1"):
            write_kv(k, v, case.kv_cache, case.meta, v_head_size=wrong)
    write_kv(k, v, case.kv_cache, case.meta, v_head_size=narrow)
    full = attention(case.q, case.kv_cache, case.meta, case.scale)
    case.check(full)
    out = attention(case.q, case.kv_cache, case.meta, case.scale, v_head_size=narrow)
    assert out.shape[-1] == narrow
    assert torch.equal(out, full[..., :narrow])
    assert (full[..., narrow:] == 0).all()
    with pytest.raises(ValueError, match="v_head_size must be from 1"):
        attention(case.q, case.kv_cache, case.meta, case.scale, v_head_size=spec.head_size + 1)


@on_every_place
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("v_head_size", [None, 32])
def test_without_a_cache(name, device, feature, v_head_size):
    """Encoders: every request over its own rows, causal or not."""
    backend, asked = usable(name), FEATURES[feature]
    support = backend.support
    if "kv_cache_dtype" in asked.spec:
        asked = FEATURES["plain"]
    spec = plain_spec(support, **asked.spec)
    lengths = [3, 0, 1, 40]
    if backend.varlen is None or not asked.declared(support):
        with pytest.raises(ValueError, match="without a KV cache"):
            varlen_metadata(lengths, spec, device, backend=name)
        return
    meta = varlen_metadata(lengths, spec, device, num_padded_tokens=46, backend=name)
    generator = torch.Generator().manual_seed(5)
    sizes = (spec.head_size, spec.head_size, v_head_size or spec.head_size)
    q, k, v = (
        torch.randn(46, heads, size, generator=generator).to(spec.dtype)
        for heads, size in zip((4, 2, 2), sizes, strict=True)
    )
    for x in (q, k, v):
        x[44:] = float("nan")
    options = asked.options(4, torch.device(device))
    arguments = (q.to(device), k.to(device), v.to(device), meta, spec.head_size**-0.5)
    if v_head_size is not None and not support.varlen_v_head_size:
        with pytest.raises(ValueError, match=r"v must have the head size of q.*supported"):
            varlen_attention(*arguments, **options)
        return
    out = varlen_attention(*arguments, **options).cpu()
    reference = varlen_metadata(lengths, spec, num_padded_tokens=46, backend="TORCH")
    on_cpu = asked.options(4, torch.device("cpu"))
    want = varlen_attention(
        q.double(), k.double(), v.double(), reference, arguments[-1], **on_cpu
    )  # fmt: skip
    assert (out.double() - want).norm() <= TOLERANCE[spec.dtype] * want.norm()
    assert (out[44:] == 0).all()
