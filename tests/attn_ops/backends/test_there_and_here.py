"""docs/backends.md says for every name of vLLM's FlashInfer and xFormers backends what does it."""

import re
from pathlib import Path

import pytest

from attn_ops.backends import xformers_backend
from attn_ops.backends.flashinfer import builder, captured, parts, wrappers
from attn_ops.metadata import AttentionMetadataBuilder

PAGE = (Path(__file__).parents[3] / "docs" / "backends.md").read_text()
FLASHINFER = """
FLASHINFER_KV_CACHE_LAYOUT FLASHINFER_WORKSPACE_BUFFER_SIZE FlashInferBackend FlashInferState
FlashInferImpl FlashInferMetadata FlashInferMetadataBuilder PerLayerParameters get_name
get_impl_cls get_metadata_cls get_builder_cls get_state_cls get_kv_cache_shape
get_kv_cache_stride_order swap_blocks copy_blocks get_supported_head_sizes
get_fp8_dtype_for_flashinfer get_per_layer_parameters infer_global_hyperparameters __post_init__
begin_forward asdict_zerocopy prefill_metadata decode_metadata advance_step prepare _add_seq_group
_update_paged_kv_tensors build _get_workspace_buffer get_kv_cache_layout _get_prefill_wrapper
_get_decode_wrapper graph_capture graph_clone graph_capture_get_metadata_for_batch
get_graph_input_buffers prepare_graph_input_buffers forward alibi_slopes use_irope
kv_sharing_target_layer_name output_scale block_table_bound is_profile_run paged_kv_indices
"""
XFORMERS = """
XFORMERS_AVAILABLE XFormersAttentionBackend XFormersAttentionImpl XFormersAttentionMetadata
XFormersAttentionMetadataBuilder get_name get_impl_cls get_metadata_cls get_builder_cls
get_supported_dtypes get_supported_head_sizes validate_head_size get_kv_cache_shape
use_cascade_attention accept_output_buffer prefill_metadata decode_metadata attn_bias
reorder_batch build forward output_scale kv_sharing_target_layer_name
"""


def cells(section: str, column: int) -> set[str]:
    """The names in a column of a section's table."""
    table = PAGE.split(f"## What vLLM's {section} backend has")[1].split("\n## ")[0]
    lines = [line.split(" | ")[column] for line in table.splitlines() if line.startswith("| ")]
    return set(re.findall(r"\w+", " ".join(lines)))


@pytest.mark.parametrize(("section", "names"), [("FlashInfer", FLASHINFER), ("xFormers", XFORMERS)])
def test_every_name_has_a_row(section, names):
    assert set(names.split()) - cells(section, 0) == set()


def test_what_does_it_here_exists():
    here = cells("FlashInfer", 1) | cells("xFormers", 1)
    known = [builder, captured, parts, wrappers, xformers_backend, AttentionMetadataBuilder]
    for name in ("CapturedDecodes", "Plan", "Wrappers", "make_plan", "page_views",
                 "prepare_replay", "reorder_batch_threshold", "unavailable"):  # fmt: skip
        assert name in here
        assert any(hasattr(place, name) for place in known), name
