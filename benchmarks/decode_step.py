"""One decode step of a model's shape, four ways: `python -m benchmarks.decode_step`.

    floor         products by cuBLAS and attention by FA3, in one CUDA graph (benchmarks/floor.py)
    ours          DecodeSession: attn_ops backend of torch.compile, the whole step in one CUDA graph
    transformers  `generate` of Transformers, eager, per token
    static        `generate(cache_implementation="static")`: its own compiled mode, per token

`--model` names one of `benchmarks.shapes`. bf16, random weights; with `--fp8` the products of the
layers are in FP8, a scale a row. A step's time is that of the device work, replayed; ours includes
metadata and sampling. A model with experts has no floor but the bytes of weights, keys and values.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import fx_passes
from attn_ops.integrations import transformers as integration
from attn_ops.integrations.merged import merge_projections
from benchmarks.floor import (
    Shape,
    Weights,
    floor_graph,
    has_experts,
    limit_ms,
    physical_limit_ms,
)
from benchmarks.harness import (
    brief,
    copy_bandwidth,
    finish,
    free,
    median_ms,
    model_of,
    origin,
    parser_of,
    token_ms,
)
from benchmarks.quantized_linear import quantize_linear_layers
from benchmarks.shapes import MODELS
from graphs import BatchDescriptor, CUDAGraphMode, DecodeSession
from graphs.capture.store import CapturedStep

CASES = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (8, 8192), (64, 8192)]


def build(config: Any, implementation: str, device: str = "cuda") -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    integration.register()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=implementation, dtype=torch.bfloat16
        )
    return model.eval().requires_grad_(False)


def merged(config: Any, device: str) -> Any:
    """The model with merged projections; on a GPU compiled, with our passes."""
    model: Any = build(config, "attn_ops", device)
    merge_projections(model)
    if device == "cuda":
        model = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    return model


def our_session(
    model: Any,
    options: dict[str, Any],
    cases: list[tuple[int, int]],
    backend: str | None,
    block_size: int = 16,
) -> DecodeSession:
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True, options=options)
    return session_of(compiled, cases, backend, block_size)


def session_of(
    compiled: Any,
    cases: list[tuple[int, int]],
    backend: str | None,
    block_size: int = 16,
    **options: Any,
) -> DecodeSession:
    """Of a compiled model, with graphs and room for the cases."""
    batches = sorted({batch for batch, _ in cases})
    longest = max(context for _, context in cases)
    tokens = max(batch * context for batch, context in cases) + 16 * max(batches)
    session = DecodeSession(
        compiled, max_batch_size=max(batches), max_tokens=longest, cache_tokens=tokens,
        capture_sizes=batches, backend=backend, block_size=block_size,
        reserve="length",  # all layers have the same blocks, which `filled_graph` fills
        **options,
    )  # fmt: skip
    for cache in session.cache.tensors:
        cache[1:].normal_()
    session.warm_up()
    return session


def decode_graph(
    session: DecodeSession, batch: int, mode: CUDAGraphMode = CUDAGraphMode.FULL
) -> CapturedStep:
    """The greedy decode step of `batch` requests."""
    assert session.graphs is not None, session.graph_mode_why
    captured = session.graphs.get(BatchDescriptor(batch, batch, uniform=True), mode)
    assert captured is not None, "failures raise"
    return captured


def filled_graph(session: DecodeSession, batch: int, context: int) -> CapturedStep:
    """The captured step of `batch` requests, each with `context` tokens in the cache after it.

    No request is active, so that none grows from replay to replay; from the second one on, keys
    and values go to the null block.
    """
    captured = decode_graph(session, batch)
    host, blocks = captured.tensors.host, -(-context // session.cache.block_size)
    host["seq_lens"].fill_(context)
    host["position_ids"].fill_(context - 1)
    host["input_ids"].random_(0, session.vocab_size)
    table = torch.arange(1, batch * blocks + 1, dtype=torch.int32).view(batch, blocks)
    if "state_slots" in host:
        host["state_slots"].copy_(torch.arange(1, batch + 1))
    host["block_table"].zero_()
    host["block_table"][:, :blocks] = table
    offset = (context - 1) % session.cache.block_size
    host["slot_mapping"].copy_(table[:, -1].long() * session.cache.block_size + offset)
    captured.tensors.upload()
    return captured


def ours_ms(session: DecodeSession, batch: int, context: int) -> float:
    """A replay of `filled_graph`."""
    captured = filled_graph(session, batch, context)
    return median_ms(lambda: session.graphs.replay(captured))


def transformers_generate(
    model: Any, cache: str | None
) -> Callable[[list[list[int]], int], object]:
    """`generate` with its default cache; with "static" its own compiled mode (CUDA graphs)."""
    options = {} if cache is None else {"cache_implementation": cache}

    def generate(prompts: list[list[int]], num_tokens: int) -> object:
        ids = torch.tensor(prompts, device="cuda")
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens,
            min_new_tokens=num_tokens, do_sample=False, pad_token_id=0, **options,
        )  # fmt: skip

    return generate


def compare_transformers(config: Any, rows: dict[str, dict[str, Any]], wanted: list[str]) -> None:
    """Add what a user of Transformers waits for a token."""
    model = build(config, "sdpa")
    for name, cache in (("transformers", None), ("static", "static")):
        for case in wanted:
            torch._dynamo.reset()
            row = rows.setdefault(case, {})
            try:
                batch, context = map(int, case.split("x"))
                row[name] = token_ms(transformers_generate(model, cache), batch, context, 4, 20)
            except Exception as error:
                row[f"{name}_error"] = brief(error)
            free()
            if name in row and "ours" in row:
                row[f"{name} / ours"] = row[name] / row["ours"]


def profile(session: DecodeSession, path: str) -> None:
    """Kernel times of one replay of the smallest graph, as text."""
    captured = decode_graph(session, min(session.capture_sizes))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        session.runner.launch(captured)
        torch.cuda.synchronize()
    with open(path, "w") as file:
        file.write(
            prof.key_averages().table(
                sort_by="cuda_time_total", row_limit=40, max_name_column_width=90
            )
        )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = MODELS[args.model](args.layers)
    pairs = (case.split("x") for case in args.cases)
    cases = [(int(batch), int(context)) for batch, context in pairs] or CASES
    rows: dict[str, Any] = {f"{b}x{c}": {} for b, c in cases}
    rate = copy_bandwidth()
    free()
    model = build(config, "attn_ops")
    merge_projections(model)
    begin = time.perf_counter()
    if args.fp8:
        quantize_linear_layers(model, "fp8_row", lambda: None)
    session = our_session(model, json.loads(args.options), cases, args.backend)
    seconds = time.perf_counter() - begin
    command = f"python -m benchmarks.decode_step --model {args.model}{' --fp8' * args.fp8}"
    command += f" --cases {' '.join(args.cases)}" if args.cases else ""
    result = {
        "command": command, **origin(args), "layers": config.num_hidden_layers,
        "options": args.options, "backend": session.backend_selection.backend.name,
        "copy_bytes_per_second": rate, "warm_up_seconds": seconds,
        "compile_seconds": session.compile_seconds, "capture_seconds": session.graphs.seconds,
        "graph_bytes": session.graphs.num_bytes, "matches": session.compile_record.matches(),
        "rows": rows,
    }  # fmt: skip
    for case, row in zip(cases, rows.values(), strict=True):
        row["ours"] = ours_ms(session, *case)
    caches = session.cache.tensors
    if args.profile:
        profile(session, args.profile)
    session.release()
    if has_experts(config):
        for case, row in zip(cases, rows.values(), strict=True):
            row["limit"], row["experts"] = limit_ms(model, caches, *case, rate)
            row["ours / limit"] = row["ours"] / row["limit"]
    del model, session
    free()
    if not has_experts(config):
        shape = Shape.of(config)
        weights = Weights(shape, fp8=args.fp8)
        for case, row in zip(cases, rows.values(), strict=True):
            row["floor"] = median_ms(floor_graph(shape, weights, caches, *case).replay)
            row["limit"] = physical_limit_ms(shape, *case, rate, fp8=args.fp8)
            row["ours / floor"] = row["ours"] / row["floor"]
        del weights
    del caches
    free()
    if args.transformers:
        compare_transformers(config, rows, args.transformers)
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="*", default=[], help="BATCHxCONTEXT; default: all")
    parser.add_argument("--options", default="{}", help="options of the attn_ops backend, JSON")
    parser.add_argument("--backend", default=None)
    parser.add_argument("--fp8", action="store_true", help="layers' products in FP8 by row")
    parser.add_argument(
        "--transformers", nargs="*", default=["1x1024"], help="cases for Transformers"
    )
    parser.add_argument(
        "--profile", default=None, help="write kernel times of the smallest batch here"
    )
    args = model_of(parser)
    finish(args, measure(args))


if __name__ == "__main__":
    main()
