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
from torch.utils.flop_counter import flop_registry

from fx_passes.analysis.fake_run import ATTENTION, NotApplicableError, fake_execution, run_node
from fx_passes.analysis.row_liveness import Liveness, OneRowError, Selection, analyse, storage
from fx_passes.analysis.row_rules import expression, tensors_of
from fx_passes.base import Pass
from fx_passes.config import PassConfig
from fx_passes.passes.columns import keep_read_columns


class FastPrefill(Pass):
    """Compute dead rows no more: in a prefill, all but the last row of a request.

    Before::

        q = linear(x, w_q); write_kv(k, v, kv_cache); out = attention(q, kv_cache, meta)
        h = add(x, linear(out, w_o)); ...; y = getitem(h, (slice(None), logits_to_keep))

    After::

        x_R = index_select(x, 1, logits_to_keep); q = linear(x_R, w_q)
        write_kv(k, v, kv_cache); out = attention(q, kv_cache, meta, logits_rows=True)
        h = add(x_R, linear(out, w_o)); ...; y = h

    `row_liveness` finds the region. Every value that enters it is gathered once, sizes inside are
    the number of logits rows, and its attention reads the reduced batch. Keys and values are
    computed and written for all rows, so that caches do not change by a bit.

    Skipped when:
        - no rows are selected by a tensor of indices, or by several;
        - something needs all rows of the last hidden states: an output of the model, or an operator
          that mixes rows, which is named;
        - rows cannot be told apart: two dimensions have the number of tokens;
        - training: an input requires grad.
    """

    name = "fast_prefill"
    stage = "dynamo"

    def __init__(self, mode: str = "auto") -> None:
        super().__init__()
        self.mode = mode
        self.facts: dict[str, Any] = {}

    @classmethod
    def of(cls, config: PassConfig) -> "FastPrefill":
        return cls(config.fast_prefill)

    def apply(self, graph: Graph) -> int:
        """Rewrite; the number of nodes that are computed for logits rows alone.

        Raises:
            ValueError: mode "on", and nothing can be dropped.
        """
        self.facts = {}
        if any(_reduced(node) for node in graph.nodes):
            return 0
        try:
            _refuse_training(graph)
            liveness = analyse(graph)
            savings = Savings.of(liveness)
            _refuse_useless(liveness, savings)
        except Exception as reason:
            if not isinstance(reason, NotApplicableError):  # a graph that is not understood
                reason = NotApplicableError(f"{type(reason).__name__}: {reason}")
            self.skip(str(reason))
            if self.mode == "on" and not isinstance(reason, OneRowError):
                raise ValueError(
                    f"fast_prefill must be 'auto' or 'off' for this model, got 'on': {reason}"
                ) from None
            return 0
        for node, reason in liveness.reasons.items():
            self.skip(f"{node.name} is computed for all rows: {reason}")
        self.facts = dataclasses.asdict(savings)
        _Rewrite(graph, liveness).run()
        return len(liveness.region)


@dataclasses.dataclass(frozen=True)
class Savings:
    """What one dropped row saves, T - R of them a step.

    Attributes:
        flops_per_row: of matrix products; attention saves more, by the length of the request.
        of_flops_per_row: of all products whose operations are a multiple of the rows.
        bytes_per_row: of the operators' results, as if each went to memory: an upper bound.
        num_attentions, of_attentions: attentions that see logits rows only, and all.
        num_products, of_products: the same of matrix products.
    """

    flops_per_row: int
    of_flops_per_row: int
    bytes_per_row: int
    num_attentions: int
    of_attentions: int
    num_products: int
    of_products: int

    @classmethod
    def of(cls, liveness: Liveness) -> "Savings":
        flops = of_flops = num_bytes = products = of_products = 0
        for node, calls in liveness.calls.items():
            for call in calls:
                count = flop_registry.get(call.op.overloadpacket)
                cost = 0
                is_product = count is not None and call.has_rows
                if count is not None and is_product:
                    cost = _a_row(count(*call.args, out_val=call.out), liveness.symbol)
                of_products, of_flops = of_products + is_product, of_flops + cost
                if node not in liveness.region:
                    continue
                products, flops = products + is_product, flops + cost
                num_bytes += sum(_bytes_a_row(x, call) for x in call.outputs)
        return cls(flops, of_flops, num_bytes, *liveness.num_attentions(), products, of_products)


def _a_row(total: Any, symbol: sympy.Symbol) -> int:
    """Of an amount that is a multiple of T, that of one row; of any other nothing."""
    amount = sympy.simplify(expression(total) / symbol)
    return int(amount) if amount.is_Integer else 0


def _bytes_a_row(x: torch.Tensor, call: Any) -> int:
    if any(storage(x) == storage(y) for y in call.inputs) or call.dim(x) is None:
        return 0
    return _a_row(x.numel(), call.symbol) * x.element_size()


def _reduced(node: Node) -> bool:
    return node.target in ATTENTION and bool(node.kwargs.get("logits_rows"))


def _refuse_training(graph: Graph) -> None:
    values = [n.meta.get("example_value") for n in graph.nodes if n.op == "placeholder"]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(values)):
        raise NotApplicableError("training: an input requires grad")


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
        self._sizes: dict[sympy.Expr, Node] = {}
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
            value = a.meta.get("example_value")
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
        if "nn_module_stack" in user.meta:  # else the layer could not be cut out around it
            new.meta["nn_module_stack"] = user.meta["nn_module_stack"]
        if source not in self._rewritten:
            self._gathered[source] = new
        return new

    def _size(self, size: sympy.Expr, node: Node) -> Node:
        """The node that holds a size with R in T's place."""
        factor = size / self.live.symbol
        if self.live.symbol not in size.free_symbols:
            return node
        if factor not in self._sizes:
            with self.graph.inserting_before(_behind_inputs(self.live.indices)):
                rows = self._num_rows()
            if factor != 1:
                with self.graph.inserting_before(rows.next):
                    rows = self.graph.call_function(operator.mul, (rows, int(factor)))
            self._sizes[factor] = rows
        return self._sizes[factor]

    def _num_rows(self) -> Node:
        """R: an input of the graph, or asked of the indices."""
        wanted = expression(self.live.indices.meta["example_value"].shape[0])
        for node in self.graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt) and expression(value) == wanted:
                return node
        return self.graph.call_function(torch.ops.aten.sym_size.int, (self.live.indices, 0))

    def _propagate(self) -> None:
        """Note the values of all nodes anew: those of the region have other sizes."""
        values: dict[Node, Any] = {}
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                values[node] = node.meta.get("example_value")
            elif node.op in ("call_function", "call_method"):
                new = node in self.live.region or "example_value" not in node.meta
                if new or any(a in self.live.region for a in node.all_input_nodes):
                    node.meta["example_value"] = run_node(node, values)
                values[node] = node.meta.get("example_value")


def _inferred(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the size in -1's place, which a shape of no rows would leave open."""
    value, arguments, keywords = node.meta.get("example_value"), list(node.args), dict(node.kwargs)
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
    """The first node behind the inputs of the graph."""
    while node.op == "placeholder":
        node = node.next
    return node
