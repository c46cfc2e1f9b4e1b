"""How libraries quantize what attention wrote, as functions of x [1, T, W] or [T, W].

Each returns FP8 values and scales, or what a model would make of them.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

FP8 = torch.float8_e4m3fn
MAX = 448.0
SCALE = torch.tensor([0.0131])


def row(x, floor=None, dtype=None, least=None):
    """PerRow of torchao; with a floor, as fbgemm and vLLM have it."""
    amax = x.abs().amax(dim=-1, keepdim=True)
    amax = amax if dtype is None else amax.to(dtype)
    amax = amax if floor is None else amax.clamp(min=floor)
    scale = amax / MAX
    scale = (scale if least is None else scale.clamp(min=least)).float()
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def tensor(x):
    """PerTensor of torchao."""
    scale = (x.abs().amax(dim=list(range(x.dim())), keepdim=True) / MAX).float()
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def by_max(x):
    """The amax by `max`, the limits in another order."""
    scale = x.abs().max().float() / MAX
    return torch.clamp(torch.clamp(x / scale.view(1), max=MAX), min=-MAX).to(FP8), scale


def by_norm(x):
    """The amax by a norm; the quotient rounded to x's dtype."""
    scale = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True).float() / MAX
    return (x / scale).to(x.dtype).clamp(-MAX, MAX).to(FP8), scale


def group(x, size=128, floor=None):
    """PerBlock of torchao: the scale is repeated."""
    amax = x.view(*x.shape[:-1], -1, size).abs().amax(dim=-1)
    amax = amax if floor is None else amax.clamp(min=floor)
    scale = (amax / MAX).float()
    spread = scale.repeat_interleave(size, dim=-1)
    return (x.float() / spread).clamp(-MAX, MAX).to(FP8), scale


def act_quant(x, size=128):
    """Transformers' and DeepSeek's `act_quant`: its signature and its formula, no kernel."""
    x_TGE = x.float().reshape(*x.shape[:-1], x.shape[-1] // size, size)
    scale = x_TGE.abs().amax(dim=-1, keepdim=True) / MAX
    return (x_TGE / scale).clamp(-MAX, MAX).to(FP8).view(x.shape), scale.squeeze(-1)


def powers_of_two(x, size=128):
    """DeepGEMM's `per_token_cast_to_fp8` with UE8M0 scales: no limits, times 1 / scale."""
    x_TGE = x.view(*x.shape[:-1], -1, size)
    amax = x_TGE.abs().float().amax(dim=-1).clamp(1e-4)
    scale = amax / MAX
    scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
    return (x_TGE * (1.0 / scale.unsqueeze(-1))).to(FP8).view(x.shape), scale


def given(x, scale):
    """A static scale, as written by hand."""
    return ((x / scale).clamp(-MAX, MAX).to(FP8),)


def inverse(x, scale):
    return ((x.float() * scale.reciprocal()).clamp(-MAX, MAX).to(FP8),)


def fake_quantized(x, scale):
    """compressed-tensors: quantized, and back in x's dtype; its limits are tensors."""
    low, high = torch.tensor(-MAX), torch.tensor(MAX)
    values = torch.clamp(x / scale, low, high).to(FP8)
    return values, values.to(scale.dtype) * scale


def quantized(x, scale):
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def times_inverse(x, dims=-1):
    scale = x.abs().amax(dims, keepdim=True).float() / MAX
    return (x.float() * scale.reciprocal()).clamp(-MAX, MAX).to(FP8), scale


class Behind:
    """The ATen graph of attention, and of what stands behind it, as Inductor hands it on.

    Args:
        batch: of `make_batch`; the number of its rows is symbolic in the graph.
        function: takes attention's output as the model reshapes it, and `more`.
        rank: 3 for x [1, T, W], 2 for [T, W].
        with_inputs: `function` also takes q and the cache, before `more`.
        keywords: of attention.
    """

    def __init__(
        self,
        batch: Any,
        function: Callable,
        *more: torch.Tensor,
        rank: int = 3,
        with_inputs: bool = False,
        **keywords: Any,
    ) -> None:
        self.batch, self.function, self.more = batch, function, more
        self.rank, self.with_inputs, self.keywords = rank, with_inputs, keywords
        self.gm = self._trace()
        self.graph = self.gm.graph
        self.graph.eliminate_dead_code()

    def _trace(self) -> GraphModule:
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 2])
        q = mode.from_tensor(self.batch.q, symbolic_context=context)
        rest = [mode.from_tensor(x, static_shapes=True) for x in (self.batch.kv_cache, *self.more)]
        return make_fx(self._behind, select_decomp_table(), tracing_mode="real")(q, *rest)

    def _behind(self, q: torch.Tensor, kv_cache: torch.Tensor, *more: torch.Tensor) -> Any:
        scale = q.shape[2] ** -0.5
        out = torch.ops.attn_ops.attention(q, kv_cache, self.batch.meta, scale, **self.keywords)
        x = out.unsqueeze(0).reshape(1, q.shape[0], -1)
        x = x if self.rank == 3 else x.view(q.shape[0], -1)
        return self.function(x, *((q, kv_cache) if self.with_inputs else ()), *more)

    def run(self) -> list[torch.Tensor]:
        """Its results as numbers whose equality means equal bits, NaN included."""
        self.gm.recompile()
        results = self.gm(self.batch.q, self.batch.kv_cache, *self.more)
        return [_bits(x) for x in results]


def _bits(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == FP8:
        return torch.where(x.float().isnan(), 0x7F, x.view(torch.uint8))
    return torch.nan_to_num(x.float(), nan=-1234.5)


def random_form(numbers: random.Random, own: torch.dtype) -> Callable:
    """Some way to quantize x [1, T, W]: recognised or not, it must give the same bits."""
    share = numbers.choice(["row", "batch", 64, 128])
    narrow = numbers.choice([own, torch.float32])
    floor, least = (numbers.choice([None, None, 1e-12, 1e-4, 0.02, 3.0]) for _ in range(2))
    powers = numbers.random() < 0.3
    rounds = numbers.random() < 0.5
    limits = numbers.choice([(-MAX, MAX)] * 4 + [None, (-MAX, None)])
    early, times, before, again, product = (numbers.random() < 0.4 for _ in range(5))
    as_tensor = numbers.random() < 0.3

    def number(value: float) -> float | torch.Tensor:
        """Of one element and one dimension, float32 makes bfloat16 wider."""
        return torch.full((1,), value) if as_tensor else value

    def at_least(x: torch.Tensor, value: float | None, here: bool = True) -> torch.Tensor:
        return x if value is None or not here else x.clamp(min=number(value))

    def spread(scale: torch.Tensor) -> torch.Tensor:
        return scale if share in ("row", "batch") else scale.repeat_interleave(share, dim=-1)

    def scale_of(x: torch.Tensor) -> torch.Tensor:
        if share == "batch":
            amax = x.abs().amax()
        elif share == "row":
            amax = x.abs().amax(dim=-1, keepdim=True)
        else:
            amax = x.view(*x.shape[:-1], -1, share).abs().amax(dim=-1)
        amax = at_least(amax, floor, before).to(narrow)
        amax = at_least(amax, floor, not before)
        scale = amax * (1 / MAX) if product else amax / number(MAX)
        scale = scale.to(own) if again else scale
        scale = scale.float() if early else scale
        scale = at_least(scale, least)
        scale = scale.float()
        return torch.exp2(torch.ceil(torch.log2(scale))) if powers else scale

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = scale_of(x)
        wide = x.float()
        values = wide * spread(scale.reciprocal()) if times else wide / spread(scale)
        values = values.to(own) if rounds else values
        if limits is not None:
            values = values.clamp(*limits)
        return values.to(FP8), scale

    return function
