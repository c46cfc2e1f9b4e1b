"""One decode step of a model's shape, four ways: `python -m benchmarks.decode_step`.

    floor         products by cuBLAS and attention by FA3, in one CUDA graph (benchmarks/floor.py)
    ours          DecodeSession: attn_ops backend of torch.compile, the whole step in one CUDA graph
    forward       Transformers eager, DynamicCache: a bare forward call
    transformers  the same through `generate`, per token
    static        `generate(cache_implementation="static")`: its own compiled mode, per token

`--model` names one of `benchmarks.shapes`. bf16, random weights; with `--fp8` the products of the
layers are in FP8, a scale a row. A step's time is that of the device work, replayed; ours includes
metadata and sampling. A model with experts has no floor but the bytes of weights, keys and values.
"""

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

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
from benchmarks.harness import copy_bandwidth, median_ms, write
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
    compiled: Any = torch.compile(
        model, backend=fx_passes.attn_ops, fullgraph=True, options=options
    )
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


def decode_graph(session: DecodeSession, batch: int) -> CapturedStep:
    """The whole greedy decode step of `batch` requests."""
    key = BatchDescriptor(batch, batch, uniform=True)
    captured = session.graphs.get(key, CUDAGraphMode.FULL)
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
    graphs, captured = session.graphs, filled_graph(session, batch, context)
    assert graphs is not None, "the session captures"
    return median_ms(lambda: graphs.replay(captured))


def transformers_ms(model: Any, batch: int, context: int, implementation: str) -> float:
    """Time per token of `model.generate` around `context` tokens: what its user waits for one.

    The difference between generating 4 and 20 tokens, so that prefill and compilation are not in
    it. "dynamic" is generate's default, "static" its own compiled mode (CUDA graphs).
    """
    ids = torch.randint(0, model.config.vocab_size, (batch, context - 12), device="cuda")

    def seconds(tokens: int) -> float:
        options = {
            "max_new_tokens": tokens,
            "min_new_tokens": tokens,
            "do_sample": False,
            "pad_token_id": 0,
        }
        if implementation == "static":
            options["cache_implementation"] = "static"
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for tokens in (20, 4, 20, 4):
        seconds(tokens)
    return 1000 * statistics.median((seconds(20) - seconds(4)) / 16 for _ in range(3))


def transformers_forward_ms(model: Any, batch: int, context: int) -> float:
    """Time of a bare forward call with DynamicCache: no generate loop, no sampling."""
    from transformers import DynamicCache

    cache, config = DynamicCache(config=model.config), model.config
    shape = (batch, config.num_key_value_heads, context - 1, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16)
        cache.update(keys, values, layer)
    ids = torch.randint(0, config.vocab_size, (batch, 1), device="cuda")
    position = torch.full((batch, 1), context - 1, device="cuda")
    given = {integration.cache_name(model): cache}

    def step() -> None:
        model(input_ids=ids, position_ids=position, use_cache=True, **given)
        cache.crop(-1)

    with torch.no_grad():
        return median_ms(step, warmup=3, repeats=15)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = MODELS[args.model](args.layers)
    cases = [c for c in CASES if f"{c[0]}x{c[1]}" in args.cases] if args.cases else CASES
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": args.model,
        "layers": config.num_hidden_layers, "options": args.options, "fp8": args.fp8,
        "copy_bytes_per_second": copy_bandwidth(), "rows": {f"{b}x{c}": {} for b, c in cases},
    }  # fmt: skip
    rows = result["rows"]
    torch.cuda.empty_cache()
    model = build(config, "attn_ops")
    result["merged_groups"] = merge_projections(model) if args.merge else 0
    begin = time.perf_counter()
    if args.fp8:
        quantize_linear_layers(model, "fp8_row", lambda: None)
    session = our_session(model, json.loads(args.options), cases, args.backend)
    result["warm_up_seconds"] = time.perf_counter() - begin
    result["compile_seconds"] = session.compile_seconds
    assert session.graphs is not None, session.graph_mode_why
    result["capture_seconds"] = session.graphs.seconds
    result["graph_bytes"] = session.graphs.num_bytes
    result["backend"] = session.backend_selection.backend.name
    result["matches"] = session.compile_record.matches()
    for batch, context in cases:
        rows[f"{batch}x{context}"]["ours"] = ours_ms(session, batch, context)
    caches = session.cache.tensors
    if args.profile:
        profile(session, args.profile)
    session.release()
    if has_experts(config):
        for batch, context in cases:
            row = rows[f"{batch}x{context}"]
            row["limit"], row["experts"] = limit_ms(
                model, caches, batch, context, result["copy_bytes_per_second"]
            )
            row["ours/limit"] = row["ours"] / row["limit"]
    del model, session
    gc.collect()
    torch.cuda.empty_cache()
    if not has_experts(config):
        measure_floor(args, config, caches, cases, result)
    del caches
    gc.collect()
    torch.cuda.empty_cache()
    if args.transformers:
        compare_transformers(config, rows, args.transformers, args.attention)
    return result


def measure_floor(
    args: argparse.Namespace,
    config: Any,
    caches: list[torch.Tensor],
    cases: list[tuple[int, int]],
    result: dict[str, Any],
) -> None:
    """Add floor and limit to the rows."""
    shape, rows = Shape.of(config), result["rows"]
    weights = Weights(shape, fp8=args.fp8)
    for batch, context in cases:
        row = rows[f"{batch}x{context}"]
        row["floor"] = median_ms(floor_graph(shape, weights, caches, batch, context).replay)
        row["limit"] = physical_limit_ms(
            shape, batch, context, result["copy_bytes_per_second"], fp8=args.fp8
        )
        row["ours/floor"] = row["ours"] / row["floor"]


def compare_transformers(
    config: Any, rows: dict[str, dict[str, Any]], wanted: list[str], attention: str
) -> None:
    model = build(config, attention)
    ways: dict[str, Callable[..., float]] = {
        "forward": transformers_forward_ms,
        "transformers": lambda m, b, c: transformers_ms(m, b, c, "dynamic"),
        "static": lambda m, b, c: transformers_ms(m, b, c, "static"),
    }
    for name, measure_one in ways.items():
        for case in wanted:
            batch, context = map(int, case.split("x"))
            torch._dynamo.reset()
            try:
                rows.setdefault(case, {})[name] = measure_one(model, batch, context)
            except Exception as error:
                rows[case][f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
            torch.cuda.empty_cache()
        for row in rows.values():
            if name in row and "ours" in row:
                row[f"{name}/ours"] = row[name] / row["ours"]


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


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"decode step of {result['model']}, ms; {result['gpu']}, torch {result['torch']}, "
        f"backend {result['backend']}"
    )
    columns = [
        "limit",
        "floor",
        "ours",
        "ours/floor",
        "ours/limit",
        "transformers",
        "transformers/ours",
        "static",
        "static/ours",
    ]
    for column in ["batch x context", *columns]:
        table.add_column(column, justify="right")
    for case, row in result["rows"].items():
        table.add_row(case, *(f"{row[c]:.3f}" if c in row else "" for c in columns))
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[], help="BATCHxCONTEXT; default: all")
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--options", default="{}", help="options of the attn_ops backend, JSON")
    parser.add_argument("--backend", default=None)
    parser.add_argument("--fp8", action="store_true", help="layers' products in FP8 by row")
    parser.add_argument("--no-merge", dest="merge", action="store_false")
    parser.add_argument(
        "--transformers", nargs="*", default=["1x1024"], help="cases for Transformers"
    )
    parser.add_argument("--attention", default="sdpa", help="attention of Transformers' own model")
    parser.add_argument("--json", default=None, help="write the result here")
    parser.add_argument(
        "--profile", default=None, help="write kernel times of the smallest batch here"
    )
    args = parser.parse_args()
    result = measure(args)
    show(result)
    print(json.dumps(result, indent=1))
    write(args.json, result)


if __name__ == "__main__":
    main()
