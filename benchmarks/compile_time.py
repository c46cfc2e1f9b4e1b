"""Cold compile of the Llama-3-8B shape, caches off: `python -m benchmarks.compile_time`.

With `--compile-cache DIR` the session keeps what was compiled there: the first run with an empty
folder is a cold start, later runs are second starts.
"""

import argparse
import json
import time
from typing import Any

import torch

import fx_passes
import fx_passes.backend
from attn_ops.integrations.merged import merge_projections
from benchmarks.decode_step import build
from benchmarks.shapes import llama_3_8b
from graphs import DecodeSession


def phases(model: torch.nn.Module, options: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase of a compile, and of all."""
    torch._inductor.config.force_disable_caches = True
    marks: dict[str, float] = {}
    inner = fx_passes.backend.compile_fx

    def timed(*a: object, **k: object) -> object:
        try:
            return inner(*a, **k)
        finally:
            marks["inductor_end"] = time.perf_counter()

    def backend(gm: torch.fx.GraphModule, inputs: object, **k: object) -> object:
        marks["dynamo_end"] = time.perf_counter()
        return fx_passes.attn_ops(gm, inputs, **k)

    fx_passes.backend.compile_fx = timed
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True, options=options)
    begin = time.perf_counter()
    session = DecodeSession(compiled, max_batch_size=1, max_tokens=1024)
    made = time.perf_counter()
    session.warm_up()
    end = time.perf_counter()
    return {
        "session": made - begin,
        "dynamo": marks["dynamo_end"] - made,
        "passes, aot, inductor": marks["inductor_end"] - marks["dynamo_end"],
        "guards, first call, one capture": end - marks["inductor_end"],
        "total": end - begin,
    }


def start(
    model: torch.nn.Module, options: dict[str, Any], cache: str, lazily: bool
) -> dict[str, Any]:
    """A session that loads what an earlier process compiled, or compiles it for the next."""
    compiled: Any = torch.compile(model, backend="attn_ops", fullgraph=True, options=options)
    begin = time.perf_counter()
    session = DecodeSession(
        compiled, max_batch_size=64, max_tokens=1024, compile_cache=cache, lazy_capture=lazily
    )
    session.generate([[1, 2, 3]], 1)
    total, report = time.perf_counter() - begin, session.report()
    return {
        "outcome": report.compile_cache,
        "compile or load": report.compile_seconds,
        "captures": report.capture_seconds,
        "from the constructor to the first token": total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--options", default="{}", help="options of the attn_ops backend, JSON")
    parser.add_argument("--compile-cache", help="time a session with this folder")
    parser.add_argument("--lazy-capture", action="store_true", help="of that session")
    args = parser.parse_args()
    model, options = build(llama_3_8b(args.layers), "attn_ops"), json.loads(args.options)
    merge_projections(model)
    if args.compile_cache is None:
        found = phases(model, options)
    else:
        found = start(model, options, args.compile_cache, args.lazy_capture)
    print(json.dumps({"layers": args.layers, "options": args.options, **found}, indent=1))


if __name__ == "__main__":
    main()
