"""Random calls of backends against the float64 reference: `python -m tests.fuzz attention`.

A case draws a backend, a geometry that it declares, lengths, padding and cache layout. Caches are
NaN where no token is. The call may write nothing: not into the cache, not into q or the batch.
What a backend refuses is a failure too, as only what it declares is drawn.
"""

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_ops import AttentionSpec, Backend, attention, backend_names, get_backend
from attn_ops.ops.attention import attention_with_lse
from attn_ops.ops.mla import mla_attention, mla_attention_with_lse
from attn_ops.output_quant.schemes import SCHEMES
from attn_ops.testing.calls import Case, chunked_oracle, make_case
from attn_ops.testing.differences import check_close, check_padding
from attn_ops.testing.features import FEATURES, Feature
from attn_ops.testing.latent_calls import LatentCase, make_latent_case
from attn_ops.testing.quantized import check_quantized, forms_of

HEADS = ((2, 2), (4, 4), (4, 2), (8, 2), (6, 2), (14, 2), (32, 8), (4, 1), (16, 1))
ANY_HEAD_SIZE = (8, 16, 24, 64, 80, 128)
ANY_BLOCK_SIZE = (1, 3, 16, 32)
WINDOWS = (1, 2, 9, 16, 17, 33, 128, 1000)
MOST_SCORES = 2**19
"""Query rows times keys of one request: what the reference holds in float64, times heads."""
NUM_KINDS = 60
"""Geometries of a backend on a GPU, where each takes seconds to compile."""

MIRRORS = ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu")


def drawn_backends(names: list[str] | None, device: str) -> list[Backend]:
    """The named ones, or all that run here.

    Raises:
        ValueError: none does.
    """
    backends = [get_backend(name) for name in names or backend_names()]
    run = [b for b in backends if b.missing() is None and device in b.support.devices]
    if not run or (names and len(run) < len(backends)):
        raise ValueError(f"backends must run on {device}, got {names or 'none'}")
    return run


def drawn_lengths(
    rng: random.Random, block_size: int, longest: int, cross: bool
) -> tuple[list[int], list[int]]:
    """Query lengths and seq_lens: 0, 1, beside a block's edge, or anything."""
    if rng.random() < 0.02:
        return [], []
    kind = rng.choice(("decode", "decode", "uniform", "mixed", "prefill"))
    uniform = 1 if kind == "decode" else rng.randint(2, 8)
    query, seq = [], []
    for _ in range(rng.choice((1, 2, 3, 4, 5, 8, 12))):
        keys = round(math.exp(rng.uniform(0, math.log(longest))))
        if rng.random() < 0.5:
            edge = block_size * rng.randint(1, 8) + rng.choice((-1, 0, 1))
            keys = min(longest, rng.choice((0, 1, 1, edge, edge, edge)))
        rows = {"mixed": rng.choice((0, 1, 1, 2, 7, 16, 40, 200)), "prefill": keys}
        rows = min(rows.get(kind, uniform), longest, MOST_SCORES // max(keys, 1))
        query.append(rows)
        seq.append(keys if cross else max(keys, rows))
    return query, seq


@dataclasses.dataclass
class Drawn:
    """What a seed says, besides the tensors."""

    backend: Backend
    spec: AttentionSpec
    lengths: tuple[list[int], list[int]]
    block_size: int
    more: dict[str, Any]  # of `make_case` or `make_latent_case`
    options: dict[str, Any]  # of the operator, numbers alone
    with_lse: bool
    strided_q: bool
    known_lengths: bool
    scheme: str | None


def drawn(seed: int, backends: list[Backend], device: str, longest: int) -> Drawn:
    rng = random.Random(seed)
    backend = rng.choice(backends)
    support = backend.support
    kind = rng if device == "cpu" else random.Random(f"{backend.name} {rng.randrange(NUM_KINDS)}")

    def asked(declared: bool, odds: float) -> bool:
        return kind.random() < odds and declared

    dtype = kind.choice(support.dtypes)
    kv_cache_dtype = kind.choice(("auto", *support.kv_cache_dtypes))
    block_size = kind.choice(support.block_sizes or ANY_BLOCK_SIZE)
    if backend.name == "FLASHINFER":  # takes minutes a module: what the conformance suite compiles
        kv_cache_dtype, block_size = "auto", 16
    options: dict[str, Any] = {}
    more: dict[str, Any] = {"num_padding_rows": rng.choice((0, 0, 1, 5)), "device": device}
    cross = False
    if support.latent:
        heads = (16, 32, 128) if support.latent_sizes else (1, 2, 3, 4, 8, 16, 20)
        more |= {"num_heads": kind.choice(heads), "kv_cache_dtype": kv_cache_dtype}
        more["workspace_tokens"] = rng.choice((None, max(block_size, 16), 4 * block_size + 3, 300))
        spec = AttentionSpec(1, 1, 64, dtype)
    else:
        causal = not asked(support.non_causal, 0.2)
        cross = not causal and rng.random() < 0.4
        spec = AttentionSpec(
            *kind.choice(HEADS), kind.choice(support.head_sizes or ANY_HEAD_SIZE), dtype,
            causal=causal, kv_cache_dtype=kv_cache_dtype,
            soft_cap=kind.choice((5.0, 30.0)) if asked(support.soft_cap, 0.2) else None,
            alibi=asked(support.alibi and not cross, 0.2), sinks=asked(support.sinks, 0.2),
        )  # fmt: skip
        if backend.name == "FLASHINFER":
            spec = dataclasses.replace(spec, head_size=64)
        may_window = support.sliding_window and (causal or support.non_causal_window) and not cross
        plain = causal and not (spec.alibi or spec.sinks or spec.soft_cap)
        if asked(may_window, 0.3):
            options["sliding_window"] = rng.choice(WINDOWS)
        elif plain and kv_cache_dtype == "auto" and rng.random() < 0.15:
            options["attention_chunk_size"] = block_size * rng.choice((1, 2, 4))
        elif support.non_causal and support.lse and causal and not spec.alibi:
            more["shared_prefix"] = rng.choice((0, 0, 0, 1, 3))
        spec = dataclasses.replace(spec, **options)
        more["cache_layout"] = rng.choice(("NHD", "NHD", "HND"))
    query, seq = drawn_lengths(rng, block_size, longest, cross)
    if shared := more.get("shared_prefix"):
        seq = [q + max(n - q, shared * block_size) for q, n in zip(query, seq, strict=True)]
        query, seq = (query, seq) if query else ([1], [shared * block_size + 1])
    elif (
        not support.latent and len(set(query)) == 1 and rng.random() < 0.25
    ):  # as captured steps have it
        padding = rng.randint(1, 3)
        query, seq = query + query[:1] * padding, seq + [0] * padding
    needs_mirrors = shared or cross or getattr(backend.builder, "needs_mirrors", False)
    plans = getattr(backend.builder, "plans_on_host", False) or options
    return Drawn(
        backend, spec, (query, seq), block_size, more, options,
        with_lse=asked(support.lse and "attention_chunk_size" not in options, 0.4),
        strided_q=rng.random() < 0.4,
        known_lengths=bool(needs_mirrors or plans) or rng.random() < 0.75,
        scheme=rng.choice(tuple(SCHEMES) if device == "cuda" else support.output_quant or (None,)),
    )  # fmt: skip


def made(case: Drawn) -> Case | LatentCase:
    """The tensors; perhaps q is a slice of a fused projection, and the host knows no lengths."""
    if case.backend.support.latent:
        more = case.more | {"known_lengths": case.known_lengths}
        device = more.pop("device")
        call: Any = make_latent_case(
            case.backend, case.spec.dtype, case.lengths, case.block_size, device, **more
        )
    else:
        call = make_case(
            case.backend, case.spec, case.lengths, _feature(case), case.block_size, **case.more
        )
        if not case.known_lengths:
            common = call.meta.common.replace(**dict.fromkeys(MIRRORS))
            builder = case.backend.builder(
                case.backend, [case.spec], case.block_size, common.device
            )
            call.meta = builder.build(0, common)
    if case.strided_q:
        wide = torch.full_like(call.q, float("nan")).repeat(1, 2, 1)
        wide[:, : call.q.shape[1]] = call.q
        call.q = wide[:, : call.q.shape[1]]
    return call


def _feature(case: Drawn) -> Feature:
    """All that the spec asks for, as one."""
    spec = case.spec
    names = [name for name in ("alibi", "sinks") if getattr(spec, name)]
    names += [spec.kv_cache_dtype] if spec.kv_cache_dtype != "auto" else []

    def options(num_heads: int, device: torch.device) -> dict[str, Any]:
        found = {k: v for n in names for k, v in FEATURES[n].options(num_heads, device).items()}
        window = {k: v for k, v in case.options.items() if k == "sliding_window"}
        return found | window | ({"soft_cap": spec.soft_cap} if spec.soft_cap else {})

    return Feature(lambda support: True, options)


@contextlib.contextmanager
def unchanged(**tensors: torch.Tensor) -> Iterator[None]:
    """Raise an AssertionError where a byte of them is another one afterwards."""
    before = {name: x.clone() for name, x in tensors.items()}
    yield
    for name, x in tensors.items():
        same = torch.equal(
            x.contiguous().view(torch.uint8), before[name].contiguous().view(torch.uint8)
        )
        assert same, f"{name} was written"


def check(case: Drawn) -> None:
    call = made(case)
    common = call.meta.common
    batch = {"table": common.block_table_tensor, "seq_lens": common.seq_lens}
    with unchanged(q=call.q, cache=call.kv_cache, starts=common.query_start_loc, **batch):
        if isinstance(call, LatentCase):
            operators: Any = (mla_attention, mla_attention_with_lse)
            out = operators[case.with_lse](*call.arguments, **call.keywords)
        else:
            operators = (attention, attention_with_lse)
            options = call.options | case.options
            inputs = (call.q, call.kv_cache, call.meta, call.scale)
            out = operators[case.with_lse](*inputs, **options)
    if chunk := case.options.get("attention_chunk_size"):
        check_close("out", out, chunked_oracle(call, chunk), case.spec.dtype, common)
        check_padding(out, common.num_actual_tokens)
        return
    out, lse = out if case.with_lse else (out, None)
    least = {"least": 1e-6} if case.more.get("shared_prefix") else {}  # merged by float32 weights
    call.check(out, lse, **least)
    if isinstance(call, Case) and case.scheme and _is_quantized(case):
        for how in forms_of(case.scheme):
            if case.spec.num_heads * case.spec.head_size % (how.group or 1) == 0:
                check_quantized(call, attention(*inputs, **options), how)


def _is_quantized(case: Drawn) -> bool:
    """Interpreted kernels cut bfloat16 where they store it and round it before they quantize it."""
    interpreted = case.more["device"] == "cpu" and case.backend.name == "TRITON"
    cut = interpreted and case.spec.dtype == torch.bfloat16
    odd = case.scheme == "nvfp4" and case.spec.head_size % 2
    return case.spec.dtype != torch.float64 and not cut and not odd and sum(case.lengths[0]) > 0


def search(args: Any) -> Callable[[int], str]:
    backends = drawn_backends(args.backends, args.device)

    def run(seed: int) -> str:
        case = drawn(seed, backends, args.device, args.longest)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{case}") from error
        return case.backend.name

    return run
