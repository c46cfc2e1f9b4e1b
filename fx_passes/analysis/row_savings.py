"""What fast prefill saves: operations, bytes, products and attentions of a row that is dropped.

T rows of the batch, R logits rows.
"""

import dataclasses
from typing import Any

import sympy
import torch
from torch.utils.flop_counter import flop_registry

from fx_passes.analysis.memory import storage
from fx_passes.analysis.row_liveness import Liveness
from fx_passes.analysis.row_rules import Call
from fx_passes.analysis.sizes import expression


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


def _bytes_a_row(x: torch.Tensor, call: Call) -> int:
    if any(storage(x) == storage(y) for y in call.inputs) or call.dim(x) is None:
        return 0
    return _a_row(x.numel(), call.symbol) * x.element_size()
