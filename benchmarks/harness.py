"""What all benchmarks share: arguments, the origin of figures, JSON, memory and timing."""

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from attn_ops.backends.measurements import library_versions


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Arguments that every benchmark has."""
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    found.add_argument("--device", default=default, choices=("cpu", "cuda"))
    found.add_argument("--commit", default=None, help="where the checkout has no .git")
    found.add_argument("--json", default=None, help="write the figures here")
    return found


def origin(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured, on what and when."""
    return {
        "commit": args.commit or commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": library_versions(),
    }


def commit() -> str | None:
    """The checkout's commit; None outside of one."""
    root = Path(__file__).parents[1]
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(path: str | None, result: Mapping[str, Any]) -> None:
    """The figures as JSON; without a path nothing."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1))


def model_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, with the two that choose a model's shape."""
    from benchmarks.shapes import MODELS

    parser.add_argument("--model", default="llama-3-8b", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=None)
    return parser.parse_args()


def finish(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the figures, and print them by row."""
    write(args.json, result)
    for name, row in result["rows"].items():
        print(name, row)


def brief(error: BaseException) -> str:
    """An exception as one line of a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def free() -> None:
    """Give a GPU's unused memory back."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def used_gib() -> float:
    """Of the whole GPU, after unused memory has been given back; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    free()
    left, total = torch.cuda.mem_get_info()
    return (total - left) / 2**30


# -- timing ----------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait for the GPU where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object]) -> float:
    """Wall seconds of a call that has ended on the device."""
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - begin


def wall_ms(run: Callable[[], object], *, warmup: int = 2, repeats: int = 7) -> float:
    """Median wall milliseconds of a call that has ended on the device."""
    for _ in range(warmup):
        run()
    return 1000 * statistics.median(seconds_of(run) for _ in range(repeats))


def token_ms(
    generate: Callable[[list[list[int]], int], object],
    batch: int,
    context: int,
    few: int,
    many: int,
    *,
    repeated: bool = False,
) -> float:
    """Milliseconds a token of all requests together, around `context` tokens.

    The difference between generating `many` tokens and `few`, so that prompts and compilation are
    not in it. Prompts are new in each call, or `repeated` where a cache of prefixes has them.
    """
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, context - (few + many) // 2)

    def new_prompts() -> list[list[int]]:
        return torch.randint(10, 32000, shape, generator=generator).tolist()

    first = new_prompts()

    def seconds(num_tokens: int) -> float:
        prompts = first if repeated else new_prompts()
        return seconds_of(lambda: generate(prompts, num_tokens))

    for num_tokens in 2 * (many, few):
        seconds(num_tokens)
    found = [(seconds(many) - seconds(few)) / (many - few) for _ in range(5)]
    return 1000 * statistics.median(found)


def median_ms(run: Callable[[], object], *, warmup: int = 5, repeats: int = 30) -> float:
    """Median milliseconds of `run`, each repeat timed by its own pair of events."""
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph, which keeps what `run` reads, after one call outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    graph.recorded = run
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_ms(lambda: target.copy_(source), repeats=10) / 1000)
