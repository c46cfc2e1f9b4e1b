"""Long prompts of layers with a state, by flash-linear-attention's kernels (`attn-ops[fla]`).

Those compute a chunk of rows by products, where ours go from row to row. They need to know on the
host where rows begin, so a call is told of its long prompts by `long_prompts`. Captured steps, rows
in float32, and prompts whose states behind single rows are kept, go from row to row.
"""

import contextlib
import contextvars
import functools
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from attn_ops.metadata.common import CommonAttentionMetadata

LONG = 128
"""Rows of a request from which on they are a long prompt; not measured yet."""


class Others(NamedTuple):
    """Requests beside each other that are no long prompts."""

    first: int
    end: int
    end_row: int


class Prompts:
    """The long prompts of a batch.

    Args:
        starts: [S + 1], where each request's rows begin.
        computed: [S], tokens of each request before these rows.
    """

    def __init__(self, starts: Sequence[int], computed: Sequence[int]) -> None:
        lens = [end - first for first, end in itertools.pairwise(starts)]
        self.requests = [s for s, length in enumerate(lens) if length >= LONG]
        self.num_rows = starts[-1]
        self.begin = [computed[s] == 0 for s in self.requests]
        self.rows = [range(starts[s], starts[s + 1]) for s in self.requests]
        edges = [-1, *self.requests, len(lens)]
        pairs = itertools.pairwise(edges)
        self.others = [Others(a + 1, b, starts[b]) for a, b in pairs if a + 1 < b]
        ends = torch.tensor([0, *map(len, self.rows)], device="cpu")
        self.lens = ends.cumsum(0)  # as the kernels take them, on the CPU
        self._on_device: tuple[torch.Tensor, ...] = ()

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """requests [L], whether each begins [L, 1, 1, 1], rows [N], and lens, on a device."""
        if not self._on_device:  # all layers of a step ask for the same
            rows = [row for rows in self.rows for row in rows]
            found = [torch.tensor(x, device="cpu") for x in (self.requests, self.begin, rows)]
            found[1] = found[1].view(-1, 1, 1, 1)
            self._on_device = tuple(x.to(device) for x in (*found, self.lens))
        return self._on_device


_prompts: contextvars.ContextVar[Prompts | None] = contextvars.ContextVar("prompts", default=None)
"""Of the call that is made. Global: compiled code hands operators tensors alone."""


@contextlib.contextmanager
def long_prompts(batch: CommonAttentionMetadata) -> Iterator[None]:
    """Calls inside are of the batch; one that is recorded has no mirrors on the CPU."""
    starts, computed, found = batch.query_start_loc_cpu, batch.num_computed_tokens_cpu, None
    if starts is not None and computed is not None and _is_installed():
        found = Prompts(starts.tolist(), computed.tolist())
    token = _prompts.set(found if found and found.requests else None)
    try:
        yield
    finally:
        _prompts.reset(token)


# Cached: each step asks.
@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def prompts_of(rows: torch.Tensor, kept: torch.Tensor | None) -> Prompts | None:
    """Those of the call that is made, which these kernels may compute."""
    is_half = rows.dtype in (torch.bfloat16, torch.float16)
    recorded = rows.is_cuda and torch.cuda.is_current_stream_capturing()
    return _prompts.get() if is_half and kept is None and not recorded else None


def delta_rule_by_chunks(
    prompts: Prompts,
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalized: bool,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Rows of long prompts of `gated_delta_rule`, or of `kda`; arguments as of the operators."""
    if g.dim() == 3:
        from fla.ops.kda import chunk_kda as by_chunks
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as by_chunks
    requests, begin, rows, lens = prompts.on(out.device)
    places = slots[requests].long()
    q, k = (x[rows].repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    given = (q, k, v[rows], g[rows].float(), beta[rows])
    y, last = by_chunks(
        *(x.unsqueeze(0) for x in given),
        initial_state=states[places].float().masked_fill(begin, 0), output_final_state=True,
        use_qk_l2norm_in_kernel=normalized, cu_seqlens=lens, cu_seqlens_cpu=prompts.lens,
    )  # fmt: skip
    out[rows] = y[0].to(out.dtype)
    states[places] = last.to(states.dtype)


def ssd_by_chunks(
    prompts: Prompts,
    out: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Rows of long prompts of `ssd_state_update`; `dt` [T, H] float32 is ready for use.

    It is linear attention with a decay a head: keys are B, values dt x, queries C.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    requests, begin, rows, lens = prompts.on(out.device)
    places = slots[requests].long()
    k, q = (y[rows].repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (B, C))
    step, values = dt[rows], x[rows]
    given = (q, k, (values * step.unsqueeze(-1)).to(x.dtype), step * A.float())
    initial = states[places].float().masked_fill(begin, 0).transpose(-1, -2).contiguous()
    y, last = chunk_simple_gla(
        *(one.unsqueeze(0) for one in given), scale=1.0, initial_state=initial,
        output_final_state=True, cu_seqlens=lens, cu_seqlens_cpu=prompts.lens,
    )  # fmt: skip
    y = y[0] if D is None else y[0] + values * D[:, None]
    out[rows] = y.to(out.dtype)
    states[places] = last.transpose(-1, -2).to(states.dtype)
