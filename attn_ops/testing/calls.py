"""One call of a backend: inputs over a poisoned cache, and the comparison with the reference.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.backends.base import Backend
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.metadata import (
    KV_CACHE_DTYPES,
    AttentionMetadata,
    AttentionSpec,
    CommonAttentionMetadata,
)
from attn_ops.testing.differences import check_close, check_padding
from attn_ops.testing.features import TOLERANCE, Feature


@dataclasses.dataclass
class Case:
    """One call: inputs on their device, cache poisoned wherever no request has written."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    meta: AttentionMetadata
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    @property
    def least_error(self) -> float:
        """Of a backend that rounds q to FP8: 3 mantissa bits, in q and in the weights."""
        fp8 = self.options.get("kv_cache_dtype", "auto") != "auto"
        return 6e-2 if fp8 and self.meta.backend.support.quantizes_query else 0.0

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None, least: float = 0.0) -> None:
        """Raise unless `out` and `lse` are what the float64 oracle gives, padding defined.

        `least`: an error that is right for any dtype.
        """
        common, least = self.meta.common, max(least, self.least_error)
        want_lse = torch.empty(self.q.shape[:2], device=self.q.device)
        want = reference_attention(
            self.q, self.kv_cache, common, self.scale, lse=want_lse, **self.options
        )
        check_close("out", out, want, self.q.dtype, common, least)
        check_padding(out, common.num_actual_tokens)
        if lse is not None:
            limit = max(TOLERANCE[self.q.dtype], least, 1e-5) * 3
            check_close("lse", lse, want_lse, torch.float32, common, limit, elementwise=True)


def make_case(
    backend: Backend,
    spec: AttentionSpec,
    lengths: tuple[list[int], list[int]],
    feature: Feature,
    block_size: int = 16,
    num_padding_rows: int = 2,
    device: str = "cpu",
    cache_layout: str = "NHD",
    shared_prefix: int = 0,
) -> Case:
    """A case of `feature` for layers of geometry `spec`, blocks shuffled.

    The first `shared_prefix` blocks of every request are those of the first one. Queries longer
    than their sequence are cross-attention.

    Raises:
        ValueError: the backend does not take the geometry.
    """
    generator = torch.Generator().manual_seed(sum(lengths[1]))
    query, seq = lengths
    width = max([1, *(-(-n // block_size) for n in seq)])
    num_blocks = len(seq) * width + 2
    owned = torch.randperm(num_blocks - 1, generator=generator)[: len(seq) * width] + 1
    table = owned.int().view(len(seq), width)
    table[:, :shared_prefix] = table[:1, :shared_prefix]
    shape = (num_blocks, 2, block_size, spec.num_kv_heads, spec.head_size)
    values = torch.randn(shape, generator=generator)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for blocks, length in zip(table.long(), seq, strict=True):
        for first in range(0, length, block_size):
            written[blocks[first // block_size], : length - first] = True
    values = values.masked_fill(~written[:, None, :, None, None], float("nan"))
    fp8 = KV_CACHE_DTYPES[spec.kv_cache_dtype]
    cache = values.to(spec.dtype) if fp8 is None else values.to(fp8).view(torch.uint8)
    if cache_layout == "HND":
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    common = _common(query, seq, table, block_size, device, sum(query) + num_padding_rows)
    common.causal = spec.causal
    q = torch.randn(
        sum(query) + num_padding_rows, spec.num_heads, spec.head_size, generator=generator
    )
    q[sum(query) :] = float("nan")
    builder = backend.builder(backend, [spec], block_size, device)
    return Case(
        q.to(spec.dtype).to(device),
        cache.to(device),
        builder.build(shared_prefix * block_size, common),
        feature.options(spec.num_heads, torch.device(device)),
    )


def _common(
    query: Sequence[int],
    seq: Sequence[int],
    table: torch.Tensor,
    block_size: int,
    device: str,
    num_rows: int,
) -> CommonAttentionMetadata:
    """The batch; `from_lengths` refuses queries longer than their sequence, so they come later."""
    longest = [max(pair) for pair in zip(query, seq, strict=True)]
    width = max([1, *(-(-n // block_size) for n in longest)])
    room = torch.zeros(len(seq), width, dtype=torch.int32)
    room[:, : table.shape[1]] = table
    common = CommonAttentionMetadata.from_lengths(
        query, longest, room, block_size, device, num_padded_tokens=num_rows
    )
    if longest == list(seq):
        return common
    lengths = torch.tensor(seq, dtype=torch.int32)
    return common.replace(
        seq_lens=lengths.to(device),
        seq_lens_cpu=lengths,
        num_computed_tokens_cpu=None,
        max_seq_len=max(seq),
        causal=False,
    )


def chunked_oracle(case: Case, chunk: int) -> torch.Tensor:
    """Chunked local attention in float64, token by token: keys of the query's own chunk."""
    common, want = case.meta.common, torch.zeros(case.q.shape, dtype=torch.float64)
    cache, q = case.kv_cache.double().cpu(), case.q.double().cpu()
    table, block_size = common.block_table_tensor.cpu(), cache.shape[2]
    group = q.shape[1] // cache.shape[3]
    starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
    for request, length in enumerate(lengths):
        for row in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - row)
            if position < 0:
                continue  # a padding request: it sees nothing
            keys = torch.arange(position // chunk * chunk, position + 1)
            blocks, offsets = table[request][keys // block_size].long(), keys % block_size
            k, v = (cache[blocks, i, offsets].repeat_interleave(group, 1) for i in (0, 1))
            scores = torch.einsum("nh,cnh->nc", q[row], k) * case.scale
            want[row] = torch.einsum("nc,cnh->nh", scores.softmax(-1), v)
    return want
