"""Checks that the layers of merged projections still read the merged weights."""

import operator

from torch import nn

from attn_ops.integrations.merged import MergedSlice


class MergedViews:
    """The slices of a model, checked at every step: each must still be a view.

    A compiled model reads the merged tensor. It would never read a weight or bias that was
    replaced, by `p.data = new` or as a parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [(n, m) for n, m in model.named_modules() if isinstance(m, MergedSlice)]
        layers = [(n, m) for n, m in layers if "weight" in m._parameters]
        places = [
            (f"{name}.{part}", layer, part, layer.begin)
            for name, layer in layers
            for part in ("weight", "bias")
            if getattr(layer, part) is not None
        ]
        self._names = [name for name, *_ in places]
        self._slices = [layer._parameters for _, layer, _, _ in places]
        self._merged = [layer.merged._buffers for _, layer, _, _ in places]
        self._parts = [part for _, _, part, _ in places]
        self._offsets = [
            begin * getattr(layer.merged, part).stride(0) * getattr(layer, part).itemsize
            for _, layer, part, begin in places
        ]

    def check(self) -> None:
        """Raise a ValueError if a layer's tensor is no longer a view of its merged one."""
        mine = map(dict.get, self._slices, self._parts)
        merged = map(operator.getitem, self._merged, self._parts)
        starts = (0 if x is None else x.data_ptr() for x in merged)
        wanted = list(map(operator.add, starts, self._offsets))
        got = [-1 if x is None else x.data_ptr() for x in mine]
        if got == wanted:
            return
        index = next(i for i, pair in enumerate(zip(got, wanted, strict=True)) if len({*pair}) > 1)
        raise ValueError(
            f"{self._names[index]} must be a view of its merged {self._parts[index]}, got a tensor "
            "of its own; write weights by weight.copy_(new) (torch does not count "
            "weight.data.copy_), or call merge_projections after moving or converting it"
        )
