"""Small calls of every Triton kernel of ours, to be run under compute-sanitizer.

`python -m tests.gpu.sanitize_cases [group ...]`, groups as in `GROUPS`; tests/gpu/sanitize.sh
runs them under its tools. Results are only checked to be finite: right or wrong is the conformance
suite's and the fuzzer's business. All memory that may be read has been written, NaN where no token
is, so that initcheck reports what is read by mistake.
"""

import dataclasses
import sys
from collections.abc import Callable

import torch

from attn_ops import (
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    attention_quant,
    attention_with_lse,
    get_backend,
    merge_attn_states,
)
from attn_ops.backends.base import AttentionOptions
from attn_ops.metadata import (
    advance_step,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
)
from attn_ops.output_quant.schemes import SCHEMES
from attn_ops.testing import make_case
from attn_ops.testing.features import FEATURES
from attn_ops.testing.quantized import forms_of
from tests.attn_ops.backends.mla.triton.reference import make_case as make_latent_case
from tests.fuzz.blocksparse import check, draw

DECODE = ([1, 1, 0, 1, 1], [1, 17, 9, 70, 300])
PREFILL = ([1, 18, 0, 35, 4], [1, 18, 7, 61, 130])
LONG = ([40, 8], [900, 700])
FEW = ("plain", "window", "alibi", "sinks, window", "soft_cap", "fp8_e4m3")


def attend(batches: tuple, features: tuple[str, ...], dtype: torch.dtype) -> None:
    backend = get_backend("TRITON")
    for name in features:
        feature = FEATURES[name]
        for batch in batches:
            spec = AttentionSpec(4, 2, 64, dtype, **feature.spec)
            case = make_case(backend, spec, batch, feature, device="cuda")
            inputs = (case.q, case.kv_cache, case.meta, case.scale)
            finite(attention(*inputs, **case.options))
            finite(attention_with_lse(*inputs, **case.options)[0])


def decode() -> None:
    attend((DECODE,), FEW, torch.bfloat16)
    attend((DECODE,), ("plain",), torch.float32)
    splits()


def splits() -> None:
    """Keys in two and three parts, merged by the second kernel."""
    from attn_ops.backends.triton.decode import decode_attention

    backend = get_backend("TRITON")
    spec = AttentionSpec(4, 2, 64, torch.bfloat16)
    case = make_case(backend, spec, DECODE, FEATURES["plain"], device="cuda")
    common = case.meta.common
    for num_splits in (2, 3):
        lse = torch.empty(case.q.shape[:2], device="cuda")
        options = AttentionOptions(case.scale, lse=lse)
        finite(decode_attention(case.q, case.kv_cache, common, options, num_splits))


def prefill() -> None:
    attend((PREFILL, LONG), FEW, torch.bfloat16)
    attend((PREFILL,), ("non-causal",), torch.float32)
    launches()


def launches() -> None:
    """Keys read in place, split, gathered first, and without a cache."""
    from attn_ops.backends.triton.prefill import choose_launch, prefill_attention, varlen_attention

    backend = get_backend("TRITON")
    spec = AttentionSpec(4, 2, 64, torch.bfloat16)
    for lengths in (PREFILL, LONG):
        case = make_case(backend, spec, lengths, FEATURES["plain"], device="cuda")
        common, options = case.meta.common, AttentionOptions(case.scale)
        launch = choose_launch(case.q, case.kv_cache, common)
        for change in ({"gather": False}, {"gather": False, "num_splits": 3}, {"gather": True}):
            asked = launch._replace(**{"num_splits": 1, **change})
            finite(prefill_attention(case.q, case.kv_cache, common, options, asked))
    k, v = torch.randn(2, len(case.q), 2, 64, dtype=torch.bfloat16, device="cuda")
    alone = common.replace(seq_lens=common.query_lens)
    finite(varlen_attention(case.q, k, v, alone, options))


def quantize() -> None:
    """Rows behind the batch's are neither read nor written."""
    from attn_ops.backends.flash_attn.triton.quantize import quantize_query

    for num_rows in (1, 37, 600):
        q = torch.randn(num_rows + 2, 6, 80, dtype=torch.bfloat16, device="cuda")
        out, scale = quantize_query(q[:, :4], num_rows)
        finite(out[:num_rows].float(), scale)


def output() -> None:
    """Quantized outputs: by the kernel of single tokens, and by the quantize kernels."""
    backend, scale = get_backend("TRITON"), torch.tensor([0.05], device="cuda")
    for scheme in SCHEMES:
        spec = AttentionSpec(4, 2, 128 if "128" in scheme else 64, torch.bfloat16)
        for how in forms_of(scheme)[:2]:
            fields = dataclasses.asdict(how)
            fields["out_scale"] = scale if scheme in ("fp8_static", "nvfp4") else None
            for batch in (DECODE, PREFILL):
                case = make_case(backend, spec, batch, FEATURES["plain"], device="cuda")
                inputs = (case.q, case.kv_cache, case.meta, case.scale)
                attention_quant(*inputs, **fields)
    torch.cuda.synchronize()


def merge() -> None:
    out = torch.randn(2, 37, 4, 80, dtype=torch.bfloat16, device="cuda")
    lse = torch.randn(2, 37, 4, device="cuda")
    lse[:, 3] = float("-inf")
    finite(merge_attn_states(out[0], lse[0], out[1], lse[1])[0])


def batch(query: list[int], seq: list[int]) -> CommonAttentionMetadata:
    """Padded by three rows and two requests."""
    width = -(-max(seq) // 16) + 1
    table = torch.arange(1, len(seq) * width + 1, dtype=torch.int32).view(len(seq), width)
    return CommonAttentionMetadata.from_lengths(
        query, seq, table, 16, "cuda", num_padded_tokens=sum(query) + 3,
        num_padded_reqs=len(seq) + 2,
    )  # fmt: skip


def metadata() -> None:
    from attn_ops.metadata.triton.pages import launch_page_indices

    for query, seq in (DECODE, PREFILL):
        common = batch(query, seq)
        assert common.positions is not None
        finite(common.slot_mapping, common.positions)
        local = make_local_attention_virtual_batches(32, common, on_device=True)
        finite(local.query_start_loc, local.seq_lens, local.block_table_tensor)
        pages = sum(-(-n // 16) for n in seq)
        finite(launch_page_indices(common.seq_lens, common.block_table_tensor, pages, 16))
    rows = common.query_start_loc[1:4].long() - 1
    reduced = make_kv_sharing_fast_prefill_common_attn_metadata(
        common.replace(logits_indices_padded=rows, num_logits_indices=len(rows))
    )
    finite(reduced.query_start_loc)
    advance()


def advance() -> None:
    common = batch(*DECODE)
    size = common.num_reqs
    tokens = torch.zeros(2, size, dtype=torch.int64, device="cuda")
    positions = torch.zeros(size, dtype=torch.int64, device="cuda")
    slots = torch.zeros(size, dtype=torch.int64, device="cuda")
    lists = {
        "paged_kv_indptr": torch.zeros(size + 1, dtype=torch.int32, device="cuda"),
        "paged_kv_indices": torch.zeros(
            common.block_table_tensor.numel(), dtype=torch.int32, device="cuda"
        ),
        "paged_kv_last_page_len": torch.zeros(size, dtype=torch.int32, device="cuda"),
    }
    for more in ({}, lists):
        advance_step(
            tokens[0], tokens[1], positions, common.seq_lens, slots, common.block_table_tensor, 16,
            **more,
        )  # fmt: skip
    finite(tokens, positions, common.seq_lens, slots, *lists.values())


def mla() -> None:
    """Latent attention: both ways, FP8 caches, split keys, gathered latents."""
    from attn_ops.backends.mla.triton.decode import mla_decode
    from attn_ops.backends.mla.triton.gather import gather_latents
    from attn_ops.backends.mla.triton.prefill import mla_prefill
    from attn_ops.backends.mla.triton.project import mla_decode_project

    size = {"latent": 64, "rope": 32, "value": 64, "dtype": torch.bfloat16}
    for batch in (([1, 1, 0, 1], [1, 70, 9, 300]), ([3, 3], [3, 200])):
        for heads, kv_cache_dtype, splits in ((4, "auto", 1), (40, "auto", 3), (16, "fp8_e4m3", 2)):
            case = make_latent_case(*batch, heads, **size, kv_cache_dtype=kv_cache_dtype)
            lse = torch.empty(case.q_pe.shape[:2], device="cuda")
            more = case.options | {"lse": lse, "num_splits": splits}
            finite(mla_decode(*case.inputs, **more))
            finite(mla_decode_project(*case.inputs, case.w_uv, **more))
    starts = torch.tensor([0, 5, 5, 40], dtype=torch.int32, device="cuda")
    q, k = torch.randn(2, 40, 4, 48, dtype=torch.bfloat16, device="cuda")
    for causal in (True, False):
        finite(*mla_prefill(q, k, k[..., :32], starts, starts, 35, 35, scale=0.2, causal=causal,
                            with_lse=True))  # fmt: skip
    case = make_latent_case([1, 1], [40, 70], 2, **size)
    out = torch.zeros(60, 96, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([[0, 30, 55], [7, 15, 0]], dtype=torch.int32, device="cuda")
    gather_latents(case.kv_cache, case.block_table, rows[0], rows[1, :2], out)
    finite(out)


def blocksparse() -> None:
    """Random layers and batches of block-sparse attention, against the dense reference."""
    for seed in range(12):
        check(draw(seed, "cuda", 300), "BLOCKSPARSE", "cuda")


def products() -> None:
    """Few rows, by every form of the kernel; and fused with norm, gate and additions."""
    from attn_ops import gated_mlp, norm_mm, skinny_mm

    for rows, k, m in ((1, 512, 256), (5, 1024, 6144), (16, 512, 16384)):
        x, w = (torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for n in (rows, m))
        finite(skinny_mm(x, w.t(), w[:, 0].contiguous()))
        fp8 = torch.float8_e4m3fn
        scales = {"x_scale": torch.ones(rows, 1), "w_scale": torch.ones(1, m)}
        scales = {name: scale.cuda() for name, scale in scales.items()}
        finite(skinny_mm(x.to(fp8), w.to(fp8).t(), **scales, out_dtype=torch.bfloat16))
        norm, down = w[0].contiguous(), torch.randn(k, m // 2, dtype=x.dtype, device=x.device)
        finite(norm_mm(x, norm, 1e-6, w.t()), gated_mlp(x, x + 1, norm, 1e-6, w.t(), down.t()))


def experts() -> None:
    """One row, few and many; some ids are no expert, and weights of one expert are NaN."""
    from attn_ops import experts as mixture

    like = {"dtype": torch.bfloat16, "device": "cuda"}
    up, down = torch.randn(5, 192, 160, **like), torch.randn(5, 160, 96, **like)
    up[4], down[4] = float("nan"), float("nan")
    turned, biases = up.mT.contiguous().mT, (up[:, :, 0], down[:, :, 0])
    gate = {"activation": "gpt_oss", "limit": 7.0, "interleaved": True}
    for rows in (1, 3, 20, 300):
        x, ids = torch.randn(rows, 160, **like), torch.rand(rows, 4, device="cuda").argsort(1)
        ids[-1, 0] = 5
        given = ids, torch.rand(rows, 4, device="cuda")
        finite(mixture(x, up, down, *given), mixture(x, turned, down, *given, *biases, **gate))


def states() -> None:
    """Decodes beside prompts, long ones in blocks whose last has one row."""
    from benchmarks.state_layers import LAYERS

    lens = torch.tensor([1, 65, 0, 1, 33, 5])
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    slots, seq_lens = torch.arange(1, 7).int(), (lens + torch.tensor([3, 0, 2, 9, 1, 0])).int()
    requests = [x.cuda() for x in (slots, starts, seq_lens)]
    kept = torch.zeros(int(lens.sum()), dtype=torch.int32, device="cuda")
    kept[torch.tensor([4, 31, 70])] = torch.tensor([7, 8, 9]).int().cuda()
    for layer in LAYERS.values():
        one = layer(len(kept), 9, "cuda", torch.bfloat16)
        finite(one.run(*requests), one.run(*requests, kept), one.states)


def sampling() -> None:
    """All kinds of sampling, of a vocabulary that no block divides."""
    from graphs.sampling import FIELDS, sample
    from graphs.sampling.params import Sampling

    rows = 5
    logits = torch.randn(rows, 20003, device="cuda")
    fields = {n: torch.full((rows,), v, dtype=t).cuda() for n, (t, v) in FIELDS.items()}
    fields["temperature"][1:] = 0.7
    fields["top_k"][2:] = 40
    fields["top_p"][3:] = 0.9
    position = torch.arange(rows, device="cuda")
    for kind in (Sampling.GREEDY, Sampling.RANDOM, Sampling.FILTERED):
        finite(sample(logits, fields, position, kind))


def finite(*tensors: torch.Tensor) -> None:
    """Read every element on the device: initcheck then knows whether it was written."""
    for x in tensors:
        assert bool(x.isfinite().all())


GROUPS: dict[str, Callable[[], None]] = {
    "decode": decode,
    "prefill": prefill,
    "quantize": quantize,
    "output": output,
    "merge": merge,
    "metadata": metadata,
    "mla": mla,
    "blocksparse": blocksparse,
    "products": products,
    "experts": experts,
    "states": states,
    "sampling": sampling,
}


def main() -> None:
    for name in sys.argv[1:] or GROUPS:
        if name not in GROUPS:
            raise ValueError(f"group must be known, got {name!r}; supported: {', '.join(GROUPS)}")
        GROUPS[name]()
        torch.cuda.synchronize()
        print(f"{name}: ran", flush=True)


if __name__ == "__main__":
    main()
