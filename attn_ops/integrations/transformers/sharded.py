"""Models that Transformers has split over ranks (`tp_plan="auto"`): each rank's part, plainly.

Transformers keeps a part as a DTensor, whose address cannot be read, and wraps the layer's
`forward`. Here the part becomes the layer's parameter, and its class says what ranks exchange: then
addresses, versions of weights, merged projections and sizes of memory are those of any model.
"""

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from attn_ops.ops.collectives import all_gather, all_reduce, shared_memory


class ReducedLinear(nn.Linear):
    """Has some columns of a weight: products are summed over the ranks, and then the bias added."""

    group: str
    first_column: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.weight.shape[1]
        if x.shape[-1] != columns:  # a plan may give every rank whole rows
            x = x[..., self.first_column : self.first_column + columns]
        out = all_reduce(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Linear):
    """Has some rows of a weight: all ranks' outputs stand side by side."""

    group: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather(F.linear(x, self.weight, self.bias), self.group)


class ReducedEmbedding(nn.Embedding):
    """Has some tokens of a vocabulary: rows of others are zero, and all are summed.

    A row is what the model's own class of embedding makes of it: Gemma's scales it.
    """

    group: str
    first_token: int

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        own = ids - self.first_token
        is_own = (own >= 0) & (own < self.weight.shape[0])
        rows = super().forward(torch.where(is_own, own, 0))
        return all_reduce(torch.where(is_own[..., None], rows, 0), self.group)


class ReducedExperts(nn.Module):
    """Has some columns of every expert's gate: what experts give is summed over the ranks."""

    group: str

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        return all_reduce(super().forward(*args, **more), self.group)


# Cached: Dynamo compiles anew for another class.
@functools.cache
def _reduced(reduced: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """A model's own kind of layer, summed over the ranks."""
    return type(reduced.__name__, (reduced, kind), {})


def num_ranks(model: Any) -> int:
    """Over how many ranks the model is split; 1: it is whole."""
    return getattr(model, "_tp_size", None) or 1


def ranks_of_model(model: Any) -> list[int]:
    """The ranks, in the process's default group, that a model is split over."""
    mesh = model._device_mesh
    return [int(rank) for rank in (mesh["tp"] if mesh.ndim > 1 else mesh).mesh.flatten()]


def keep_parts(model: Any) -> list[str]:
    """Make every part a plain parameter; harmless if repeated.

    Returns:
        Layers that stay as Transformers made them, which is right too: with parts of different
        sizes.

    Raises:
        ValueError: heads cannot be split over the ranks.
    """
    left = []
    for name, module in list(model.named_modules()):
        _drop_gradient_hooks(module)
        wrapped = vars(module).get("forward")
        if not inspect.isfunction(wrapped):
            continue
        cells = inspect.getclosurevars(wrapped).nonlocals
        style, mesh = cells.get("self"), cells.get("mesh")
        if mesh is None:
            continue
        parent, _, own = name.rpartition(".")
        layer = model.get_submodule(parent)
        splits = type(style).__name__ == "ColwiseParallel" and not _gathers(style)
        if splits and getattr(layer, "layer_idx", None) is not None:
            _split_heads(layer, own, module, mesh)
        if not _settle(module, style, mesh):
            left.append(f"{name} ({type(style).__name__})")
    return left


def _drop_gradient_hooks(module: Any) -> None:
    """Transformers 5.17 sums gradients of norms by hooks, which Dynamo does not trace."""
    for key, hook in list(module._backward_hooks.items()):
        if getattr(hook, "__qualname__", "").startswith("ReplicatedWithGradAllReduce."):
            del module._backward_hooks[key]


def _split_heads(layer: Any, name: str, module: Any, mesh: Any) -> None:
    """Note that an attention layer has some of its heads.

    Where key and value heads are fewer than ranks, several ranks have the same one whole.
    """
    ranks, config = mesh.size(), getattr(layer, "config", None)
    heads = getattr(config, "num_attention_heads", ranks)
    kv_heads = getattr(config, "num_key_value_heads", None) or ranks
    shared = ranks % kv_heads == 0
    if heads % ranks or (kv_heads % ranks and not (shared and hasattr(layer, "k_proj"))):
        raise ValueError(
            "num_attention_heads must be a multiple of the ranks, and num_key_value_heads a "
            f"multiple or a divisor, got {heads} and {kv_heads} for {ranks} ranks"
        )
    layer.num_shards = ranks
    if kv_heads < ranks and name in ("k_proj", "v_proj"):
        head = mesh.get_local_rank() * kv_heads // ranks
        for key, held in module._parameters.items():
            if held is not None and hasattr(held, "full_tensor"):
                part = held.full_tensor().detach().chunk(kv_heads)[head].clone()
                module._parameters[key] = nn.Parameter(part, held.requires_grad)


def _settle(module: Any, style: Any, mesh: Any) -> bool:
    """Whether the layer's style is known; then the layer computes with its own part."""
    kind, group, rank = type(style).__name__, mesh.get_group().group_name, mesh.get_local_rank()
    if kind == "ColwiseParallel" and type(module) is nn.Linear:
        whole = module.out_features
        if _gathers(style) and whole % mesh.size():
            return False  # the last rank has fewer rows
        _take_part(module)
        module.out_features = module.weight.shape[0]
        if _gathers(style):
            module.__class__, module.group = GatheredLinear, group
    elif kind == "RowwiseParallel" and type(module) is nn.Linear:
        first = rank * -(-module.in_features // mesh.size())
        _take_part(module)
        module.in_features = module.weight.shape[1]
        module.__class__, module.group, module.first_column = ReducedLinear, group, first
    elif isinstance(module, nn.Embedding) and _splits_vocabulary(style):
        first = rank * -(-module.num_embeddings // mesh.size())
        _take_part(module)
        module.padding_idx = None  # of gradients, and may be of another rank
        module.__class__ = _reduced(ReducedEmbedding, type(module))
        module.group, module.first_token = group, first
    elif kind == "MoeExpertsParallel":
        if any(hasattr(held, "to_local") for held in module.parameters()):  # else: whole
            _take_part(module)
            module.__class__, module.group = _reduced(ReducedExperts, type(module)), group
    elif kind not in ("MlaKvAProjParallel", "ReplicatedWithGradAllReduce"):  # those: of gradients
        return False
    del module.forward
    if isinstance(module, (ReducedLinear, ReducedEmbedding, ReducedExperts)):
        device = next(module.parameters()).device
        if device.type == "cuda":
            shared_memory(group, device)  # of all ranks, so before anything compiles
    return True


def _gathers(style: Any) -> bool:
    """Whether every rank gets the whole output."""
    return type(style.output_layouts).__name__ != "Shard"


def _splits_vocabulary(style: Any) -> bool:
    """Whether ranks have some tokens each; Transformers 5.17 names the style after matrices."""
    kind = type(style).__name__
    return kind == "RowwiseParallel" or (kind == "EmbeddingParallel" and style.shard_dim == 0)


def _take_part(module: nn.Module) -> None:
    """On a CPU a part may be a view of the whole weight; the copy lets the rest go."""
    for name, held in module._parameters.items():
        if held is not None and hasattr(held, "to_local"):
            part = held.to_local().detach()  # pyright: ignore[reportCallIssue]
            is_view = part.untyped_storage().nbytes() > part.nbytes
            module._parameters[name] = nn.Parameter(
                part.clone() if is_view else part, held.requires_grad
            )
