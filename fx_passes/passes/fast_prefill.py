"""Fast prefill: what only the logits rows need is computed for the logits rows alone.

T rows of the batch, R logits rows.
"""

import dataclasses
import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map

from fx_passes.analysis.fake_run import NotApplicableError, fake_execution, run_node
from fx_passes.analysis.graph_ops import ATTENTION
from fx_passes.analysis.layer_paths import copy_path
from fx_passes.analysis.row_liveness import Liveness, analyse
from fx_passes.analysis.row_savings import Savings
from fx_passes.analysis.row_selection import OneRowError, Selection
from fx_passes.analysis.sizes import expression, input_of_size, multiple
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass
from fx_passes.config import PassConfig
from fx_passes.failures import RefusedError
from fx_passes.passes.columns import keep_read_columns


class FastPrefill(Pass):
    """Compute dead rows no more: in a prefill, all but the last row of a request.

    Before::

        T: int; R: int; rows: i64[R]; slots: i64[T]; meta: AttentionMetadata
        x: f32[T, 16]; k: f32[T, 2, 8]; v: f32[T, 2, 8]; kv_cache: f32[3, 2, 4, 2, 8]
        w_q: f32[16, 16]; w_o: f32[16, 16]
        q = F.linear(x, w_q); view = q.view(T, 2, 8)
        attn_ops.write_kv(k, v, kv_cache, meta, slot_mapping=slots)
        out = attn_ops.attention(view, kv_cache, meta, 0.25)
        flat = out.flatten(1); o = F.linear(flat, w_o)
        h = x + o
        y = h[rows]
        return y

    After::

        index_select = torch.index_select(x, 0, rows)
        q = F.linear(index_select, w_q); view = q.view(R, 2, 8)
        attn_ops.write_kv(k, v, kv_cache, meta, slot_mapping=slots)
        out = attn_ops.attention(view, kv_cache, meta, 0.25, logits_rows=True)
        flat = out.flatten(1); o = F.linear(flat, w_o)
        h = index_select + o
        return h

    `row_liveness` finds the region of nodes that only the logits rows need. Every value that enters
    it is gathered once. Sizes inside are the number of logits rows, and attention inside reads the
    reduced batch. Keys and values are computed and written for all rows, so caches do not change by
    a bit.

    Skipped when:
        - no rows are selected by a tensor of indices, or by several;
        - something needs all rows of the last hidden states: an output of the model, or an operator
          that mixes rows, which is named;
        - rows cannot be told apart: two dimensions have the number of tokens;
        - training: an input requires grad.
    """

    name = "fast_prefill"
    stage = "dynamo"
    needs_inference = True
    looks_for = "row that no logits need"

    def __init__(self, mode: str = "auto") -> None:
        super().__init__()
        self.mode = mode

    @classmethod
    def of(cls, config: PassConfig) -> "FastPrefill":
        return cls(config.fast_prefill)

    def apply(self, graph: Graph) -> int:
        """Rewrite; the number of nodes that are computed for logits rows alone.

        Raises:
            RefusedError: mode "on", and nothing can be dropped.
        """
        if any(_reduced(node) for node in graph.nodes):
            return 0
        try:
            liveness = analyse(graph)
            savings = Savings.of(liveness)
            _refuse_useless(liveness, savings)
        except Exception as reason:
            if not isinstance(reason, NotApplicableError):  # a graph that is not understood
                reason = NotApplicableError(f"{type(reason).__name__}: {reason}")
            if isinstance(reason, OneRowError):
                self.skip(str(reason))
            else:
                self.refuse(str(reason))
            return 0
        for node, reason in liveness.reasons.items():
            self.skip(f"{node.name} is computed for all rows: {reason}")
        self.facts = dataclasses.asdict(savings)
        _Rewrite(graph, liveness).run()
        return len(liveness.region)

    def refuse(self, reason: str) -> None:
        """Skip the graph, or raise in mode "on"."""
        super().refuse(reason)
        if self.mode == "on":
            raise RefusedError(
                f"fast_prefill must be 'auto' or 'off' for this model, got 'on': {reason}"
            ) from None

    def summary(self) -> str:
        f = self.facts
        if not f:
            reasons = "; ".join(self.skipped) or "the graph is reduced already"
            return f"nothing is dropped: {reasons}"
        return (
            f"computes {f['num_products']} of {f['of_products']} products and "
            f"{f['num_attentions']} of {f['of_attentions']} attentions for logits rows only; saves "
            f"{f['flops_per_row']:,} FLOP and {f['bytes_per_row']:,} bytes a dead row"
        )


def _reduced(node: Node) -> bool:
    return node.target in ATTENTION and bool(node.kwargs.get("logits_rows"))


def _refuse_useless(liveness: Liveness, savings: Savings) -> None:
    if not (savings.flops_per_row or savings.num_attentions):
        node, reason = next(iter(liveness.reasons.items()), (liveness.selections[-1].source, ""))
        raise NotApplicableError(f"no product or attention has dead rows; {node.name}: {reason}")


class _Rewrite:
    """One graph with its liveness, in place."""

    def __init__(self, graph: Graph, liveness: Liveness) -> None:
        self.graph, self.live = graph, liveness
        self.values: dict[Node, Any] = {}
        self._gathered: dict[Node, Node] = {}
        self._rows: Node | None = None
        self._sizes: dict[int, Node] = {}
        self._rewritten = set().union(*liveness.rewritten) - liveness.region

    def run(self) -> None:
        region = [node for node in self.graph.nodes if node in self.live.region]
        for node in region:
            with self.graph.inserting_before(node):
                self._reduce(node)
        for selection in self.live.selections:
            if selection.source in self.live.region:
                self._drop(selection)
        with fake_execution(self.graph):
            self._propagate()
            for source, rows in self._gathered.items():
                keep_read_columns(self.graph, source, rows)

    def _drop(self, selection: Selection) -> None:
        """Put the region's value in a selection's place; a copy, if one of the two is written."""
        value = selection.source
        if any({selection.node, value} & group for group in self.live.rewritten):
            with self.graph.inserting_before(selection.node):
                value = self.graph.call_function(torch.clone, (value,))
        selection.node.replace_all_uses_with(value)
        self.graph.erase_node(selection.node)

    def _reduce(self, node: Node) -> None:
        """Gather what enters, put R where T was, and tell attention."""

        def reduced(a: Any) -> Any:
            if not isinstance(a, Node) or a in self.live.region:
                return a
            value = value_of(a)
            if isinstance(value, torch.Tensor):
                return a if self.live.dim(a) is None else self._gather(a, node)
            if isinstance(value, torch.SymInt):
                return self._size(expression(value), a)
            return a

        if node.target in ATTENTION:  # the cache is read whole, whatever its sizes are
            q, *others = node.args
            node.args = (reduced(q), *others)
            node.kwargs = {**node.kwargs, "logits_rows": True}
            return
        node.args, node.kwargs = tree_map(reduced, _inferred(node))

    def _gather(self, source: Node, user: Node) -> Node:
        """Rows of a value from outside: one node before its first user and in its layer.

        Of a value that is rewritten in place, one before each user.
        """
        if source in self._gathered:
            return self._gathered[source]
        with self.graph.inserting_before(user):
            arguments = (source, self.live.dim(source), self.live.indices)
            new = self.graph.call_function(torch.index_select, arguments)
        copy_path(new, user)  # else the layer could not be cut out around it
        if source not in self._rewritten:
            self._gathered[source] = new
        return new

    def _size(self, size: sympy.Expr, node: Node) -> Node:
        """The node that holds a size with R in T's place."""
        if self.live.symbol not in size.free_symbols:
            return node
        factor = multiple(size, self.live.symbol)
        assert factor is not None, "the liveness lets nothing else into the region"
        if factor not in self._sizes:
            with self.graph.inserting_before(_behind_inputs(self.live.indices)):
                rows = self._num_rows()
            if factor != 1:
                with self.graph.inserting_before(rows.next):
                    rows = self.graph.call_function(operator.mul, (rows, factor))
            self._sizes[factor] = rows
        return self._sizes[factor]

    def _num_rows(self) -> Node:
        """R: an input of the graph, or asked of the indices."""
        rows = expression(value_of(self.live.indices).shape[0])
        if (known := input_of_size(self.graph, rows)) is not None:
            return known
        return self.graph.call_function(torch.ops.aten.sym_size.int, (self.live.indices, 0))

    def _propagate(self) -> None:
        """Note the values of all nodes again: those of the region have other sizes."""
        values: dict[Node, Any] = {}
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                values[node] = value_of(node)
            elif node.op in ("call_function", "call_method"):
                new = node in self.live.region or "example_value" not in node.meta
                if new or any(a in self.live.region for a in node.all_input_nodes):
                    node.meta["example_value"] = run_node(node, values)
                values[node] = value_of(node)


def _inferred(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the size in place of -1, which torch cannot infer for no rows."""
    value, arguments, keywords = value_of(node), list(node.args), dict(node.kwargs)
    views = node.target in ("view", "reshape", torch.reshape) and isinstance(value, torch.Tensor)
    named = next((name for name in ("size", "shape") if name in keywords), None)
    sizes: Any = arguments[1:] if named is None else keywords[named]
    listed = named is None and len(sizes) == 1 and isinstance(sizes[0], list | tuple)
    sizes = sizes[0] if listed else sizes
    views = views and isinstance(sizes, list | tuple)
    if not views or not any(isinstance(size, int) and size == -1 for size in sizes):
        return node.args, keywords
    known = tuple(
        found if size == -1 and isinstance(found, int) else size  # a symbol: the rows themselves
        for size, found in zip(sizes, value.shape, strict=True)  # type: ignore
    )
    if named is not None:
        return node.args, keywords | {named: known}
    return (arguments[0], *((known,) if listed else known)), keywords


def _behind_inputs(node: Node) -> Node:
    """The first node after the inputs of the graph."""
    while node.op == "placeholder":
        node = node.next
    return node
