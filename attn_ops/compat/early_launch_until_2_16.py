"""Inductor's kernels made to wait before they write, when they are launched early.

Torch 2.11 to 2.15 need it. With `triton.enable_pdl` a kernel waits before it reads what the kernel
in front writes, and before it lets the next one start. Two things are missing: a kernel that reads
nothing never waits, and one may write to memory that the kernel in front still reads, as Inductor
gives a buffer's memory to the next under another name. It can go when
`test_what_inductor_writes` of tests/fx_passes/test_early_launch.py finds no fault without it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from attn_ops.compat.inductor_lock import INDUCTOR_LOCK


@contextlib.contextmanager
def kernels_wait() -> Iterator[None]:
    """Kernels that Inductor writes inside the block wait before their first store."""
    from torch._inductor.codegen.triton import TritonKernel

    before, filtered = TritonKernel._handle_pdl_before_access, TritonKernel._filter_pdl

    def handle(self: Any, buffer: Any, *names: str, consider_reads: bool = False) -> None:
        stores = consider_reads or buffer is self.stores or buffer is self.post_loop_store
        with _first_of_the_graph(stores):
            before(self, buffer, *names, consider_reads=consider_reads)

    def keep_one(self: Any, code: Any) -> None:
        filtered(self, code)
        lines = [line for line in code._lines if isinstance(line, str)]
        if self._enable_pdl_codegen() and not any(self.GDC_WAIT in line for line in lines):
            code._lines.insert(0, self.GDC_WAIT)

    with (
        INDUCTOR_LOCK,
        patch.object(TritonKernel, "_handle_pdl_before_access", handle),
        patch.object(TritonKernel, "_filter_pdl", keep_one),
    ):
        yield


@contextlib.contextmanager
def _first_of_the_graph(always: bool) -> Iterator[None]:
    """Inside the block Inductor finds no kernel in front, and so waits: always, or if in doubt."""
    from torch._inductor.virtualized import V

    scheduler: Any = V.graph.scheduler
    if scheduler is None or (previous := scheduler.previous_node) is None:
        yield
        return
    if not always and _waits(scheduler, previous):
        yield
        return
    scheduler.previous_node = None
    try:
        yield
    finally:
        scheduler.previous_node = previous


def _waits(scheduler: Any, node: Any) -> bool:
    """Whether the node is a kernel of Inductor's on the same stream: it waits before it ends."""
    streams = getattr(scheduler, "_has_multi_stream_nodes", None)
    if streams is not None and streams():
        return False
    device = node.get_device()
    return device is not None and device.type == "cuda" and not node.is_template()
