"""How a model is compiled once for batches of every size.

T rows of the batch.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.fx.experimental._config as symbolic_shapes_config

from attn_ops.compat.one_token_until_2_16 import traced_for_any_size
from attn_ops.ops.write_kv import SlotMapping

PATCHING = threading.RLock()
"""Held while torch or Transformers is patched, so that every patch is undone in order.

Global, as what is changed.
"""


@contextlib.contextmanager
def dynamic_batch(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    slot_mapping: SlotMapping | None = None,
    logits_to_keep: torch.Tensor | None = None,
    kv_caches: Sequence[torch.Tensor] = (),
    states: Sequence[torch.Tensor] = (),
    of_requests: Sequence[torch.Tensor] = (),
) -> Iterator[None]:
    """Call a compiled model for the first time inside, and no later batch recompiles it.

    Marks the last dimension of each tensor as dynamic, and the first one of caches and pools of
    states, whose size another session may choose otherwise. `of_requests`: the tensors [S],
    [S + 1] and [T] of a `StateCache`. Keeps Dynamo from specializing a batch of
    one token. The tensors must not be views, as Dynamo guards on their bases. Threads enter one at
    a time.
    """
    slots = slot_mapping if isinstance(slot_mapping, tuple) else (slot_mapping,)
    for tensor in (input_ids, position_ids, *slots, logits_to_keep, *of_requests):
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
    for cache in (*kv_caches, *states):
        torch._dynamo.maybe_mark_dynamic(cache, 0)
    oblivious = symbolic_shapes_config.patch(backed_size_oblivious=True)
    # What hooks of a torch.nn module hold is no weight (`select_logits`).
    held = torch._dynamo.config.patch(force_nn_module_property_static_shapes=False)
    with PATCHING, oblivious, held, traced_for_any_size():
        yield
