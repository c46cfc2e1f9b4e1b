"""`attn_ops::copy_blocks`, `swap_blocks` and `gather_kv`: the paged cache, moved and read.

T tokens, S requests, M blocks a request may own, K kv heads, H head size, P physical blocks,
B block size, n pairs of blocks.
"""

import itertools
from collections.abc import Sequence

import torch

from attn_ops.backends.checks import check_cache_shape
from attn_ops.metadata import kv_dtype_of
from attn_ops.metadata.validation import check_tensor, overlap
from attn_ops.ops.checks import check_scales
from attn_ops.ops.library import operator

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@operator(mutates=("kv_caches",))
def copy_blocks(kv_caches: Sequence[torch.Tensor], block_pairs: torch.Tensor) -> None:
    """Copy blocks within each cache, all at once: every block is read before any is written.

    Two kernels a cache and no read of the device, so that it can be captured; it needs room for n
    blocks of one cache at a time. A captured list is padded with pairs (b, b), b a block that no
    other pair writes.

    Args:
        kv_caches: a list or tuple of caches, each [P, 2, B, K, H], or [P, B, Lkv + R] of latents,
            of any dtype, all on one device; mutated.
        block_pairs: [n, 2] int64 on the caches' device: block to read, block to write.

    What a block named twice as destination holds afterwards is undefined on CUDA.

    Raises:
        ValueError: shapes or dtypes do not fit, or a cache is listed twice. With pairs on the CPU
            also: a block out of range, the null block (0) as destination, one destination for two
            sources. Nothing is written.
    """
    _check_pairs(block_pairs)
    for index, kv_cache in enumerate(kv_caches):
        _check_paged(f"kv_caches[{index}]", kv_cache)
        if block_pairs.device != kv_cache.device:
            raise ValueError(
                f"block_pairs must be on the device of kv_caches[{index}], {kv_cache.device}, "
                f"got {block_pairs.device}"
            )
    # By address and not by extent: layers may be interleaved views of one allocation.
    addresses = [kv_cache.data_ptr() for kv_cache in kv_caches if kv_cache.numel()]
    if len(set(addresses)) < len(addresses):
        raise ValueError("kv_caches must be different tensors, got one of them twice")
    if kv_caches and block_pairs.device.type == "cpu":
        num_blocks = min(kv_cache.shape[0] for kv_cache in kv_caches)
        _check_block_ids(block_pairs, num_blocks, num_blocks, first_target=1)
    source_n, target_n = block_pairs.unbind(1)
    for kv_cache in kv_caches:
        # index_select makes a copy: everything is read before anything is written. Both refuse
        # an index out of range on the device, where indexing with [] would wrap a negative one.
        kv_cache.index_copy_(0, target_n, kv_cache.index_select(0, source_n))


@operator(mutates=("target",))
def swap_blocks(source: torch.Tensor, target: torch.Tensor, block_pairs: torch.Tensor) -> None:
    """Copy blocks from one cache into another, such as out to pinned host memory and back.

    One copy for each run of blocks that are neighbours on both sides. Between pinned memory and
    CUDA the copies are only enqueued, on the current stream of the CUDA device: the caller orders
    them with streams or events. Before the host reads or rewrites a pinned tensor, wait for an
    event recorded after the call; a kernel on another stream that uses the blocks waits for one
    too. Pageable memory, and blocks of different strides, may make the host wait. Not for capture:
    a graph would keep these very blocks. Caches that overlap are read before they are written.

    Args:
        source: [P, 2, B, K, H], or [P, B, Lkv + R] of latents, any dtype and device; read.
        target: the same with any number of blocks, the source's dtype, any device; mutated.
        block_pairs: [n, 2] int64 on the CPU: block of the source, block of the target. Block 0 is
            a block like any other: a pool on the host need not have a null block.

    Raises:
        ValueError: shapes or dtypes do not fit, pairs are not on the CPU, a block is out of range,
            or one destination has two sources; nothing is written.
    """
    _check_pairs(block_pairs)
    _check_paged("source", source)
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(
            f"target must have blocks as the source's, {list(source.shape[1:])} {source.dtype}, "
            f"got {list(target.shape[1:])} {target.dtype}"
        )
    if block_pairs.device.type != "cpu":
        raise ValueError(f"block_pairs must be on cpu, got {block_pairs.device}")
    _check_block_ids(block_pairs, source.shape[0], target.shape[0], first_target=0)
    if source.device == target.device and overlap(source, target):
        # Also where the caller cloned the cache: Inductor may hand in a view (pytorch#198031).
        source_n, target_n = block_pairs.to(target.device).unbind(1)
        target.index_copy_(0, target_n, source.index_select(0, source_n))
        return
    for read, written in _runs(block_pairs):
        target[written].copy_(source[read], non_blocking=True)


def _runs(block_pairs: torch.Tensor) -> list[tuple[slice, slice]]:
    """Blocks to read and to write, neighbours on both sides together.

    >>> _runs(torch.tensor([[4, 7], [1, 5], [3, 6]]))
    [(slice(1, 2, None), slice(5, 6, None)), (slice(3, 5, None), slice(6, 8, None))]
    """
    if block_pairs.shape[0] == 0:
        return []
    pairs = block_pairs.unique(dim=0)  # sorted; the order of the copies does not matter
    starts = (pairs.diff(dim=0) != 1).any(dim=1).nonzero().flatten().add(1).tolist()
    runs = []
    for begin, end in itertools.pairwise([0, *starts, pairs.shape[0]]):
        source, target = pairs[begin].tolist()
        length = end - begin
        runs.append((slice(source, source + length), slice(target, target + length)))
    return runs


def _check_paged(name: str, kv_cache: torch.Tensor) -> None:
    """Raise a ValueError unless it is a cache of keys and values, or one of latents."""
    if kv_cache.dim() != 3 and (kv_cache.dim() != 5 or kv_cache.shape[1] != 2):
        raise ValueError(
            f"{name} must have shape [num_blocks, 2, block_size, num_kv_heads, head_size], "
            f"got {list(kv_cache.shape)}; supported: also latents, with three dimensions"
        )


def _check_pairs(block_pairs: torch.Tensor) -> None:
    if block_pairs.dtype != torch.int64 or block_pairs.shape[1:] != (2,):
        raise ValueError(
            "block_pairs must be int64 of shape [num_pairs, 2], "
            f"got {block_pairs.dtype} {list(block_pairs.shape)}"
        )


def _check_block_ids(
    block_pairs: torch.Tensor, num_sources: int, num_targets: int, first_target: int
) -> None:
    """Raise a ValueError unless every block exists and none is written from two; pairs on CPU."""
    if block_pairs.shape[0] == 0:
        return
    for column, role, first, end in (
        (0, "sources", 0, num_sources),
        (1, "destinations", first_target, num_targets),
    ):
        ids_n = block_pairs[:, column]
        wrong_n = ids_n[(ids_n < first) | (ids_n >= end)]
        if wrong_n.numel():
            raise ValueError(
                f"block_pairs must have {role} of at least {first} and below {end}, "
                f"got {wrong_n[0].item()}"
            )
    written, counts = block_pairs.unique(dim=0)[:, 1].unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            "block_pairs must have one source for each destination, "
            f"got several for block {written[counts > 1][0].item()}"
        )


# -- gather_kv -------------------------------------------------------------------------------------


def _gather_kv_fake(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    *,
    dtype: torch.dtype | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_tokens, *kv_cache.shape[3:])
    k = kv_cache.new_empty(shape, dtype=dtype or kv_cache.dtype)
    return k, torch.empty_like(k)


@operator(fake=_gather_kv_fake)
def gather_kv(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int | torch.SymInt,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all requests one after the other, as a dense kernel wants them.

    Computed on the device without reading it: capturable. Row t belongs to the request r with
    sum(seq_lens[:r]) <= t < sum(seq_lens[:r + 1]).

    Args:
        kv_cache: [P, 2, B, K, H] float64, float32, float16 or bfloat16; uint8 for FP8.
        block_table: [S, M] int32; only entries that hold tokens are used.
        seq_lens: [S] int32.
        num_tokens: T; usually the sum of seq_lens, which the host knows. Rows after the last
            request, and tokens that the table has no block for, are zero; tokens after T are left
            out.
        kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2.
        k_scale, v_scale: [1] float32, of an FP8 cache: stored * scale is meant. None is 1.
        dtype: of the results, one of the four above; None is the cache's. FP8 needs it.

    Returns:
        k and v, [T, K, H] each, contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_gather(kv_cache, block_table, seq_lens, kv_cache_dtype, dtype)
    check_scales(k_scale, v_scale, kv_cache.device)
    num_tokens, dtype = int(num_tokens), dtype or kv_cache.dtype
    if 0 in (num_tokens, *block_table.shape):
        zeros_TKH = kv_cache.new_zeros((num_tokens, *kv_cache.shape[3:]), dtype=dtype)
        return zeros_TKH, zeros_TKH.clone()
    block_T, offset_T, owned_T = locate(block_table, seq_lens, num_tokens, kv_cache.shape[2])
    unowned_T11 = ~owned_T[:, None, None]
    k_TKH, v_TKH = (
        _restored(kv_cache[:, half][block_T, offset_T].contiguous(), kv_cache_dtype, scale, dtype)
        for half, scale in enumerate((k_scale, v_scale))
    )
    return k_TKH.masked_fill_(unowned_T11, 0), v_TKH.masked_fill_(unowned_T11, 0)


def locate(
    block_table: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block and offset of every row, and whether it is a request's; block 0 for other rows."""
    num_reqs, max_blocks = block_table.shape
    row_T = torch.arange(num_tokens, device=seq_lens.device)
    end_S = seq_lens.cumsum(0)
    request_T = torch.searchsorted(end_S, row_T, right=True)
    owned_T = request_T < num_reqs
    request_T = request_T.clamp(max=num_reqs - 1)
    position_T = row_T - (end_S - seq_lens)[request_T]
    index_T = position_T.div(block_size, rounding_mode="floor")
    owned_T = owned_T & (index_T < max_blocks)
    block_T = block_table[request_T, index_T.clamp(0, max_blocks - 1)].long()
    return torch.where(owned_T, block_T, 0), position_T % block_size, owned_T


def _restored(
    x: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x [T, K, H] of the cache as it is meant: the inverse of `write_kv`'s `stored`."""
    fp8 = kv_dtype_of(kv_cache_dtype)
    if fp8 is None:
        return x.to(dtype)
    x = x.view(fp8).to(torch.promote_types(dtype, torch.float32))
    return (x if scale is None else x * scale).to(dtype)


def _check_gather(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str,
    dtype: torch.dtype | None,
) -> None:
    check_cache_shape(kv_cache)
    check_tensor("seq_lens", seq_lens, (torch.int32,), (None,), kv_cache.device)
    wanted = (seq_lens.shape[0], None)
    check_tensor("block_table", block_table, (torch.int32,), wanted, kv_cache.device)
    plain = kv_dtype_of(kv_cache_dtype) is None
    stored = _FLOATS if plain else (torch.uint8,)
    meant = dtype or (kv_cache.dtype if plain else None)
    for name, got, supported in (
        ("kv_cache.dtype", kv_cache.dtype, stored),
        ("dtype", meant, _FLOATS),
    ):
        if got not in supported:
            raise ValueError(
                f"{name} must fit kv_cache_dtype {kv_cache_dtype}, got {got}; "
                f"supported: {', '.join(map(str, supported))}"
            )
