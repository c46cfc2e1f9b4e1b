"""The captured floor of a decode step: products by cuBLAS, attention by FA3, in one CUDA graph.

Nothing that a correct step needs besides is in it (norms, RoPE, KV write, activation,
residuals, sampling), so no implementation on the same libraries can be faster. q, k, v and
gate, up are merged products.
"""

import dataclasses
from typing import Any

import torch

from benchmarks.timing import capture


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        return cls(
            config.hidden_size, config.intermediate_size, config.num_hidden_layers,
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            config.vocab_size,
        )  # fmt: skip

    def weight_elements(self) -> int:
        """Elements of the weights that a step reads: all products and lm_head, no embedding."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size
        layer = self.hidden * (qkv + self.heads * self.head_size + 3 * self.intermediate)
        return self.layers * layer + self.hidden * self.vocab

    def kv_elements(self, tokens: int) -> int:
        """Elements of keys and values of `tokens` tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * tokens


def physical_limit_ms(shape: Shape, batch: int, context: int, bytes_per_second: float) -> float:
    """Milliseconds that the bytes of weights and caches (bf16) need at the measured bandwidth."""
    return (
        1000 * 2 * (shape.weight_elements() + shape.kv_elements(batch * context)) / bytes_per_second
    )


class Weights:
    """Random merged weights of all layers, so that every product reads its own bytes."""

    def __init__(self, shape: Shape) -> None:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02

        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        self.layers = [
            (
                matrix(qkv, shape.hidden),
                matrix(shape.hidden, shape.heads * shape.head_size),
                matrix(2 * shape.intermediate, shape.hidden),
                matrix(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        self.lm_head = matrix(shape.vocab, shape.hidden)


def floor_graph(
    shape: Shape,
    weights: Weights,
    caches: list[torch.Tensor],
    batch: int,
    context: int,
    block_size: int = 16,
) -> torch.cuda.CUDAGraph:
    """The floor for `batch` requests of `context` tokens.

    `caches` are [P, 2, B, K, H]; the requests own blocks 1, 2, 3, ...
    """
    from vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x_h = torch.randn(batch, shape.hidden, **bf16)
    x_q = torch.randn(batch, shape.heads, shape.head_size, **bf16)
    x_a = torch.randn(batch, shape.heads * shape.head_size, **bf16)
    x_i = torch.randn(batch, shape.intermediate, **bf16)
    blocks = -(-context // block_size)
    table = torch.arange(1, batch * blocks + 1, device="cuda", dtype=torch.int32).view(
        batch, blocks
    )
    lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)

    def step() -> None:
        plan = get_scheduler_metadata(
            batch, 1, context, shape.heads, shape.kv_heads, shape.head_size, lens,
            qkv_dtype=torch.bfloat16, cu_seqlens_q=starts, page_size=block_size, causal=True,
        )  # fmt: skip
        for (qkv, o, gate_up, down), cache in zip(weights.layers, caches, strict=True):
            x_h @ qkv.t()
            flash_attn_varlen_func(
                x_q, cache[:, 0], cache[:, 1], 1, starts, context, seqused_k=lens, causal=True,
                block_table=table, scheduler_metadata=plan, fa_version=3,
            )  # fmt: skip
            x_a @ o.t()
            x_h @ gate_up.t()
            x_i @ down.t()
        x_h @ weights.lm_head.t()

    return capture(step)
