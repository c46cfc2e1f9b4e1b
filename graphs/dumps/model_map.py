"""The model as a map: its modules, with equal layers in one row, and its attention by group."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attn_ops.integrations.transformers.layers import cache_index, cache_owner, shares_cache
from attn_ops.integrations.transformers.specs import attention_layers
from attn_ops.metadata.features import AttentionSpec

_MOST_ROWS = 400


def module_rows(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Rows of the module tree: depth, path, class, how many are equal, bytes of parameters."""
    return [row for row, _ in zip(_rows(model, "", 0), range(_MOST_ROWS), strict=False)]


def _rows(module: torch.nn.Module, path: str, depth: int) -> Iterator[dict[str, Any]]:
    yield _row([module], path, depth)
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if not isinstance(child, torch.nn.ModuleList):
            yield from _rows(child, inside, depth + 1)
            continue
        for first, members in _runs(list(child)):
            last = first + len(members) - 1
            span = f"{inside}.{first}" if first == last else f"{inside}.{first}-{last}"
            yield _row(members, span, depth + 1)
            yield from list(_rows(members[0], f"{inside}.{first}", depth + 1))[1:]


def _runs(layers: list[torch.nn.Module]) -> list[tuple[int, list[torch.nn.Module]]]:
    """Neighbours that are built alike, with the number of the first."""
    runs: list[tuple[int, list[torch.nn.Module]]] = []
    for i, layer in enumerate(layers):
        if runs and _built(runs[-1][1][0]) == _built(layer):
            runs[-1][1].append(layer)
        else:
            runs.append((i, [layer]))
    return runs


def _built(layer: torch.nn.Module) -> list[tuple[Any, ...]]:
    shapes = [(name, type(m).__name__) for name, m in layer.named_modules()]
    return [*shapes, *((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())]


def _row(members: Sequence[torch.nn.Module], path: str, depth: int) -> dict[str, Any]:
    shapes = [f"{n} {list(p.shape)}" for n, p in members[0].named_parameters(recurse=False)]
    return {
        "depth": depth,
        "path": path,
        "kind": type(members[0]).__name__,
        "count": len(members),
        "bytes": sum(weight_bytes(one) for one in members),
        "shapes": ", ".join(shapes)[:200],
    }


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters; those that share memory count once."""
    storages = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
    return sum(p.untyped_storage().nbytes() for p in storages.values())


def attention_groups(
    model: torch.nn.Module, specs: Sequence[AttentionSpec]
) -> list[dict[str, Any]]:
    """Layers of equal attention, which share one cache group: numbers, heads and options.

    "shared" has, by the layer whose cache others read, the numbers of those layers.
    """
    found: dict[AttentionSpec, list[Any]] = {}
    for layer in attention_layers(model):
        found.setdefault(specs[cache_index(layer)], []).append(layer)
    groups = []
    for spec, layers in found.items():
        readers: dict[int, list[int]] = {}
        for layer in filter(shares_cache, layers):
            readers.setdefault(cache_owner(layer), []).append(layer.layer_idx)
        groups.append(
            {
                "layers": _spans([layer.layer_idx for layer in layers]),
                "num": len(layers),
                "words": _in_words(spec),
                "shared": {owner: _spans(numbers) for owner, numbers in readers.items()},
            }
        )
    return groups


def _in_words(spec: AttentionSpec) -> list[str]:
    """Heads, options that are not the default, and the dtype."""
    named = ("num_heads", "num_kv_heads", "head_size", "dtype")
    options = [
        f"{field.name} {value}"
        for field in dataclasses.fields(spec)
        if field.name not in named and (value := getattr(spec, field.name)) != field.default
    ]
    heads = f"{spec.num_heads} heads, {spec.num_kv_heads} KV heads of {spec.head_size}"
    return [heads, *options, str(spec.dtype).removeprefix("torch.")]


def _spans(numbers: list[int]) -> str:
    """`0-3, 5`."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
