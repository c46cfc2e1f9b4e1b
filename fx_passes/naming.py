"""What a graph is called in records, reports and dumps: by what it computes, not by a number."""

import collections
import dataclasses
import re
from typing import cast

from torch.fx import Graph, GraphModule

from fx_passes.analysis.graph_ops import ATTENTION, QUANTIZED, operator_name

_ATTENTION = tuple(op.overloadpacket.__name__ for op in (*ATTENTION, *QUANTIZED))
_PRODUCTS = ("linear", "matmul", "mm", "addmm", "_scaled_mm")


@dataclasses.dataclass(frozen=True)
class GraphName:
    """A graph's name, and how often it stands in the model."""

    text: str  # "decoder layer"
    num_calls: int = 1  # of it in one call of the model; it is compiled once


def name_of(graph: Graph) -> GraphName:
    """The name of a graph that is no piece of another."""
    found = _operators(graph)
    num_attentions = sum(found[name] for name in _ATTENTION)
    if found["embedding"] and num_attentions:
        return GraphName("whole model")
    if num_attentions:
        return GraphName(_layers(num_attentions))
    return GraphName("embedding" if found["embedding"] else "whole graph")


def names_of_pieces(gm: GraphModule) -> dict[str, GraphName]:
    """By submodule, the names of the pieces that `gm` calls. A piece called again is a layer."""
    calls = [str(node.target) for node in gm.graph.find_nodes(op="call_module")]
    counts = collections.Counter(calls)
    layers = [i for i, target in enumerate(calls) if counts[target] > 1] or [0]
    texts: dict[str, str] = {}
    for i, target in enumerate(calls):
        where = "before" if i < layers[0] else "after" if i > layers[-1] else "between"
        piece = cast(GraphModule, gm.get_submodule(target))
        found = _operators(piece.graph)
        if counts[target] > 1:
            texts[target] = _layers(min(1, sum(found[name] for name in _ATTENTION)))
        else:
            texts[target] = _text_between(found, where)
    return {target: GraphName(text, counts[target]) for target, text in _numbered(texts).items()}


def safe_name(text: str) -> str:
    """`text` as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:80] or "graph"


def _text_between(found: collections.Counter[str], where: str) -> str:
    """What a piece beside the layers is; where it stands, if nothing in it tells."""
    num_attentions = sum(found[name] for name in _ATTENTION)
    is_head = where == "after" and any(found[name] for name in _PRODUCTS)
    parts = [
        *(["embedding"] if found["embedding"] else []),
        *([_layers(num_attentions)] if num_attentions else []),
        *(["head"] if is_head else []),
    ]
    return " and ".join(parts) or f"{where} the layers"


def _layers(num_attentions: int) -> str:
    if num_attentions > 1:
        return f"{num_attentions} decoder layers"
    return "decoder layer" if num_attentions else "layer"


def _numbered(texts: dict[str, str]) -> dict[str, str]:
    """Each text once: those that occur again get numbers, in order."""
    counts, numbers = collections.Counter(texts.values()), collections.Counter[str]()
    for target, text in texts.items():
        if counts[text] > 1:
            numbers[text] += 1
            texts = texts | {target: f"{text} {numbers[text]}"}
    return texts


def _operators(graph: Graph) -> collections.Counter[str]:
    """How often each operator is called, by its name."""
    called = ("call_function", "call_method")
    return collections.Counter(operator_name(node) for node in graph.nodes if node.op in called)
