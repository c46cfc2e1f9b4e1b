"""Mixtures of experts: `python -m benchmarks.experts`.

One layer's experts of Qwen3-30B-A3B, GPT-OSS-20B, Mixtral 8x7B and, with 64 of its 256 experts,
DeepSeek-V3: `attn_ops.experts` beside Transformers' `grouped_mm`, called and compiled. Rows choose
experts at random. The limit is the longer one of two times: that in which a copy moves as many
bytes as the chosen experts' weights and the rows have, and that of the products at the peak of the
tensor cores. `--fp8`: weights in FP8 with a scale a block of 128 x 128, by ours alone, as
Transformers has no function for them without kernels from a hub. On a CPU sizes are tiny, and
figures mean nothing.
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from attn_ops import experts
from attn_ops.ops.moe.composite import BLOCK, experts_by_torch
from attn_ops.ops.moe.experts import FP8
from benchmarks.harness import (
    brief,
    capture,
    copy_bandwidth,
    free,
    median_ms,
    origin,
    parser_of,
    write,
)

ROWS = (1, 8, 64, 256, 512, 2048, 8192)
MOST_CAPTURED = 512
"""Rows of a step that is captured."""

CACHE_BYTES = 2**28
"""Layers that follow each other read so many bytes at least, several times what an L2 holds."""

PEAK = 989e12
"""Operations a second of an H100's tensor cores in bfloat16, as NVIDIA states them."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's experts: K inputs and outputs, F columns of a gate, E experts."""

    k: int
    f: int
    num_experts: int
    top_k: int
    gpt_oss: bool = False  # biases, and weights stored as [E, inputs, outputs]
    fp8: bool = False  # weights, with a scale a block of 128 x 128


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, gpt_oss=True),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "deepseek-v3, 64 experts": Shape(7168, 2048, 64, 8),
}
TINY = {name: Shape(64, 32, 4, 2, shape.gpt_oss) for name, shape in SHAPES.items()}
SILU = {"activation": "silu", "alpha": 1.0, "limit": None, "interleaved": False}
GPT_OSS = {"activation": "gpt_oss", "alpha": 1.702, "limit": 7.0, "interleaved": True}


class Layer:
    """Weights of one layer, as a module that Transformers' function reads."""

    has_gate, has_post_expert_norm, _is_expert_parallel = True, False, False

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        e, k, f = shape.num_experts, shape.k, shape.f
        self.shape, self.num_experts = shape, e
        self.has_bias = self.is_transposed = shape.gpt_oss
        up, down = ((e, k, 2 * f), (e, f, k)) if shape.gpt_oss else ((e, 2 * f, k), (e, k, f))
        like = {"device": device, "dtype": dtype}
        self.gate_up_proj = torch.randn(up, **like).mul_(k**-0.5)
        self.down_proj = torch.randn(down, **like).mul_(f**-0.5)
        self.gate_up_proj_bias = torch.randn(e, 2 * f, **like)
        self.down_proj_bias = torch.randn(e, k, **like)
        self.scales: dict[str, torch.Tensor] = {}
        if shape.fp8:
            for name, (m, n) in {"gate_up": (2 * f, k), "down": (k, f)}.items():
                setattr(self, f"{name}_proj", getattr(self, f"{name}_proj").to(FP8))
                scale = torch.rand(e, -(-m // BLOCK), -(-n // BLOCK), device=device) + 0.5
                self.scales[f"{name}_scale"] = scale

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        if not self.shape.gpt_oss:
            gate, up = both.chunk(2, dim=-1)
            return functional.silu(gate) * up
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    def stored(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None], dict[str, Any]]:
        """Weights [E, outputs, inputs], biases and gate, as the operator takes them."""
        weights = [self.gate_up_proj, self.down_proj]
        if not self.shape.gpt_oss:
            return weights, [None, None], {}
        return [w.mT for w in weights], [self.gate_up_proj_bias, self.down_proj_bias], GPT_OSS

    def ours(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        stored, biases, gate = self.stored()
        return experts(x, *stored, ids, weights, *biases, **gate, **self.scales)

    def by_torch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the operator does where our kernels do not run."""
        stored, biases, gate = self.stored()
        return experts_by_torch(x, *stored, ids, weights, *biases, **(SILU | gate))

    def theirs(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return _theirs(compiled=False)(self, x, ids, weights)

    def compiled(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return _theirs(compiled=True)(self, x, ids, weights)


@functools.cache
def _theirs(*, compiled: bool) -> Callable[..., torch.Tensor]:
    from transformers.integrations.moe import grouped_mm_experts_forward as forward

    return torch.compile(forward) if compiled else forward


def routed(shape: Shape, rows: int, device: str) -> tuple[torch.Tensor, ...]:
    """x [T, K], expert ids and weights [T, top_k]."""
    x = torch.randn(rows, shape.k, device=device, dtype=torch.bfloat16)
    weights, ids = torch.rand(rows, shape.num_experts, device=device).topk(shape.top_k)
    return x, ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


def limit_us(shape: Shape, ids: torch.Tensor, bandwidth: float) -> float:
    """The longer one of moving chosen weights and rows, and of multiplying; microseconds."""
    rows, chosen = ids.shape[0], ids.unique().numel()
    of_weight = 1 if shape.fp8 else 2
    num_bytes = of_weight * 3 * chosen * shape.k * shape.f + 4 * rows * shape.k
    operations = 2 * 3 * ids.numel() * shape.k * shape.f
    return 1e6 * max(num_bytes / bandwidth, operations / PEAK)


def microseconds(run: Callable[[int], object], copies: int, rows: int, device: str) -> float:
    """Of one layer among `copies` that follow each other."""

    def step() -> None:
        for i in range(copies):
            run(i)

    if device == "cpu":
        begin = time.perf_counter()
        step()
        return 1e6 * (time.perf_counter() - begin) / copies
    captured = capture(step).replay if rows <= MOST_CAPTURED else step
    return 1e3 * median_ms(captured, repeats=20) / copies


def times(
    shape: Shape, rows: int, layers: list[Layer], device: str, bandwidth: float | None
) -> dict[str, Any]:
    """Ours, Transformers' and the limit, and how far results are from each other."""
    given = [routed(shape, rows, device) for _ in layers]
    found: dict[str, Any] = {}
    names = ["ours"]
    if not shape.fp8:
        names += ["theirs", "by_torch", *(["compiled"] if device == "cuda" else [])]
        ours, theirs = (f(*given[0]).float() for f in (layers[0].ours, layers[0].theirs))
        found["difference"] = round((ours - theirs).abs().max().item(), 4)
    for name in names:
        calls = [getattr(layer, name) for layer in layers]
        try:
            us = microseconds(lambda i, calls=calls: calls[i](*given[i]), len(layers), rows, device)
            found[f"{name} us"] = round(us, 1)
        except Exception as error:  # one that cannot be captured is not measured
            found[f"{name} us"] = brief(error)
    if bandwidth is not None and isinstance(us := found["ours us"], float):
        limit = limit_us(shape, given[0][1], bandwidth)
        found |= {"limit us": round(limit, 1), "ours / limit": round(us / limit, 2)}
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    bandwidth = copy_bandwidth() if args.device == "cuda" else None
    rows = {}
    for name in args.shapes:
        shape = SHAPES[name] if args.device == "cuda" else TINY[name]
        shape = dataclasses.replace(shape, fp8=args.fp8)
        smallest = (3 if args.fp8 else 6) * shape.k * shape.f * shape.top_k
        copies = min(4, max(2, math.ceil(CACHE_BYTES / smallest)))
        layers = [Layer(shape, args.device) for _ in range(copies)]
        for number in args.rows:
            row = times(shape, number, layers, args.device, bandwidth)
            rows[f"{name}, {number}"] = row
            print(f"{name}, {number}", row, flush=True)
        del layers
        free()
    copied = "not measured" if bandwidth is None else f"{bandwidth / 1e12:.2f} TB/s"
    note = (
        f"Model, rows: microseconds of one layer's experts in {'FP8' if args.fp8 else 'bfloat16'}, "
        f"whose weights are in no cache; in a CUDA graph up to {MOST_CAPTURED} rows. A copy: "
        f"{copied}."
    )
    command = f"python -m benchmarks.experts --device {args.device}{' --fp8' * args.fp8}"
    return origin(args) | {"command": command, "note": note, "rows": rows}


def main() -> None:
    found = parser_of(__doc__)
    found.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    found.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    found.add_argument("--fp8", action="store_true", help="weights in FP8, by ours alone")
    args = found.parse_args()
    torch.manual_seed(0)
    write(args.json, measure(args))


if __name__ == "__main__":
    main()
