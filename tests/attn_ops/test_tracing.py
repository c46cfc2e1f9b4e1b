"""Where `dynamic_batch` is found; tests/fx_passes/passes/test_fast_prefill.py compiles with it."""

import attn_ops
from attn_ops.integrations import transformers as integration


def test_the_name_of_old_is_the_same_object():
    assert integration.dynamic_batch is attn_ops.dynamic_batch
