"""Which ATen operators keep rows apart: row i of the result needs row i of the arguments only.

One table, `RULES`. An operator that is not in it, and is not pointwise, is taken to mix rows.

T rows of the batch. "The row dimension" of a value is its one dimension of size T.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.memory import mutated_names
from fx_passes.analysis.sizes import expression, mentions, row_dim
from fx_passes.analysis.values import tensors_of


class Call:
    """One call of an ATen operator on fake tensors, and what it gave.

    Args:
        symbol: T, as the shapes name it.
    """

    def __init__(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        out: Any,
        symbol: sympy.Symbol,
    ) -> None:
        self.op, self.args, self.out, self.symbol = op, args, out, symbol
        named = op._schema.arguments
        self.given: dict[str, Any] = {
            a.name: a.default_value for a in named if a.has_default_value()
        }
        self.given |= dict(zip((a.name for a in named), args, strict=False)) | kwargs
        self.inputs = list(tensors_of((args, kwargs)))
        self.outputs = list(tensors_of(out))

    def dim(self, x: torch.Tensor) -> int | None:
        """The row dimension of x."""
        return row_dim(x, self.symbol)

    def dims(self, name: str = "dim") -> set[int] | None:
        """What the argument `name` says, as positive dimensions of the first input; None: all."""
        value = self.given.get(name)
        if value is None or value == []:
            return None
        rank = max(self.inputs[0].dim(), 1)
        return {int(d) % rank for d in (value if isinstance(value, list | tuple) else [value])}

    def with_rows(self) -> list[torch.Tensor]:
        return [x for x in self.inputs if self.dim(x) is not None]

    @property
    def has_rows(self) -> bool:
        return any(mentions(x, self.symbol) for x in (*self.inputs, *self.outputs))

    @property
    def counts_rows(self) -> bool:
        """Whether it computes with T as a number, where it is no size."""
        kinds = {a.name: str(a.real_type) for a in self.op._schema.arguments}
        return any(
            isinstance(value, torch.SymInt)
            and self.symbol in expression(value).free_symbols
            and kinds.get(name) not in ("int", "Optional[int]")
            for name, value in self.given.items()
        )

    @property
    def mutated(self) -> list[torch.Tensor]:
        """Arguments that are written to."""
        return list(tensors_of([self.given.get(name) for name in mutated_names(self.op)]))


def why_not(call: Call) -> str | None:
    """Why the call mixes rows, None if it does not."""
    if not (call.outputs or call.mutated):  # asks for a size or a device
        return None
    if call.counts_rows:
        return "it computes with the number of rows"
    try:
        if not call.has_rows:
            return None
        outs = [call.dim(x) for x in call.outputs]
        ins = [call.dim(x) for x in call.inputs]  # raises where rows cannot be told apart
    except ValueError as error:
        return str(error)
    if any(d is None for d in outs) and any(d is not None for d in ins):
        return "its result has no row for every row"
    rule = _rule_of(call.op)
    if rule is None:
        return "the table of row-wise operators does not have it"
    return None if rule(call) else "it mixes rows"


def _rule_of(op: torch._ops.OpOverload) -> Callable[[Call], bool] | None:
    packet = op.overloadpacket
    rule = RULES.get(packet)
    if rule is None and packet.__name__.endswith("_"):  # in place, as the functional form
        functional = getattr(aten, packet.__name__.rstrip("_"), None)
        rule = RULES.get(functional)
    random = torch.Tag.nondeterministic_seeded in op.tags
    if rule is None and torch.Tag.pointwise in op.tags and not random:
        return _aligned
    return rule


# -- rules -----------------------------------------------------------------------------------------


def _constant(call: Call) -> bool:
    """Every row is the same."""
    return True


def _aligned(call: Call) -> bool:
    """Broadcast from the right: rows stand as far from the last dimension in all that has any."""
    rows = [(x, call.dim(x)) for x in (*call.with_rows(), *call.outputs)]
    places = {x.dim() - d for x, d in rows if d is not None}
    return len(places) == 1


def _same_place(call: Call) -> bool:
    """Rows stand in the same dimension in all that has any."""
    return len({d for x in (*call.with_rows(), *call.outputs) if _has(d := call.dim(x))}) == 1


def _other_dim(call: Call) -> bool:
    """Works along dimensions, none of which are the rows."""
    dims = call.dims()
    return dims is not None and all(call.dim(x) not in dims for x in call.with_rows())


def _other_dim_in_place(call: Call) -> bool:
    return _other_dim(call) and _same_place(call)


def _last_dims(call: Call) -> bool:
    """Normalizes the last dimensions."""
    x, d = call.inputs[0], call.dim(call.inputs[0])
    return d is not None and d < x.dim() - len(call.given["normalized_shape"])


def _reshaped(call: Call) -> bool:
    """Rows are neither merged nor split: as much stands before them as did."""
    x, out = call.inputs[0], call.outputs[0]
    before = [math.prod(expression(s) for s in y.shape[: call.dim(y)]) for y in (x, out)]
    return before[0] == before[1]


def _kept(call: Call) -> bool:
    """Dimensions are moved or added."""
    return True


def _squeezed(call: Call) -> bool:
    """The row dimension is not asked for: there may be one logits row among many rows."""
    dims = call.dims()
    return dims is not None and call.dim(call.inputs[0]) not in dims


def _gathered(call: Call) -> bool:
    """Along another dimension; a table without rows would be read at the rows' numbers."""
    return _other_dim_in_place(call) and all(_has(call.dim(x)) for x in call.inputs)


def _sliced(call: Call) -> bool:
    """Another dimension is cut, or nothing. A table cut to T rows has no rows of the batch."""
    x = call.inputs[0]
    (dim,) = call.dims() or {0}
    d = call.dim(x)
    if d is None:
        return False
    return dim != d or (call.dim(call.outputs[0]) == d and call.given.get("step", 1) == 1)


def _tuple_along_other(call: Call) -> bool:
    (dim,) = call.dims() or {0}
    return dim != call.dim(call.inputs[0])


def _joined(call: Call) -> bool:
    """cat: of tensors whose rows stand in the same dimension, along another."""
    (dim,) = call.dims() or {0}
    return _same_place(call) and dim != call.dim(call.outputs[0])


def _stacked(call: Call) -> bool:
    out = call.outputs[0]
    places = {call.dim(x) for x in call.inputs}
    return len(places) == 1 and int(call.given.get("dim", 0)) % out.dim() != call.dim(out)


def _padded(call: Call) -> bool:
    x, pad = call.inputs[0], call.given["pad"]
    d = call.dim(x)
    if d is None:  # padded to T rows
        return False
    from_last = x.dim() - 1 - d
    return all(n == 0 for n in pad[2 * from_last : 2 * from_last + 2])


def _product(call: Call) -> bool:
    """mm: rows of the left factor. A bias is for all rows or has none."""
    *bias, a, b = call.inputs
    return call.dim(a) == 0 and call.dim(b) is None and all(call.dim(x) in (None, 0) for x in bias)


def _scaled_product(call: Call) -> bool:
    a, b, *scales = call.inputs
    factors = call.dim(a) == 0 and call.dim(b) is None
    return factors and all(call.dim(x) in (None, 0) for x in scales)


def _batched_product(call: Call) -> bool:
    """bmm: rows are the batch, or rows of the left factors."""
    *bias, a, b = call.inputs
    if call.dim(call.outputs[0]) == 0:
        return all(call.dim(x) in (None, 0) for x in call.inputs)
    rows_of_left = call.dim(call.outputs[0]) == 1 and call.dim(a) == 1 and call.dim(b) is None
    return rows_of_left and all(call.dim(x) in (None, 1) for x in bias)


def _looked_up(call: Call) -> bool:
    """A table without rows, looked up by an index a row."""
    table, *indices = call.inputs
    return call.dim(table) is None and len(indices) == 1


def _has(d: int | None) -> bool:
    return d is not None


RULES: dict[Any, Callable[[Call], bool]] = (
    dict.fromkeys(
        [aten.zeros, aten.ones, aten.full, aten.empty, aten.new_zeros, aten.new_ones,
         aten.new_full, aten.new_empty, aten.scalar_tensor],
        _constant,
    )
    | dict.fromkeys(
        [aten.clone, aten._to_copy, aten.copy, aten.copy_, aten.detach, aten.alias,
         aten.lift_fresh, aten.lift_fresh_copy, aten.zeros_like, aten.ones_like, aten.full_like,
         aten.empty_like, aten.where, aten.masked_fill, aten.expand, aten.repeat, aten.fill,
         aten.clamp, aten.contiguous],
        _aligned,
    )
    | dict.fromkeys(
        [aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean, aten.std, aten.prod,
         aten.linalg_vector_norm, aten.norm, aten.logsumexp, aten.any, aten.all, aten.argmax,
         aten.argmin, aten.max, aten.min],
        _other_dim,
    )
    | dict.fromkeys(
        [aten._softmax, aten._log_softmax, aten.softmax, aten.log_softmax, aten.cumsum,
         aten.cumprod, aten.sort, aten.topk, aten.glu],
        _other_dim_in_place,
    )
    | dict.fromkeys([aten.native_layer_norm, aten._fused_rms_norm], _last_dims)
    | dict.fromkeys(
        [aten.view, aten.reshape, aten._unsafe_view, aten._reshape_alias], _reshaped
    )
    | dict.fromkeys(
        [aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.unsqueeze_, aten.movedim],
        _kept,
    )
    | dict.fromkeys([aten.slice], _sliced)
    | dict.fromkeys(
        [aten.select, aten.split, aten.split_with_sizes, aten.unbind, aten.chunk, aten.narrow],
        _tuple_along_other,
    )
    | {
        aten.squeeze: _squeezed,
        aten.gather: _gathered,
        aten.cat: _joined,
        aten.stack: _stacked,
        aten.constant_pad_nd: _padded,
        aten.mm: _product,
        aten.addmm: _product,
        aten._scaled_mm: _scaled_product,
        aten.bmm: _batched_product,
        aten.baddbmm: _batched_product,
        aten.embedding: _looked_up,
        aten.index: _looked_up,
        aten.index_select: _looked_up,
    }
)  # fmt: skip
"""By operator, the condition under which its rows stay apart; in-place forms go by the same."""
