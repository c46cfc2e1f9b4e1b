"""TORCH's fast path on a CPU: `scaled_dot_product_attention` for requests of like lengths at once.

Takes float32, float16 and bfloat16 with windows, ALiBi, FP8 caches and non-causal batches. All
else stays with `torch_backend`'s reference: other features and devices, float64, the log-sum-exp.

Requests of one query length whose keys are about as many make a bucket. Their keys are gathered by
the block table in one indexed read and rows without a token zeroed: a weight of zero times NaN is
NaN. Few query rows are folded with their head group, [K, G * Q] rows over K heads, which spares
PyTorch a copy of the keys for every query head and keeps the model's dtype; many rows are computed
in float32: PyTorch's bfloat16 prefill took twice as long (2 cores of an AMD EPYC, 2026-11-21).

T tokens, R requests of a bucket, N query heads, K kv heads, G = N // K, H head size, V head size of
values, P blocks, B block size, M blocks a request may own, Q query rows of a request, C keys.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_ops.backends.base import AttentionOptions
from attn_ops.metadata import CommonAttentionMetadata, kv_dtype_of

FOLDED_ROWS = 64
"""G * Q up to which rows are folded."""

MASKED_ROWS = 256
"""Query rows computed at once where a mask is needed, which bounds the mask's memory."""

BUCKET_TOKENS = 4096
"""Keys gathered at once, if one request does not have more: they should stay in the CPU's cache."""


def takes(q: torch.Tensor, options: AttentionOptions) -> bool:
    """Whether the fast path computes this call."""
    return (
        q.device.type == "cpu"
        and q.dtype != torch.float64
        and options.lse is None
        and options.has_only("sliding_window", "alibi_slopes")
    )


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Requests computed by one call."""

    requests: list[int]  # R indices into the batch
    starts: list[int]  # [R] first query row of each
    num_queries: int  # Q
    num_keys: list[int]  # [R] keys of each, at most C

    @property
    def width(self) -> int:
        """C."""
        return max(self.num_keys)

    @property
    def ragged(self) -> bool:
        return min(self.num_keys) < self.width

    def rows(self) -> torch.Tensor | slice:
        """The bucket's query rows, [R * Q] int64 or, if they stand together, a slice."""
        first, size = self.starts[0], self.num_queries
        if all(start == first + i * size for i, start in enumerate(self.starts)):
            return slice(first, first + len(self.starts) * size)
        return (
            torch.tensor(self.starts, device="cpu")[:, None] + torch.arange(size, device="cpu")
        ).flatten()

    def missing(self) -> torch.Tensor:
        """[R, C] bool: no token of the request stands there."""
        return (
            torch.arange(self.width, device="cpu")
            >= torch.tensor(self.num_keys, device="cpu")[:, None]
        )


def forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    starts: list[int],
    seq_lens: list[int],
) -> torch.Tensor:
    """Paged attention: [T, N, H] in q's dtype, padding zero. `starts` has S + 1 entries."""
    out_TNH = torch.zeros(q.shape, dtype=q.dtype, device="cpu")
    for bucket in buckets(starts, seq_lens):
        k_RCKH, v_RCKH = _gather(kv_cache, common.block_table_tensor, bucket, options)
        rows = bucket.rows()
        q_RQNH = q[rows].unflatten(0, (len(bucket.requests), bucket.num_queries))
        out_RQNH = _attend(q_RQNH, k_RCKH, v_RCKH, bucket, options, common.causal)
        out_TNH[rows] = out_RQNH.flatten(0, 1).to(q.dtype)
    return out_TNH


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    options: AttentionOptions,
    starts: list[int],
) -> torch.Tensor:
    """Attention over this step's own keys: [T, N, V] in q's dtype, padding zero."""
    out_TNV = q.new_zeros(*q.shape[:2], v.shape[2])
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    for bucket in buckets(starts, lengths, step=1):
        rows, size = bucket.rows(), (len(bucket.requests), bucket.num_queries)
        q_RQNH, k_RCKH, v_RCKV = (x[rows].unflatten(0, size) for x in (q, k, v))
        out_RQNV = _attend(q_RQNH, k_RCKH, v_RCKV, bucket, options, causal)
        out_TNV[rows] = out_RQNV.flatten(0, 1).to(q.dtype)
    return out_TNV


def buckets(starts: list[int], seq_lens: list[int], step: int = 0) -> Iterator[Bucket]:
    """Requests with query rows and keys, by query length and key length rounded up.

    `step`: keys a bucket's lengths may differ by; 0 takes a quarter of the largest power of two
    below them, so that at most a fifth of what is read is padding.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for request, num_keys in enumerate(seq_lens):
        num_queries = starts[request + 1] - starts[request]
        if num_queries and num_keys:
            each = step or max(32, 2 ** (num_keys.bit_length() - 3))
            groups.setdefault((num_queries, -(-num_keys // each) * each), []).append(request)
    for (num_queries, width), requests in groups.items():
        most = max(1, BUCKET_TOKENS // width)
        for first in range(0, len(requests), most):
            chosen = requests[first : first + most]
            keys = [seq_lens[r] for r in chosen]
            yield Bucket(chosen, [starts[r] for r in chosen], num_queries, keys)


def _gather(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    bucket: Bucket,
    options: AttentionOptions,
) -> torch.Tensor:
    """[2, R, C, K, H]: keys and values of the bucket's requests as they are meant, else zeros.

    Table entries behind a request's last block may be anything; block 0 is read in their place.
    """
    block_size = kv_cache.shape[2]
    num_blocks = torch.tensor(bucket.num_keys, device="cpu").add(block_size - 1) // block_size
    width = -(-bucket.width // block_size)
    blocks_RM = block_table[bucket.requests, :width].long()
    if bucket.ragged:
        blocks_RM = blocks_RM.masked_fill(
            torch.arange(width, device="cpu") >= num_blocks[:, None], 0
        )
    kv_2RCKH = kv_cache.transpose(0, 1)[:, blocks_RM].flatten(2, 3)[:, :, : bucket.width]
    fp8 = kv_dtype_of(options.kv_cache_dtype)
    if fp8 is not None:
        kv_2RCKH = kv_2RCKH.contiguous().view(fp8).float()
        for x, scale in zip(kv_2RCKH, (options.k_scale, options.v_scale), strict=True):
            if scale is not None:
                x.mul_(scale)
    if bucket.ragged:
        kv_2RCKH[:, bucket.missing()] = 0
    return kv_2RCKH


def _attend(
    q_RQNH: torch.Tensor,
    k_RCKH: torch.Tensor,
    v_RCKV: torch.Tensor,
    bucket: Bucket,
    options: AttentionOptions,
    causal: bool,
) -> torch.Tensor:
    """[R, Q, N, V], in float32 or q's dtype."""
    num_queries, num_heads = q_RQNH.shape[1:3]
    groups = num_heads // k_RCKH.shape[2]
    folded = num_queries * groups <= FOLDED_ROWS
    # A bias of q's dtype would be as coarse as q's dtype at the distance's size.
    if not folded or options.alibi_slopes is not None or k_RCKH.dtype != q_RQNH.dtype:
        q_RQNH, k_RCKH, v_RCKV = (x.float() for x in (q_RQNH, k_RCKH, v_RCKV))
    k_RKCH, v_RKCV = k_RCKH.transpose(1, 2), v_RCKV.transpose(1, 2)
    plain = options.sliding_window is None and options.alibi_slopes is None
    triangle = causal and plain and not bucket.ragged and num_queries == bucket.width > 1
    triangle = triangle and options.scale > 0  # else PyTorch's own mask makes NaN
    unmasked = plain and not bucket.ragged and (num_queries == 1 or not causal)
    if triangle or (unmasked and not folded):
        out_RNQV = scaled_dot_product_attention(
            q_RQNH.transpose(1, 2), k_RKCH, v_RKCV, is_causal=triangle, scale=options.scale,
            enable_gqa=groups > 1,
        )  # fmt: skip
        return out_RNQV.transpose(1, 2)
    parts = []
    for first in range(0, num_queries, MASKED_ROWS):
        part_RQNH = q_RQNH[:, first : first + MASKED_ROWS]
        mask = None
        if not unmasked:
            mask = _mask(bucket, first, part_RQNH, options, causal)
        parts.append(_masked(part_RQNH, k_RKCH, v_RKCV, mask, folded, options.scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _masked(
    q_RQNH: torch.Tensor,
    k_RKCH: torch.Tensor,
    v_RKCV: torch.Tensor,
    mask: torch.Tensor | None,
    folded: bool,
    scale: float,
) -> torch.Tensor:
    """[R, Q, N, V] under a mask [R, 1, Q or 1, C] bool or [R, N, Q, C] float."""
    num_requests, num_queries, num_heads, _ = q_RQNH.shape
    num_kv_heads = k_RKCH.shape[1]
    groups = num_heads // num_kv_heads
    q_RNQH = q_RQNH.transpose(1, 2)
    if folded:
        # Heads of a group are neighbours, so that [N, Q] rows are [K, G * Q] rows.
        q_RNQH = q_RNQH.reshape(num_requests, num_kv_heads, groups * num_queries, -1)
        if mask is not None and mask.shape[1] == num_heads > 1:
            mask = mask.reshape(num_requests, num_kv_heads, groups * num_queries, -1)
        elif mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, groups, 1)
    out_RNQV = scaled_dot_product_attention(
        q_RNQH, k_RKCH, v_RKCV, attn_mask=mask, scale=scale, enable_gqa=not folded and groups > 1
    )
    return out_RNQV.reshape(num_requests, num_heads, num_queries, -1).transpose(1, 2)


def _mask(
    bucket: Bucket,
    first: int,
    q_RQNH: torch.Tensor,
    options: AttentionOptions,
    causal: bool,
) -> torch.Tensor:
    """What the rows from `first` on see: [R, 1, Q or 1, C] bool; with ALiBi [R, N, Q, C] float32.

    A request's Q rows are the last of its keys.
    """
    seen = ~bucket.missing()[:, None, None, :]
    window, slopes = options.sliding_window, options.alibi_slopes
    if window is None and slopes is None and (not causal or bucket.num_queries == 1):
        return seen
    offset = torch.arange(first, first + q_RQNH.shape[1], device="cpu") - bucket.num_queries
    position = (torch.tensor(bucket.num_keys, device="cpu")[:, None] + offset)[:, None, :, None]
    ahead_R1QC = torch.arange(bucket.width, device="cpu") - position
    if causal:
        seen = seen & (ahead_R1QC <= 0)
    if window is not None:
        seen = seen & (ahead_R1QC > -window)
        seen = seen if causal else seen & (ahead_R1QC < window)
    if slopes is None:
        return seen
    bias_RNQC = -slopes[:, None, None] * ahead_R1QC.abs()
    return bias_RNQC.masked_fill(~seen, float("-inf"))
