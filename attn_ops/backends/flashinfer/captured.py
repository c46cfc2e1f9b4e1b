"""Decode batches in CUDA graphs: page arrays that stay where they are, planned before every replay.

`plan()` is host code, which no replay runs. With a fixed number of requests FlashInfer's decode
plan asks for the same launches whatever the lengths are, and only the arrays that they read change;
so the host plans before each replay and the graph holds attention alone.

Requests without tokens have no pages. The plan gives them one tile, as it gives a request of one
page, so the launches stay the same; the tile loads no key, its q meets none, and the FA2 kernels
write zeros where a row's maximum is still the initial one (`OutputTransform` in variant_helper.cuh;
the merge copies a single part). So the graph needs no kernel to clear padding: one behind every
layer took 3 us of 14 (one H200, 2026-11-21, one request of 1024 tokens). Their log-sum-exp is
FlashInfer's finite stand-in for -inf plus log2 of the warps, and `forward` overwrites it.

The page indices are written before the replay too, by a kernel behind the step's upload on the
stream, not inside the graph: FlashInfer copies what `plan` is given into the wrapper's buffer, and
one place then writes all that depends on lengths. In the graph they would be right for lengths that
the host does not know, but the rest of a plan would not.

S requests, M blocks a request may own.
"""

from collections.abc import Sequence

import torch

from attn_ops.backends.flashinfer.parts import divide_captured, page_indices
from attn_ops.backends.flashinfer.wrappers import Kind, Wrappers, plan_arguments
from attn_ops.metadata import AttentionSpec, CommonAttentionMetadata


class CapturedDecodes:
    """What the layers of a captured decode batch read: a wrapper a geometry, shared page arrays.

    Attributes:
        num_reqs: S; every batch has so many, padding included.
        is_empty: [S, 1] bool, device: requests without tokens.
        wrappers: by geometry; on one stream, as all of a builder's.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        common: CommonAttentionMetadata,
        wrappers: Wrappers,
        block_size: int,
    ) -> None:
        (self.num_reqs, self._max_blocks), device = common.block_table_tensor.shape, common.device
        self._block_size = block_size
        self.is_empty = torch.ones(self.num_reqs, 1, dtype=torch.bool, device=device)
        sizes = {
            "paged_kv_indptr_buffer": self.num_reqs + 1,
            "paged_kv_indices_buffer": self.num_reqs * self._max_blocks,
            "paged_kv_last_page_len_buffer": self.num_reqs,
        }
        buffers = {
            name: torch.zeros(size, dtype=torch.int32, device=device)
            for name, size in sizes.items()
        }
        self.wrappers = {
            spec: wrappers.captured(spec, self.num_reqs, device, **buffers) for spec in specs
        }

    def plan(self, common: CommonAttentionMetadata) -> None:
        """Plan for a batch of other lengths and blocks; launches on the current stream.

        Columns of the block table behind those of the captured step are ignored.

        Raises:
            ValueError: the batch has another number of requests, needs more blocks a request, or is
                no decode batch.
        """
        num_reqs, max_blocks = common.block_table_tensor.shape
        if num_reqs != self.num_reqs:
            raise ValueError(
                f"block_table_tensor must have {self.num_reqs} rows as when the step was captured, "
                f"got {num_reqs}"
            )
        if max_blocks > self._max_blocks:
            table = common.block_table_tensor[:, : self._max_blocks]
            common = common.replace(block_table_tensor=table)
        part = divide_captured(common, self._block_size)
        indices = page_indices(common, part.pages.stop, self._block_size)
        with torch.cuda.device_of(indices):
            for spec, wrapper in self.wrappers.items():
                wrapper.plan(**plan_arguments(Kind.DECODE, spec, part, indices, self._block_size))
        torch.eq(common.seq_lens.view(-1, 1), 0, out=self.is_empty)
