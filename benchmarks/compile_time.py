"""Cold compile of the Llama-3-8B shape, caches off: `python -m benchmarks.compile_time`.

With `--compile-cache DIR` the session keeps what was compiled there: the first run with an empty
folder is a cold start, later runs are second starts.
"""

import argparse
import json
import time

import torch

import fx_passes
import fx_passes.backend
from attn_ops.integrations.merged import merge_projections
from benchmarks.decode_step import build
from benchmarks.shapes import llama_3_8b
from graphs import DecodeSession


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--options", default="{}", help="options of the attn_ops backend, JSON")
    parser.add_argument("--times", action="store_true", help="print Dynamo's own table of phases")
    parser.add_argument("--compile-cache", help="time a session with this folder")
    parser.add_argument("--lazy-capture", action="store_true", help="of that session")
    args = parser.parse_args()
    if args.compile_cache is not None:
        return start(args)
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
    model = build(llama_3_8b(args.layers), "attn_ops")
    merge_projections(model)
    compiled = torch.compile(
        model, backend=backend, fullgraph=True, options=json.loads(args.options)
    )
    begin = time.perf_counter()
    session = DecodeSession(compiled, max_batch_size=1, max_tokens=1024)
    phases = {"session": time.perf_counter() - begin}
    session.warm_up()
    end = time.perf_counter()
    phases |= {
        "dynamo": marks["dynamo_end"] - begin - phases["session"],
        "passes, aot, inductor": marks["inductor_end"] - marks["dynamo_end"],
        "guards, first call, one capture": end - marks["inductor_end"],
        "total": end - begin,
    }
    print(json.dumps({"layers": args.layers, "options": args.options, **phases}, indent=1))
    if args.times:
        print(torch._dynamo.utils.compile_times(repr="str", aggregate=True))


def start(args: argparse.Namespace) -> None:
    """A session that loads what an earlier process compiled, or compiles it for the next."""
    model = build(llama_3_8b(args.layers), "attn_ops")
    merge_projections(model)
    options = json.loads(args.options)
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True, options=options)
    begin = time.perf_counter()
    session = DecodeSession(
        compiled, max_batch_size=64, max_tokens=1024, compile_cache=args.compile_cache,
        lazy_capture=args.lazy_capture,
    )  # fmt: skip
    session.generate([[1, 2, 3]], 1)
    total, report = time.perf_counter() - begin, session.report()
    found = {
        "outcome": report.compile_cache,
        "compile or load": report.compile_seconds,
        "captures": report.capture_seconds,
        "from the constructor to the first token": total,
    }
    print(json.dumps({"layers": args.layers, "options": args.options, **found}, indent=1))


if __name__ == "__main__":
    main()
