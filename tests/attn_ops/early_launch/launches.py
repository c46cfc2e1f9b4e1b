"""Every kernel of ours that is launched early, compiled for Hopper: `python -m` it to get JSON.

It runs in a process without TRITON_INTERPRET. Launchers are called with few tensors on the CPU;
`tests.kit.sm90` compiles instead of launching.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_ops import AttentionSpec, get_backend
from attn_ops.backends.base import AttentionOptions
from attn_ops.output_quant.schemes import OutputQuant, QuantizedOutput
from attn_ops.testing import make_case
from attn_ops.testing.features import FEATURES
from tests.attn_ops.backends.mla.triton.reference import make_case as make_latent_case
from tests.attn_ops.early_launch import faulty_kernels
from tests.kit.ptx import faults
from tests.kit.sm90 import Compiled, compiling

BF16 = torch.bfloat16
DECODE = ([1, 1, 0, 1], [1, 17, 9, 70])
PREFILL = ([1, 18, 0, 35], [1, 18, 7, 61])
LONG = ([1, 18], [1, 700])

NEVER_WRITTEN = {
    "attn_ops.ops.triton.skinny.skinny_kernel": {"w_ptr"},
    "attn_ops.ops.triton.fused_products.fused_kernel": {"w_ptr"},
    "attn_ops.backends.mla.triton.project.project_kernel": {"w_ptr"},
    "attn_ops.backends.triton.decode_parts.combine_kernel": {"quant.1"},
}
"""What kernels may read before they wait: weights, and the scale that the caller gives."""


def attention_cases(*batches: Any) -> Iterator[tuple[Any, ...]]:
    """q, cache, metadata and options of a decode, and of a prefill."""
    spec = AttentionSpec(4, 2, 64, BF16)
    for batch in batches or (DECODE, PREFILL):
        case = make_case(get_backend("TORCH"), spec, batch, FEATURES["plain"])
        yield case.q, case.kv_cache, case.meta.common, AttentionOptions(case.scale)


def triton() -> None:
    from attn_ops.backends.triton.decode import decode_attention
    from attn_ops.backends.triton.fixed import fixed_attention
    from attn_ops.backends.triton.prefill import choose_launch, prefill_attention

    decode, prefill = attention_cases()
    for splits in (1, 3):
        decode_attention(*decode, splits)
    how = OutputQuant("fp8_static")
    quant = QuantizedOutput(how, torch.tensor([0.05]), *how.empty(decode[0]))
    decode_attention(*decode[:3], dataclasses.replace(decode[3], quant=quant), 3)
    launch = choose_launch(*prefill[:3])
    for splits in (1, 3):
        prefill_attention(*prefill, launch._replace(gather=False, num_splits=splits))
    prefill_attention(*prefill, launch._replace(gather=True, num_splits=1))
    for case in (decode, *attention_cases(LONG)):
        fixed_attention(*case, num_splits=3)


def blocksparse() -> None:
    from attn_ops.backends.blocksparse.triton.decode import decode_attention
    from attn_ops.backends.blocksparse.triton.prefill import choose_launch, prefill_attention
    from attn_ops.block_layout import BlockLayout, BlockTables

    decode, prefill = attention_cases()
    masks = torch.ones(4, 8, 8, dtype=torch.bool)
    layout = BlockTables(BlockLayout.from_masks(masks, 16, 2)).tensors()
    decode_attention(*decode, 16, layout, 2)
    launch = choose_launch(*prefill[:3], 16)._replace(gather=False)
    prefill_attention(*prefill, 16, layout, launch, by_rows=False)


def mla() -> None:
    from attn_ops.backends.mla.triton.absorb import absorb
    from attn_ops.backends.mla.triton.decode import mla_decode
    from attn_ops.backends.mla.triton.gather import gather_latents
    from attn_ops.backends.mla.triton.prefill import mla_prefill
    from attn_ops.backends.mla.triton.project import mla_decode_project
    from attn_ops.backends.mla.triton.write import write_latents

    size = {"latent": 64, "rope": 32, "value": 64, "dtype": BF16}
    case = make_latent_case(*DECODE, 4, **size)
    rows, heads = case.q_pe.shape[:2]
    absorb(torch.zeros(rows, heads, 32, dtype=BF16), torch.zeros(heads, 32, 64, dtype=BF16))
    mla_decode(*case.inputs, **case.options | {"num_splits": 2})
    for splits in (1, 2):
        mla_decode_project(*case.inputs, case.w_uv, **case.options | {"num_splits": splits})
    starts = torch.tensor([0, 5, 5, 40], dtype=torch.int32)
    q = torch.zeros(40, 4, 48, dtype=BF16)
    mla_prefill(q, q, q[..., :32], starts, starts, 35, 35, scale=0.2, causal=True, with_lse=True)
    table, out = torch.ones(2, 8, dtype=torch.int32), torch.zeros(60, 96, dtype=BF16)
    gather_latents(torch.zeros(9, 16, 96, dtype=BF16), table, starts[:3], starts[:2], out)
    latents, slots = torch.zeros(2, 96, dtype=BF16), torch.zeros(2, dtype=torch.int64)
    write_latents(latents[:, :64], latents[:, 64:], torch.zeros(9, 16, 96, dtype=BF16), slots)


def products() -> None:
    from attn_ops.ops.triton.fused_products import launch_fused
    from attn_ops.ops.triton.rows import launch_rms_norm, launch_silu_mul
    from attn_ops.ops.triton.skinny import launch_skinny

    x, w = torch.zeros(2, 512, dtype=BF16), torch.zeros(512, 512, dtype=BF16)
    launch_skinny(x, w.t(), w[0], None, None, BF16)
    many = torch.zeros(40, 512, dtype=BF16)
    launch_skinny(many, w.t(), None, None, None, BF16)
    launch_fused(many, w.t(), residuals=(many,))
    fp8 = torch.float8_e4m3fn
    scales = (torch.ones(2, 1), torch.ones(1, 512))
    launch_skinny(x.to(fp8), w.to(fp8).t(), None, *scales, BF16)
    normed = {"norm_weight": w[0], "eps": 1e-5}
    launch_fused(x, w.t(), addend=x, gated=True, **normed)
    launch_fused(x, w.t(), residuals=(x, x), bias=w[0], **normed)
    launch_rms_norm(x, x, w[0], 1e-5)
    launch_silu_mul(x)


def experts() -> None:
    from attn_ops.ops.moe.constants import ExpertsConstants
    from attn_ops.ops.triton.experts import launch_experts
    from attn_ops.ops.triton.top_experts import launch_top_experts

    for weights in ("sum", "softmax"):
        launch_top_experts(torch.zeros(3, 40, dtype=BF16), 4, weights == "sum", weights, BF16)
    gate_up, down = torch.zeros(4, 256, 320, dtype=BF16), torch.zeros(4, 320, 128, dtype=BF16)
    bias, turned = gate_up[:, :, 0], gate_up.mT.contiguous().mT
    gpt_oss = {"activation": "gpt_oss", "limit": 7.0, "interleaved": True}
    for rows in (1, 3, 130):
        ids = torch.zeros(rows, 2, dtype=torch.int64)
        given = torch.zeros(rows, 320, dtype=BF16), gate_up, down, ids, torch.zeros(rows, 2)
        launch_experts(*given, residual=given[0])
        launch_experts(given[0], turned, *given[2:], bias, bias[:, :1].expand(4, 320), **gpt_oss)
        fp8 = (w.to(torch.float8_e4m3fn) for w in (gate_up, down))
        scales = {"gate_up_scale": torch.ones(4, 2, 3), "down_scale": torch.ones(4, 320, 1)}
        launch_experts(given[0], *fp8, *given[3:], **scales)
    for form in ((64, 128, 64, 4, 4), (128, 128, 64, 8, 4)):
        launch_experts(*given, constants=ExpertsConstants(*form))


def ranks() -> None:
    from attn_ops.ops.triton.collectives import PROGRAMS, Shared, launch_all_reduce

    epochs = torch.zeros(2, PROGRAMS, dtype=torch.int64)
    for number in (2, 3):
        shared = Shared(torch.zeros(number, dtype=torch.int64), (epochs[0], epochs[1]), 1, None)
        for length in (4096, 1 << 19):
            launch_all_reduce(torch.zeros(length, dtype=BF16), shared)
    launch_all_reduce(torch.zeros(4096), shared)


def states() -> None:
    from attn_ops.ops.triton import states as kernels

    rows, heads, k, v = 3, 4, 128, 64
    batch = (torch.ones(rows).int(), torch.arange(rows + 1).int(), torch.ones(rows).int(), None)
    keeping = (*batch[:3], batch[0])
    keys, values = torch.zeros(rows, 2, k, dtype=BF16), torch.zeros(rows, heads, v, dtype=BF16)
    per_head, of_head = torch.zeros(rows, heads, dtype=BF16), torch.zeros(heads)
    x, weight = torch.zeros(rows, 512, dtype=BF16), torch.zeros(512, 4, dtype=BF16)
    pool = torch.zeros(9, 512, 3, dtype=BF16)
    for bias, silu, requests in ((None, False, batch), (x[0], True, keeping)):
        kernels.launch_causal_conv1d(x, weight, bias, silu, pool, requests)
    pool = torch.zeros(9, heads, k, v)
    for g, requests in ((per_head, keeping), (torch.zeros(rows, heads, k), batch)):
        kernels.launch_delta_rule(keys, keys, values, g, per_head, True, pool, requests)
        long = [x.expand(200, *x.shape[1:]) for x in (keys[:1], values[:1], g[:1], per_head[:1])]
        for kept in (batch, keeping):
            kernels.launch_delta_rule(long[0], *long[:1], *long[1:], True, pool, kept)
    shared = (values, per_head, of_head, keys, keys)
    pool = torch.zeros(9, heads, v, k)
    clamped = ((0.001, 0.1), batch[0])
    kernels.launch_ssd(*shared, of_head, of_head, True, *clamped, pool, batch)
    kernels.launch_ssd(*shared, None, None, False, (None, None), None, pool, keeping)
    long = [x if x is of_head else x[:1].expand(200, *x.shape[1:]) for x in shared]
    for kept in (batch, keeping):
        kernels.launch_ssd(*long, of_head, of_head, True, *clamped, pool, kept)
    A, B, pool = torch.zeros(512, 16), torch.zeros(rows, 16, dtype=BF16), torch.zeros(9, 512, 16)
    kernels.launch_selective(x, x, A, B, B, A[:, 0], x, A[:, 0], True, pool, batch)
    kernels.launch_selective(x, x, A, B, B, None, None, None, False, pool, keeping)


def query() -> None:
    from attn_ops.backends.flash_attn.triton.quantize import quantize_query, quantize_tokens

    q = torch.zeros(5, 4, 64, dtype=BF16)
    quantize_query(q, 5)
    quantize_tokens(q, torch.arange(6, dtype=torch.int32), 2)


def step() -> None:
    from graphs.sampling.triton.edits import launch_allowed
    from graphs.sampling.triton.logprobs import launch_log_probs
    from graphs.sampling.triton.race import launch_argmax, launch_race
    from graphs.sampling.triton.select import thresholds
    from graphs.step.triton.finish import launch_finish_step

    logits, rows = torch.zeros(2, 5000), torch.zeros(2, dtype=torch.int64)
    launch_race(logits, torch.ones(2), rows, rows)
    launch_argmax(logits.bfloat16())
    launch_log_probs(logits, rows, 2)
    launch_allowed(logits, torch.zeros(2, 157, dtype=torch.int32))
    thresholds(logits, torch.ones(2, dtype=torch.int32), torch.ones(2))
    count = torch.zeros(2, dtype=torch.int32)
    tensors = {
        "tokens": torch.zeros(3, 2, dtype=torch.int64), "step": rows[:1],
        "stop_tokens": rows[:, None],
        "remaining": count, "active": torch.ones(2, dtype=torch.bool), "input_ids": rows,
        "position_ids": rows, "seq_lens": count, "slot_mapping": rows,
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
    }  # fmt: skip
    launch_finish_step(rows, tensors, 16)


def planted() -> None:
    x = torch.zeros(4)
    for name in faulty_kernels.EXPECTED:
        getattr(faulty_kernels, name)[(8,)](x, x, x, PDL=True, launch_pdl=True)


GROUPS: dict[str, Callable[[], None]] = {
    "ranks": ranks,
    "triton": triton,
    "blocksparse": blocksparse,
    "mla": mla,
    "products": products,
    "experts": experts,
    "query": query,
    "states": states,
    "step": step,
    "planted": planted,
}


def described(kernel: Compiled) -> dict[str, object]:
    free = NEVER_WRITTEN.get(kernel.name, {"w_ptr"} if "faulty" in kernel.name else set())
    wrong = faults(kernel.ptx, kernel.pointers, free)
    by_position = kernel.constants_alone_by_name
    said = {"name": kernel.name, "early": kernel.launched_early, "faults": wrong}
    return said | {"by_position": by_position}


def main() -> None:
    with compiling() as found:
        for name in sys.argv[1:] or GROUPS:
            GROUPS[name]()
    print(json.dumps([described(one) for one in found]))


if __name__ == "__main__":
    main()
