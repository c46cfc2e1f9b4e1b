"""The captured floor of a decode step: products by cuBLAS, attention by FA3, in one CUDA graph.

Nothing that a correct step needs besides is in it (norms, RoPE, KV write, activation,
residuals, sampling), so no implementation on the same libraries can be faster. q, k, v and
gate, up are merged products. In FP8, those of the layers are `torch._scaled_mm` with a scale a row
of both sides, whose inputs are quantized already; the head is bf16.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch

from attn_ops.backends.flash_attn.library import window_sizes
from benchmarks.direct import vllm_flash_attn
from benchmarks.harness import capture


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model without experts."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    windows: tuple[int | None, ...]  # of each layer; None: it sees all keys

    @classmethod
    def of(cls, config: Any) -> "Shape":
        return cls(
            config.hidden_size, config.intermediate_size, config.num_hidden_layers,
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            config.vocab_size, windows_of(config),
        )  # fmt: skip

    def weight_elements(self) -> int:
        """Elements of the weights that a step reads: all products and lm_head, no embedding."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size
        layer = self.hidden * (qkv + self.heads * self.head_size + 3 * self.intermediate)
        return self.layers * layer + self.hidden * self.vocab

    def kv_elements(self, context: int) -> int:
        """Elements of keys and values that a request of `context` tokens reads in all layers."""
        tokens = sum(context if w is None else min(w, context) for w in self.windows)
        return 2 * self.kv_heads * self.head_size * tokens


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Of each layer with keys; None: it sees all of them."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    kinds = [kind for kind in kinds if kind != "linear_attention"]
    return tuple(config.sliding_window if k == "sliding_attention" else None for k in kinds)


def has_experts(config: Any) -> bool:
    return hasattr(config, "num_experts_per_tok")


def limit_ms(
    model: torch.nn.Module, caches: list[torch.Tensor], batch: int, context: int, rate: float
) -> tuple[float, float]:
    """A step's limit, and the mean of experts a layer that are chosen; 0 where there are none.

    `rate` is in bytes a second. Each token chooses its experts at random. Counted are the bytes of
    all weights but of an embedding that is not the head too, those of experts by the chosen part,
    and those of keys and values.
    """
    config: Any = model.config
    total, chosen = 1, 0.0
    if has_experts(config):
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        total = next(getattr(config, name) for name in names if hasattr(config, name))
        chosen = total * (1 - (1 - config.num_experts_per_tok / total) ** batch)
    num_bytes = 0.0
    embedding: Any = model.get_input_embeddings()
    is_head = embedding.weight is cast(Any, model.get_output_embeddings()).weight
    for weight in model.parameters():
        if weight is not embedding.weight or is_head:
            is_expert = weight.dim() > 1 and weight.shape[0] == total and weight.numel() > 2**22
            num_bytes += weight.nbytes * (chosen / total if is_expert else 1)
    for cache, window in zip(caches, windows_of(config), strict=True):
        tokens = context if window is None else min(context, window)
        block_size = cache.shape[2] if cache.dim() == 5 else cache.shape[1]
        num_bytes += batch * tokens * cache[0].nbytes / block_size
    return 1000 * num_bytes / rate, chosen


def physical_limit_ms(
    shape: Shape, batch: int, context: int, bytes_per_second: float, fp8: bool = False
) -> float:
    """Milliseconds that the bytes of weights and caches need at the measured bandwidth.

    bf16, but for the layers' weights with `fp8`.
    """
    num_bytes = 2 * (shape.weight_elements() + batch * shape.kv_elements(context))
    if fp8:
        num_bytes -= shape.weight_elements() - shape.hidden * shape.vocab
    return 1000 * num_bytes / bytes_per_second


class Matrix:
    """A random weight [rows, columns] in bf16, or in FP8 with a scale a row."""

    def __init__(self, rows: int, columns: int, fp8: bool = False) -> None:
        self.weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
        self.scale = torch.full((1, rows), 1e-3, device="cuda") if fp8 else None
        if fp8:
            self.weight = (self.weight / 1e-3).to(torch.float8_e4m3fn)

    def input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, columns] as the product takes it, and its scales [T, 1]."""
        scale = torch.full((x.shape[0], 1), 1e-2, device=x.device)
        return (x if self.scale is None else (x / 1e-2).to(torch.float8_e4m3fn)), scale

    def __call__(self, x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            return x @ self.weight.t()
        return torch._scaled_mm(x, self.weight.t(), x_scale, self.scale, out_dtype=torch.bfloat16)


class Weights:
    """Random merged weights of all layers, so that every product reads its own bytes."""

    def __init__(self, shape: Shape, fp8: bool = False) -> None:
        hidden, qkv = shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_size
        sizes = [(qkv, hidden), (hidden, shape.heads * shape.head_size)]
        sizes += [(2 * shape.intermediate, hidden), (hidden, shape.intermediate)]
        self.layers = [[Matrix(*size, fp8) for size in sizes] for _ in range(shape.layers)]
        self.lm_head = Matrix(shape.vocab, shape.hidden)


def floor_graph(
    shape: Shape,
    weights: Weights,
    caches: list[torch.Tensor],
    batch: int,
    context: int,
    block_size: int = 16,
    reduce: Callable[[torch.Tensor], object] = lambda rows: None,
    query: int = 1,
) -> torch.cuda.CUDAGraph:
    """The floor for `batch` requests of `context` tokens, the last `query` of them computed.

    `caches` are [P, 2, B, K, H]; the requests own blocks 1, 2, 3, ... `reduce` sums rows over
    ranks, behind the two products of a layer that have a part of each sum. The head has a row a
    request.
    """
    library = vllm_flash_attn()
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    num_rows = batch * query
    x_rows = torch.randn(num_rows, shape.hidden, **bf16)
    x_q = torch.randn(num_rows, shape.heads, shape.head_size, **bf16)
    qkv, o, _, down = weights.layers[0]
    x_h, x_last = qkv.input(x_rows), weights.lm_head.input(x_rows[:batch])
    x_a = o.input(torch.randn(num_rows, shape.heads * shape.head_size, **bf16))
    x_i = down.input(torch.randn(num_rows, shape.intermediate, **bf16))
    blocks = -(-context // block_size)
    table = torch.arange(1, batch * blocks + 1, device="cuda", dtype=torch.int32)
    table = table.view(batch, blocks)
    lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    starts = torch.arange(0, num_rows + 1, query, device="cuda", dtype=torch.int32)
    sizes = {window: window_sizes(window, causal=True) for window in shape.windows}

    def step() -> None:
        plans = {
            window: library.get_scheduler_metadata(
                batch, query, context, shape.heads, shape.kv_heads, shape.head_size, lens,
                qkv_dtype=torch.bfloat16, cu_seqlens_q=starts, page_size=block_size, causal=True,
                window_size=size,
            )
            for window, size in sizes.items()
        }  # fmt: skip
        layers = zip(weights.layers, caches, shape.windows, strict=True)
        for (qkv, o, gate_up, down), cache, window in layers:
            qkv(*x_h)
            library.flash_attn_varlen_func(
                x_q, cache[:, 0], cache[:, 1], query, starts, context, seqused_k=lens, causal=True,
                block_table=table, scheduler_metadata=plans[window], fa_version=3,
                window_size=sizes[window],
            )  # fmt: skip
            reduce(o(*x_a))
            gate_up(*x_h)
            reduce(down(*x_i))
        weights.lm_head(*x_last)

    return capture(step)
