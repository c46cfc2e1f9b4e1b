"""Where a recording of a step may be cut: a hook in the operators that attend to the KV cache.

Nothing else of a model reads a batch's host values, so nothing else must run outside a graph.
While no hook is set an operator pays one look at a global.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_ops.backends.checks import latent_spec
from attn_ops.metadata import AttentionMetadata, AttentionOptions, AttentionSpec, LatentOptions

Results = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an operator that attends, as the model made it.

    `options` are its keywords, except those that say how the output is quantized. Chunked local
    attention and cascades are not yet looked up: `meta` is the whole batch's, and another step's
    can take its place.
    """

    compute: Callable[..., Results]  # of q, kv_cache, meta, scale and the options: the results
    q: torch.Tensor  # [T, N, H]
    kv_cache: torch.Tensor  # [P, 2, B, K, H]
    meta: AttentionMetadata
    scale: float
    options: dict[str, Any]
    empty: Callable[[torch.Tensor], Results]  # memory for the results, from q

    @property
    def spec(self) -> AttentionSpec:
        """Geometry of the layer, as the builder was given it."""
        keywords = dict(self.options)
        chunk, causal = (keywords.pop(n, None) for n in ("attention_chunk_size", "causal"))
        keywords.pop("logits_rows", None)
        if causal is None:
            causal = self.meta.common.causal
        spec = AttentionOptions(self.scale, **keywords).spec(self.q, self.kv_cache, causal)
        return dataclasses.replace(spec, attention_chunk_size=chunk)

    def empty_results(self) -> Results:
        """Memory for what the operator returns."""
        return self.empty(self.q)

    def run(self, meta: AttentionMetadata | None = None) -> Results:
        """The results, over the batch of `meta`; None: of the call. Not by the dispatcher."""
        return self.compute(self.q, self.kv_cache, meta or self.meta, self.scale, **self.options)

    def run_into(self, results: Results, meta: AttentionMetadata | None = None) -> None:
        """`run`, copied into tensors of `empty_results`: one copy kernel a result."""
        for static, new in zip(results, self.run(meta), strict=True):
            static.copy_(new)


@dataclasses.dataclass(frozen=True, eq=False)
class LatentCall(AttentionCall):
    """A call of latent attention: `kv_b` and `v_head_dim` are among the options."""

    @property
    def spec(self) -> AttentionSpec:
        o = self.options
        asked = LatentOptions(self.scale, o["kv_b"], o["v_head_dim"], o["kv_cache_dtype"])
        causal = self.meta.common.causal if o["causal"] is None else o["causal"]
        return latent_spec(self.q, self.kv_cache, asked, causal)

    def empty_results(self) -> Results:
        return self.empty(self.q.new_empty(*self.q.shape[:2], self.options["v_head_dim"]))


def attended(
    call_type: type[AttentionCall],
    compute: Callable[..., Results],
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    options: dict[str, Any],
    empty: Callable[[torch.Tensor], Results],
) -> Results:
    """The results of an operator that attends: nothing computed for no rows, by a hook, or here."""
    no_rows = options.get("logits_rows") and meta.wants_no_logits(q.shape[0])
    if no_rows or hooks:
        call = call_type(compute, q, kv_cache, meta, scale, options, empty)
        results = call.empty_results() if no_rows else asked(call)
        if results is not None:
            return results
    return compute(q, kv_cache, meta, scale, **options)


Hook = Callable[[AttentionCall], Results | None]
"""Takes a call over and returns its results, or None: then the operator runs as without a hook."""

hooks: dict[int, Hook] = {}
"""What is asked, by thread; set by `around_attention` alone. Global, as operators have no owner."""


@contextlib.contextmanager
def around_attention(new: Hook) -> Iterator[None]:
    """Ask `new` before every call of attention that this thread makes inside the block.

    Calls that the hook itself makes are not asked about.
    """
    thread, busy = threading.get_ident(), False
    assert thread not in hooks, "attention is hooked already"

    def ask_once(call: AttentionCall) -> Results | None:
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


def asked(call: AttentionCall) -> Results | None:
    """What this thread's hook gives for a call; None without one."""
    hook = hooks.get(threading.get_ident())
    return None if hook is None else hook(call)
