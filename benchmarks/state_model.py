"""A model whose layers keep states, whole: `python -m benchmarks.state_model`.

Milliseconds of a captured decode step beside those that its bytes take (weights, keys and values,
every request's states read and written), and from `add` to the first token of a prompt beside
products of the layers by cuBLAS, and flash-linear-attention's kernels of the rule where it is
installed, else ours, in a CUDA graph.
"""

from typing import Any

import torch

from benchmarks.batch_invariance_cost import prompt_ms
from benchmarks.decode_step import build, ours_ms, session_of
from benchmarks.floor import limit_ms
from benchmarks.harness import capture, copy_bandwidth, finish, free, median_ms, origin, parser_of
from benchmarks.shapes import MODELS
from benchmarks.state_layers import LAYERS, by_fla


def products_ms(model: torch.nn.Module, rows: int) -> float:
    """All products of the layers, each on its own, and the head of one row."""
    layers = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    *weights, head = (w.detach() for w in layers)
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(w) for w in layers}

    def run() -> None:
        for weight in weights:
            inputs[weight.shape[1]] @ weight.t()
        inputs[head.shape[1]][:1] @ head.t()

    return median_ms(capture(run).replay)


def rule_ms(config: Any, rows: int) -> tuple[float, str]:
    """The gated delta rule of all layers that have one, over a prompt; and by whose kernels."""
    layer = LAYERS["gated_delta_rule"](
        rows, 1, "cuda", torch.bfloat16, config.linear_num_value_heads, config.linear_value_head_dim
    )
    starts = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    by = by_fla("gated_delta_rule", layer, prompt=True)
    run = by or (lambda: layer.run(one, starts, starts[1:]))
    run()  # compiles
    number = list(config.layer_types).count("linear_attention")
    return number * median_ms(capture(run).replay), "fla" if by else "ours"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--cases", nargs="+", default=["1x1024", "8x1024", "64x1024"])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048])
    args = parser.parse_args()
    config, bandwidth = MODELS[args.model](args.layers), copy_bandwidth()
    cases = [(int(batch), int(context)) for batch, context in (c.split("x") for c in args.cases)]
    model = build(config, "attn_ops")
    compiled: Any = torch.compile(model, backend="attn_ops", fullgraph=True)
    session = session_of(
        compiled, [*cases, *((1, n + 1) for n in args.prompts)], None, merge_projections=True
    )
    states = session.cache.states
    assert states is not None, "its layers keep states"
    kept = sum(state[0].nbytes for state in states.tensors.values())
    rows: dict[str, dict[str, Any]] = {}
    for batch, context in cases:
        ours = ours_ms(session, batch, context)
        limit, _ = limit_ms(session.original, session.cache.tensors, batch, context, bandwidth)
        limit += 1000 * 2 * batch * kept / bandwidth
        rows[f"{batch}x{context}"] = {"ours": ours, "limit": limit, "ratio": ours / limit}
    for length in args.prompts:
        rows[str(length)] = {"ours": prompt_ms(session, length)}
    session.release()
    del session, compiled
    free()
    for length in args.prompts:
        row = rows[str(length)]
        row["products"] = products_ms(model, length)
        row["rule"], row["rule by"] = rule_ms(config, length)
        row["ratio"] = row["ours"] / (row["products"] + row["rule"])
    shown = ["python -m benchmarks.state_model --model", args.model, "--cases", *args.cases]
    shown += ["--prompts", *map(str, args.prompts)]
    shown += [] if args.layers is None else ["--layers", str(args.layers)]
    note = f"Milliseconds; a copy moves {bandwidth / 1e12:.2f} TB/s; states {kept} bytes a request."
    finish(args, {"command": " ".join(shown), "note": note, **origin(args), "rows": rows})


if __name__ == "__main__":
    main()
