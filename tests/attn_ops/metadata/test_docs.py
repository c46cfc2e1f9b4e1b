"""docs/by_hand.md maps every name of the reference to one that exists."""

import re
from pathlib import Path

import attn_ops.metadata
from attn_ops import vllm_api
from attn_ops.metadata import AttentionMetadataBuilder, CommonAttentionMetadata

PAGE = (Path(__file__).parents[3] / "docs" / "by_hand.md").read_text()
REFERENCE = """
KVCacheLayoutType KV_SHARING_FAST_PREFILL_METADATA_FIELDS M PAD_SLOT_ID
_KV_CACHE_LAYOUT_OVERRIDE logger
AttentionCGSupport AttentionMetadataBuilder CommonAttentionMetadata KVSharingFastPrefillMetadata
PerLayerParameters UBatchSlice _make_metadata_with_slice compute_causal_conv1d_metadata
create_fast_prefill_custom_backend get_kv_cache_layout get_per_layer_parameters
infer_global_hyperparameters is_valid_kv_cache_layout
make_kv_sharing_fast_prefill_common_attn_metadata
make_local_attention_virtual_batches reorder_batch_to_split_decodes_and_prefills
reshape_attn_output_for_spec_decode reshape_query_for_spec_decode set_kv_cache_layout
slice_query_start_locs split_attn_metadata split_decodes_and_prefills subclass_attention_backend
subclass_attention_metadata
"""
FIELDS = """
query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu num_computed_tokens_cpu num_reqs
num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal
logits_indices_padded num_logits_indices encoder_seq_lens
"""
BUILDER = """
build build_for_cudagraph_capture build_for_drafting use_cascade_attention reorder_batch
_init_reorder_batch_threshold reorder_batch_threshold cudagraph_support kv_cache_spec vllm_config
layer_names device
"""
INTERNAL = {"_KV_CACHE_LAYOUT_OVERRIDE", "logger"}
PUBLIC = {*attn_ops.metadata.__all__, *vllm_api.__all__}


def rows() -> list[list[str]]:
    """First two cells of every row of the table of names."""
    table = PAGE.split("## Names of the reference and ours")[1].split("\n## ")[0]
    return [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")]


def names(cell: str) -> set[str]:
    return {name.strip("().") for name in re.findall(r"`([^`]+)`", cell)}


def test_every_name_of_the_reference_is_mapped():
    left = set().union(*(names(cell) for cell, _ in rows()))
    assert set(f"{REFERENCE} {FIELDS} {BUILDER}".split()) <= left


def test_every_name_of_ours_exists():
    known = {*PUBLIC, *dir(AttentionMetadataBuilder)}
    known |= {f.name for f in CommonAttentionMetadata.__dataclass_fields__.values()}
    known |= set(dir(CommonAttentionMetadata)) | {"specs", "block_size", "layer_names", "device"}
    for reference, ours in rows():
        wanted = names(reference) - INTERNAL if ours.strip() == "same" else names(ours)
        for name in wanted:
            assert name.split(".")[-1].strip("()") in known, name


def test_what_is_left_out_of_the_names_is_nothing_that_we_have():
    assert not any(hasattr(attn_ops.metadata, name) for name in INTERNAL)
    assert set(REFERENCE.split()) - INTERNAL <= PUBLIC


def test_attn_ops_metadata_hands_on_every_name():
    for name in PUBLIC:
        assert getattr(attn_ops.metadata, name) is not None
    assert attn_ops.metadata.UBatchSlice is vllm_api.UBatchSlice
