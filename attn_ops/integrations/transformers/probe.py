"""A forward that records every call of attention: which layer, which rows, which options.

A sum of each row's own query, key and value replaces attention. Rows then meet nowhere, unless the
model lets them meet outside its attention.

T rows of the batch, N query heads, K kv heads, H head size.
"""

import dataclasses
from typing import Any

import torch

from attn_ops.metadata import AttentionSpec
from attn_ops.states import StateSpec


class LogitsOfAllRows(ValueError):
    """A model has ignored `logits_to_keep`."""


@dataclasses.dataclass(frozen=True, eq=False)
class ProbedCall:
    """One call of the attention function."""

    name: str  # of the layer, in the model
    layer: Any
    cache: int  # which of `kv_caches` it reads
    q: torch.Tensor  # [T, N, H]
    k: torch.Tensor  # [T, K, H]
    v: torch.Tensor  # [T, K, H]
    spec: AttentionSpec  # what the call asks for, its dtype q's
    scale: float
    mask: Any  # LayerMask, a tensor or None: what the layer was given
    extras: dict[str, Any]  # further keywords, which the operators do not compute
    latent: torch.Tensor | None = None  # [T, Lkv] where the layer expands k and v from it

    def asked(self) -> tuple:
        """What the call asks for, of which cache: equal in every forward."""
        return id(self.layer), self.cache, self.spec, self.scale


class AttentionProbe:
    """Given as `attn_metadata`, it gets the calls of attention in place of the operators.

    Args:
        names: of modules, by id.

    Attributes:
        calls: in the order in which the model made them.
        states: that layers have used, in that order; see `StateProbe`.
        state_layers: each layer that keeps states, and what it was called with.
    """

    def __init__(self, names: dict[int, str] | None = None) -> None:
        self.names = names or {}
        self.calls: list[ProbedCall] = []
        self.states: list[StateSpec] = []
        self.state_layers: list[tuple[Any, tuple, dict[str, Any]]] = []

    def name(self, layer: Any) -> str:
        return self.names.get(id(layer), type(layer).__name__)

    def attend(self, call: ProbedCall) -> torch.Tensor:
        """[1, T, N, H]: for each row a mixture of its own q, k and v."""
        self.calls.append(call)
        if call.k.shape[0] != call.q.shape[0] or call.v.shape[0] != call.q.shape[0]:
            raise ValueError(
                f"{call.name} must attend over a key a row, got {call.k.shape[0]} keys and "
                f"{call.v.shape[0]} values for {call.q.shape[0]} rows; supported: no prefixes"
            )
        groups = call.q.shape[1] // call.k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (call.k, call.v))
        out = v.clone()  # only q and k hold the position; it must not cancel out
        width = min(v.shape[2], call.q.shape[2])
        out[..., :width] += (0.5 * call.q + 0.25 * k)[..., :width]
        return out.unsqueeze(0)
