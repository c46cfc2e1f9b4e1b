"""A router's softmax, choice and weights become one operator."""

import operator
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from attn_ops.ops.products.skinny_constants import is_measured
from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass
from fx_passes.config import PassConfig
from fx_passes.passes.rms_norms import CONVERT, unconverted

_EXPERTS = torch.ops.attn_ops.experts.default
_TOP_EXPERTS = torch.ops.attn_ops.top_experts.default
_ROWS = ([-1], [1])
"""The columns of a row, as a list of dimensions."""


class Weights(NamedTuple):
    """What the graph makes of the chosen scores."""

    kind: str
    node: Node
    dtype: torch.dtype


class Router(Pass):
    """Replace the choice of experts, with the softmax before and the weights behind it.

    Compiled, a choice takes five kernels for each layer: a softmax, two of `topk`, the weights and
    their conversion. The operator is one, which is launched early.

    Before::

        T: int; x: f32[T, 8]; r: f32[T, 4]; w: f32[4, 16, 8]; d: f32[4, 8, 8]
        largest = aten.amax(r, [-1], True); less = aten.sub.Tensor(r, largest); exp = aten.exp(less)
        total = aten.sum.dim_IntList(exp, [-1], True); scores = aten.div.Tensor(exp, total)
        topk = aten.topk(scores, 4); chosen = topk[0]; ids = topk[1]
        both = aten.sum.dim_IntList(chosen, [-1], True); weights = aten.div.Tensor(chosen, both)
        experts = attn_ops.experts(x, w, d, ids, weights)
        return experts

    After::

        top_experts = attn_ops.top_experts(r, 4, softmax=True, weights="sum")
        of_chosen = top_experts[0]; chosen_ids = top_experts[1]
        experts = attn_ops.experts(x, w, d, chosen_ids, of_chosen)
        return experts

    Skipped when:
        - scores are not those of rows, of which `topk` takes the highest of the last dimension;
        - no kernel runs on the device.
    """

    name = "router"
    stage = "aten"
    switch = "experts"
    needs_inference = True
    looks_for = "choice of experts"

    def __init__(self, mode: str = "auto") -> None:
        super().__init__()
        self.mode = mode

    @classmethod
    def of(cls, config: PassConfig) -> "Router":
        return cls(config.experts)

    def settings(self) -> dict[str, object]:
        return {"experts": self.mode}

    def apply(self, graph: Graph) -> int:
        if not graph.find_nodes(op="call_function", target=_EXPERTS):
            return 0
        matches = 0
        for node in graph.find_nodes(op="call_function", target=aten.topk.default):
            scores = value_of(cast(Node, node.args[0]))
            if not _is_choice(node, scores):
                self.skip(
                    "scores are not those of rows, of which `topk` takes the highest", node.name
                )
            elif self.mode != "always" and not is_measured(scores.device):
                self.skip("no kernel runs on the device", node.name)
            else:
                _rewrite(graph, node)
                matches += 1
        if matches:
            graph.eliminate_dead_code()
        return matches


def _is_choice(node: Node, scores: torch.Tensor) -> bool:
    given = node.args[2:4]  # whether they are sorted does not matter
    plain = not node.kwargs and given == (-1, True)[: len(given)]
    static = isinstance(node.args[1], int) and isinstance(scores.shape[-1], int)
    return plain and static and scores.dim() == 2 and scores.dtype != torch.float64


def _rewrite(graph: Graph, topk: Node) -> None:
    scores, top_k = cast(tuple[Node, int], topk.args[:2])
    parts = {cast(int, user.args[1]): user for user in topk.users}
    plain = Weights("scores", parts[0], value_of(parts[0]).dtype) if 0 in parts else None
    weights = None if plain is None else _weights_of(plain.node) or plain
    source = _softmax_of(scores)
    keywords: dict[str, Any] = {} if source is None else {"softmax": True}
    if weights is not None:
        keywords |= {} if weights.kind == "scores" else {"weights": weights.kind}
        keywords |= {} if weights.dtype == torch.float32 else {"dtype": weights.dtype}
    with graph.inserting_before(topk):
        given = (source or scores, top_k)
        new = graph.create_node("call_function", _TOP_EXPERTS, given, keywords, name="top_experts")
        value = value_of(topk)
        chosen = value[0] if weights is None else value_of(weights.node)
        new.meta["val"] = (chosen, value[1])
        olds = (weights and weights.node, parts.get(1))
        for index, (old, name) in enumerate(zip(olds, ("of_chosen", "chosen_ids"), strict=True)):
            if old is not None:
                target, given = operator.getitem, (new, index)
                part = graph.create_node("call_function", target, given, name=name)
                part.meta["val"] = new.meta["val"][index]
                old.replace_all_uses_with(part)


def _softmax_of(node: Node) -> Node | None:
    """The scores [T, E] whose softmax a node is, in float32."""
    if node.target is not aten.div.Tensor or value_of(node).dtype != torch.float32:
        return None
    exp, total = cast(tuple[Any, Any], node.args)
    if not _is_over_row(total, aten.sum.dim_IntList, exp) or exp.target is not aten.exp.default:
        return None
    less = cast(Node, exp.args[0])
    if less.target is not aten.sub.Tensor or less.kwargs:
        return None
    scores, largest = cast(tuple[Node, Any], less.args)
    if not _is_over_row(largest, aten.amax.default, scores):
        return None
    narrow = unconverted(scores, torch.bfloat16)
    return scores if value_of(narrow).dtype == torch.float64 else narrow


def _weights_of(chosen: Node) -> Weights | None:
    """What all readers of the chosen scores make of them."""
    found = _normalized(chosen) or _softmax_behind(chosen)
    if found is None:
        return None
    readers = list(found.node.users)
    if len(readers) == 1 and _is_conversion(readers[0]):
        return found._replace(node=readers[0], dtype=value_of(readers[0]).dtype)
    return found


def _normalized(chosen: Node) -> Weights | None:
    """Over their sum, in float32."""
    sums = [u for u in chosen.users if _is_over_row(u, aten.sum.dim_IntList, chosen)]
    if len(sums) != 1 or len(chosen.users) != 2 or value_of(chosen).dtype != torch.float32:
        return None
    (ratio,) = list(sums[0].users)[:1]
    if len(sums[0].users) != 1 or ratio.target is not aten.div.Tensor:
        return None
    return Weights("sum", ratio, torch.float32) if ratio.args == (chosen, sums[0]) else None


def _softmax_behind(chosen: Node) -> Weights | None:
    """Their softmax, computed in float32."""
    source = chosen
    if len(source.users) == 1 and _is_conversion(only := next(iter(source.users))):
        source = only
    for less in source.users:
        for exp in less.users:
            for ratio in exp.users:
                if ratio.target is aten.div.Tensor and _softmax_of(ratio) in (source, chosen):
                    alone = {*source.users} == {less, cast(Node, less.args[1])}
                    return Weights("softmax", ratio, torch.float32) if alone else None
    return None


def _is_conversion(node: Node) -> bool:
    copied = node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}
    return (copied or node.target is CONVERT) and value_of(node).is_floating_point()


def _is_over_row(node: Any, target: Any, of: Any) -> bool:
    """Whether a node is a sum or a maximum of each row of `of`, as a column."""
    if not isinstance(node, Node) or node.target is not target or node.kwargs:
        return False
    return node.args[0] is of and node.args[1] in _ROWS and node.args[2:] == (True,)
