"""One graph of a compiled model for all of its batches."""

import torch

import attn_ops
from attn_ops import CommonAttentionMetadata, get_backend
from attn_ops.integrations import transformers as integration
from tests.kit.models import build_model


def test_dynamic_batch_makes_one_graph_without_a_session():
    model = build_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    specs = integration.attention_specs(model)
    torch_backend = get_backend("TORCH")
    builder = torch_backend.builder(torch_backend, specs, 16, "cpu")
    caches = [torch.zeros(4, 2, 16, 2, 16) for _ in specs]
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for query, seq in (([5, 3], [5, 3]), ([1, 1], [6, 4]), ([1], [7])):
        table = torch.tensor([[1], [2]][: len(query)], dtype=torch.int32)
        common = CommonAttentionMetadata.from_lengths(query, seq, table, 16)
        rows = sum(query)
        batch = {
            "input_ids": torch.ones(1, rows, dtype=torch.int64),
            "position_ids": torch.zeros(1, rows, dtype=torch.int64),
            "slot_mapping": common.slot_mapping,
            "logits_to_keep": torch.arange(len(query)),
        }
        keywords = {"attn_metadata": builder.build(0, common), "kv_caches": caches}
        with torch.no_grad(), attn_ops.dynamic_batch(**batch):
            compiled(**batch, **keywords, use_cache=False)
    assert graphs["unique_graphs"] - before == 1


def test_the_name_of_old_is_the_same_object():
    assert integration.dynamic_batch is attn_ops.dynamic_batch
