"""Which ATen operators are views, and which are products: the vocabulary that the passes share."""

import torch

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
    }
)
"""Operators of the functional graph whose result shares the storage of their first argument."""

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
"""Matrix products: their results are contiguous and written by a kernel of their own."""
