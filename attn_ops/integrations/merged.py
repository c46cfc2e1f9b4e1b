"""Merge projections that read the same input: q, k, v into one product, gate and up into another.

A decode step is bound by memory traffic and launches. One product of a merged weight reads the same
bytes in one kernel, without the split-K reductions of the small ones. Modules, names and the state
dict stay: each weight becomes a view of the merged one, so loading and in-place updates reach both.
`save_pretrained` and `safetensors.torch.save_file(model.state_dict(), ...)` save them;
`safetensors.torch.save_model` refuses views.
"""

import collections
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

GROUPS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),  # OLMo hybrid
    ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj"),  # Kimi Linear
    ("q_proj", "k_proj", "v_proj", "b_proj", "g_proj"),  # Bailing hybrid
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),  # latent attention whose queries have no latent
    ("gate_proj", "up_proj"),
    ("w1", "w3"),  # LFM2
)
"""Names of sibling linear layers that read the same input in Transformers' models.

A layer is in the first group of its parent that has it.
"""

_FORWARD = nn.Linear.forward
_NO_SIBLINGS = "no layers are siblings by the names in `attn_ops.integrations.merged.GROUPS`"


class MergedSlice(nn.Linear):
    """A linear layer whose weight is rows `begin` to `end` of a merged weight.

    Traced, it is a slice of the whole product. The pass `share_products` then computes the product
    of a group once. In eager it computes its own rows only.
    """

    merged: "MergedWeights"

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        merged: "MergedWeights",
        begin: int,
        end: int,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self.begin, self.end = begin, end
        # Owned by the parent: registered once, not in every slice.
        object.__setattr__(self, "merged", merged)

    def __deepcopy__(self, memo: dict) -> "MergedSlice":
        """A copy is a slice of the copied merged weight."""
        merged = copy.deepcopy(self.merged, memo)
        rows = slice(self.begin, self.end)
        weight = nn.Parameter(merged.weight[rows], self.weight.requires_grad)
        bias = None
        if self.bias is not None:
            assert merged.bias is not None, "slices have a bias only where the merged weight has"
            bias = nn.Parameter(merged.bias[rows], self.bias.requires_grad)
        twin = memo[id(self)] = MergedSlice(weight, bias, merged, self.begin, self.end)
        kept = {k: v for k, v in vars(self).items() if k not in ("_parameters", "merged")}
        vars(twin).update(copy.deepcopy(kept, memo))  # hooks too
        return twin

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as any module; the new tensors of `assign=True` are merged again."""
        super()._load_from_state_dict(*args, **kwargs)
        rows = slice(self.begin, self.end)
        for name in ("weight", "bias"):
            mine, merged = getattr(self, name), getattr(self.merged, name)
            if mine is not None and mine.data_ptr() != merged[rows].data_ptr():
                merged[rows].copy_(mine.data)
                mine.data = merged[rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # With gradients it is the layer's own weight that must get them.
        trained = torch.is_grad_enabled() and self.weight.requires_grad
        own = "weight" in self._parameters  # else: parametrized or pruned since
        if trained or not own or not torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.merged.weight, self.merged.bias)[..., self.begin : self.end]


class MergedWeights(nn.Module):
    """Holder of a group's merged weight and bias, kept out of the state dict."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        bias = torch.cat([x.bias.data for x in layers]) if layers[0].bias is not None else None
        self.register_buffer("weight", torch.cat([x.weight.data for x in layers]), persistent=False)
        self.register_buffer("bias", bias, persistent=False)


def merge_projections(model: nn.Module) -> int:
    """Merge every group of `GROUPS` in `model`, in place; returns the number of groups merged.

    Call it when the model is on its device and in its dtype: moving it later would break the views.
    Layers of a group must be plain `nn.Linear` of one dtype and device, all with a bias or all
    without, and none of their weights has another name in the model (tied ones). Other groups are
    left alone. Where gradients are on, layers compute their own rows. A
    merged model that was moved or converted since is merged again; it does not count.

    Raises:
        ValueError: a weight of a group is quantized; nothing was merged.
    """
    mend_merged(model)
    groups, count = list(_groups(model)), 0
    _check_plain(model, groups)
    for parent, names in groups:
        layers = [getattr(parent, name) for name in names]
        merged = MergedWeights(layers)
        setattr(parent, "_".join(names) + "_merged", merged)
        begin = 0
        for name, layer in zip(names, layers, strict=True):
            end = begin + layer.out_features
            layer.weight.data = merged.weight[begin:end]
            if merged.bias is not None:
                layer.bias.data = merged.bias[begin:end]
            twin = MergedSlice(layer.weight, layer.bias, merged, begin, end)
            setattr(parent, name, twin.train(layer.training))
            begin = end
        count += 1
    return count


def mend_merged(model: nn.Module) -> int:
    """Make slices views of their merged weights again, after the model was moved or converted.

    Values are those of the slices. Returns the number of groups that were mended.
    """
    groups: dict[MergedWeights, list[MergedSlice]] = {}
    for module in model.modules():
        if isinstance(module, MergedSlice):
            groups.setdefault(module.merged, []).append(module)
    mended = 0
    for merged, slices in groups.items():
        plain = all(type(one.weight.data) is torch.Tensor for one in slices)  # else: quantized
        if plain and any(_is_apart(one, part) for one in slices for part in ("weight", "bias")):
            _mend(merged, slices)
            mended += 1
    return mended


def _is_apart(one: MergedSlice, part: str) -> bool:
    mine, merged = getattr(one, part), getattr(one.merged, part)
    if mine is None:
        return False
    same = (mine.dtype, mine.device) == (merged.dtype, merged.device)
    return not same or mine.data_ptr() != merged[one.begin : one.end].data_ptr()


def _mend(merged: MergedWeights, slices: list[MergedSlice]) -> None:
    slices.sort(key=lambda one: one.begin)
    for part in ("weight", "bias"):
        if getattr(merged, part) is None:
            continue
        setattr(merged, part, torch.cat([getattr(one, part).data for one in slices]))
        for one in slices:
            getattr(one, part).data = getattr(merged, part)[one.begin : one.end]


def merged_in_words(model: nn.Module, wanted: bool | str, *, compiled: bool) -> str:
    """Merge the model's projections if that is wanted, and say what was done.

    Args:
        wanted: True, False, or "auto": where it gains (`why_unmerged`).
    """
    device = next(model.parameters()).device
    why = "merge_projections is False" if wanted is False else None
    if wanted == "auto":
        why = why_unmerged(model, device, compiled=compiled)
    if why is None:
        merge_projections(model)
    count = sum(isinstance(module, MergedWeights) for module in model.modules())
    if count:
        return f"{count} groups of projections share a product"
    return f"not merged: {why or _NO_SIBLINGS}"


def why_unmerged(model: nn.Module, device: torch.device, *, compiled: bool) -> str | None:
    """Why merging would gain nothing, or cannot be had; None: it would gain."""
    if not compiled:
        return "the model is not compiled: each layer computes its own product"
    if device.type != "cuda":
        return f"no gain was measured on a {device.type}"
    groups = list(_groups(model))
    try:
        _check_plain(model, groups)
    except ValueError:
        return "the weights are quantized"
    merged = any(isinstance(module, MergedSlice) for module in model.modules())
    return None if groups or merged else _NO_SIBLINGS


def _groups(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    children = [x for m in model.modules() for x in (*m._modules.values(), *m._parameters.values())]
    holders = collections.Counter(map(id, children))
    for parent in model.modules():
        grouped: set[str] = set()
        for names in GROUPS:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if not grouped.isdisjoint(names) or not all(map(_is_plain, layers)):
                continue
            held = [x for layer in layers for x in (layer, *layer.parameters())]
            if _alike(layers) and all(holders[id(x)] == 1 for x in held):
                grouped.update(names)
                yield parent, names


def _check_plain(model: nn.Module, groups: list[tuple[nn.Module, tuple[str, ...]]]) -> None:
    parents = {id(module): name for name, module in model.named_modules()}
    for parent, names in groups:
        for name in names:
            weight = getattr(parent, name).weight
            if type(weight.data) is not torch.Tensor:
                raise ValueError(
                    f"weight of {parents[id(parent)]}.{name} must be a plain tensor, got "
                    f"{type(weight.data).__name__}; supported: models whose weights are not "
                    "quantized, before or after"
                )


def _is_plain(layer: Any) -> bool:
    """Whether calling, saving and loading the layer is what `nn.Linear` does: no hook, no patch."""
    if type(layer) is not nn.Linear or nn.Linear.forward is not _FORWARD:
        return False
    own = vars(layer)
    hooked = any(value for name, value in own.items() if name.endswith("hooks"))
    return not hooked and not own.keys() & {"forward", "_call_impl"}


def _alike(layers: list[nn.Linear]) -> bool:
    first = layers[0]
    return all(
        x.weight.dtype == first.weight.dtype
        and x.weight.device == first.weight.device
        and x.in_features == first.in_features
        and (x.bias is None) == (first.bias is None)
        for x in layers
    )
