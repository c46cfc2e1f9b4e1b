"""Which constants products of few rows are fastest with: `python -m benchmarks.product_forms`.

Each with what stands before and behind it in a decode step (a norm, the residual before it, a gate,
the residual behind), weights in no cache, a CUDA graph of many. Processes compile the forms first.
`attn_ops/ops/products/skinny_constants.py` takes what is found here. On a CPU sizes are tiny, and
figures mean nothing.

    python -m benchmarks.product_forms --rows 1 8 --products "12352x2560 norm"
"""

import argparse
import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

from attn_ops.ops.products.skinny_constants import SkinnyConstants, skinny_constants
from attn_ops.ops.triton.fused_products import launch_fused
from attn_ops.ops.triton.skinny import launch_skinny
from benchmarks.harness import brief, capture, copy_bandwidth, median_ms, origin, parser_of, write

FORMS = [
    SkinnyConstants(m, k, warps, stages, 1)
    for m, k, warps, stages in [
        (16, 256, 4, 6), (16, 512, 4, 4), (32, 128, 4, 6), (32, 256, 4, 4), (32, 256, 4, 6),
        (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 128, 8, 4),
        (64, 256, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 4, 6), (128, 64, 8, 6),
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4),
    ]
]  # fmt: skip
PRODUCTS = [
    "12352x2560 norm", "10240x2560 norm", "12352x2560", "18432x2560 norm addend gated",
    "2560x9216 residual", "2560x4096", "6144x4096 norm", "28672x4096 norm addend gated",
    "4096x14336 residual", "4096x4096", "24576x4096 norm addend gated", "5120x2048 norm",
    "2048x4096", "12288x2048 norm addend gated",
]  # fmt: skip
WEIGHTS = 300_000_000
"""Bytes of the weights that take turns: more than the L2 holds."""


class Product(NamedTuple):
    """An output's size, K, and what is fused."""

    m: int
    k: int
    fused: frozenset[str]

    @classmethod
    def of(cls, text: str) -> "Product":
        sizes, *fused = text.split()
        m, k = map(int, sizes.split("x"))
        return cls(m, k, frozenset(fused))

    def weight(self, device: str) -> torch.Tensor:
        return torch.randn(self.m, self.k, device=device).to(torch.bfloat16).t()

    def on(self, rows: int, device: str) -> Callable[[torch.Tensor, SkinnyConstants], object]:
        """Launch it for a weight by a form."""
        x = torch.randn(rows, self.k, device=device).to(torch.bfloat16)
        if not self.fused:
            return lambda w, form: launch_skinny(x, w, None, None, None, x.dtype, constants=form)
        gated = "gated" in self.fused
        residual = x.new_ones(rows, self.m // 2 if gated else self.m)
        given: dict[str, Any] = {
            "norm_weight": x.new_ones(self.k) if "norm" in self.fused else None,
            "eps": 1e-6,
            "addend": torch.ones_like(x) if "addend" in self.fused else None,
            "gated": gated,
            "residuals": (residual,) if "residual" in self.fused else (),
            "widen": device == "cpu",
        }
        return lambda w, form: launch_fused(x, w, constants=form, **given)


def compile_form(text: str, form: SkinnyConstants) -> None:
    """Into Triton's cache. What is wrong with one that does not fit, its timing tells."""
    product = Product.of(text)
    with contextlib.suppress(Exception):  # one that cannot be sent back would end the pool
        product.on(1, "cuda")(product.weight("cuda"), form)


def compile_all(texts: list[str]) -> None:
    """In as many processes as there are cores."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context) as pool:
        for text in texts:
            for form in FORMS:
                pool.submit(compile_form, text, form)


def timed(product: Product, rows: int, device: str, form: SkinnyConstants) -> float:
    """Microseconds of one launch."""
    launch, w = product.on(rows, device), product.weight(device)
    launch(w, form)
    if device == "cpu":
        return 0.0
    copies = max(2, -(-WEIGHTS // (2 * w.numel())))
    weights = [w, *(product.weight(device) for _ in range(copies - 1))]
    turns = max(1, 16 // copies)

    def run() -> None:
        for _ in range(turns):
            for one in weights:
                launch(one, form)

    return 1000 * median_ms(capture(run).replay) / (turns * copies)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.device == "cuda":
        compile_all(args.products)
    bandwidth = copy_bandwidth() if args.device == "cuda" else 1e12
    rows: dict[str, Any] = {}
    for text in args.products:
        product = Product.of(text)
        for number in args.rows:
            now = skinny_constants(product.m, False, number)
            found = []
            for form in dict.fromkeys([now, *FORMS]):
                try:
                    us = timed(product, number, args.device, form)
                except Exception as error:  # it does not fit
                    print(text, form, brief(error), flush=True)
                    continue
                found.append((round(us, 1), str(tuple(form)[:4])))
            row = {
                "bytes us": round(2e6 * product.m * product.k / bandwidth, 1),
                "now us": found[0][0],
                "now": found[0][1],
                "best": sorted(found)[:6],
            }
            rows[f"{text}, {number}"] = row
            print(f"{text}, {number}", row, flush=True)
    note = "Product, rows: microseconds by (block_m, block_k, warps, stages)."
    command = f"python -m benchmarks.product_forms --device {args.device}"
    return origin(args) | {"command": command, "note": note, "rows": rows}


def main() -> None:
    found = parser_of(__doc__)
    found.add_argument("--rows", type=int, nargs="+", default=[1])
    found.add_argument("--products", nargs="+", default=PRODUCTS)
    args = found.parse_args()
    torch.manual_seed(0)
    write(args.json, measure(args))


if __name__ == "__main__":
    main()
