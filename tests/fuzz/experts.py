"""Random mixtures of experts against a loop over experts in float64.

python -m tests.fuzz experts --number 5000

Weights of experts that nobody chose are NaN, and so are their scales; some weights are in FP8. On a
GPU rows, sizes and experts are those of our kernels, and a row alone must have the bits that it has
among the others.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from attn_ops import experts
from attn_ops.ops.moe.experts import takes_experts
from tests.kit.fp8 import in_fp8, scaled
from tests.kit.operators import bits

BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def search(args: Any) -> Callable[[int], str]:
    def run(seed: int) -> str:
        # A kernel is compiled for its sizes: a hundred cases of a GPU share them.
        sizes = random.Random(f"sizes {seed // 100 if args.device == 'cuda' else seed}")
        return compare(random.Random(seed), sizes, args.device)

    return run


def compare(rng: random.Random, sizes: random.Random, device: str) -> str:
    """Compute one case both ways; the kind of routing. What is compiled for is drawn by `sizes`."""
    generator = torch.Generator(device).manual_seed(rng.randrange(2**31))
    step = 16 if device == "cuda" else 8
    dtype = sizes.choice([torch.bfloat16, torch.float16] if device == "cuda" else [torch.float32])
    k, f = sizes.randint(1, 24) * step, sizes.randint(1, 24) * step
    e, rows = sizes.choice([1, 2, 5, 8, 64, 128]), rng.choice([1, 2, 3, 17, 64, 200, 1000, 4096])
    rows, top_k = rows if device == "cuda" else min(rows, 64), min(e, sizes.randint(1, 16))

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    turned, biased = sizes.random() < 0.3, sizes.random() < 0.4
    w_gate_up, w_down = randn(e, 2 * f, k, scale=k**-0.5), randn(e, k, f, scale=f**-0.5)
    if turned:
        w_gate_up, w_down = (w.mT.contiguous().mT for w in (w_gate_up, w_down))
    biases = (randn(e, 2 * f), randn(e, k)) if biased else (None, None)
    kind = rng.choice(["random", "few", "one", "none among them"])
    ids = torch.rand(rows, e, generator=generator, device=device).argsort(1)[:, :top_k]
    if kind in ("few", "one"):
        ids = ids % (1 if kind == "one" else min(e, 3))
    if kind == "none among them":
        ids[torch.rand(ids.shape, generator=generator, device=device) < 0.2] = rng.choice([-1, e])
    weights = torch.rand(ids.shape, generator=generator, device=device)
    weights = weights.to(sizes.choice([dtype, torch.float32]))
    gate: dict[str, Any] = {"activation": sizes.choice(["silu", "gelu_tanh", "gpt_oss"])}
    gate |= {"interleaved": sizes.random() < 0.4, "limit": sizes.choice([None, 0.7])}
    gate |= {} if gate["activation"] == "gelu_tanh" else {"alpha": rng.choice([1.0, 1.702])}
    unused = [i for i in range(e) if not (ids == i).any()]
    for tensor in (w_gate_up, w_down, *biases):
        if tensor is not None:
            tensor[unused] = float("nan")
    scales, wide = {}, [w_gate_up, w_down]
    fp8 = scales_of(sizes, min(k, f))
    if fp8 is not None:
        w_gate_up, scales["gate_up_scale"] = in_fp8(w_gate_up, fp8, generator)
        w_down, scales["down_scale"] = in_fp8(w_down, fp8, generator)
        wide = [scaled(w_gate_up, scales["gate_up_scale"], fp8)]
        wide += [scaled(w_down, scales["down_scale"], fp8)]

    def of(chosen: slice) -> torch.Tensor:
        given = x[chosen], w_gate_up, w_down, ids[chosen], weights[chosen]
        more = gate | scales
        more |= {} if residual is None else {"residual": residual[chosen]}
        return experts(*given, *biases, **more)

    x, residual = randn(rows, k), randn(rows, k) if sizes.random() < 0.3 else None
    found = of(slice(None))
    wanted = loop(x, *wide, ids, weights, biases, gate)
    wanted = wanted if residual is None else wanted + residual.double()
    bound = BOUNDS[dtype] * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    if takes_experts(w_gate_up, w_down, x.device):
        begin = rng.randrange(rows)
        part = slice(begin, begin + rng.randint(1, 40))
        assert torch.equal(bits(of(part)), bits(found[part])), "a row depends on the others"
    return kind


def scales_of(sizes: random.Random, smallest: int) -> str | None:
    """What shares a scale of FP8 weights, whose sizes are at least `smallest`; None: no FP8."""
    kind = sizes.choice([None, None, None, "row", "expert", "block", "row of blocks"])
    return "row" if kind == "block" and smallest <= 128 else kind  # two meanings


def loop(x, w_gate_up, w_down, ids, weights, biases, gate) -> torch.Tensor:
    """Expert by expert, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert in range(w_gate_up.shape[0]):
        rows, places = torch.where(ids == expert)
        if rows.numel():
            both = x[rows].double() @ w_gate_up[expert].double().t()
            both = both if biases[0] is None else both + biases[0][expert].double()
            y = gated(both, **gate) @ w_down[expert].double().t()
            y = y if biases[1] is None else y + biases[1][expert].double()
            out.index_add_(0, rows, y * weights[rows, places, None].double())
    return out


def gated(both, activation, interleaved, limit, alpha=1.0) -> torch.Tensor:
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return gate * torch.sigmoid(alpha * gate) * (up + 1 if activation == "gpt_oss" else up)
