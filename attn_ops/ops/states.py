"""Layers with a state, over the rows of many requests: convolutions, delta rules, state spaces.

    attn_ops::causal_conv1d_update     a short convolution (LFM2, and before all rules below)
    attn_ops::gated_delta_rule         Qwen3-Next, Qwen3.5: https://arxiv.org/abs/2412.06464
    attn_ops::kda                      Kimi Linear, a decay a key: https://arxiv.org/abs/2510.26692
    attn_ops::ssd_state_update         Mamba-2: https://arxiv.org/abs/2405.21060
    attn_ops::selective_state_update   Mamba: https://arxiv.org/abs/2312.00752

T rows of a batch, S requests, P slots of a pool, C channels, L inputs of a kernel, H heads, G heads
of keys or groups of heads, K key size, V value size, N state size.

A request's state is `states[slot]`. Its rows are those from `starts[s]` to `starts[s + 1]`; each
reads the state that the row before has left, and the last one's stays in the slot. A request whose
rows are all that it has begins: whatever its slot holds counts as 0. Requests in slot 0, the null
slot, are padding: their rows give 0, and nothing is read or written. No slot but 0 may be named
twice.

All operators take three tensors of the batch, int32 or int64: slots [S], starts [S + 1], and
seq_lens [S], the tokens of each request with these rows. A fourth, kept [T], may name slots that
keep the states behind single rows too, 0 for none; they are no slots of the batch's requests.
The first request's rows begin at row 0. Results have the dtype of x or v; sums are computed in
float32 at least, of operands in bfloat16 where prompts in it are long (`triton.chunks`). On CUDA a
Triton kernel computes each rule, without the host (`triton.states`). Elsewhere it is plain PyTorch,
which the kernels are compared with.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from attn_ops.ops.library import operator


class _Requests:
    """The A requests of a batch that are no padding, and their rows, one after the other."""

    def __init__(
        self,
        slots: torch.Tensor,
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        kept: torch.Tensor | None,
    ) -> None:
        self.kept = kept
        lens = starts.diff()
        (real,) = torch.where((slots > 0) & (lens > 0))
        self.slots, self.lens = slots[real].long(), lens[real].long()
        self.first = starts[:-1][real].long()
        self.num_computed = seq_lens[real].long() - self.lens

    def states(self, pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[A, ...]: a copy of their states, 0 of those that begin."""
        begins = (self.num_computed == 0).view(-1, *[1] * (pool.dim() - 1))
        return pool[self.slots].to(dtype).masked_fill(begins, 0)

    def rows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The first row of all, the second of those that have two, ...: requests and rows."""
        for number in range(int(self.lens.max()) if self.lens.numel() else 0):
            (which,) = torch.where(self.lens > number)
            yield which, self.first[which] + number

    def keep_behind(self, rows: torch.Tensor, pool: torch.Tensor, states: torch.Tensor) -> None:
        """Keep the states behind such rows where a slot is named for them."""
        if self.kept is not None:
            slots = self.kept[rows].long()
            pool[slots[slots > 0]] = states[slots > 0].to(pool.dtype)

    def keep(self, pool: torch.Tensor, states: torch.Tensor) -> None:
        pool[self.slots] = states.to(pool.dtype)


def _like_first(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_value(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    return _like_first(v)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@operator(mutates=("states",), fake=_like_first)
def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve each channel over a request's inputs, of which the last L - 1 are its state.

    Args:
        x: [T, C].
        weight: [C, L].
        bias: [C].
        activation: silu (or swish) of the result.
        states: [P, C, L - 1], the oldest input first.

    Returns:
        [T, C].

    Raises:
        ValueError: the activation is unknown.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation must be known, got {activation!r}; supported: silu, swish")
    if x.device.type == "cuda":
        from attn_ops.ops.triton.states import launch_causal_conv1d

        batch = slots, starts, seq_lens, kept
        return launch_causal_conv1d(x, weight, bias, activation is not None, states, batch)
    requests, dtype = _Requests(slots, starts, seq_lens, kept), _wide(x)
    taps = weight.to(dtype)
    window, out = requests.states(states, dtype), _like_first(x).zero_()
    for which, rows in requests.rows():
        inputs_ACL = torch.cat([window[which], x[rows].to(dtype).unsqueeze(-1)], dim=-1)
        y = (inputs_ACL * taps).sum(-1)
        y = y if bias is None else y + bias.to(dtype)
        out[rows] = (y if activation is None else F.silu(y)).to(out.dtype)
        window[which] = inputs_ACL[..., 1:]
        requests.keep_behind(rows, states, inputs_ACL[..., 1:])
    requests.keep(states, window)
    return out


@operator(mutates=("states",), fake=_like_value)
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalized: bool,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """State: exp(g) times itself, then corrected by beta towards v at k; result: what it has at q.

    Args:
        q, k: [T, G, K].
        v: [T, H, V]; H is a multiple of G.
        g: [T, H], logarithm of the decay.
        beta: [T, H].
        normalized: q and k are divided by their lengths first.
        states: [P, H, K, V].

    Returns:
        [T, H, V].
    """
    return _delta_rule(q, k, v, g, beta, normalized, states, (slots, starts, seq_lens, kept))


@operator(mutates=("states",), fake=_like_value)
def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalized: bool,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gated_delta_rule` with a decay for every key: g [T, H, K]."""
    return _delta_rule(q, k, v, g, beta, normalized, states, (slots, starts, seq_lens, kept))


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalized: bool,
    states: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """g [T, H] or [T, H, K]; the rest as of the operators."""
    if v.device.type == "cuda":
        from attn_ops.ops.triton.states import launch_delta_rule

        return launch_delta_rule(q, k, v, g, beta, normalized, states, batch)
    requests, dtype = _Requests(*batch), _wide(v)
    g = g if g.dim() == 3 else g.unsqueeze(-1)
    q, k = (x.to(dtype).repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
    if normalized:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, decay = q * q.shape[-1] ** -0.5, g.to(dtype).exp()
    values, beta = v.to(dtype), beta.to(dtype)
    state, out = requests.states(states, dtype), _like_first(v).zero_()
    for which, rows in requests.rows():
        old_AHKV, key = state[which] * decay[rows].unsqueeze(-1), k[rows].unsqueeze(-1)
        change_AHV = (values[rows] - (old_AHKV * key).sum(-2)) * beta[rows].unsqueeze(-1)
        new_AHKV = old_AHKV + key * change_AHV.unsqueeze(-2)
        out[rows] = (new_AHKV * q[rows].unsqueeze(-1)).sum(-2).to(out.dtype)
        state[which] = new_AHKV
        requests.keep_behind(rows, states, new_AHKV)
    requests.keep(states, state)
    return out


@operator(mutates=("states",), fake=_like_first)
def ssd_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    prompt_dt_min: float | None,
    prompt_dt_max: float | None,
    prompt_lens: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """State: exp(dt A) times itself, plus dt B x; result: what it has at C, plus D x.

    Args:
        x: [T, H, V].
        dt: [T, H]; `dt_bias` [H] is added, then `softplus` taken.
        A, D: [H].
        B, C: [T, G, N]; H is a multiple of G.
        prompt_dt_min, prompt_dt_max: dt is clamped to these in rows of prompts.
        prompt_lens: [S], tokens of each request's prompt; None: no row is one of a prompt.
        states: [P, H, V, N].

    Returns:
        [T, H, V].
    """
    if x.device.type == "cuda":
        from attn_ops.ops.triton.states import launch_ssd

        inputs = (x, dt, A, B, C, D, dt_bias, softplus, (prompt_dt_min, prompt_dt_max))
        return launch_ssd(*inputs, prompt_lens, states, (slots, starts, seq_lens, kept))
    requests, dtype = _Requests(slots, starts, seq_lens, kept), _wide(x)
    dt = _step_size(dt, dt_bias, softplus, dtype)
    if prompt_lens is not None and (prompt_dt_min is not None or prompt_dt_max is not None):
        clamped = dt.clamp(prompt_dt_min, prompt_dt_max)
        dt = torch.where(_in_prompt(prompt_lens, starts, seq_lens, len(x))[:, None], clamped, dt)
    B, C = (y.to(dtype).repeat_interleave(x.shape[1] // B.shape[1], 1) for y in (B, C))
    decay = (dt * A.to(dtype)).exp()
    state, out = requests.states(states, dtype), _like_first(x).zero_()
    for which, rows in requests.rows():
        inputs_AHV = x[rows].to(dtype)
        added = (dt[rows].unsqueeze(-1) * inputs_AHV).unsqueeze(-1) * B[rows].unsqueeze(-2)
        new_AHVN = state[which] * decay[rows][..., None, None] + added
        y = (new_AHVN * C[rows].unsqueeze(-2)).sum(-1)
        y = y if D is None else y + inputs_AHV * D.to(dtype)[:, None]
        out[rows], state[which] = y.to(out.dtype), new_AHVN
        requests.keep_behind(rows, states, new_AHVN)
    requests.keep(states, state)
    return out


@operator(mutates=("states",), fake=_like_first)
def selective_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ssd_state_update` with a step size and a decay for every channel, gated by z.

    Args:
        x: [T, C].
        dt: [T, C]; `dt_bias` [C] is added, then `softplus` taken.
        A: [C, N].
        B, C: [T, N].
        D: [C].
        z: [T, C]; the result is multiplied by silu(z).
        states: [P, C, N].

    Returns:
        [T, C].
    """
    if x.device.type == "cuda":
        from attn_ops.ops.triton.states import launch_selective

        inputs = (x, dt, A, B, C, D, z, dt_bias, softplus)
        return launch_selective(*inputs, states, (slots, starts, seq_lens, kept))
    requests, dtype = _Requests(slots, starts, seq_lens, kept), _wide(x)
    dt = _step_size(dt, dt_bias, softplus, dtype)
    A, B, C = (y.to(dtype) for y in (A, B, C))
    state, out = requests.states(states, dtype), _like_first(x).zero_()
    for which, rows in requests.rows():
        inputs_AC, step_AC1 = x[rows].to(dtype), dt[rows].unsqueeze(-1)
        added = step_AC1 * inputs_AC.unsqueeze(-1) * B[rows].unsqueeze(-2)
        new_ACN = state[which] * (step_AC1 * A).exp() + added
        y = (new_ACN * C[rows].unsqueeze(-2)).sum(-1)
        y = y if D is None else y + inputs_AC * D.to(dtype)
        y = y if z is None else y * F.silu(z[rows].to(dtype))
        out[rows], state[which] = y.to(out.dtype), new_ACN
        requests.keep_behind(rows, states, new_ACN)
    requests.keep(states, state)
    return out


def _step_size(
    dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool, dtype: torch.dtype
) -> torch.Tensor:
    """In the dtype of dt, as models compute it, and then wider."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (F.softplus(dt) if softplus else dt).to(dtype)


def _in_prompt(
    prompt_lens: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """[T] bool: which rows are tokens of prompts."""
    row_T = torch.arange(num_rows, device=starts.device)
    request_T = torch.bucketize(row_T, starts[1:].long(), right=True).clamp(max=len(seq_lens) - 1)
    position_T = row_T - starts[1:].long()[request_T] + seq_lens[request_T]
    return position_T < prompt_lens[request_T]
