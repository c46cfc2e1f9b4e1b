"""What every backend of latent attention must keep, one function a rule; see rules.py.

T tokens, N query heads, V head size of values, Lkv latent, R head size with RoPE.
"""

import dataclasses
from typing import Any

import torch
from torch._dynamo.utils import counters

from attn_ops.backends.base import Backend
from attn_ops.backends.mla.builder import MLAPlan
from attn_ops.metadata import AttentionSpec
from attn_ops.ops.attention import attention
from attn_ops.ops.mla import mla_attention, mla_attention_with_lse
from attn_ops.ops.mla_cache import gather_mla_kv, write_mla_kv
from attn_ops.ops.mla_quant import mla_attention_quant
from attn_ops.output_quant.quantize import reference_quantize
from attn_ops.output_quant.schemes import OutputQuant
from attn_ops.testing.differences import expect
from attn_ops.testing.latent_calls import SMALL, LatentCase, make_latent_case
from attn_ops.testing.quantized import forms_of, nibble_steps, scale_steps
from attn_ops.testing.rules import OPCHECKS, block_size_of, refused

LENGTHS = {
    "decode": ([1, 1, 1, 1], [1, 2, 17, 70]),
    "mixed": ([1, 1, 0, 12, 40], [5, 33, 0, 12, 61]),
    "prefill": ([1, 18, 35], [1, 18, 35]),
    "unsorted": ([30, 1, 0, 12, 2], [61, 33, 0, 12, 9]),
    "uniform": ([4, 4, 4], [4, 50, 35]),
}
"""Query lengths and seq_lens: ragged, with 0 and 1; both ways alone and beside each other."""

CHUNKS = {"one chunk": 150, "two chunks": 300, "five chunks": 780}
"""Context of a request, which goes through a workspace of 160 tokens, as many as its queries."""

LATENT_CACHES = ("auto", "fp8_e4m3", "fp8_e5m2")

UNIFORM = {n: ([n] * 4, [n, n + 1, 33, 70]) for n in (2, 3, 5, 8)}
"""Drafts to verify: 1 + k query tokens each."""


def attend(case: LatentCase) -> torch.Tensor:
    return mla_attention(*case.arguments, **case.keywords)


def plain_case(
    backend: Backend, device: str, lengths: tuple[list[int], list[int]], **more: Any
) -> LatentCase:
    support = backend.support
    size = more.pop("block_size", block_size_of(support))
    return make_latent_case(backend, support.dtypes[0], lengths, size, device, **more)


def latent_batches(backend: Backend, device: str, batch: str, kv_cache_dtype: str) -> None:
    """Every dtype on ragged batches, with the log-sum-exp; undeclared caches are refused."""
    support = backend.support
    for dtype in support.dtypes:
        arguments = (backend, dtype, LENGTHS[batch], block_size_of(support), device)
        if kv_cache_dtype not in support.kv_cache_dtypes:
            with refused("kv_cache_dtype.*supported", f"{kv_cache_dtype} with {dtype}"):
                make_latent_case(*arguments, kv_cache_dtype=kv_cache_dtype)
            continue
        case = make_latent_case(*arguments, kv_cache_dtype=kv_cache_dtype)
        case.check(attend(case))
        if support.lse:
            case.check(*mla_attention_with_lse(*case.arguments, **case.keywords))


def latent_log_sum_exp(backend: Backend, device: str) -> None:
    """Refused where it is not declared."""
    if not backend.support.lse:
        case = plain_case(backend, device, LENGTHS["mixed"])
        with refused(f"{backend.name} cannot return the log-sum-exp", "the log-sum-exp"):
            mla_attention_with_lse(*case.arguments, **case.keywords)


def latent_chunks(backend: Backend, device: str, chunks: str) -> None:
    """A long context through a small workspace, beside requests without one."""
    context, room = CHUNKS[chunks], 160
    lengths = ([room, 10, 1, 15, 0], [room + context, 10, 40, 50, 0])
    case = plain_case(backend, device, lengths, workspace_tokens=room)
    plan = case.meta.planned(case.spec)
    if isinstance(plan, MLAPlan):
        expect(plan.prefill is not None, "so long a query must take the prefill way")
    case.check(attend(case))
    if backend.support.lse:
        case.check(*mla_attention_with_lse(*case.arguments, **case.keywords))


def latent_ways(backend: Backend, device: str) -> None:
    """Long queries without context, as the builder splits them and without known lengths.

    Of the latter all take the decode way; builders that need the lengths are not asked.
    """
    lengths = ([40, 35, 50], [40, 35, 60])
    known = plain_case(backend, device, lengths)
    known.check(attend(known))
    if getattr(backend.builder, "needs_mirrors", False):
        return
    case = plain_case(backend, device, lengths, known_lengths=False)
    case.check(attend(case))


def latent_heads(backend: Backend, device: str, num_heads: int) -> None:
    for batch in ("decode", "mixed"):
        case = plain_case(backend, device, LENGTHS[batch], num_heads=num_heads)
        case.check(attend(case))


def latent_block_sizes(backend: Backend, device: str, block_size: int) -> None:
    sizes = backend.support.block_sizes
    for batch in ("decode", "mixed"):
        if sizes and block_size not in sizes:
            wanted = "block_size must be supported, got .*supported: "
            with refused(wanted, f"blocks of {block_size}"):
                plain_case(backend, device, LENGTHS[batch], block_size=block_size)
            continue
        case = plain_case(backend, device, LENGTHS[batch], block_size=block_size)
        case.check(attend(case))


def latent_no_tokens(backend: Backend, device: str) -> None:
    """A batch without requests, and one whose requests have no query tokens."""
    for lengths in (([], []), ([0, 0], [5, 0])):
        case = plain_case(backend, device, lengths)
        case.check(attend(case))


def latent_uniform_queries(backend: Backend, device: str, length: int) -> None:
    """Drafts to verify, 2 to 8 rows a request."""
    case = plain_case(backend, device, UNIFORM[length])
    case.check(attend(case))


def latent_strides(backend: Backend, device: str) -> None:
    """q a part of a fused projection, and a cache whose rows stand apart; the last stride is 1."""
    for batch in ("decode", "mixed"):
        case = plain_case(backend, device, LENGTHS[batch])
        want = attend(case)
        wide = torch.full_like(case.q, float("nan")).repeat(1, 2, 1)
        wide[:, : case.q.shape[1]] = case.q
        room = torch.empty_like(case.kv_cache).repeat(1, 1, 2)
        room[..., : case.kv_cache.shape[2]] = case.kv_cache
        strided = dataclasses.replace(
            case, q=wide[:, : case.q.shape[1]], kv_cache=room[..., : case.kv_cache.shape[2]]
        )
        strided.check(attend(strided))
        case.check(want)


def latent_writes(backend: Backend, device: str, kv_cache_dtype: str) -> None:
    """This step's latents are written, and then attended to."""
    if kv_cache_dtype not in backend.support.kv_cache_dtypes:
        return
    case = plain_case(backend, device, LENGTHS["mixed"], kv_cache_dtype=kv_cache_dtype)
    latent = case.spec.latent
    assert latent is not None, "a case of latent attention"
    rows, generator = case.q.shape[0], torch.Generator().manual_seed(7)
    kv_c, k_pe = (
        torch.randn(rows, width, generator=generator).to(case.q.dtype).to(device)
        for width in (latent.kv_lora_rank, latent.qk_rope_head_dim)
    )
    scale = case.keywords.get("kv_scale")
    write_mla_kv(kv_c, k_pe, case.kv_cache, case.meta, kv_cache_dtype=kv_cache_dtype, scale=scale)
    case.check(attend(case))


def latent_output_quantization(backend: Backend, device: str, batch: str, scheme: str) -> None:
    """What the operator returns in every scheme is the backend's own output, quantized."""
    support = backend.support
    case = make_latent_case(
        backend, support.dtypes[-1], LENGTHS[batch], block_size_of(support), device
    )
    width = case.q.shape[1] * case.keywords["v_head_dim"]
    plain = attend(case)
    for how in forms_of(scheme):
        if width % (how.group or 1) == 0:
            _check_quantized(case, plain, how)


def _check_quantized(case: LatentCase, plain: torch.Tensor, how: OutputQuant) -> None:
    given = how.scheme in ("fp8_static", "nvfp4")
    value = torch.tensor([17.0 if how.multiply else 0.02], device=case.q.device)
    fields = dataclasses.asdict(how) | {"out_scale": value if given else None}
    got = mla_attention_quant(*case.arguments, **fields, **case.keywords)
    want = reference_quantize(plain, how, value if given else None)
    for name, mine, wanted in zip(("out", "scales"), got, want, strict=True):
        expect(
            (mine.shape, mine.dtype, mine.stride())
            == (wanted.shape, wanted.dtype, wanted.stride()),
            f"{how.scheme}: {name} must be {wanted.dtype} {list(wanted.shape)} with strides "
            f"{wanted.stride()}, got {mine.dtype} {list(mine.shape)} with {mine.stride()}",
        )
    steps = nibble_steps if how.scheme == "nvfp4" else scale_steps
    off = steps(got[0], want[0]), scale_steps(got[1], want[1])
    expect(max(off) <= 1, f"{how}: values and scales must be within a step, got {off}")


def latent_geometry(backend: Backend, device: str) -> None:
    """Layers without latent attention are refused, and operators for them."""
    support = backend.support
    plain = AttentionSpec(4, 2, 64, support.dtypes[0])
    with refused("latent must be a LatentShape, got None", "layers without latent attention"):
        backend.builder(backend, [plain], block_size_of(support), device)
    case = plain_case(backend, device, LENGTHS["decode"])
    cache = torch.zeros(9, 2, block_size_of(support), 2, 64, dtype=plain.dtype, device=device)
    q = torch.zeros(case.q.shape[0], 4, 64, dtype=plain.dtype, device=device)
    with refused("latent must be a LatentShape, got None", "attention()"):
        attention(q, cache, case.meta, 0.3)


def refuses_latent_layers(backend: Backend, device: str) -> None:
    """Of a backend for layers without latent attention."""
    support = backend.support
    spec = AttentionSpec.of_latent(4, SMALL, support.dtypes[0])
    with refused(r"latent must be None, got LatentShape", "layers with latent attention"):
        backend.builder(backend, [spec], block_size_of(support), device)


def latent_operators(backend: Backend, device: str) -> None:
    """PyTorch's own check: they change what they say, and their fakes tell the truth."""
    ops = torch.ops.attn_ops
    case = plain_case(backend, device, LENGTHS["mixed"])

    def check(op: Any, arguments: tuple[Any, ...], **keywords: Any) -> None:
        torch.library.opcheck(op.default, arguments, keywords, test_utils=OPCHECKS)

    check(ops.mla_attention, case.arguments, **case.keywords)
    if backend.support.lse:
        check(ops.mla_attention_with_lse, case.arguments, **case.keywords)
    quant = {"scheme": "fp8_row", "min_scale": 1e-6}
    check(ops.mla_attention_quant, case.arguments, **quant, **case.keywords)
    latent, rows = case.spec.latent, case.q.shape[0]
    assert latent is not None, "a case of latent attention"
    kv_c = case.q.new_ones(rows, latent.kv_lora_rank)
    k_pe = case.q.new_ones(rows, latent.qk_rope_head_dim)
    check(ops.write_mla_kv, (kv_c, k_pe, torch.zeros_like(case.kv_cache), case.meta))


def latent_gather(backend: Backend, device: str, kv_cache_dtype: str) -> None:
    """`gather_mla_kv` from the middle of pages gives what stands there."""
    if kv_cache_dtype not in backend.support.kv_cache_dtypes:
        return
    case = plain_case(backend, device, LENGTHS["mixed"], kv_cache_dtype=kv_cache_dtype)
    cu = torch.tensor([0, 2, 12, 12, 17, 57], dtype=torch.int32, device=device)
    starts = torch.tensor([3, 19, 0, 7, 21], dtype=torch.int32, device=device)
    out = torch.zeros(60, case.kv_cache.shape[2], dtype=case.q.dtype, device=device)
    gather_mla_kv(
        case.kv_cache, case.meta.common.block_table_tensor, cu, starts, out,
        kv_cache_dtype=kv_cache_dtype, scale=case.keywords.get("kv_scale"),
    )  # fmt: skip
    expect(bool(out.isfinite().all()), "no byte is read where no token stands")
    expect(bool((out[:57] != 0).any(1).all()), "every row is written")
    expect(bool((out[57:] == 0).all()), "rows behind the last request's stay")


def latent_compiled(backend: Backend, device: str, kv_cache_dtype: str) -> None:
    """One graph for all ragged batches."""
    if kv_cache_dtype not in backend.support.kv_cache_dtypes:
        return
    compiled = torch.compile(mla_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    before = counters["stats"]["unique_graphs"]
    for lengths in LENGTHS.values():
        case = plain_case(backend, device, lengths, kv_cache_dtype=kv_cache_dtype)
        case.check(compiled(*case.arguments, **case.keywords))
    made = counters["stats"]["unique_graphs"] - before
    expect(made == 1, f"all batches must run in 1 graph, got {made}")


def latent_beyond_64k(backend: Backend, device: str) -> None:
    """A request of more than 64 Ki tokens, decoded and prefilled."""
    support = backend.support
    lengths = ([1, 30], [66000, 66001])
    case = make_latent_case(
        backend, support.dtypes[-1], lengths, block_size_of(support), device, num_heads=1
    )
    case.check(attend(case))
