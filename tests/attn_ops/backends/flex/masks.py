"""Custom masks and scores, batches for them, and their oracle.

T rows, N query heads."""

import torch

from attn_ops.backends.flex import BACKEND

RAGGED = ([1, 3, 0, 7, 40, 2], [5, 33, 4, 7, 61, 2])
PREFIX = torch.tensor([2, 9, 1, 5, 30, 0], dtype=torch.int32)


def ragged(make_batch, backend=BACKEND, **options):
    """RAGGED, its last request made one of padding: it has rows and no keys."""
    batch = make_batch(*RAGGED, backend=backend, num_padding_rows=3, **options)
    for lengths in (batch.common.seq_lens, batch.common.seq_lens_cpu):
        lengths[-1] = 0
    batch.q[sum(RAGGED[0]) - 2 :] = float("nan")
    batch.meta = batch.meta.replace()  # what it found was for the lengths before
    return batch


def prefix_lm(request, query_position, key_position):
    return (key_position < PREFIX[request]) | (key_position <= query_position)


def every_third(request, query_position, key_position):
    """Rows at positions that 5 divides see nothing."""
    return ((query_position - key_position) % 3 == 0) & (query_position % 5 != 0)


def nearer_is_better(score, head, request, query_position, key_position):
    return score - (head + 1) * 0.1 * (query_position - key_position).abs() + request


def oracle(batch, options, causal, mask, score=None):
    """Dense, in float64: out [T, N, H] and log-sum-exp [T, N]."""
    c, scale = batch.common, 0.3
    out, lse = batch.q.new_zeros(batch.q.shape).double(), torch.zeros(batch.q.shape[:2]).double()
    lse.fill_(float("-inf"))
    starts = c.query_start_loc.tolist()
    for request, length in enumerate(c.seq_lens.tolist()):
        begin, end = starts[request : request + 2]
        if begin == end or length == 0:
            continue
        table, size = c.block_table_tensor[request].long(), batch.kv_cache.shape[2]
        keys = torch.arange(length)
        k, v = batch.kv_cache[table[keys // size], :, keys % size].double().unbind(1)
        group = batch.q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        rows = torch.arange(length - (end - begin), length)
        s = torch.einsum("qnh,cnh->nqc", batch.q[begin:end].double(), k) * scale
        places = torch.meshgrid(torch.arange(s.shape[0]), rows, keys, indexing="ij")
        request_NQC = torch.full_like(places[0], request)
        if score is not None:
            s = score(s, places[0], request_NQC, *places[1:])
        seen = mask(request_NQC, *places[1:])
        if causal:
            seen &= places[2] <= places[1]
        s = s.masked_fill(~seen, float("-inf"))
        if "sinks" in options:
            sink = options["sinks"].double()[:, None, None].expand(*s.shape[:2], 1)
            s = torch.cat([s, sink], -1)
        weights = s.softmax(-1).nan_to_num(0)[..., :length]
        out[begin:end] = torch.einsum("nqc,cnh->qnh", weights, v)
        lse[begin:end] = s.logsumexp(-1).T
    return out, lse


def check(out, lse, want, want_lse):
    assert out.isfinite().all()
    assert (out - want).norm() <= 1e-5 * want.norm()
    assert (out[want.abs().amax((1, 2)) == 0] == 0).all()
    assert torch.equal(lse.isinf(), want_lse.isinf())
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
