"""What kernels of Inductor's do before they wait, as it writes them and mended: prints JSON.

`python -m tests.fx_passes.inductor_kernels`, in a process without TRITON_INTERPRET.
"""

import contextlib
import json

import torch

from attn_ops.compat.early_launch_until_2_16 import kernels_wait
from tests.kit.inductor_sm90 import hopper, kernels, ptx_of, written
from tests.kit.ptx import faults


def fills_behind_a_kernel(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A kernel that reads nothing, behind one that does, and one that reads both."""
    norm = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    place = torch.arange(96, device=x.device)
    return norm, place, (norm @ norm.t()).sigmoid()


def layer(
    x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Norm, products, SiLU x up, residual, norm; a kernel that does not need the one in front."""
    norm = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    y = x + torch.nn.functional.silu(norm @ gate) * (norm @ up)
    cache = (up * 2).cos()
    return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6) * w, cache


def looped(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows too long for a program to hold: it reads them twice."""
    y = torch.relu(x) * w
    return y, y / y.sum(-1, keepdim=True), x.exp().sum(-1)


def apart(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three kernels that need nothing of each other; `combo_kernels` makes one of them."""
    return x.sin() * 2, w.exp(), y.relu() + 1, torch.arange(70, device=x.device)


CASES = {
    "fills": (fills_behind_a_kernel, ((4, 64), (64,)), {}),
    "layer": (layer, ((4, 64), (64,), (64, 64), (64, 64)), {}),
    "looped": (looped, ((4, 20000), (20000,)), {}),
    "combo": (apart, ((4, 64), (640,), (3, 50)), {"combo_kernels": True}),
}


def found(mended: bool) -> dict[str, list[str]]:
    """Faults of every kernel. They may read what kernels before the one in front have written."""
    result: dict[str, list[str]] = {}
    for case, (function, shapes, config) in CASES.items():
        with kernels_wait() if mended else contextlib.nullcontext():
            code = written(function, *shapes, **config)
        for name, source in kernels(code).items():
            ptx, pointers = ptx_of(source)
            wrong = faults(ptx, pointers, set(pointers.values()))
            if case == "combo":  # a program behind the last of its kernels would do nothing
                wrong = [fault for fault in wrong if "end without" not in fault]
            result[f"{case} {name}"] = wrong
    return result


def main() -> None:
    with hopper():
        print(json.dumps({"plain": found(mended=False), "mended": found(mended=True)}))


if __name__ == "__main__":
    main()
