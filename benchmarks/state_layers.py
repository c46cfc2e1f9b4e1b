"""Decode kernels of layers with a state: `python -m benchmarks.state_layers`.

Every request brings one row. A kernel reads and writes the state of each, and inputs that are small
beside it, so a copy of as many bytes is the limit. Sizes are those of one layer of Qwen3-Next-80B,
Kimi-Linear-48B, Nemotron-H-8B and Jamba-v0.1, and of Qwen3-Next's convolution. On a CPU, where the
operators are plain PyTorch, sizes are tiny and figures mean nothing.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from attn_ops.ops import states as ops
from attn_ops.states import StateSpec, allocated
from benchmarks.harness import capture, copy_bandwidth, finish, free, median_ms, origin, parser_of

CACHE_BYTES = 2**28
"""Launches that follow each other go over so many bytes, several times what an L2 holds."""

MOST_COPIES = 32
NUM_LAUNCHES = 64
"""Of a graph."""


@dataclasses.dataclass
class Layer:
    """An operator with the inputs of T rows, and states of some slots beside the null slot."""

    operator: Callable[..., torch.Tensor]
    given: tuple[Any, ...]
    states: torch.Tensor

    def run(self, *batch: torch.Tensor) -> torch.Tensor:
        """slots, starts, seq_lens and perhaps kept."""
        return self.operator(*self.given, self.states, *batch)

    def moved(self, device: str | None = None, dtype: torch.dtype | None = None) -> "Layer":
        """A copy, perhaps elsewhere or in another dtype."""
        given = [
            x.to(device, dtype, copy=True) if isinstance(x, torch.Tensor) else x for x in self.given
        ]
        return Layer(self.operator, tuple(given), self.states.to(device, dtype, copy=True))

    @property
    def num_bytes(self) -> int:
        """That a step of one row a request moves: its inputs, its result, states twice."""
        given = [x for x in self.given if isinstance(x, torch.Tensor)]
        rows = sum(x.numel() * x.element_size() for x in given)
        values = given[2] if self.operator in (ops.gated_delta_rule, ops.kda) else given[0]
        states = self.states[1:]
        result = values.numel() * values.element_size()
        return rows + result + 2 * states.numel() * states.element_size()


def _random(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    return new


def conv(rows: int, slots: int, device: str, dtype: torch.dtype, channels: int = 8192) -> Layer:
    """4 inputs of each channel."""
    new = _random(device, dtype)
    given = (new(rows, channels), new(channels, 4), None, "silu")
    return Layer(ops.causal_conv1d_update, given, _columns((channels, 3), dtype, slots, device))


def _columns(shape: tuple[int, ...], dtype: torch.dtype, slots: int, device: str) -> torch.Tensor:
    """States as a `StatePool` has them that are held by columns."""
    spec = StateSpec(("recurrent", 0, 0), shape, dtype, by_columns=True)
    return allocated(spec, slots + 1, device).normal_()


def delta(
    rows: int,
    slots: int,
    device: str,
    dtype: torch.dtype,
    heads: int = 32,
    size: int = 128,
    *,
    kda: bool = False,
) -> Layer:
    """Two heads of values a head of keys; of KDA one, with a decay for each of its numbers."""
    new, keys = _random(device, dtype), heads if kda else max(1, heads // 2)
    decay = new(rows, heads, *([size] if kda else []), dtype=torch.float32)
    inputs = (new(rows, keys, size), new(rows, keys, size), new(rows, heads, size))
    given = (*inputs, -decay.abs(), new(rows, heads).sigmoid(), True)
    states = _columns((heads, size, size), torch.float32, slots, device)
    return Layer(ops.kda if kda else ops.gated_delta_rule, given, states)


def ssd(
    rows: int, slots: int, device: str, dtype: torch.dtype, heads: int = 128, width: int = 128
) -> Layer:
    """Heads of 64 in up to 8 groups."""
    new, groups = _random(device, dtype), min(8, heads)
    A, D, bias = (new(heads, dtype=torch.float32) for _ in range(3))
    inputs = (new(rows, heads, 64), new(rows, heads), -A.abs())
    shared = (new(rows, groups, width), new(rows, groups, width))
    states = new(slots + 1, heads, 64, width, dtype=torch.float32)
    given = (*inputs, *shared, D, bias, True, None, None, None)
    return Layer(ops.ssd_state_update, given, states)


def selective(
    rows: int, slots: int, device: str, dtype: torch.dtype, channels: int = 8192
) -> Layer:
    """16 numbers a channel."""
    new = _random(device, dtype)
    A = -new(channels, 16, dtype=torch.float32).abs()
    D, bias = (new(channels, dtype=torch.float32) for _ in range(2))
    inputs = (new(rows, channels), new(rows, channels), A, new(rows, 16), new(rows, 16), D)
    states = new(slots + 1, channels, 16, dtype=torch.float32)
    given = (*inputs, new(rows, channels), bias, True)
    return Layer(ops.selective_state_update, given, states)


LAYERS: dict[str, Callable[..., Layer]] = {
    "causal_conv1d_update": conv,
    "gated_delta_rule": delta,
    "kda": functools.partial(delta, kda=True),
    "ssd_state_update": ssd,
    "selective_state_update": selective,
}
"""By operator: `layer(rows, slots, device, dtype)`."""

TINY: dict[str, dict[str, int]] = {
    "causal_conv1d_update": {"channels": 32},
    "gated_delta_rule": {"heads": 2, "size": 16},
    "kda": {"heads": 2, "size": 16},
    "ssd_state_update": {"heads": 2, "width": 16},
    "selective_state_update": {"channels": 32},
}


def decodes(number: int, device: str) -> tuple[torch.Tensor, ...]:
    """A row of each request; slots are in no order, every request goes on."""
    order = 1 + torch.randperm(number, device=device)
    starts = torch.arange(number + 1, device=device)
    return order.int(), starts.int(), torch.full_like(order, 100).int()


def layers_of(name: str, number: int, device: str) -> list[Layer]:
    """For so many requests: as many alike as no cache holds at once; on a CPU one."""
    if device == "cpu":
        return [LAYERS[name](number, number, device, torch.bfloat16, **TINY[name])]
    first = LAYERS[name](number, number, device, torch.bfloat16)
    copies = min(MOST_COPIES, max(2, math.ceil(CACHE_BYTES / first.num_bytes)))
    return [first, *(first.moved() for _ in range(copies - 1))]


def launch_us(calls: list[Callable[[], Any]], device: str) -> float:
    """Microseconds of one, in a graph that goes over them, each with memory for its results."""
    if device == "cpu":
        begin = time.perf_counter()
        calls[0]()
        return 1e6 * (time.perf_counter() - begin)
    calls[0]()  # compiles

    def run() -> None:
        held = collections.deque(maxlen=len(calls))
        for i in range(NUM_LAUNCHES):
            held.append(calls[i % len(calls)]())

    return 1e3 * median_ms(capture(run).replay) / NUM_LAUNCHES


def of_decodes(name: str, number: int, device: str, bandwidth: float | None) -> dict[str, Any]:
    """A launch in a step of so many requests, and fla's where it has one."""
    layers, batch = layers_of(name, number, device), decodes(number, device)
    num_bytes = layers[0].num_bytes
    us = launch_us([functools.partial(layer.run, *batch) for layer in layers], device)
    percent = None if bandwidth is None else round(1e8 * num_bytes / bandwidth / us, 1)
    row = {"us": round(us, 2), "MB": round(num_bytes / 1e6, 2), "% of a copy": percent}
    if device == "cuda":
        calls = [call for layer in layers if (call := by_fla(name, layer, prompt=False))]
        row |= {"fla, us": round(launch_us(calls, device), 2)} if calls else {}
    return row


def of_a_prompt(name: str, length: int, device: str) -> dict[str, float]:
    """Microseconds of a graph with one request of so many rows: ours, row by row, and fla's.

    And ours where the state behind the last full block of 16 tokens is kept, as for prefixes.
    """
    from attn_ops.ops.triton import chunks

    sizes = TINY[name] if device == "cpu" else {}
    layer = LAYERS[name](length, 2, device, torch.bfloat16, **sizes)
    starts = torch.tensor([0, length], dtype=torch.int32)
    slots, lens = torch.ones(1, dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    kept = torch.zeros(length, dtype=torch.int32)
    kept[(length - 1) // 16 * 16 - 1] = 2
    batch = [x.to(device) for x in (slots, starts, lens, kept)]
    ways: dict[str, Callable[[], Any]] = {
        "us": lambda: layer.run(*batch[:3]),
        "kept, us": lambda: layer.run(*batch),
    }
    if device == "cpu":
        for run in ways.values():
            run()
        return {}
    if fla := by_fla(name, layer, prompt=True):
        ways["by fla, us"] = fla
    found = {}
    for way, run in ways.items():
        run()  # compiles
        found[way] = round(1e3 * median_ms(capture(run).replay), 1)
    usual, chunks.LONG = chunks.LONG, length + 1
    found["by rows, us"] = round(1e3 * median_ms(capture(ways["us"]).replay), 1)
    chunks.LONG = usual
    return found


def by_fla(name: str, layer: Layer, *, prompt: bool) -> Callable[[], Any] | None:
    """flash-linear-attention's kernels: one request's prompt, or a decode of each; None: none.

    States lie in a row, so that it reads no slots, and it returns new ones.
    """
    if importlib.util.find_spec("fla") is None or name not in ("gated_delta_rule", "kda"):
        return None
    from fla.ops import gated_delta_rule, kda

    q, k, v, g, beta, normalized = layer.given
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    given = [x.unsqueeze(0 if prompt else 1) for x in (q, k, v, g.float(), beta)]
    kinds = {
        ("gated_delta_rule", True): gated_delta_rule.chunk_gated_delta_rule,
        ("gated_delta_rule", False): gated_delta_rule.fused_recurrent_gated_delta_rule,
        ("kda", True): kda.chunk_kda,
        ("kda", False): kda.fused_recurrent_kda,
    }
    function, states = kinds[name, prompt], layer.states[1:].contiguous()

    def run() -> Any:
        return function(
            *given, initial_state=states, output_final_state=True,
            use_qk_l2norm_in_kernel=normalized,
        )  # fmt: skip

    return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    bandwidth = copy_bandwidth() if args.device == "cuda" else None
    rows = {}
    for name in args.rules or LAYERS:
        for number in args.batches:
            rows[f"{name}, {number}"] = of_decodes(name, number, args.device, bandwidth)
            free()
        for length in args.prompts:
            rows[f"{name}, a prompt of {length}"] = of_a_prompt(name, length, args.device)
            free()
    copied = "not measured" if bandwidth is None else f"{bandwidth / 1e12:.2f} TB/s"
    note = (
        "Rule, requests with one row each: microseconds of a launch in a CUDA graph over inputs "
        f"that are in no cache; bf16 rows, float32 states. A copy: {copied}."
    )
    prompts = f" --prompts {' '.join(map(str, args.prompts))}" if args.prompts else ""
    command = f"python -m benchmarks.state_layers --device {args.device}{prompts}"
    return origin(args) | {"command": command, "note": note, "rows": rows}


def main() -> None:
    found = parser_of(__doc__)
    found.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    found.add_argument("--rules", nargs="+", choices=list(LAYERS), help="default: all")
    found.add_argument("--prompts", type=int, nargs="*", default=[], help="rows of one request")
    args = found.parse_args()
    torch.manual_seed(0)
    finish(args, measure(args))


if __name__ == "__main__":
    main()
