"""Makes a backend's metadata of a batch, once a step for all layers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic

import numpy as np
import torch

from attn_ops.metadata.attention import (
    AttentionBackend,
    AttentionMetadata,
    LogitsRows,
    M,
    Views,
)
from attn_ops.metadata.chunked_local import make_local_attention_virtual_batches
from attn_ops.metadata.common import CommonAttentionMetadata
from attn_ops.metadata.fast_prefill import (
    make_kv_sharing_fast_prefill_common_attn_metadata,
    with_known_logits_rows,
)
from attn_ops.metadata.features import AttentionCGSupport, AttentionSpec
from attn_ops.metadata.shared_prefix import cascade_pays, split_on_device, split_shared_prefix
from attn_ops.metadata.splits import (
    InputBatch,
    SchedulerOutput,
    reorder_batch_to_split_decodes_and_prefills,
)


class AttentionMetadataBuilder(Generic[M]):
    """Turns a batch into a backend's metadata, once per step for all layers.

    Args:
        backend: the backend that the metadata will name.
        specs: the distinct geometries of the model's layers.
        block_size: tokens a block of the KV cache holds.
        device: where the metadata's tensors live.
        layer_names: the layers that share the metadata; errors of the geometries name them.
        num_speculative_tokens: draft tokens that a decode step verifies; None: no drafting.

    Attributes:
        cudagraph_support: which batches may be captured.
        reorder_batch_threshold: queries up to this length must stand in front of the batch
            (`reorder_batch`); None: any order will do.
        plans_on_host: plans read the CPU mirrors; else they may be missing, as under capture.
        needs_mirrors: no plan can be made where they are missing.
        plans_in_turn: a plan may overwrite one that the device has yet to copy: it is made only
            after the step before has begun.
        takes_windows: layers with a window may have blocks of their own. False of a class that
            overrides what builds metadata, unless it says otherwise.
        prefix_builder: of the backend for a shared prefix, all rows as one request; None: this one.

    Raises:
        ValueError: the backend does not support a geometry; the reasons are in the message.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    plans_on_host: ClassVar[bool] = False
    needs_mirrors: ClassVar[bool] = False
    plans_in_turn: ClassVar[bool] = False
    takes_windows: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        builds = {"build", "build_for_cudagraph_capture", "prepare_capture"}
        if builds & vars(cls).keys() and "takes_windows" not in vars(cls):
            cls.takes_windows = False

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Sequence[AttentionSpec],
        block_size: int,
        device: torch.device | str,
        *,
        layer_names: Sequence[str] = (),
        num_speculative_tokens: int | None = None,
    ) -> None:
        reasons = [
            reason
            for spec in specs
            for reason in backend.support.reasons_against(spec, block_size, torch.device(device))
        ]
        if reasons:
            layers = ", ".join(layer_names) or "these layers"
            raise ValueError(f"backend {backend.name} cannot take {layers}: {'; '.join(reasons)}")
        self.backend = backend
        self.specs = tuple(dict.fromkeys(specs))
        self.block_size = block_size
        self.device = torch.device(device)
        self.layer_names = tuple(layer_names)
        self.num_speculative_tokens = num_speculative_tokens
        self.prefix_builder: AttentionMetadataBuilder | None = None

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold: int | None = 1, supports_spec_as_decode: bool = False
    ) -> None:
        """Set `reorder_batch_threshold`; with drafts that the backend takes as decodes, 1 + k."""
        self.reorder_batch_threshold = reorder_batch_threshold
        if (
            reorder_batch_threshold is not None
            and supports_spec_as_decode
            and self.num_speculative_tokens is not None
        ):
            self.reorder_batch_threshold = 1 + self.num_speculative_tokens

    def plan(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> Any:
        """What the kernels of one geometry share over a step; capturable: device work only."""
        return None

    def profile_run(self, max_num_tokens: int) -> int:
        """Reserve what a step of so many rows takes at most beside its results; bytes of it."""
        return 0

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """The step's metadata. Reads no device memory.

        Args:
            common_prefix_len: tokens that all requests share, for backends with cascade attention.
            common_attn_metadata: the batch.
            fast_build: without effect; taken for code that is written against vLLM's builders.

        Raises:
            ValueError: the batch is on another device or in blocks of another size; a prefix is
                shared, and layers with a window have blocks of their own.
        """
        common = common_attn_metadata
        if not isinstance(common, CommonAttentionMetadata):
            raise ValueError(
                "common_attn_metadata must be a CommonAttentionMetadata, "
                f"got {type(common).__name__}"
            )
        if common.device.type != self.device.type:
            raise ValueError(f"common must be on {self.device}, got {common.device}")
        if common.block_size not in (None, self.block_size):
            raise ValueError(
                f"common must have block_size {self.block_size}, got {common.block_size}"
            )
        if common_prefix_len:
            return self._build_cascade(common_prefix_len, common)  # type: ignore
        plain = [s for s in self.specs if s.attention_chunk_size is None]
        if common.window_block_table_tensor is None:
            return self._planned(plain, common, self._views(common))  # type: ignore
        windowed = [s for s in plain if s.sliding_window is not None]
        others = [s for s in plain if s.sliding_window is None]
        views = self._views(common, window=self._planned(windowed, common.of_windows()))
        return self._planned(others, common, views)  # type: ignore

    def build_logits_rows(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Metadata of a batch reduced to its logits rows; no prefix is taken apart.

        Args:
            common_attn_metadata: the whole batch, with logits_indices_padded and
                num_logits_indices, and their mirror logits_indices_cpu or, under capture,
                num_logits. The rows must be the last of their requests.

        Raises:
            ValueError: one of them is missing or wrong.
        """
        common = with_known_logits_rows(common_attn_metadata)
        reduced = make_kv_sharing_fast_prefill_common_attn_metadata(common)
        if reduced.query_start_loc_cpu is None:
            return self.build_for_cudagraph_capture(reduced)
        return self.build(0, reduced)

    def _planned(
        self,
        specs: Sequence[AttentionSpec],
        common: CommonAttentionMetadata,
        views: Views | None = None,
    ) -> AttentionMetadata:
        plans = {s: self.plan(s, common) for s in specs}
        return AttentionMetadata(common, self.backend, plans, self.block_size, views=views)

    def _views(self, common: CommonAttentionMetadata, **parts: Any) -> Views:
        """Virtual batches of each chunk size that a layer has, logits rows, and `parts`."""
        rows = LogitsRows(self.build_logits_rows)  # type: ignore
        return Views(chunked=self._chunked(common), logits_rows=rows, **parts)

    def _chunked(self, common: CommonAttentionMetadata) -> Mapping[int, AttentionMetadata]:
        chunked = {}
        on_device = not self.plans_on_host or common.query_start_loc_cpu is None
        for chunk in {s.attention_chunk_size for s in self.specs if s.attention_chunk_size}:
            virtual = make_local_attention_virtual_batches(
                chunk, common, self.block_size, on_device=on_device
            )
            plain = [
                dataclasses.replace(s, attention_chunk_size=None)
                for s in self.specs
                if s.attention_chunk_size == chunk
            ]
            chunked[chunk] = self._planned(plain, virtual)
        return chunked

    def _build_cascade(self, length: int, common: CommonAttentionMetadata) -> AttentionMetadata:
        """Layers that see all keys get prefix and rest; the others the batch as it is."""
        self._check_cascade("common_prefix_len must be 0", str(length), common)
        prefix, rest = split_shared_prefix(length, common, self.block_size)
        if not prefix.max_seq_len:
            plain = [s for s in self.specs if not s.attention_chunk_size]
            return self._planned(plain, common, self._views(common))
        return self._cascaded(prefix, rest, common)

    def build_cascade(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        shared_lens: torch.Tensor,
        group_starts: torch.Tensor,
    ) -> M:
        """`build` of decodes that share prefixes in groups, which the device knows; capturable.

        Args:
            common_attn_metadata: the batch, one row a request; its `max_seq_len` must bound that of
                every replay.
            shared_lens: [S] int32, tokens that a request shares with its whole group: a multiple of
                the block size, without its query token. 0 is none.
            group_starts: [G + 1] int32, the first request of each group of neighbours, and S behind
                the last; groups may be empty.

        Raises:
            ValueError: the backend cannot take prefixes apart, or not on the device; the batch is
                not of single tokens; the tensors do not fit it.
        """
        common = common_attn_metadata
        self._check_cascade("shared_lens must be None", "a tensor", common)
        if not self.cascades_on_device:
            raise ValueError(
                f"shared_lens must be None with backend {self.backend.name}, got a tensor; "
                "it needs the lengths on the host"
            )
        if common.max_query_len > 1 or shared_lens.shape != common.seq_lens.shape:
            raise ValueError(
                f"shared_lens must be [{common.num_reqs}] of requests with one row each, got "
                f"{list(shared_lens.shape)} and max_query_len {common.max_query_len}"
            )
        parts = split_on_device(shared_lens, group_starts, common, self.block_size)
        return self._cascaded(*parts, common)  # type: ignore

    def _check_cascade(self, must: str, got: str, common: CommonAttentionMetadata) -> None:
        if not self.cascades:
            raise ValueError(
                f"{must} with backend {self.backend.name}, got {got}; "
                "cascade attention needs non-causal attention and the log-sum-exp"
            )
        if common.window_block_table_tensor is not None:
            raise ValueError(f"{must} with window_block_table_tensor, got {got}")

    @property
    def cascades(self) -> bool:
        """Whether the backend can attend to a shared prefix and the rest apart."""
        return self.backend.support.non_causal and self.backend.support.lse

    @property
    def cascades_on_device(self) -> bool:
        """Whether it can where the device holds the prefix's length: its plans need no mirrors."""
        return self.cascades and not (self.needs_mirrors or self.plans_in_turn)

    def _cascaded(
        self,
        prefix: CommonAttentionMetadata,
        rest: CommonAttentionMetadata,
        common: CommonAttentionMetadata,
    ) -> AttentionMetadata:
        whole = [s for s in self.specs if s.cascades]
        plain = [s for s in self.specs if not s.attention_chunk_size and not s.cascades]
        builder = self if self.prefix_builder is None else self.prefix_builder
        shared = builder._planned([s.of_shared_prefix() for s in whole], prefix)
        views = self._views(common, cascade=(shared, self._planned(whole, rest)))
        return self._planned(plain, common, views)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Metadata for a captured step; its `max_seq_len` must bound that of every replay."""
        return self.build(0, common_attn_metadata)

    def prepare_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M | None:
        """Metadata for a step that is about to be captured, made before the capture begins.

        None, unless the backend plans on the host: then the graph builds its metadata itself.
        """
        return None

    def prepare_replay(self, metadata: M, common_attn_metadata: CommonAttentionMetadata) -> None:
        """Bring what `prepare_capture` gave up to date, on the host, before a replay.

        Args:
            metadata: of the captured step.
            common_attn_metadata: its batch; the CPU mirrors hold this replay's lengths.
        """

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> M:
        """Metadata for a draft model's step.

        Args:
            common_attn_metadata: the batch.
            draft_index: which token of the chain, or level of the tree, is drafted.
        """
        return self.build(0, common_attn_metadata, fast_build=True)

    def reorder_batch(self, input_batch: InputBatch, scheduler_output: SchedulerOutput) -> bool:
        """Bring the batch into the order that the backend wants; whether anything changed.

        Decodes first where `reorder_batch_threshold` is set, else nothing.
        """
        if self.reorder_batch_threshold is None:
            return False
        return reorder_batch_to_split_decodes_and_prefills(
            input_batch, scheduler_output, self.reorder_batch_threshold
        )

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: np.ndarray,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
    ) -> bool:
        """Whether cascade attention over the shared prefix pays, by vLLM's rule (`cascade_pays`).

        The layers must see all keys, and the backend be able to cascade.
        """
        if use_alibi or use_sliding_window or use_local_attention:
            return False
        return self.cascades and cascade_pays(
            common_prefix_len, query_lens, num_query_heads, num_kv_heads, num_sms
        )
