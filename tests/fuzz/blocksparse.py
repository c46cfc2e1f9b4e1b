"""Block-sparse attention on random layers and batches: `python -m tests.fuzz blocksparse`.

Each case draws parameters, heads, lengths and features from a seed. The oracle is dense attention
in float64 under a mask that `block_mask` gives, block by block, for the heads of all ranks; a rank
must give its slice of it. Other cases draw the blocks themselves: heads and rows without any, heads
that share their columns with other rows. The cache is NaN wherever no visible key of any rank's
head stands: between tokens, behind them, and in blocks that no row sees.

T rows, S requests, N query heads, K kv heads, H head size, P cache blocks, B cache block size.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention_with_lse, get_backend
from attn_ops.block_layout import (
    BlockLayout,
    BlocksparseParams,
    BlockTables,
    block_mask,
    local_strided,
)
from attn_ops.metadata import KV_CACHE_DTYPES
from attn_ops.testing.features import FEATURES

LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Relative error of the rows, by dtype of q."""

DRAWN = ("masks", "rows", "shared columns")
"""How a layout is made of blocks that are drawn by head and row."""

NUM_KINDS = 40
"""Kinds of layers on a GPU: head counts and sizes, dtypes, block sizes, features."""


@dataclasses.dataclass(frozen=True)
class BlocksparseCase:
    """One layer and batch, by a seed."""

    seed: int
    params: BlocksparseParams  # of rank 0
    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str
    cache_block_size: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_padding_rows: int
    features: tuple[str, ...]  # of soft_cap, alibi_slopes, sinks
    layout: str = "params"  # or made of drawn blocks: one of DRAWN

    def __str__(self) -> str:
        p = self.params
        return (
            f"seed {self.seed}: {p.num_heads}/{p.num_kv_heads} heads of {self.head_size} on "
            f"{p.tp_size} ranks, blocks of {p.block_size}, {p.local_blocks} local, stride "
            f"{p.vert_stride}, step {p.head_sliding_step}, {self.dtype}, {self.kv_cache_dtype}, "
            f"layout by {self.layout}, "
            f"pages of {self.cache_block_size}, {self.query_lens} of {self.seq_lens}, "
            f"{', '.join(self.features) or 'plain'}"
        )


def draw(seed: int, device: str = "cpu", largest: int = 400) -> BlocksparseCase:
    """The case of a seed; `largest`: tokens of a sequence."""
    on_gpu = device == "cuda"
    rng = random.Random(f"blocksparse {seed}")
    # What kernels are compiled for; on a GPU of few kinds, as each takes seconds.
    kind = random.Random(f"kind {seed % NUM_KINDS}") if on_gpu else rng
    tp_size = rng.choice([1, 1, 2, 4])
    kv_heads, group = kind.choice([1, 1, 2]), kind.choice([1, 2, 3, 4, 4, 1, 2, 35])
    pattern = rng.choice([{}, {}, {"homo_head": True}, {"homo_head_group": True}])
    longest = rng.choice([largest // 4, largest])
    params = BlocksparseParams(
        max_seqlen=longest + rng.choice([0, rng.randint(0, 100), 1000]),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        block_size=kind.choice([16, 16, 32, 48, 64, 112]),
        local_blocks=rng.choice([0, 1, 2, 3, 16]),
        vert_stride=rng.choice([1, 2, 3, 8, 1000]),
        tp_size=tp_size,
        **pattern,
    )
    num_reqs = rng.randint(1, 4)
    seq_lens = [rng.choice([0, 1, rng.randint(1, longest), longest]) for _ in range(num_reqs)]
    decode = rng.random() < 0.5
    query_lens = [
        min(n, 1) if decode else rng.choice([min(n, 1), min(n, 4), n, rng.randint(0, n)])
        for n in seq_lens
    ]
    dtypes = [torch.bfloat16, torch.float16] if on_gpu else [torch.float32, torch.bfloat16]
    sizes = [16, 64, 128, 128, 256] if on_gpu else [16, 32]
    optional = ("soft_cap", "alibi_slopes", "sinks")
    return BlocksparseCase(
        seed=seed,
        params=params,
        head_size=kind.choice(sizes),
        dtype=kind.choice(dtypes),
        kv_cache_dtype=kind.choice(["auto", "auto", "auto", "fp8_e4m3", "fp8_e5m2"]),
        cache_block_size=kind.choice([16, 16, 32, 64, 128]),
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_padding_rows=rng.choice([0, 0, 3]),
        features=tuple(f for f in optional if kind.random() < 0.25),
        layout=rng.choice(["params", *DRAWN]),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Tensors:
    """A case's tensors, for the heads of all ranks."""

    q: torch.Tensor  # [T, N, H]
    cache: torch.Tensor  # [P, 2, B, K, H], poisoned
    common: CommonAttentionMetadata
    options: dict[str, Any]
    seen: list[torch.Tensor]  # of each request [N, Q, C] bool
    values: list[torch.Tensor]  # of each request [2, C, K, H] float64, before poison


def total(case: BlocksparseCase) -> BlocksparseParams:
    """The parameters without ranks: all heads on one."""
    p, tp = case.params, case.params.tp_size
    return dataclasses.replace(
        p, num_heads=p.num_heads * tp, num_kv_heads=p.num_kv_heads * tp, tp_size=1
    )


def rows_of(case: BlocksparseCase) -> list[list[list[int]]]:
    """The blocks that each row of each head sees, for the heads of all ranks."""
    params = total(case)
    heads, blocks = params.num_heads, params.num_blocks
    if case.layout == "params":
        masks = [block_mask(params, blocks, blocks, head) for head in range(heads)]
        return [[[c for c, sees in enumerate(row) if sees] for row in mask] for mask in masks]
    rng = random.Random(f"layout {case.seed}")
    drawn = [_drawn_rows(rng, blocks) for _ in range(heads)]
    if case.layout == "shared columns":
        return [_moved(rng, drawn[0]) for _ in range(heads)]
    return [rng.choice(drawn) for _ in range(heads)]  # some heads are equal


def _drawn_rows(rng: random.Random, num_blocks: int) -> list[list[int]]:
    density = rng.choice([0.0, 0.1, 0.5, 1.0])
    own = rng.choice([0.0, 1.0, density])
    return [
        [*(c for c in range(row) if rng.random() < density), *([row] if rng.random() < own else [])]
        for row in range(num_blocks)
    ]


def _moved(rng: random.Random, rows: list[list[int]]) -> list[list[int]]:
    """The same blocks in the same order, some of them a row later."""
    moved = [list(row) for row in rows]
    for row, behind in itertools.pairwise(moved):
        while row and (not behind or row[-1] < behind[0]) and rng.random() < 0.5:
            behind.insert(0, row.pop())
    return moved


def layout_of_rank(case: BlocksparseCase, rank: int) -> BlockLayout:
    """The layout of one rank's heads, made as the case says."""
    params = dataclasses.replace(case.params, tp_rank=rank)
    if case.layout == "params":
        return local_strided(params)
    rows = rows_of(case)[slice(*params.active_head_range)]
    size, kv_heads = params.block_size, params.num_kv_heads
    if case.layout == "rows":
        return BlockLayout.from_rows(rows, size, kv_heads)
    if case.layout == "masks":
        blocks = range(params.num_blocks)
        masks = [torch.tensor([[c in row for c in blocks] for row in head]) for head in rows]
        return BlockLayout.from_masks(masks, size, kv_heads)
    ends = [list(itertools.accumulate(map(len, head), initial=0)) for head in rows]
    columns = [c for row in rows[0] for c in row]
    starts, columns = (torch.tensor(x, dtype=torch.int32) for x in (ends, columns))
    return BlockLayout(size, kv_heads, starts, columns)


def seen_of(
    rows: list[list[list[int]]], size: int, num_queries: int, num_keys: int
) -> torch.Tensor:
    """[N, Q, C] bool, of blocks of `size`; the queries are the last of the keys."""
    blocks = -(-num_keys // size)
    whole = [[[c in row for c in range(blocks)] for row in head[:blocks]] for head in rows]
    seen = torch.tensor(whole, dtype=torch.bool).view(len(rows), blocks, blocks)
    seen = seen.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :num_keys, :num_keys]
    return seen.tril()[:, num_keys - num_queries :]


def make(case: BlocksparseCase, device: str) -> Tensors:
    """The tensors of a case; keys and values that no row sees are NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    params, size = total(case), case.cache_block_size
    width = max([1, *(-(-n // size) for n in case.seq_lens)])
    num_blocks = 1 + len(case.seq_lens) * width
    table = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
    table = table.view(len(case.seq_lens), width)
    fp8 = KV_CACHE_DTYPES[case.kv_cache_dtype]
    stored = fp8 or case.dtype
    shape = (num_blocks, 2, size, params.num_kv_heads, case.head_size)
    cache = torch.randn(shape, generator=generator).to(stored)
    poisoned = torch.ones(shape[0], size, shape[3], dtype=torch.bool)
    seen, values, rows = [], [], rows_of(case)
    for blocks, queries, keys in zip(table.long(), case.query_lens, case.seq_lens, strict=True):
        kv = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :keys]
        values.append(kv.double())
        seen.append(seen_of(rows, params.block_size, queries, keys))
        by_head = seen[-1].any(1).unflatten(0, (params.num_kv_heads, -1)).any(1)  # [K, C]
        place = torch.arange(keys)
        poisoned[blocks[place // size], place % size] = ~by_head.T
    if fp8 is not None:
        cache = cache.view(torch.uint8)
    # 0x7f is NaN in both forms of FP8, and a large number to the interpreter.
    cache = cache.masked_fill(poisoned[:, None, :, :, None], 0x7F if fp8 else float("nan"))
    num_rows = sum(case.query_lens) + case.num_padding_rows
    q = torch.randn(num_rows, params.num_heads, case.head_size, generator=generator).to(case.dtype)
    q[sum(case.query_lens) :] = float("nan")
    common = CommonAttentionMetadata.from_lengths(
        case.query_lens, case.seq_lens, table, size, device, num_padded_tokens=num_rows
    )
    options = _options(case, params.num_heads, device)
    return Tensors(q.to(device), cache.to(device), common, options, seen, values)


def _options(case: BlocksparseCase, num_heads: int, device: str) -> dict[str, Any]:
    asked = [name.removesuffix("_slopes") for name in case.features]
    asked += [case.kv_cache_dtype] if case.kv_cache_dtype != "auto" else []
    options: dict[str, Any] = {}
    for name in asked:
        options |= FEATURES[name].options(num_heads, torch.device(device))
    return options


def oracle(case: BlocksparseCase, made: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [T, N, H] and log-sum-exp [T, N] of all heads, float64, on the CPU."""
    q, options = made.q.double().cpu(), made.options
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    row = 0
    for queries, seen, values in zip(case.query_lens, made.seen, made.values, strict=True):
        if not queries:
            continue
        rows, row = slice(row, row + queries), row + queries
        group = q.shape[1] // values.shape[2]
        k, v = values.repeat_interleave(group, 2)
        if case.kv_cache_dtype != "auto":
            k, v = k * options["k_scale"].cpu(), v * options["v_scale"].cpu()
        scores = torch.einsum("qnh,cnh->nqc", q[rows], k) * case.head_size**-0.5
        if "soft_cap" in options:
            scores = options["soft_cap"] * torch.tanh(scores / options["soft_cap"])
        if "alibi_slopes" in options:
            keys = torch.arange(len(k))
            distance = keys[len(k) - queries :, None] - keys
            scores = scores - options["alibi_slopes"].cpu()[:, None, None] * distance
        scores = scores.masked_fill(~seen, float("-inf"))
        if "sinks" in options:
            sinks = options["sinks"].cpu().double()[:, None, None].expand(-1, queries, 1)
            scores = torch.cat([scores, sinks], 2)
        of_row = scores.logsumexp(-1)
        weights = (scores - of_row.clamp(min=-1e300)[..., None]).exp()[..., : len(k)]
        out[rows] = torch.einsum("nqc,cnh->qnh", weights, v)
        lse[rows] = of_row.T
    return out, lse


def run_rank(
    case: BlocksparseCase, made: Tensors, rank: int, backend_name: str, attend: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and log-sum-exp of one rank's heads, by the operator; `attend` stands in for it."""
    backend, params = get_backend(backend_name), dataclasses.replace(case.params, tp_rank=rank)
    heads = slice(*params.active_head_range)
    kv_heads = slice(rank * params.num_kv_heads, (rank + 1) * params.num_kv_heads)
    options = dict(made.options)
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = options[name][heads].contiguous()
    device = made.q.device.type
    tables = BlockTables(layout_of_rank(case, rank)).to(device)
    spec = AttentionSpec(
        params.num_heads, params.num_kv_heads, case.head_size, case.dtype,
        kv_cache_dtype=case.kv_cache_dtype, blocksparse=params.block_size,
        soft_cap=options.get("soft_cap"), alibi="alibi_slopes" in options, sinks="sinks" in options,
    )  # fmt: skip
    meta = backend.builder(backend, [spec], case.cache_block_size, device).build(0, made.common)
    return (attend or attention_with_lse)(
        made.q[:, heads].contiguous(), made.cache[..., kv_heads, :].contiguous(), meta,
        case.head_size**-0.5, blocksparse=tables, **options,
    )  # fmt: skip


def check(
    case: BlocksparseCase, backend_name: str, device: str = "cpu", attend: Any = None
) -> float:
    """The largest relative error of a row, over all ranks.

    Raises:
        AssertionError: a row is wrong.
    """
    made = make(case, device)
    want, want_lse = oracle(case, made)
    worst = 0.0
    for rank in range(case.params.tp_size):
        heads = slice(rank * case.params.num_heads, (rank + 1) * case.params.num_heads)
        out, lse = (x.double().cpu() for x in run_rank(case, made, rank, backend_name, attend))
        said = f"{case}, rank {rank}"
        wanted, limit = want[:, heads], LIMITS[case.dtype]
        assert out.isfinite().all(), f"{said}: not finite"
        norm = wanted.norm(dim=-1).clamp(min=0.05)
        error = ((out - wanted).norm(dim=-1) / norm).flatten()
        worst = max(worst, float(error.max()) if len(error) else 0.0)
        assert worst <= 3 * limit, f"{said}: relative error {worst:.2e}"
        torch.testing.assert_close(lse, want_lse[:, heads], rtol=limit, atol=3 * limit, msg=said)
    return worst


def search(args: Any) -> Callable[[int], str]:
    names = args.backends or ["BLOCKSPARSE"]

    def run(seed: int) -> str:
        for name in names:
            check(draw(seed, args.device, args.longest), name, args.device)
        return "right"

    return run
