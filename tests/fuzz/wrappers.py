"""Modules that are put around others: they mix rows, call twice, or attend by themselves.

B sequences, T rows, D hidden size.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]


def _top_rows(x: torch.Tensor) -> torch.Tensor:
    """Only the rows with the largest norms stay, half of them."""
    norms = x.norm(dim=-1)
    bound = norms.topk(max(1, x.shape[1] // 2), dim=1).values[:, -1:]
    return x * (norms >= bound)[..., None]


def _capacity(x: torch.Tensor) -> torch.Tensor:
    """The first two rows of each of two experts go through, as in a mixture with capacities."""
    expert = (x[..., 0] > 0).long()
    place = F.one_hot(expert, 2).cumsum(1).gather(2, expert[..., None])
    return torch.where(place <= 2, x * 1.5, x)


def _conv(x: torch.Tensor) -> torch.Tensor:
    """A causal depthwise convolution of width 3."""
    padded = F.pad(x, (0, 0, 2, 0))
    return 0.5 * padded[:, :-2] + 0.3 * padded[:, 1:-1] + x


MIXERS: dict[str, Any] = {
    "scale": lambda x: x * 1.3,
    "shift": lambda x: x + torch.roll(x, 1, dims=1),
    "shift_causal": lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "mean": lambda x: x + x.mean(1, keepdim=True),
    "cumsum": lambda x: x + 0.3 * x.cumsum(1),
    "conv": _conv,
    "quantile": lambda x: x - torch.quantile(x, 0.5, dim=1, keepdim=True),
    "top_rows": _top_rows,
    "capacity": _capacity,
    "softmax_rows": lambda x: x + 5 * x.softmax(1),
    "num_rows": lambda x: x + torch.sin(torch.arange(x.shape[-1]) * float(x.shape[1])),
    "row_number": lambda x: x + torch.sin(torch.arange(x.shape[-1]) * 0.1 * _rows(x)),
    "first_row": lambda x: x + x[:, :1],
    "last_row": lambda x: x + x[:, -1:],
    "flip": lambda x: x.flip(1),
    "long_only": lambda x: x.abs() if x.shape[1] > 1 else x,
    "long_scale": lambda x: x * 1.5 if x.shape[1] > 8 else x,
    # By a small scale: where each row sees itself alone, the contract does not see that rows meet.
    "attend_rows": lambda x: x + F.scaled_dot_product_attention(x, x, x, is_causal=True),
}
"""What may be done to [B, T, D]; `scale` alone leaves rows alone."""


class Mixer(nn.Module):
    """One of `MIXERS` as a module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MIXERS[self.kind](x)


class Counter(nn.Module):
    """Turns its input a little further at every call; the count is a buffer or an attribute."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.in_buffer, self.count = buffer, 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_buffer:
            self.calls += 1
            return x + torch.sin(torch.arange(x.shape[-1]) * self.calls)
        self.count += 1
        return x + torch.sin(torch.arange(x.shape[-1]) * float(self.count))


class Memory(nn.Module):
    """Adds the last row of its previous call."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + self.last
        self.last.copy_(x[0, -1])
        return out


class Positions(nn.Module):
    """Learned absolute positions of the rows, counted from 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(512, size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[torch.arange(x.shape[1])]


def first_of(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def like(out: Any, first: torch.Tensor) -> Any:
    return (first, *out[1:]) if isinstance(out, tuple) else first


class Around(nn.Module):
    """Calls `inner` on what `mixer` makes of its input, or `mixer` on its result."""

    def __init__(self, inner: nn.Module, mixer: nn.Module, before: bool) -> None:
        super().__init__()
        self.inner, self.mixer, self.before = inner, mixer, before

    def forward(self, x: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if x is None:
            x = kwargs.pop("hidden_states")
        if self.before and x.is_floating_point():
            return self.inner(self.mixer(x), *args, **kwargs)
        out = self.inner(x, *args, **kwargs)
        return like(out, self.mixer(first_of(out)))


class Again(nn.Module):
    """Calls `inner` another number of times than once."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if x is None:
            x = kwargs.pop("hidden_states")
        short = self.kind == "unless_short" and x.shape[1] <= 4  # a step of few rows never attends
        if self.kind == "never" or short:
            return (x * 0.5, None) if hasattr(self.inner, "q_proj") else x
        out = self.inner(x, *args, **kwargs)
        if self.kind == "chain":
            return self.inner(first_of(out), *args, **kwargs)
        if self.kind == "both":
            other = first_of(self.inner(x.flip(-1), *args, **kwargs))
            return like(out, 0.5 * (first_of(out) + other))
        return out


AGAIN = ("chain", "both", "never", "unless_short")


class OwnAttention(nn.Module):
    """Softmax attention with the projections of `inner`, without positions, by itself."""

    def __init__(self, inner: nn.Module, adds: bool) -> None:
        super().__init__()
        self.inner, self.adds = inner, adds

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x, inner = hidden_states, self.inner
        shape = (*x.shape[:2], -1, inner.head_dim)
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (inner.q_proj, inner.k_proj, inner.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2).reshape(*x.shape[:2], -1)
        out = (inner.o_proj if hasattr(inner, "o_proj") else inner.dense)(out)
        if self.adds:
            out = out + inner(x, *args, **kwargs)[0]
        return out, None


class OtherMask(nn.Module):
    """Hides more keys of the mask that a layer is given, if it is given one."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.width = inner, width

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None:
            near = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1 - self.width)
            kwargs["attention_mask"] = torch.where(near, mask, torch.finfo(x.dtype).min)
        return self.inner(x, *args, **kwargs)
