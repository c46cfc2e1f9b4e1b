"""Latent attention in float64, straight from its formula, and batches to try kernels on.

T rows, S requests, N query heads, L latent, E rotated columns, V columns of a value, B block size.
"""

import dataclasses
from typing import Any

import torch

from attn_ops.metadata import KV_CACHE_DTYPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A batch for the decode kernel, and its latents by request in float64."""

    ql_nope: torch.Tensor  # [D, N, L], strides not contiguous
    q_pe: torch.Tensor  # [D, N, E]
    kv_cache: torch.Tensor  # [P, B, L + E]; NaN where no token is
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    w_uv: torch.Tensor  # [N, V, L]
    tokens: list[torch.Tensor]  # [seq_len, L + E] float64 a request
    query_lens: list[int]
    options: dict[str, Any]

    @property
    def inputs(self) -> Inputs:
        return (
            self.ql_nope, self.q_pe, self.kv_cache, self.block_table, self.seq_lens,
            self.query_start_loc,
        )  # fmt: skip

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[D, N, L] and log-sum-exp [D, N], float64; zero and -inf where a row sees no key."""
        num_rows, num_heads, latent = self.ql_nope.shape
        out = torch.zeros(num_rows, num_heads, latent, dtype=torch.float64)
        lse = torch.full((num_rows, num_heads), float("-inf"), dtype=torch.float64)
        q = torch.cat([self.ql_nope, self.q_pe], 2).double().cpu()
        row = 0
        for kv, query_len in zip(self.tokens, self.query_lens, strict=True):
            for query in range(query_len):
                seen = kv[: max(len(kv) - query_len + query + 1, 0)]
                if len(seen):
                    score = q[row] @ seen.T * self.options["scale"]
                    out[row] = score.softmax(1) @ seen[:, :latent]
                    lse[row] = score.logsumexp(1)
                row += 1
        return out, lse


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    num_heads: int = 4,
    latent: int = 32,
    rope: int = 16,
    value: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    kv_cache_dtype: str = "auto",
    num_padding_rows: int = 2,
) -> Case:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    fp8 = KV_CACHE_DTYPES[kv_cache_dtype]
    num_reqs, width = len(seq_lens), max(1, *(-(-n // block_size) for n in seq_lens)) + 1
    num_blocks = num_reqs * width + 1
    table = (torch.randperm(num_blocks - 1, generator=generator) + 1).int().view(num_reqs, width)
    cache = torch.full((num_blocks, block_size, latent + rope), float("nan")).to(fp8 or dtype)
    kv_scale = None if fp8 is None else torch.tensor([0.5])
    tokens = []
    for request, num_tokens in enumerate(seq_lens):
        kv = randn(num_tokens, latent + rope).to(fp8 or dtype)
        for place in range(num_tokens):
            cache[table[request, place // block_size], place % block_size] = kv[place]
        tokens.append(kv.double() * (1.0 if kv_scale is None else kv_scale.double()))
        table[request, -(-num_tokens // block_size) :] = 0
    num_rows = sum(query_lens) + num_padding_rows
    ql_nope, q = randn(num_heads, num_rows, latent), randn(num_rows, num_heads, 8 + rope)
    ql_nope[:, sum(query_lens) :] = float("nan")
    q[sum(query_lens) :] = float("nan")
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    w = randn(num_heads, 8 + value, latent).to(dtype).to(DEVICE)
    options = {
        "scale": 0.3,
        "max_query_len": max(query_lens),
        "max_seq_len": max(1, *seq_lens),
        "kv_scale": None if kv_scale is None else kv_scale.to(DEVICE),
        "fp8": fp8,
    }
    return Case(
        ql_nope.to(dtype).to(DEVICE).transpose(0, 1),
        q.to(dtype).to(DEVICE)[:, :, 8:],
        (cache if fp8 is None else cache.view(torch.uint8)).to(DEVICE),
        table.to(DEVICE),
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        starts.to(DEVICE),
        w[:, 8:],
        tokens,
        query_lens,
        options,
    )


def assert_near(out: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Relative error norm; zero where `wanted` is."""
    out = out.double().cpu()
    error = (out - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"
    empty = (wanted == 0).flatten(1).all(1)
    assert (out[empty] == 0).all()
