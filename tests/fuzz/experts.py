"""Random mixtures of experts against float64, pair by pair.

python -m tests.fuzz experts --number 5000

Weights of experts that nobody chose are NaN, and so are their scales; some weights are in FP8. On a
GPU rows, sizes and experts are those of our kernels, and a row alone must have the bits that it has
among the others.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

from attn_ops import experts
from attn_ops.ops.moe.experts import takes_experts
from tests.attn_ops.ops.moe.test_experts import Case
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
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    step = 16 if device == "cuda" else 8
    dtype = sizes.choice([torch.bfloat16, torch.float16] if device == "cuda" else [torch.float32])
    k, f = sizes.randint(1, 24) * step, sizes.randint(1, 24) * step
    e, rows = sizes.choice([1, 2, 5, 8, 64, 128]), rng.choice([1, 2, 3, 17, 64, 200, 1000, 4096])
    rows, top_k = rows if device == "cuda" else min(rows, 64), min(e, sizes.randint(1, 16))
    kind = rng.choice(["random", "few", "one", "none among them"])
    ids = torch.rand(rows, e, generator=generator).argsort(1)[:, :top_k]
    if kind in ("few", "one"):
        ids = ids % (1 if kind == "one" else min(e, 3))
    if kind == "none among them":
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = rng.choice([-1, e])
    gate: dict[str, Any] = {"activation": sizes.choice(["silu", "gelu_tanh", "gpt_oss"])}
    gate |= {"interleaved": sizes.random() < 0.4, "limit": sizes.choice([None, 0.7])}
    gate |= {} if gate["activation"] == "gelu_tanh" else {"alpha": rng.choice([1.0, 1.702])}
    forms = {"bias": sizes.random() < 0.4, "turned": sizes.random() < 0.3}
    scale = scales_of(sizes, min(k, f))
    case = Case(rows, k, f, e, top_k, dtype, ids=ids, gate=gate, scale=scale, **forms)
    case.weights = case.weights.to(sizes.choice([dtype, torch.float32]))
    residual = torch.randn_like(case.x) if sizes.random() < 0.3 else None

    def of(chosen: slice) -> torch.Tensor:
        more = {} if residual is None else {"residual": residual[chosen]}
        return experts(*case.rows_of(chosen), **gate, **case.scales, **more)

    found = of(slice(None))
    wanted = case.wanted() if residual is None else case.wanted() + residual.double()
    bound = BOUNDS[dtype] * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    if takes_experts(case.w_gate_up, case.w_down, case.x.device):
        begin = rng.randrange(rows)
        part = slice(begin, begin + rng.randint(1, 40))
        assert torch.equal(bits(of(part)), bits(found[part])), "a row depends on the others"
    return kind


def scales_of(sizes: random.Random, smallest: int) -> str | None:
    """What shares a scale of FP8 weights, whose sizes are at least `smallest`; None: no FP8."""
    kind = sizes.choice([None, None, None, "row", "expert", "block", "row of blocks"])
    return "row" if kind == "block" and smallest <= 128 else kind  # two meanings
