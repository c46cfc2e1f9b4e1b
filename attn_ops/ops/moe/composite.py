"""A mixture of experts by PyTorch, for devices and dtypes that our kernels do not take.

T rows, top_k experts of each, S = T * top_k pairs, E experts, K inputs, M outputs, F of a gate.
"""

import torch

BLOCK = 128
"""Rows and inputs of a weight that share a scale, where scales are of blocks."""


def experts_by_torch(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    interleaved: bool,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attn_ops::experts`: pairs sorted by expert, a product for each expert that has some."""
    num_experts, top_k = w_gate_up.shape[0], expert_ids.shape[1]
    ids = expert_ids.reshape(-1)
    is_there = (ids >= 0) & (ids < num_experts)
    ids = torch.where(is_there, ids, num_experts)
    sorted_ids, order = torch.sort(ids, stable=True)
    bounds = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(sorted_ids, bounds, right=True, out_int32=True)
    of_bias = sorted_ids.clamp(max=num_experts - 1)

    def product(
        rows: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        out = _grouped(rows, w, scale, ends)
        return out if bias is None else (out + bias[of_bias]).to(x.dtype)

    both = product(x[order // top_k], w_gate_up, gate_up_bias, gate_up_scale)
    gated = _gated(both, activation, alpha, limit, interleaved)
    y = product(gated, w_down, down_bias, down_scale)
    by_pair = torch.empty_like(y)
    by_pair[order] = y
    by_pair = (by_pair * weights.reshape(-1, 1)).masked_fill_(~is_there[:, None], 0)
    return by_pair.view(-1, top_k, x.shape[1]).sum(1).to(x.dtype)


def scale_group(w: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """Rows and inputs of FP8 w [E, M, K] that share an element of its scale [E, R, C].

    Raises:
        ValueError: there are no such groups, or several.
    """
    (m, k), (rows, columns) = w.shape[1:], scale.shape[1:]
    groups = set()
    if columns == 1 and rows > 0 and m % rows == 0:
        groups.add(m // rows)
    if columns == -(-k // BLOCK):
        groups |= {1} if rows == m else set()
        groups |= {min(BLOCK, m)} if rows == -(-m // BLOCK) else set()
    if len(groups) == 1:
        return groups.pop(), k if columns == 1 else BLOCK
    raise ValueError(
        f"a scale of weights [{m}, {k}] must have a shape of one meaning, got [{rows}, {columns}]; "
        f"supported: one a row [{m}, {-(-k // BLOCK)}], one a block of {BLOCK} x {BLOCK} "
        f"[{-(-m // BLOCK)}, {-(-k // BLOCK)}], one a part [R, 1] where R divides {m}"
    )


def dequantized(
    w: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, experts: slice = slice(None)
) -> torch.Tensor:
    """Weights [E, M, K] of some experts, times their scales, in a dtype."""
    if scale is None:
        return w[experts]
    (group_m, group_k), (m, k) = scale_group(w, scale), w.shape[1:]
    by_row = scale[experts].repeat_interleave(group_m, 1)[:, :m]
    by_weight = by_row.repeat_interleave(group_k, 2)[:, :, :k]
    return (w[experts].float() * by_weight).to(dtype)


def _grouped(
    rows: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    """Rows [S, K], sorted by expert, times w [E, M, K]; those of an expert end at `ends` [E]."""
    aligned = rows.shape[1] % 8 == 0 and w.shape[1] % 8 == 0
    if rows.is_cuda and rows.dtype == torch.bfloat16 and aligned:
        w = dequantized(w, scale, rows.dtype)
        return torch._grouped_mm(rows, w.transpose(1, 2), offs=ends)  # asks the host for nothing
    out = rows.new_zeros(rows.shape[0], w.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            of_expert = dequantized(w, scale, rows.dtype, slice(expert, expert + 1))[0]
            torch.mm(rows[begin:end], of_expert.t(), out=out[begin:end])
        begin = end
    return out


def _gated(
    both: torch.Tensor, activation: str, alpha: float, limit: float | None, interleaved: bool
) -> torch.Tensor:
    """The activation of a gate times up, of [S, 2 * F] -> [S, F]; in float32 or in wider."""
    wide = both.to(torch.promote_types(both.dtype, torch.float32))
    gate, up = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "gelu_tanh":
        return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(both.dtype)
    if activation == "gpt_oss":
        up = up + 1
    return (gate * torch.sigmoid(alpha * gate) * up).to(both.dtype)
