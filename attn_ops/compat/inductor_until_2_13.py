"""Inductor mended while our backend compiles, so that one graph serves steps of any size.

Torch 2.11 and 2.12 need it. It can go when pyproject.toml asks for 2.13, which does nothing of what
`inductor_mended` lists. All of this only chooses layouts, padding and grids; what is chosen for
many rows is right for one.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from attn_ops.compat.inductor_lock import INDUCTOR_LOCK
from attn_ops.compat.torch_version import TORCH_VERSION


@contextlib.contextmanager
def inductor_mended() -> Iterator[None]:
    """Take away what would compile a model again for its first decode step, or for no rows.

    - Its decomposition of `cat((x, x))`, which RoPE uses, flattens an expanded view, and so guards
      on more than one row. Its lowering of `cat` needs no guard.
    - That lowering asks whether arguments of four dimensions (Gemma 3n, Gemma 4) lie channels last.
    - Products of unaligned sizes (Gemma 3n's of 4 columns) are padded if they are bound by
      arithmetic, which it asks of the symbolic sizes.
    - Launchers of kernels with two dimensions divide by the number of blocks, which is zero
      where a chunk of a prompt wants no logits. (Those that `mode="max-autotune"` makes when a
      kernel first runs still do; a session then computes such rows.)
    - CUDA graphs of "reduce-overhead" are silently given up where an input is no tensor, though
      they are cut around the operators that read the metadata.
    """
    if TORCH_VERSION >= (2, 13):
        yield
        return
    from torch._inductor import output_code
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.ir import ConcatKernel
    from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow

    with (
        INDUCTOR_LOCK,
        _repeated_cat_kept(),
        patch.object(ConcatKernel, "create", _concat_without_guards(ConcatKernel.create)),
        patch.object(pad_mm, "is_mm_compute_bound", _by_hints(pad_mm.is_mm_compute_bound)),
        patch.object(
            Grid2DWithYZOverflow, "generate", _for_empty_grids(Grid2DWithYZOverflow.generate)
        ),
        patch.object(
            output_code,
            "cudagraph_partition_post_compile",
            _with_opaque_inputs(output_code.cudagraph_partition_post_compile),
        ),
    ):
        yield


@contextlib.contextmanager
def _repeated_cat_kept() -> Iterator[None]:
    """The table's entry is changed in place.

    A new table would be part of Inductor's cache key and cannot be pickled: nothing would be
    cached.
    """
    from torch._inductor.decomposition import select_decomp_table

    table, cat = select_decomp_table(), torch.ops.aten.cat.default
    decompose = table.get(cat)
    if decompose is None:
        yield
        return

    def cat_unless_repeated(tensors: list[torch.Tensor], dim: int = 0) -> Any:
        if len(tensors) > 1 and all(t is tensors[0] for t in tensors):
            return NotImplemented
        return decompose(tensors, dim)

    table[cat] = cat_unless_repeated
    try:
        yield
    finally:
        table[cat] = decompose


def _concat_without_guards(create: Any) -> Any:
    from torch._inductor.virtualized import V

    def create_without_guards(inputs: Sequence[Any], dim: int) -> Any:
        with V.graph.sizevars.shape_env.suppress_guards():
            return create(inputs, dim)

    return staticmethod(create_without_guards)


def _by_hints(is_mm_compute_bound: Any) -> Any:
    def hinted(size: Any) -> Any:
        hint = size.node.hint if isinstance(size, torch.SymInt) else None
        return size if hint is None else hint

    def by_hints(*sizes_and_dtype: Any) -> bool:
        return is_mm_compute_bound(*map(hinted, sizes_and_dtype))

    return by_hints


def _for_empty_grids(generate: Any) -> Any:
    def generate_for_any(self: Any, *arguments: Any) -> None:
        generate(self, *arguments)
        if self.mode == "python":
            self.y_grid = f"(0 if y_grid_div_ == 0 else {self.y_grid})"

    return generate_for_any


def _with_opaque_inputs(record_partitions: Any) -> Any:
    from torch._library.fake_class_registry import FakeScriptObject

    known = (torch.Tensor, torch.SymInt, torch.Generator, FakeScriptObject)

    def record_partitions_with_opaque_inputs(inputs: Any, compiled: Any, *rest: Any) -> None:
        reasons = compiled.cudagraph_info.cudagraph_fail_reasons
        if all(isinstance(x, known) for x in inputs):
            reasons[:] = [r for r in reasons if r != "non-Tensor inputs"]
        record_partitions(inputs, compiled, *rest)

    return record_partitions_with_opaque_inputs
