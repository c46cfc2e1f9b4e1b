"""What every backend must keep, one function a rule; each runs a backend on one device.

A rule raises an AssertionError where the backend breaks it. What a backend does not declare, it
must refuse with a ValueError.

T tokens, N query heads, K kv heads, H head size, V head size of values.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.utils import counters

from attn_ops.backends.base import Backend, Support
from attn_ops.metadata import AttentionSpec
from attn_ops.ops.attention import attention, attention_with_lse
from attn_ops.ops.varlen import varlen_attention, varlen_metadata
from attn_ops.ops.write_kv import write_kv
from attn_ops.testing.calls import Case, chunked_oracle, make_case
from attn_ops.testing.differences import check_close, check_padding, expect
from attn_ops.testing.features import CROSS, FEATURES, HEADS, LENGTHS, UNIFORM
from attn_ops.testing.quantized import check_quantized, forms_of

PLAIN = FEATURES["plain"]


@contextlib.contextmanager
def refused(pattern: str, what: str) -> Iterator[None]:
    """The code inside must raise a ValueError whose message has `pattern`."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        expect(re.search(pattern, said) is not None, f"{what}: refused without {pattern!r}: {said}")
    else:
        raise AssertionError(f"{what} must be refused with a ValueError: it is not declared")


def head_size_of(support: Support) -> int:
    """A size that the backend takes; small where the interpreter has to run it."""
    return 64 if not support.head_sizes or 64 in support.head_sizes else support.head_sizes[0]


def block_size_of(support: Support) -> int:
    return 16 if not support.block_sizes or 16 in support.block_sizes else support.block_sizes[0]


def plain_spec(support: Support, **geometry: Any) -> AttentionSpec:
    return AttentionSpec(4, 2, head_size_of(support), support.dtypes[0], **geometry)


def attend(case: Case) -> torch.Tensor:
    return attention(case.q, case.kv_cache, case.meta, case.scale, **case.options)


def features(backend: Backend, device: str, batch: str, feature: str) -> None:
    """Every dtype on ragged batches; undeclared features are refused."""
    support, asked = backend.support, FEATURES[feature]
    for dtype in support.dtypes:
        spec = AttentionSpec(4, 2, head_size_of(support), dtype, **asked.spec)
        arguments = (backend, spec, LENGTHS[batch], asked, block_size_of(support))
        if not asked.declared(support):
            with refused(rf"({asked.refusal}).*supported", f"{feature} with {dtype}"):
                make_case(*arguments, device=device)
            continue
        case = make_case(*arguments, device=device)
        case.check(attend(case))


def compiled_features(backend: Backend, device: str, feature: str) -> None:
    """One graph for all ragged batches."""
    support, asked = backend.support, FEATURES[feature]
    spec = plain_spec(support, **asked.spec)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    arguments = (asked, block_size_of(support))
    cases = [make_case(backend, spec, n, *arguments, device=device) for n in LENGTHS.values()]
    for case in cases if device != "cpu" else ():  # a backend may compile kernels, which count too
        attend(case)
    before = counters["stats"]["unique_graphs"]
    for case in cases:
        case.check(compiled(case.q, case.kv_cache, case.meta, case.scale, **case.options))
    made = counters["stats"]["unique_graphs"] - before
    expect(made == 1, f"all batches must run in 1 graph, got {made}")


def log_sum_exp(backend: Backend, device: str, batch: str, feature: str) -> None:
    support, asked = backend.support, FEATURES[feature]
    if not asked.declared(support):
        asked = PLAIN
    spec = plain_spec(support, **asked.spec)
    case = make_case(backend, spec, LENGTHS[batch], asked, block_size_of(support), device=device)
    arguments = (case.q, case.kv_cache, case.meta, case.scale)
    if not support.lse:
        with refused(f"{backend.name} cannot return the log-sum-exp", "the log-sum-exp"):
            attention_with_lse(*arguments, **case.options)
        return
    case.check(*attention_with_lse(*arguments, **case.options))


def output_quantization(backend: Backend, device: str, batch: str, scheme: str) -> None:
    """What the operator returns in every scheme is the backend's own output, quantized.

    A kernel that quantizes may sum in another order: a value may be one step of FP8 or FP4 off.
    """
    support = backend.support
    sizes = support.head_sizes or (128,)
    size = 128 if "128" in scheme and 128 in sizes else head_size_of(support)
    spec = AttentionSpec(4, 2, size, support.dtypes[-1])
    case = make_case(backend, spec, LENGTHS[batch], PLAIN, block_size_of(support), device=device)
    for how in forms_of(scheme):
        check_quantized(case, attend(case), how)


def groups(backend: Backend, device: str, heads: str) -> None:
    """As many query heads as KV heads, several for each, one KV head for all."""
    support = backend.support
    spec = AttentionSpec(*HEADS[heads], head_size_of(support), support.dtypes[0])
    for batch in ("decode", "mixed"):
        case = make_case(
            backend, spec, LENGTHS[batch], PLAIN, block_size_of(support), device=device
        )
        case.check(attend(case))


def head_sizes(backend: Backend, device: str, head_size: int) -> None:
    support = backend.support
    spec = AttentionSpec(2, 1, head_size, support.dtypes[0])
    for batch in ("decode", "uniform"):
        arguments = (backend, spec, LENGTHS[batch], PLAIN, block_size_of(support))
        if support.head_sizes and head_size not in support.head_sizes:
            with refused("head_size must be supported, got .*supported: ", f"heads of {head_size}"):
                make_case(*arguments, device=device)
            continue
        case = make_case(*arguments, device=device)
        case.check(attend(case))


def block_sizes(backend: Backend, device: str, block_size: int) -> None:
    support = backend.support
    spec = AttentionSpec(2, 1, head_size_of(support), support.dtypes[0])
    for batch in ("decode", "mixed"):
        arguments = (backend, spec, LENGTHS[batch], PLAIN, block_size)
        if support.block_sizes and block_size not in support.block_sizes:
            wanted = "block_size must be supported, got .*supported: "
            with refused(wanted, f"blocks of {block_size}"):
                make_case(*arguments, device=device)
            continue
        case = make_case(*arguments, device=device)
        case.check(attend(case))


def no_tokens(backend: Backend, device: str) -> None:
    """A batch without requests, and one whose requests have no query tokens."""
    support = backend.support
    for lengths in (([], []), ([0, 0], [5, 0])):
        case = make_case(
            backend, plain_spec(support), lengths, PLAIN, block_size_of(support), device=device
        )
        case.check(attend(case))


def uniform_queries(backend: Backend, device: str, length: int) -> None:
    """Drafts to verify, 2 to 8 rows a request."""
    support = backend.support
    case = make_case(
        backend, plain_spec(support), UNIFORM[length], PLAIN, block_size_of(support), device=device
    )
    case.check(attend(case))


def cross_attention(backend: Backend, device: str, batch: str) -> None:
    """Non-causal over cached keys of an encoder, more or fewer than the rows."""
    support = backend.support
    spec = plain_spec(support, causal=False)
    arguments = (backend, spec, CROSS[batch], PLAIN, block_size_of(support))
    if not support.non_causal:
        with refused(r"causal must be True.*supported", "cross-attention"):
            make_case(*arguments, device=device)
        return
    case = make_case(*arguments, device=device)
    case.check(attend(case))


def heads_before_tokens(backend: Backend, device: str, batch: str, kv_cache_dtype: str) -> None:
    """A cache in HND order: the same shape, other strides."""
    support = backend.support
    asked = PLAIN if kv_cache_dtype == "auto" else FEATURES[kv_cache_dtype]
    case = make_case(
        backend, plain_spec(support, **asked.spec), LENGTHS[batch], asked, block_size_of(support),
        device=device, cache_layout="HND",
    )  # fmt: skip
    expect(case.kv_cache.stride(3) > case.kv_cache.stride(2), "the cache must be in HND order")
    case.check(attend(case))


def chunked_local_attention(backend: Backend, device: str, batch: str) -> None:
    support = backend.support
    block_size = block_size_of(support)
    chunk = 2 * block_size
    spec = plain_spec(support, attention_chunk_size=chunk)
    case = make_case(backend, spec, LENGTHS[batch], PLAIN, block_size, device=device)
    inputs = (case.q, case.kv_cache, case.meta, case.scale)
    out = attention(*inputs, attention_chunk_size=chunk)
    common = case.meta.common
    check_close("out", out, chunked_oracle(case, chunk), spec.dtype, common)
    with refused("attention_chunk_size must be that of a spec", "a chunk of another size"):
        attention(*inputs, attention_chunk_size=chunk + 1)


def cascade(backend: Backend, device: str, feature: str) -> None:
    """Two blocks that every request begins with are attended to once, then merged."""
    support, asked = backend.support, FEATURES[feature]
    block_size = block_size_of(support)
    first = 2 * block_size
    lengths = ([1, 1, 9, 4], [first + 1, first + 33, first + 9, first + 40])
    if not asked.declared(support):
        asked = PLAIN
    arguments = (backend, plain_spec(support, **asked.spec), lengths, asked, block_size)
    if not (support.non_causal and support.lse):
        with refused("common_prefix_len must be 0", "a shared prefix"):
            make_case(*arguments, device=device, shared_prefix=2)
        return
    case = make_case(*arguments, device=device, shared_prefix=2)
    expect(case.meta.views.cascade is not None, "the builder must take the prefix apart")
    out, lse = attention_with_lse(case.q, case.kv_cache, case.meta, case.scale, **case.options)
    case.check(out, lse, least=1e-6)  # merged by float32 weights, float64 too
    case.check(attend(case), least=1e-6)


def narrow_values(backend: Backend, device: str) -> None:
    """Values narrower than keys: stored padded, read back as their own columns."""
    support = backend.support
    spec = plain_spec(support)
    case = make_case(
        backend, spec, LENGTHS["prefill"], PLAIN, block_size_of(support), device=device
    )
    rows, narrow = case.meta.common.slot_mapping.shape[0], spec.head_size // 2
    k = torch.randn(rows, 2, spec.head_size, dtype=torch.float32).to(spec.dtype).to(device)
    v = torch.randn(rows, 2, narrow, dtype=torch.float32).to(spec.dtype).to(device)
    with refused("v must have shape", "narrow values without v_head_size"):
        write_kv(k, v, case.kv_cache, case.meta)
    for wrong in (narrow + 1, 0, spec.head_size + 1):
        with refused("v must have shape|v_head_size must be from 1", f"v_head_size={wrong}"):
            write_kv(k, v, case.kv_cache, case.meta, v_head_size=wrong)
    write_kv(k, v, case.kv_cache, case.meta, v_head_size=narrow)
    full = attend(case)
    case.check(full)
    inputs = (case.q, case.kv_cache, case.meta, case.scale)
    out = attention(*inputs, v_head_size=narrow)
    expect(torch.equal(out, full[..., :narrow]), f"the first {narrow} columns must be the values'")
    expect(bool((full[..., narrow:] == 0).all()), "columns behind the values must be zero")
    with refused("v_head_size must be from 1", "more columns than the cache has"):
        attention(*inputs, v_head_size=spec.head_size + 1)


def without_a_cache(backend: Backend, device: str, feature: str, v_head_size: int | None) -> None:
    """Encoders: every request over its own rows, causal or not."""
    support, asked = backend.support, FEATURES[feature]
    if "kv_cache_dtype" in asked.spec or "blocksparse" in asked.spec:  # need a cache
        asked = PLAIN
    spec, lengths = plain_spec(support, **asked.spec), [3, 0, 1, 40]
    if backend.varlen is None or not asked.declared(support):
        with refused("without a KV cache", "attention without a cache"):
            varlen_metadata(lengths, spec, device, backend=backend.name)
        return
    meta = varlen_metadata(lengths, spec, device, num_padded_tokens=46, backend=backend.name)
    generator = torch.Generator().manual_seed(5)
    sizes = (spec.head_size, spec.head_size, v_head_size or spec.head_size)
    q, k, v = (
        torch.randn(46, heads, size, generator=generator).to(spec.dtype)
        for heads, size in zip((4, 2, 2), sizes, strict=True)
    )
    for x in (q, k, v):
        x[44:] = float("nan")
    scale, options = spec.head_size**-0.5, asked.options(4, torch.device(device))
    arguments = (q.to(device), k.to(device), v.to(device), meta, scale)
    if v_head_size is not None and not support.varlen_v_head_size:
        with refused("v must have the head size of q.*supported", "values of another head size"):
            varlen_attention(*arguments, **options)
        return
    out = varlen_attention(*arguments, **options).cpu()
    reference = varlen_metadata(lengths, spec, num_padded_tokens=46, backend="TORCH")
    on_cpu = asked.options(4, torch.device("cpu"))
    want = varlen_attention(q.double(), k.double(), v.double(), reference, scale, **on_cpu)
    check_close("out", out, want, spec.dtype, reference.common)
    check_padding(out, 44)


OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def operator_contract(backend: Backend, device: str) -> None:
    """PyTorch's own check of the operator: it changes no input, and its fake tells the truth."""
    support = backend.support
    case = make_case(
        backend, plain_spec(support), LENGTHS["mixed"], PLAIN, block_size_of(support), device=device
    )
    arguments = (case.q, case.kv_cache, case.meta, case.scale)
    torch.library.opcheck(torch.ops.attn_ops.attention.default, arguments, test_utils=OPCHECKS)


Rule = Callable[..., None]
"""rule(backend, device, *parameters)."""
