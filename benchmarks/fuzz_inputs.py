"""The tensors of a fuzz case: poisoned, surrounded by guards, and compared byte by byte afterwards.

T tokens, S requests, N query heads, K kv heads, H head size, P blocks, B block size, M blocks a
request may own.
"""

import dataclasses
import math
import random
from typing import Any

import numpy as np
import torch

from attn_ops import AttentionMetadata, Backend, CommonAttentionMetadata, write_kv
from attn_ops.metadata import KV_CACHE_DTYPES, PAD_SLOT_ID
from benchmarks.fuzz_cases import Case
from benchmarks.fuzz_latent import (
    draw_kv_b,
    keys_and_values,
    latent_options,
    of_builder,
    padded_query,
    write_latents,
)
from benchmarks.fuzz_oracle import Asked

MARGIN = 4096
"""Guard bytes before and behind q and the cache; a multiple of every alignment that is needed."""


class Guarded:
    """A tensor inside a larger buffer of random bytes, all of which may be watched."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // 256) * 256 + 2 * MARGIN
        self.bytes = torch.empty(room, dtype=torch.uint8, device=generator.device)
        self.bytes.random_(0, 256, generator=generator)
        self.tensor = self.bytes[MARGIN : MARGIN + size].view(dtype).view(shape)
        self.before = self.bytes

    def remember(self) -> None:
        """What the bytes are now is what they must stay."""
        self.before = self.bytes.clone()

    def remembered(self) -> torch.Tensor:
        """The tensor within the remembered bytes."""
        size = self.tensor.numel() * self.tensor.dtype.itemsize
        inside = self.before[MARGIN : MARGIN + size]
        return inside.view(self.tensor.dtype).view(self.tensor.shape)


@dataclasses.dataclass
class Inputs:
    """One call's tensors, and copies of all that it must leave alone."""

    q: torch.Tensor  # [T, N, H]
    kv_cache: torch.Tensor  # [P, 2, B, K, H]
    meta: AttentionMetadata
    options: dict[str, Any]  # of `attention`
    lse: Guarded  # [T, N] float32
    watched: dict[str, tuple[torch.Tensor, torch.Tensor]]  # name: now, as it must stay
    copies: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, cache and table as they must be
    asked: Asked
    kv_b: torch.Tensor | None = None  # [N * (P + V), Lkv] of latent attention

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the operators take before their keywords."""
        weights = () if self.kv_b is None else (self.kv_b,)
        return (self.q, self.kv_cache, self.meta, *weights, self.asked.scale)

    def for_oracle(self, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The copies; of latent attention with the keys and values that its latents stand for."""
        if self.kv_b is None:
            return self.copies
        q, latents, table = self.copies
        cache = keys_and_values(case.spec, latents, self.kv_b, self.options)
        return padded_query(q, cache.shape[-1]), cache, table

    def changed(self) -> dict[str, torch.Tensor]:
        """By name, whether any byte changed: bools on the device."""
        return {name: (now != must).any() for name, (now, must) in self.watched.items()}


def make_inputs(case: Case, backend: Backend, device: torch.device) -> Inputs:
    """Draw and build everything; writes this step's tokens by `write_kv` if the case does.

    Raises:
        ValueError: the backend refuses the geometry or the batch.
    """
    rng = random.Random(f"tensors {case.seed}")
    generator = torch.Generator(device).manual_seed(case.seed)
    table_SM, num_blocks = _block_table(case, rng)
    common = _common(case, table_SM, device)
    size = case.geometry.block_size
    more = of_builder(case.spec, case.workspace, size, device)
    meta = backend.builder(backend, [case.spec], size, device, **more).build(
        case.prefix_blocks * size, common
    )
    options = _options(case, device)
    cache = _cache(case, table_SM, num_blocks, generator)
    kv_cache = _layout(cache.tensor, case)
    q = _q(case, generator)
    lse = Guarded((q.tensor.shape[0], case.spec.num_heads), torch.float32, generator)
    lse.remember()
    q.remember()
    cache.remember()
    watched = {
        "block_table": (common.block_table_tensor, common.block_table_tensor.clone()),
        "seq_lens": (common.seq_lens, common.seq_lens.clone()),
        "query_start_loc": (common.query_start_loc, common.query_start_loc.clone()),
        "slot_mapping": (common.slot_mapping, common.slot_mapping.clone()),
    }
    if case.writes:
        _write(case, kv_cache, _layout(cache.remembered(), case), meta, options, generator)
    watched |= {"q and around": (q.bytes, q.before), "cache": (cache.bytes, cache.before)}
    heads = slice(0, case.spec.num_heads)
    copies = (
        q.remembered()[:, heads],
        _layout(cache.remembered(), case),
        watched["block_table"][1],
    )
    asked = _asked(case, options)
    kv_b = None if case.spec.latent is None else draw_kv_b(case.spec, generator)
    return Inputs(q.tensor[:, heads], kv_cache, meta, options, lse, watched, copies, asked, kv_b)


def _block_table(case: Case, rng: random.Random) -> tuple[torch.Tensor, int]:
    """[S, M] int32 on the CPU, and P: owned blocks are even, guards odd.

    Block 0 is the null block. The last block is a guard full of NaN, which all entries behind a
    request's last block name.
    """
    size = case.geometry.block_size
    longest = map(max, case.query_lens, case.seq_lens)
    width = max([1, *(-(-n // size) for n in longest)]) + rng.randint(0, 3)
    counts = [-(-n // size) for n in case.seq_lens]
    num_owned = sum(counts)
    owned = iter(rng.sample(range(1, num_owned + 1), num_owned))
    num_blocks = 2 * num_owned + 4
    table = np.full((len(counts), width), num_blocks - 1, dtype=np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = [2 * next(owned) for _ in range(count)]
    table[:, : case.prefix_blocks] = table[:1, : case.prefix_blocks]
    return torch.from_numpy(table), num_blocks


def _common(case: Case, table_SM: torch.Tensor, device: torch.device) -> CommonAttentionMetadata:
    """The batch; `from_lengths` refuses rows without keys, which come after it."""
    query, seq = case.query_lens, case.seq_lens
    longest = list(map(max, query, seq))
    common = CommonAttentionMetadata.from_lengths(
        query,
        longest,
        table_SM,
        case.geometry.block_size,
        device,
        num_padded_tokens=sum(query) + case.num_padding_rows,
    )
    starts = np.cumsum([0, *query])
    for request, (rows, keys) in enumerate(zip(query, seq, strict=True)):
        if keys < rows:
            common.slot_mapping[starts[request] : starts[request + 1]] = PAD_SLOT_ID
    seq_cpu = torch.tensor(seq, dtype=torch.int32)
    computed = (seq_cpu - torch.tensor(query, dtype=torch.int32)).clamp(min=0)
    bound = case.unknown_lengths
    return common.replace(
        seq_lens=seq_cpu.to(device),
        seq_lens_cpu=None if bound else seq_cpu,
        query_start_loc_cpu=None if bound else common.query_start_loc_cpu,
        num_computed_tokens_cpu=None if bound else computed,
        max_seq_len=max(seq, default=0) * (2 if bound else 1),
        causal=case.spec.causal,
    )


def _options(case: Case, device: torch.device) -> dict[str, Any]:
    spec, options = case.spec, {}
    if spec.latent is not None:
        return latent_options(spec, device)
    if spec.sliding_window is not None:
        options["sliding_window"] = spec.sliding_window
    if spec.attention_chunk_size is not None:
        options["attention_chunk_size"] = spec.attention_chunk_size
    if spec.soft_cap is not None:
        options["soft_cap"] = spec.soft_cap
    if spec.alibi:
        options["alibi_slopes"] = torch.linspace(0.02, 0.5, spec.num_heads, device=device)
    if spec.sinks:  # bfloat16 numbers, as FlashAttention reads them
        sinks = torch.linspace(-2, 3, spec.num_heads, device=device)
        options["sinks"] = sinks.bfloat16().float()
    if spec.kv_cache_dtype != "auto":
        options["kv_cache_dtype"] = spec.kv_cache_dtype
        options["k_scale"] = torch.tensor([0.5], device=device)
        options["v_scale"] = torch.tensor([1.7], device=device)
    return options


def _cache(
    case: Case, table_SM: torch.Tensor, num_blocks: int, generator: torch.Generator
) -> Guarded:
    """In its storage order: values where tokens are, NaN in the rest of owned blocks, guards."""
    spec, size, device = case.spec, case.geometry.block_size, generator.device
    valid = np.zeros((num_blocks, size), dtype=bool)
    for row, length in zip(table_SM.numpy(), case.seq_lens, strict=True):
        full, rest = divmod(length, size)
        valid[row[:full]] = True
        if rest:
            valid[row[full], :rest] = True
    poisoned = np.zeros((num_blocks, size), dtype=bool)
    poisoned[0::2] = poisoned[-1] = True
    valid_PB, poisoned_PB = (torch.from_numpy(x).to(device) for x in (valid, poisoned))
    heads_first = case.geometry.cache_layout == "HND"
    shape = spec.cache_shape(num_blocks, size)
    shape = (*shape[:2], shape[3], shape[2], shape[4]) if heads_first else shape
    cache = Guarded(shape, spec.cache_dtype, generator)
    view = _layout(cache.tensor, case)
    values = torch.randn(view.shape, generator=generator, device=device)
    if spec.latent is None:
        valid_PB, poisoned_PB = (x[:, None, :, None] for x in (valid_PB, poisoned_PB))
    values.masked_fill_(~valid_PB[..., None], float("nan"))
    fp8 = KV_CACHE_DTYPES[spec.kv_cache_dtype]
    stored = values.to(spec.dtype) if fp8 is None else values.to(fp8).view(torch.uint8)
    view.copy_(torch.where(poisoned_PB[..., None], stored, view))
    return cache


def _layout(cache: torch.Tensor, case: Case) -> torch.Tensor:
    """[P, 2, B, K, H] of a cache in its storage order."""
    return cache.transpose(2, 3) if case.geometry.cache_layout == "HND" else cache


def _q(case: Case, generator: torch.Generator) -> Guarded:
    """q's N heads, with those of k and v behind them if the case is strided; padding rows NaN."""
    spec, rows = case.spec, sum(case.query_lens)
    heads = spec.num_heads + (2 * spec.num_kv_heads if case.strided_q else 0)
    width = spec.head_size if spec.latent is None else spec.latent.qk_head_dim
    q = Guarded((rows + case.num_padding_rows, heads, width), spec.dtype, generator)
    values = torch.randn(q.tensor.shape, generator=generator, device=generator.device)
    values[rows:] = float("nan")
    q.tensor.copy_(values)
    return q


def _write(
    case: Case,
    kv_cache: torch.Tensor,
    expected: torch.Tensor,
    meta: AttentionMetadata,
    options: dict[str, Any],
    generator: torch.Generator,
) -> None:
    """Write new tokens, and what must come of it into `expected`; padding goes to block 0."""
    spec, slots_T = case.spec, meta.common.slot_mapping
    has_padding = case.num_padding_rows or any(map(int.__lt__, case.seq_lens, case.query_lens))
    if spec.latent is not None:
        write_latents(spec, kv_cache, expected, meta, options, generator)
        if has_padding:
            kv_cache[0, 0] = expected[0, 0]  # any padding row may have come last
        return
    shape = (len(slots_T), spec.num_kv_heads, spec.head_size)
    k, v = (
        torch.randn(shape, generator=generator, device=generator.device).to(spec.dtype)
        for _ in range(2)
    )
    names = ("kv_cache_dtype", "k_scale", "v_scale")
    write_kv(k, v, kv_cache, meta, **{n: options[n] for n in names if n in options})
    size, fp8 = case.geometry.block_size, KV_CACHE_DTYPES[spec.kv_cache_dtype]
    block_T, offset_T = slots_T.clamp(min=0) // size, slots_T.clamp(min=0) % size
    for index, (x, name) in enumerate(((k, "k_scale"), (v, "v_scale"))):
        if fp8 is not None:
            limit = torch.finfo(fp8).max
            x = (x.float() / options[name]).clamp(-limit, limit).to(fp8).view(torch.uint8)
        expected[block_T, index, offset_T] = x
    if has_padding:
        kv_cache[0, :, 0] = expected[0, :, 0]  # any padding row may have come last


def _asked(case: Case, options: dict[str, Any]) -> Asked:
    spec = case.spec
    names = ("alibi_slopes", "sinks", "k_scale", "v_scale")
    if spec.latent is not None:
        return Asked(case.query_lens, case.seq_lens, spec.latent.qk_head_dim**-0.5)
    return Asked(
        query_lens=case.query_lens,
        seq_lens=case.seq_lens,
        scale=spec.head_size**-0.5,
        causal=spec.causal,
        sliding_window=spec.sliding_window,
        attention_chunk_size=spec.attention_chunk_size,
        soft_cap=spec.soft_cap,
        fp8=KV_CACHE_DTYPES[spec.kv_cache_dtype],
        **{name: options.get(name) for name in names},
    )
