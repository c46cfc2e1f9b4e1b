"""A decode step without a session, every way: `python -m benchmarks.by_hand`.

Layers of the Llama-3-8B shape, bf16, TRITON. `called` calls the model with metadata that is there;
`captured` writes the inputs, checks addresses and replays (examples/own_loop.py); `session` replays
the whole step of a DecodeSession, its metadata and its sampling included. Wall milliseconds.
"""

from typing import Any

import torch

import fx_passes
from attn_ops import PagedKVCache, get_backend
from attn_ops.integrations import transformers as integration
from benchmarks.decode_step import build, ours_ms, session_of
from benchmarks.harness import finish, free, origin, parser_of, wall_ms
from benchmarks.shapes import llama_3_8b
from examples.own_loop import BLOCK, DecodeStep

CALLED: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "attn_ops": {"backend": fx_passes.attn_ops},
    "attn_ops, reduce-overhead": {"backend": fx_passes.attn_ops, "mode": "reduce-overhead"},
    "inductor": {},
    "inductor, reduce-overhead": {"mode": "reduce-overhead"},
    "inductor, reduce-overhead, our passes": {
        "options": {"triton.cudagraphs": True, **fx_passes.options()},
    },
}
TIMES = {"warmup": 10, "repeats": 60}


@torch.no_grad()
def measure(layers: int, batch: int, context: int) -> dict[str, dict[str, float]]:
    model = build(llama_3_8b(layers), "attn_ops")
    specs, backend = integration.attention_specs(model), get_backend("TRITON")
    builder = backend.builder(backend, specs, BLOCK, "cuda")
    cache = PagedKVCache(specs, num_tokens=batch * (context + 2 * BLOCK), device="cuda")
    for request in range(batch):
        cache.reserve(request, context + 1)
    tokens, lengths = torch.arange(batch, device="cuda"), [context + 1] * batch
    table, rows = cache.block_table(range(batch)), {}
    for name, options in CALLED.items():
        torch._dynamo.reset()
        run = model if options is None else torch.compile(model, fullgraph=True, **options)
        step = DecodeStep(run, builder, cache, batch, context + 2)
        metadata = builder.build(0, step.write(tokens, lengths, table))
        rows[name] = {"called": wall_ms(lambda step=step, m=metadata: step.call(m), **TIMES)}
        if options is None or "reduce-overhead" not in name:
            replay = step.capture(step.write(tokens, lengths, table))
            rows[name]["captured"] = wall_ms(lambda r=replay: r(tokens, lengths, table), **TIMES)
        free()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = session_of(compiled, [(batch, context)], "TRITON")
    rows["attn_ops"]["session"] = ours_ms(session, batch, context)
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--case", default="8x100", help="BATCHxCONTEXT")
    args = parser.parse_args()
    batch, context = map(int, args.case.split("x"))
    command = f"python -m benchmarks.by_hand --layers {args.layers} --case {args.case}"
    rows = measure(args.layers, batch, context)
    finish(args, {"command": command, **origin(args), "rows": rows})


if __name__ == "__main__":
    main()
