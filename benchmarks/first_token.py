"""From a prompt to its first token: `python -m benchmarks.first_token`.

    ours     ms from `add` to the first token of one prompt, in a warm session with its defaults
    floor    products by cuBLAS and attention by FA3 of the whole prompt, in one CUDA graph

A session of 64 requests, whose steps hold a whole prompt. Its report says how long its captures
took, and which steps with prompts are replayed.
"""

from typing import Any

import torch

from benchmarks.batch_invariance_cost import prompt_ms
from benchmarks.decode_step import build
from benchmarks.floor import Shape, Weights, floor_graph
from benchmarks.harness import finish, free, median_ms, origin, parser_of
from benchmarks.shapes import MODELS
from graphs import DecodeSession

NOTE = (
    "Milliseconds from `add` to the first token of one prompt. ours: a warm session with its "
    "defaults, for 64 requests, whose steps hold the whole prompt; floor: products by cuBLAS and "
    "FA3, captured. Asked of ratio: 1.3 at 64 and 256, 1.2 at 512, 1.15 beyond."
)
PROMPTS = [64, 256, 512, 1024, 2048, 4096, 8192]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    args = parser.parse_args()
    config, longest = MODELS[args.model](args.layers), max(args.prompts)
    shape, model = Shape.of(config), build(config, "attn_ops")
    compiled: Any = torch.compile(model, backend="attn_ops", fullgraph=True)
    session = DecodeSession(
        compiled, max_batch_size=64, max_tokens=longest + 1, max_tokens_per_step=longest,
        cache_tokens=longest + 64 * 64, merge_projections=True,
    )  # fmt: skip
    session.warm_up()
    rows = {str(length): {"ours": prompt_ms(session, length)} for length in args.prompts}
    print(session.report())
    note = ""
    if session.graphs is not None:
        gib = session.graphs.num_bytes / 2**30
        note = f"Captured in {session.graphs.seconds:.1f} s, {gib:.2f} GiB (asked 6, 0.4)."
    caches = session.cache.tensors
    session.release()
    del session, compiled, model
    torch._dynamo.reset()
    free()
    weights = Weights(shape)
    for length in args.prompts:
        graph = floor_graph(shape, weights, caches, 1, length, query=length)
        row = rows[str(length)]
        row["floor"] = median_ms(graph.replay, repeats=11)
        row["ratio"] = row["ours"] / row["floor"]
        del graph
        free()
    command = f"python -m benchmarks.first_token --model {args.model}"
    command += f" --prompts {' '.join(map(str, args.prompts))}"
    command += "" if args.layers is None else f" --layers {args.layers}"
    finish(args, {"command": command, "note": f"{NOTE} {note}", **origin(args), "rows": rows})


if __name__ == "__main__":
    main()
