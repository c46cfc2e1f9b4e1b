"""Paged attention in float64, many requests at once, without reading the device.

Independent of the backends and of the metadata's builders: what a row sees follows from the
lengths, chunks included, and a shared prefix is nothing special. Requests whose lengths have equal
powers of two are padded to each other.

T tokens, R requests of a group, N query heads, K kv heads, G = N // K, H head size, P blocks,
B block size, Q query rows, C keys.
"""

import dataclasses

import torch

GROUP_SCORES = 2**25
"""Scores held at once, all heads, if one request does not have more: 256 MiB in float64."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is to be computed, lengths on the host."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    scale: float
    causal: bool = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None  # [N]
    sinks: torch.Tensor | None = None  # [N]
    fp8: torch.dtype | None = None  # of the cache's bytes
    k_scale: torch.Tensor | None = None  # [1]
    v_scale: torch.Tensor | None = None  # [1]


def oracle(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, N, H] and log-sum-exp [T, N], float64; rows that see nothing are 0 and -inf."""
    out_TNH = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse_TN = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    starts = [0]
    for length in asked.query_lens:
        starts.append(starts[-1] + length)
    for group in _groups(asked, q.shape[1]):
        query = torch.tensor([asked.query_lens[r] for r in group], device=q.device)
        keys = torch.tensor([asked.seq_lens[r] for r in group], device=q.device)
        first = torch.tensor([starts[r] for r in group], device=q.device)
        num_rows = max(asked.query_lens[r] for r in group)
        num_keys = max(asked.seq_lens[r] for r in group)
        row_Q = torch.arange(num_rows, device=q.device)
        # Rows behind a request's last repeat it: they compute, and store, the same numbers.
        row_RQ = torch.minimum(row_Q.expand(len(group), -1), query[:, None] - 1)
        index_RQ = first[:, None] + row_RQ
        position_RQ = (keys - query)[:, None] + row_RQ
        table_RM = block_table[torch.tensor(group, device=q.device)].long()
        kv_2RCKH = _keys(kv_cache, table_RM, keys, num_keys, asked)
        out_RQNH, lse_RQN = _attend(q[index_RQ].double(), kv_2RCKH, position_RQ, keys, asked)
        out_TNH[index_RQ] = out_RQNH
        lse_TN[index_RQ] = lse_RQN
    return out_TNH, lse_TN


def _groups(asked: Asked, num_heads: int) -> list[list[int]]:
    by_size: dict[tuple[int, int], list[int]] = {}
    for request, (query, keys) in enumerate(zip(asked.query_lens, asked.seq_lens, strict=True)):
        if query and keys:
            by_size.setdefault((query.bit_length(), keys.bit_length()), []).append(request)
    groups = []
    for (query_bits, key_bits), requests in by_size.items():
        most = max(1, (GROUP_SCORES // num_heads) >> (query_bits + key_bits))
        groups += [requests[i : i + most] for i in range(0, len(requests), most)]
    return groups


def _keys(
    kv_cache: torch.Tensor, table_RM: torch.Tensor, keys: torch.Tensor, num_keys: int, asked: Asked
) -> torch.Tensor:
    """[2, R, C, K, H] float64, token by token through the table; zero where there is none."""
    token_C = torch.arange(num_keys, device=kv_cache.device)
    token_RC = torch.minimum(token_C.expand(len(keys), -1), keys[:, None] - 1)
    block_RC = table_RM.gather(1, token_RC // kv_cache.shape[2])
    offset_RC = token_RC % kv_cache.shape[2]
    kv_2RCKH = torch.stack([kv_cache[block_RC, i, offset_RC] for i in (0, 1)])
    if asked.fp8 is None:
        return kv_2RCKH.double()
    kv_2RCKH = kv_2RCKH.view(asked.fp8).double()
    for x, scale in zip(kv_2RCKH, (asked.k_scale, asked.v_scale), strict=True):
        if scale is not None:
            x.mul_(scale.double())
    return kv_2RCKH


def _attend(
    q_RQNH: torch.Tensor,
    kv_2RCKH: torch.Tensor,
    position_RQ: torch.Tensor,
    keys: torch.Tensor,
    asked: Asked,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, Q, N, H] and [R, Q, N]: scale, cap, bias, mask, then a softmax with the sink."""
    num_requests, num_rows, num_heads, _ = q_RQNH.shape
    k_RCKH, v_RCKH = kv_2RCKH
    q_RQKGH = q_RQNH.unflatten(2, (k_RCKH.shape[2], -1))
    scores = torch.einsum("rqkgh,rckh->rkgqc", q_RQKGH, k_RCKH) * asked.scale
    scores = scores.reshape(num_requests, num_heads, num_rows, -1)
    if asked.soft_cap is not None:
        scores = (scores / asked.soft_cap).tanh() * asked.soft_cap
    key_C = torch.arange(k_RCKH.shape[1], device=q_RQNH.device)
    distance_RQC = position_RQ[:, :, None] - key_C
    if asked.alibi_slopes is not None:
        slope_N11 = asked.alibi_slopes.double()[:, None, None]
        scores = scores - slope_N11 * distance_RQC[:, None].abs()
    seen_RQC = _seen(distance_RQC, position_RQ, key_C, keys, asked)
    scores = scores.masked_fill(~seen_RQC[:, None], float("-inf"))
    lse_RNQ = scores.logsumexp(-1)
    if asked.sinks is not None:
        lse_RNQ = torch.logaddexp(lse_RNQ, asked.sinks.double()[None, :, None])
    weights = (scores - lse_RNQ.clamp(min=-1e300)[..., None]).exp()
    weights = weights.reshape(num_requests, k_RCKH.shape[2], -1, num_rows, k_RCKH.shape[1])
    out = torch.einsum("rkgqc,rckh->rqkgh", weights, v_RCKH)
    return out.flatten(2, 3), lse_RNQ.transpose(1, 2)


def _seen(
    distance_RQC: torch.Tensor,
    position_RQ: torch.Tensor,
    key_C: torch.Tensor,
    keys: torch.Tensor,
    asked: Asked,
) -> torch.Tensor:
    """[R, Q, C] bool."""
    seen_RQC = (key_C < keys[:, None])[:, None].expand_as(distance_RQC)
    if asked.causal:
        seen_RQC = seen_RQC & (distance_RQC >= 0)
    if asked.sliding_window is not None:
        seen_RQC = seen_RQC & (distance_RQC.abs() < asked.sliding_window)
    if asked.attention_chunk_size is not None:
        chunk = asked.attention_chunk_size
        seen_RQC = seen_RQC & (position_RQ[:, :, None] // chunk == key_C // chunk)
    return seen_RQC
