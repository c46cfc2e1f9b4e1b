"""Which constants the products of `experts` are fastest with: `python -m benchmarks.experts_forms`.

Each product by itself, for several layers whose weights are in no cache, in a CUDA graph. Blocks
have the pairs that `rows_of_a_block` says, half and twice as many. A form that does not fit into
the shared memory is left out. `attn_ops/ops/moe/constants.py` takes what is found here. `--fp8`:
weights with a scale a block of 128 x 128. On a CPU sizes are tiny, and figures mean nothing.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_ops.ops.moe.composite import BLOCK
from attn_ops.ops.moe.constants import ExpertsConstants, experts_constants, rows_of_a_block
from benchmarks.experts import SHAPES, TINY, Layer, microseconds, routed
from benchmarks.harness import brief, free, origin, parser_of, write

SHARED_MEMORY = 227 * 1024
NUM_LAYERS = 4
ROWS = (1, 8, 64, 512, 2048)


def forms(block_t: int, tiny: bool, fp8: bool) -> Iterator[ExpertsConstants]:
    """Those with a wgmma's 64 rows for each four warps; one block of inputs at once in FP8."""
    if tiny:
        yield ExpertsConstants(block_t, 64, BLOCK if fp8 else 32, 4, 2)
        return
    sizes = (64, 128) if block_t < 64 else (64, 128, 256)
    for m, k, stages in itertools.product(sizes, (BLOCK,) if fp8 else (64, 128, 256), (3, 4, 6)):
        for warps in {4, min(8, m // 16)}:
            held = stages * k * ((1 if fp8 else 2) * m + 2 * block_t)
            if held <= SHARED_MEMORY and m * block_t <= 256 * 128:
                yield ExpertsConstants(block_t, m, k, warps, stages)


def products(layer: Layer, given: tuple[torch.Tensor, ...], form: ExpertsConstants, wide: bool):
    """Product 1 and product 2 of a layer, as functions of nothing."""
    from attn_ops.ops.triton.experts import Blocks, launch_blocks, launch_product

    x, ids, _ = given
    flat, pairs = ids.view(-1), ids.numel()
    one = Blocks(flat, None, form.block_t)
    blocks = one if x.shape[0] == 1 else launch_blocks(flat, layer.num_experts, form.block_t)
    (up, down), biases, gate = layer.stored()
    h = torch.randn(pairs, down.shape[2], device=x.device).to(x.dtype)
    first: dict[str, Any] = {"scale": layer.scales.get("gate_up_scale"), "activation": "silu"}
    first |= gate
    scale = layer.scales.get("down_scale")
    return (
        lambda: launch_product(x, up, biases[0], blocks, pairs, form, widen=wide, **first),
        lambda: launch_product(h, down, biases[1], blocks, pairs, form, widen=wide, scale=scale),
    )


def fastest(layers: list[Layer], rows: int, device: str, block_ts: list[int]) -> dict[str, list]:
    """Times and forms of both products, the fastest first."""
    found: dict[str, list] = {"product 1": [], "product 2": []}
    given = [routed(layer.shape, rows, device) for layer in layers]
    for block_t in block_ts:
        for form in forms(block_t, device == "cpu", layers[0].shape.fp8):
            calls = [
                products(layer, one, form, device == "cpu")
                for layer, one in zip(layers, given, strict=True)
            ]
            for i, name in enumerate(found):
                run: Callable[[int], object] = lambda n, i=i, calls=calls: calls[n][i]()  # noqa: E731
                try:
                    us = microseconds(run, len(layers), min(rows, 512), device)
                except Exception as error:  # it does not fit
                    print(form, name, brief(error), flush=True)
                    continue
                found[name].append((round(us, 1), str(tuple(form))))
    return {name: sorted(times) for name, times in found.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in args.shapes:
        shape = SHAPES[name] if args.device == "cuda" else TINY[name]
        shape = dataclasses.replace(shape, fp8=args.fp8)
        layers = [Layer(shape, args.device) for _ in range(NUM_LAYERS)]
        for number in args.rows:
            pairs = number * shape.top_k
            block_t = rows_of_a_block(pairs, shape.num_experts)
            tried = {n for n in (16, block_t // 2, block_t, 2 * block_t) if 16 <= n <= 128}
            tried = [16] if number == 1 else sorted(tried)
            found = fastest(layers, number, args.device, tried)
            chosen = (pairs, shape.num_experts, shape.gpt_oss, BLOCK if args.fp8 else None)
            used = [tuple(experts_constants(k, *chosen)) for k in (shape.k, shape.f)]
            row: dict[str, Any] = {"in use": [str(one) for one in used]}
            for i, (product, times) in enumerate(found.items()):
                now = [us for us, form in times if form == str(used[i])]
                row[product] = {"now us": now[0] if now else None, "best": times[:5]}
            rows[f"{name}, {number}"] = row
            print(f"{name}, {number}", row, flush=True)
        del layers
        free()
    note = "Model, rows: microseconds of a product by (block_t, block_m, block_k, warps, stages)."
    command = f"python -m benchmarks.experts_forms --device {args.device}{' --fp8' * args.fp8}"
    return origin(args) | {"command": command, "note": note, "rows": rows}


def main() -> None:
    found = parser_of(__doc__)
    found.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    found.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b"], choices=list(SHAPES))
    found.add_argument("--fp8", action="store_true", help="weights in FP8")
    args = found.parse_args()
    torch.manual_seed(0)
    write(args.json, measure(args))


if __name__ == "__main__":
    main()
