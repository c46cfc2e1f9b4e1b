"""Where a recording of a step may be cut: a hook in the operators that attend to the KV cache.

Nothing else of a model reads a batch's host values, so nothing else has to stand outside a graph.
While no hook is set an operator pays one look at a global.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_ops.metadata import AttentionMetadata, AttentionOptions, AttentionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an operator that attends, as the model made it.

    `options` are its keywords, but for those that only say what becomes of the output. Chunked
    local attention and cascades are not yet looked up: `meta` is the whole batch's, and another
    step's can stand in its place.
    """

    implementation: Callable[..., Any]
    q: torch.Tensor  # [T, N, H]
    kv_cache: torch.Tensor  # [P, 2, B, K, H]
    meta: AttentionMetadata
    scale: float
    options: dict[str, Any]
    empty: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]  # memory for the results, from q

    @property
    def spec(self) -> AttentionSpec:
        """Geometry of the layer, as the builder was given it."""
        keywords = dict(self.options)
        chunk, causal = keywords.pop("attention_chunk_size"), keywords.pop("causal")
        keywords.pop("logits_rows")
        if causal is None:
            causal = self.meta.common.causal
        spec = AttentionOptions(self.scale, **keywords).spec(self.q, self.kv_cache, causal)
        return dataclasses.replace(spec, attention_chunk_size=chunk)

    def empty_results(self) -> tuple[torch.Tensor, ...]:
        """Memory for what the operator returns."""
        return self.empty(self.q)

    def run(self, meta: AttentionMetadata | None = None) -> tuple[torch.Tensor, ...]:
        """The results, over the batch of `meta`; None: of the call. Not by the dispatcher."""
        results = self.implementation(
            self.q, self.kv_cache, meta or self.meta, self.scale, **self.options
        )
        return results if isinstance(results, tuple) else (results,)

    def run_into(
        self, results: tuple[torch.Tensor, ...], meta: AttentionMetadata | None = None
    ) -> None:
        """`run`, copied into tensors of `empty_results`: one copy kernel a result."""
        for static, new in zip(results, self.run(meta), strict=True):
            static.copy_(new)


Hook = Callable[[AttentionCall], tuple[torch.Tensor, ...] | None]
"""Takes a call over and returns its results, or None: then the operator runs as ever."""

hooks: dict[int, Hook] = {}
"""What is asked, by thread; set by `around_attention` alone. Global, as operators have no owner."""


@contextlib.contextmanager
def around_attention(new: Hook) -> Iterator[None]:
    """Ask `new` before every call of attention that this thread makes inside the block.

    Calls that the hook itself makes are not asked about.
    """
    thread, busy = threading.get_ident(), False
    assert thread not in hooks, "attention is hooked already"

    def ask_once(call: AttentionCall) -> tuple[torch.Tensor, ...] | None:
        nonlocal busy
        if busy:
            return None
        busy = True
        try:
            return new(call)
        finally:
            busy = False

    hooks[thread] = ask_once
    try:
        yield
    finally:
        del hooks[thread]


def asked(call: AttentionCall) -> tuple[torch.Tensor, ...] | None:
    """What this thread's hook gives for a call; None without one."""
    hook = hooks.get(threading.get_ident())
    return None if hook is None else hook(call)
