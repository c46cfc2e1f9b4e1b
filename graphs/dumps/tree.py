"""The model as a map: modules with equal layers in one row, attention by group, live rows."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attn_ops.integrations.transformers.layers import (
    cache_index,
    cache_owner,
    is_causal,
    shares_cache,
)
from attn_ops.integrations.transformers.specs import attention_layers
from attn_ops.metadata.features import AttentionSpec

_MOST_ROWS = 400
_SHAPED = re.compile(r"^\w+\[(?:1, )?(\w+)[,\]]")


def module_rows(
    model: torch.nn.Module, specs: Sequence[AttentionSpec] = (), own_blocks: Sequence[bool] = ()
) -> list[dict[str, Any]]:
    """Rows of the module tree: depth, path, class, how many are equal, bytes of parameters.

    "attention" is what an attention module asks for; if modules that are built alike differ in it,
    all of that, and how many ask for each.

    Args:
        model: a Transformers model.
        specs: of its KV caches.
        own_blocks: of each, whether its kind of layers has blocks of its own.
    """
    words = [_in_words(spec) for spec in specs]
    if any(own_blocks):
        kinds = "layers that see all keys", "layers with a window"
        pairs = zip(words, own_blocks, strict=True)
        words = [f"{what}, blocks of {kinds[own]}" for what, own in pairs]
    found = _rows([model], "", 0, words)
    return [row for row, _ in zip(found, range(_MOST_ROWS), strict=False)]


def _rows(
    twins: Sequence[torch.nn.Module], path: str, depth: int, words: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Of the first of modules that are built alike."""
    module = twins[0]
    yield _row(module, path, depth, 1) | {"attention": _attention_of(twins, words)}
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if not isinstance(child, torch.nn.ModuleList):
            yield from _rows([one.get_submodule(name) for one in twins], inside, depth + 1, words)
            continue
        for first, last, members in _runs(list(child)):
            span = f"{inside}.{first}" if first == last else f"{inside}.{first}-{last}"
            row = _row(members[0], span, depth + 1, len(members))
            yield {**row, "bytes": sum(_bytes(one) for one in members), "attention": ""}
            yield from list(_rows(members, f"{inside}.{first}", depth + 1, words))[1:]


def _attention_of(twins: Sequence[Any], words: Sequence[str]) -> str:
    """What attention modules ask for, and how often; of other modules nothing."""
    number = getattr(twins[0], "layer_idx", None)
    if "attention" not in type(twins[0]).__name__.lower() or not isinstance(number, int):
        return ""
    indices = [(cache_index(one), _whose(one)) for one in twins if is_causal(one)]
    asked = collections.Counter(words[i] + whose for i, whose in indices if i < len(words))
    if len(asked) < 2:
        return next(iter(asked), "")
    return "; ".join(f"{number} x {what}" for what, number in asked.items())


def _runs(layers: list[torch.nn.Module]) -> list[tuple[int, int, list[torch.nn.Module]]]:
    """Neighbours that are built alike."""
    runs: list[tuple[int, int, list[torch.nn.Module]]] = []
    for i, layer in enumerate(layers):
        if runs and _built(runs[-1][2][0]) == _built(layer):
            runs[-1] = (runs[-1][0], i, [*runs[-1][2], layer])
        else:
            runs.append((i, i, [layer]))
    return runs


def _built(layer: torch.nn.Module) -> list[tuple[Any, ...]]:
    shapes = [(name, type(m).__name__) for name, m in layer.named_modules()]
    return [*shapes, *((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())]


def _row(module: torch.nn.Module, path: str, depth: int, count: int) -> dict[str, Any]:
    shapes = [f"{n} {list(p.shape)}" for n, p in module.named_parameters(recurse=False)]
    return {
        "depth": depth,
        "path": path,
        "kind": type(module).__name__,
        "count": count,
        "bytes": _bytes(module),
        "shapes": ", ".join(shapes)[:200],
    }


def _bytes(module: torch.nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
    return sum(p.untyped_storage().nbytes() for p in storages.values())


def _whose(layer: Any) -> str:
    return f", cache of layer {cache_owner(layer)}" if shares_cache(layer) else ""


def attention_groups(
    model: torch.nn.Module, specs: Sequence[AttentionSpec]
) -> list[dict[str, Any]]:
    """Layers of equal attention, which share one cache group: numbers, heads and options.

    "shared" is by the layer whose cache others read: the numbers of those.
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
                "words": _words_of(spec),
                "shared": {owner: _spans(numbers) for owner, numbers in readers.items()},
            }
        )
    return groups


def _words_of(spec: AttentionSpec) -> list[str]:
    """Heads, what is no default, and the dtype."""
    default = {f.name: f.default for f in dataclasses.fields(spec)}
    fields = {name: getattr(spec, name) for name in default}
    words = [f"{spec.num_heads} heads, {spec.num_kv_heads} KV heads of {spec.head_size}"]
    words += [
        f"{name} {value}"
        for name, value in fields.items()
        if name not in ("num_heads", "num_kv_heads", "head_size", "dtype")
        and value != default[name]
    ]
    return [*words, str(spec.dtype).removeprefix("torch.")]


def _in_words(spec: AttentionSpec) -> str:
    return ", ".join(_words_of(spec))


def _spans(numbers: list[int]) -> str:
    """`0-3, 5`."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def live_rows(graphs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Of every graph, products and attentions by the rows that they compute.

    Keys: "all tokens" and "logits rows". The rows of logits are those of the model's last product,
    where another product has other ones.
    """
    found = [_symbols(graph["nodes"]) for graph in graphs]
    logits = next((symbols[-1] for symbols in reversed(found) if symbols), None)
    others = {symbol for symbols in found for symbol in symbols} - {logits}
    words = {logits: "logits rows" if others else "all tokens"}
    return [
        dict(collections.Counter(words.get(symbol, "all tokens") for symbol in symbols))
        for symbols in found
    ]


def _symbols(nodes: list[dict[str, Any]]) -> list[str]:
    """Numbers of rows of products and attentions, in order."""
    wanted = re.compile(r"mm$|^linear$|^gated_mlp$|attention")
    ours = (n for n in nodes if wanted.search(n["op"]))
    shapes = (_SHAPED.match(node["type"]) for node in ours)
    return [match[1] for match in shapes if match and not match[1].isdigit()]
