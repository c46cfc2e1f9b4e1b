"""What a layer can ask for, and how a backend declares that it can do it.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from attn_ops import AttentionMetadata, AttentionSpec, Backend, CommonAttentionMetadata, Support
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.metadata import KV_CACHE_DTYPES

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}
"""Relative error norm against the float64 oracle, by the dtype of q."""

LENGTHS = {
    "decode": ([1, 1, 1, 1], [1, 2, 17, 70]),
    "mixed": ([1, 1, 0, 7, 40], [5, 33, 0, 7, 61]),
    "prefill": ([1, 18, 35], [1, 18, 35]),
    "uniform": ([4, 4, 4], [4, 50, 35]),
}
"""Query lengths and seq_lens: ragged, with 0 and 1."""

UNIFORM = {n: ([n] * 4, [n, n + 1, 33, 70]) for n in range(2, 9)}
"""Drafts to verify: 1 + k query tokens each."""

CROSS = {
    "decoding": ([1, 1, 1], [1, 40, 17]),
    "prompts": ([5, 20, 1], [3, 1, 50]),
}
"""Queries over an encoder's keys: rows have no positions among them, and may be more."""

Options = Callable[[int, torch.device], dict[str, Any]]


def _slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.02, 0.5, num_heads, device=device)


def _sinks(num_heads: int, device: torch.device) -> torch.Tensor:
    """bfloat16 numbers, as models store them and FlashAttention reads them."""
    return torch.linspace(-2, 3, num_heads, device=device).bfloat16().float()


def _scales(dtype: str, device: torch.device) -> dict[str, Any]:
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([1.7])}
    return {"kv_cache_dtype": dtype, **{name: s.to(device) for name, s in scales.items()}}


@dataclasses.dataclass(frozen=True)
class Feature:
    """One thing that a layer asks for."""

    declared: Callable[[Support], bool]
    options: Options  # of `attention`, for a number of heads on a device
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)  # what of it is geometry
    refusal: str = ""  # the argument that the error names where it is not declared


FEATURES = {
    "plain": Feature(lambda s: True, lambda n, d: {}),
    "window": Feature(
        lambda s: s.sliding_window,
        lambda n, d: {"sliding_window": 9},
        {"sliding_window": 9},
        "sliding_window",
    ),
    "soft_cap": Feature(
        lambda s: s.soft_cap, lambda n, d: {"soft_cap": 5.0}, {"soft_cap": 5.0}, "soft_cap"
    ),
    "alibi": Feature(
        lambda s: s.alibi, lambda n, d: {"alibi_slopes": _slopes(n, d)}, {"alibi": True}, "alibi"
    ),
    "sinks": Feature(
        lambda s: s.sinks, lambda n, d: {"sinks": _sinks(n, d)}, {"sinks": True}, "sinks"
    ),
    "sinks, window": Feature(
        lambda s: s.sinks and s.sliding_window,
        lambda n, d: {"sinks": _sinks(n, d), "sliding_window": 9},
        {"sinks": True, "sliding_window": 9},
        "sinks|sliding_window",
    ),
    "non-causal": Feature(lambda s: s.non_causal, lambda n, d: {}, {"causal": False}, "causal"),
    "non-causal, window": Feature(
        lambda s: s.non_causal and s.sliding_window and s.non_causal_window,
        lambda n, d: {"sliding_window": 9},
        {"causal": False, "sliding_window": 9},
        "causal|sliding_window",
    ),
    **{
        dtype: Feature(
            lambda s, dtype=dtype: dtype in s.kv_cache_dtypes,
            lambda n, d, dtype=dtype: _scales(dtype, d),
            {"kv_cache_dtype": dtype},
            "kv_cache_dtype",
        )
        for dtype in KV_CACHE_DTYPES
        if dtype != "auto"
    },
}


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
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        assert out.isfinite().all()
        error = float((out.double() - want).norm() / want.norm().clamp(min=1e-30))
        assert error <= max(TOLERANCE[self.q.dtype], least), f"relative error {error:.2e}"
        assert (out[common.num_actual_tokens :] == 0).all(), "padding rows are zero"
        if lse is not None:
            assert lse.dtype == torch.float32
            assert torch.equal(lse.isinf(), want_lse.isinf())
            seen = ~want_lse.isinf()
            limit = max(TOLERANCE[self.q.dtype], least, 1e-5) * 3
            assert (lse - want_lse)[seen].abs().max() <= limit


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


def _common(query, seq, table, block_size, device, num_rows) -> CommonAttentionMetadata:
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
            keys = torch.arange(position // chunk * chunk, position + 1)
            blocks, offsets = table[request][keys // block_size].long(), keys % block_size
            k, v = (cache[blocks, i, offsets].repeat_interleave(group, 1) for i in (0, 1))
            scores = torch.einsum("nh,cnh->nc", q[row], k) * case.scale
            want[row] = torch.einsum("nc,cnh->nh", scores.softmax(-1), v)
    return want
