"""A row's attention in one large step, and the same row in other steps.

T tokens, N query heads, K kv heads, H head size.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.triton.fixed import fixed_attention
from attn_ops.metadata import KV_CACHE_DTYPES, CommonAttentionMetadata


class Rows:
    """Requests of the given lengths, whose keys are all in the cache, with a query for each key."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: tuple[int, int],
        head_size: int,
        dtype: torch.dtype,
        device: str,
        block_size: int = 16,
        **asked: Any,
    ) -> None:
        self.lengths, self.block_size, self.device = lengths, block_size, device
        generator = torch.Generator().manual_seed(len(lengths) + head_size)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        width = max(-(-n // block_size) for n in lengths)
        blocks = torch.randperm(len(lengths) * width, generator=generator) + 1
        self.table_SM = blocks.int().view(len(lengths), width)
        kv_dtype = KV_CACHE_DTYPES[asked.get("kv_cache_dtype", "auto")]
        cache = randn(len(blocks) + 1, 2, block_size, heads[1], head_size)
        if kv_dtype is not None:
            cache = cache.to(kv_dtype).view(torch.uint8)
        self.cache, self.q_TNH = cache, randn(sum(lengths), heads[0], head_size)
        if asked.pop("sinks", False):
            asked["sinks"] = torch.randn(heads[0], generator=generator).to(device)
        self.options = AttentionOptions(scale=head_size**-0.5, **asked)
        self.whole_TNH = self.attend([(s, 0, n) for s, n in enumerate(lengths)])[1]

    def attend(
        self, chunks: Sequence[tuple[int, int, int]], longer: int = 0, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(row numbers, their attention) of a step with rows begin..end of some requests.

        `longer`: tokens by which the batch claims to be longer than it is.
        """
        starts = [0]
        for n in self.lengths:
            starts.append(starts[-1] + n)
        index = [torch.arange(starts[s] + a, starts[s] + b) for s, a, b in chunks]
        rows_T = torch.cat(index)
        common = CommonAttentionMetadata.from_lengths(
            [b - a for _, a, b in chunks],
            [b for _, _, b in chunks],
            self.table_SM[[s for s, _, _ in chunks]].to(self.device),
            self.block_size,
            device=self.device,
        )
        common = dataclasses.replace(common, max_seq_len=common.max_seq_len + longer)
        q_TNH = self.q_TNH[rows_T.to(self.device)]
        out_TNH = fixed_attention(q_TNH, self.cache, common, self.options, **more)
        return rows_T, out_TNH

    def steps(
        self,
        splits: Sequence[int | None] = (None, 1, 2, 7),
        batches: Sequence[int] = (1, 3, 33),
        chunks: Sequence[int] = (2, 16, 100, 300),
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(what, got, wanted) of decodes and chunks, by several numbers of splits."""
        pick = torch.Generator().manual_seed(0)
        some = [s for s, n in enumerate(self.lengths) if n]
        for num in splits:
            for batch in batches:
                ends = []
                for number in range(batch):
                    s = some[number % len(some)]
                    end = 1 + int(torch.randint(self.lengths[s], (), generator=pick))
                    ends.append((s, end - 1, end))
                yield self._compared(f"decode of {batch}, {num} splits", ends, num)
            for chunk in chunks:
                for s in some[:2]:
                    begins = list(range(0, self.lengths[s], chunk))
                    begin = begins[int(torch.randint(len(begins), (), generator=pick))]
                    end = min(begin + chunk, self.lengths[s])
                    last = self.lengths[some[-1]]
                    mixed = [(s, begin, end), (some[-1], last - 1, last)]
                    yield self._compared(f"chunk of {chunk}, {num} splits", mixed, num)
                    if num is None:  # so many that they have a launch of their own
                        many = [mixed[1]] * 70 + [mixed[0]] + [mixed[1]] * 70
                        yield self._compared(f"chunk of {chunk} beside 140", many, num)

    def _compared(
        self, what: str, chunks: Sequence[tuple[int, int, int]], splits: int | None
    ) -> tuple[str, torch.Tensor, torch.Tensor]:
        rows_T, got = self.attend(chunks, num_splits=splits, longer=1000 if splits == 2 else 0)
        return what, got, self.whole_TNH[rows_T.to(self.device)]
