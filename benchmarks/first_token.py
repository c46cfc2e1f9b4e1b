"""From a prompt to its first token: `python -m benchmarks.first_token`.

    ours     ms from `add` to the first token of one prompt, in a warm session with its defaults
    called   the same in a session that captures no step with prompts
    floor    products by cuBLAS and attention by FA3 of the whole prompt, in one CUDA graph

A session of 64 requests, whose steps hold a whole prompt. With `--profile FOLDER` each prompt's
kernels, by time, are written there. A session's report says how long its captures took, and which
steps with prompts are replayed.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.batch_invariance_cost import prompt_ms
from benchmarks.decode_step import build
from benchmarks.floor import Shape, Weights, floor_graph
from benchmarks.harness import Bar, finish, free, median_ms, origin, parser_of
from benchmarks.shapes import MODELS
from graphs import DecodeSession

NOTE = (
    "Milliseconds from `add` to the first token of one prompt. ours: a warm session with its "
    "defaults, for 64 requests, whose steps hold the whole prompt; called: one that captures no "
    "step with prompts; floor: products by cuBLAS and FA3, captured. Asked of ratio: 1.3 at 64 and "
    "256, 1.2 at 512, 1.15 beyond."
)
BARS = {64: 1.3, 256: 1.3, 512: 1.2, 1024: 1.15, 2048: 1.15, 4096: 1.15, 8192: 1.15}


def made(model: torch.nn.Module, lengths: list[int], mode: str) -> DecodeSession:
    """Of a compiled model; a whole prompt is one step."""
    compiled: Any = torch.compile(model, backend="attn_ops", fullgraph=True)
    session = DecodeSession(
        compiled, max_batch_size=64, max_tokens=max(lengths) + 1, cudagraph_mode=mode,
        max_tokens_per_step=max(lengths), cache_tokens=max(lengths) + 64 * 64,
        merge_projections=True,
    )  # fmt: skip
    session.warm_up()
    return session


def write_profile(session: DecodeSession, length: int, folder: str) -> None:
    """Kernels of one prompt, and what the host does meanwhile, by time."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        prompt_ms(session, length, repeats=1)
    averages = found.key_averages()
    Path(folder).mkdir(parents=True, exist_ok=True)
    tables = [
        averages.table(sort_by=by, row_limit=45, max_name_column_width=90)
        for by in ("self_cuda_time_total", "self_cpu_time_total")
    ]
    Path(folder, f"{length}.txt").write_text("\n".join(tables))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--prompts", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--profile", default=None, metavar="FOLDER")
    parser.add_argument("--no-called", dest="called", action="store_false")
    args = parser.parse_args()
    config = MODELS[args.model](args.layers)
    shape, model = Shape.of(config), build(config, "attn_ops")
    rows: dict[str, dict[str, float]] = {str(length): {} for length in args.prompts}
    ways = {"ours": "auto"} | ({"called": "FULL_DECODE_ONLY"} if args.called else {})
    note, caches = "", []
    for name, mode in ways.items():
        session = made(model, args.prompts, mode)
        for length in args.prompts:
            rows[str(length)][name] = prompt_ms(session, length)
        if args.profile and name == "ours":
            for length in args.prompts:
                write_profile(session, length, args.profile)
        print(session.report())
        if session.graphs is not None and name == "ours":
            gib = session.graphs.num_bytes / 2**30
            note = f"Captured in {session.graphs.seconds:.1f} s, {gib:.2f} GiB (asked 6, 0.4)."
        caches = session.cache.tensors
        session.release()
        del session
        torch._dynamo.reset()
        free()
    del model
    free()
    weights = Weights(shape)
    for length in args.prompts:
        graph = floor_graph(shape, weights, caches, 1, length, query=length)
        row = rows[str(length)]
        row["floor"] = median_ms(graph.replay, repeats=11)
        row["ratio"] = row["ours"] / row["floor"]
        del graph
        free()
    bars = [
        Bar(f"ours / floor: {length}", "<=", BARS[length], rows[str(length)]["ratio"])
        for length in args.prompts
        if length in BARS
    ]
    command = f"python -m benchmarks.first_token --model {args.model}"
    command += f" --prompts {' '.join(map(str, args.prompts))}"
    command += "" if args.layers is None else f" --layers {args.layers}"
    finish(args, {
        "command": command, "note": f"{NOTE} {note}", **origin(args), "rows": rows,
        "bars": [bar.as_dict() for bar in bars],
    })  # fmt: skip


if __name__ == "__main__":
    main()
