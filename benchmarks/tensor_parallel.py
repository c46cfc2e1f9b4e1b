"""A model split over GPUs: `torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel`.

    floor     a rank's products by cuBLAS, attention by FA3, sums over ranks by PyTorch's one-shot
              kernel, in one CUDA graph (benchmarks/floor.py)
    ours      a replay of the captured step on each rank, the first rank's time
    one GPU   the same of the whole model on the first rank

Milliseconds of a decode step; bf16, random weights. `--workload`: seconds of the 512 requests of
benchmarks/workload as well.
"""

import argparse
import copy
import dataclasses
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist

import fx_passes
from attn_ops.integrations import transformers as integration
from attn_ops.integrations.merged import merge_projections
from attn_ops.integrations.transformers import num_ranks
from attn_ops.integrations.transformers.sharded import keep_parts
from benchmarks.all_reduce import symmetric_bytes
from benchmarks.decode_step import build, ours_ms, session_of
from benchmarks.floor import Shape, Weights, floor_graph
from benchmarks.harness import finish, free, median_ms, model_of, origin, parser_of
from benchmarks.shapes import MODELS, tiny_llama
from benchmarks.workload.ours import make_session, run_all
from benchmarks.workload.requests import SMALL, Workload

CASES = [(1, 1024), (8, 1024), (64, 1024)]


def split(config: Any, device: torch.device) -> Any:
    """This rank's part: Transformers splits a model of one layer, the others are copies of it."""
    from transformers import AutoModelForCausalLM

    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    with tempfile.TemporaryDirectory() as folder:
        path = [folder if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(path, device=torch.device("cpu"))
        if dist.get_rank() == 0:
            build(one, "attn_ops", str(device)).save_pretrained(folder)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(
            path[0], attn_implementation="attn_ops", tp_plan="auto", dtype=torch.bfloat16
        )
        dist.barrier()
    keep_parts(model)
    layers = model.model.layers
    for index in range(1, config.num_hidden_layers):
        layer = copy.deepcopy(layers[0])
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index
            for weight in part.parameters(recurse=False):
                if weight.dim() > 1:
                    weight.data.normal_(0, config.initializer_range)
        layers.append(layer)
    model.config.num_hidden_layers = config.num_hidden_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types * config.num_hidden_layers
    return model.eval().requires_grad_(False)


def compiled(model: Any) -> Any:
    merge_projections(model)
    return torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)


def part_of(shape: Shape, ranks: int) -> Shape:
    return dataclasses.replace(
        shape, heads=shape.heads // ranks, kv_heads=shape.kv_heads // ranks,
        intermediate=shape.intermediate // ranks, vocab=shape.vocab // ranks,
    )  # fmt: skip


def one_shot(rows: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name  # type: ignore
    place = symmetric_bytes(group, rows.device)[: rows.nbytes].view(rows.dtype).view(rows.shape)
    return torch.ops.symm_mem.one_shot_all_reduce_copy(place, rows, "sum", group)


def steps(model: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Milliseconds of each case, and the caches."""
    session = session_of(model, CASES, None)
    found = [ours_ms(session, *case) for case in CASES]
    caches = session.cache.tensors
    session.release()
    return found, caches


def seconds_of(model: Any, workload: Workload, device: str) -> float:
    """Of the whole workload, after one that compiles and captures."""
    split_cache = workload.max_batch_size * workload.max_tokens if num_ranks(model) > 1 else None
    session = make_session(
        model, workload, "FULL_DECODE_ONLY", 4, device == "cuda", cache_tokens=split_cache
    )
    session.warm_up()
    wishes = workload.draw(session.vocab_size)
    run_all(session, wishes[: max(4, len(wishes) // 8)])
    seconds, _ = run_all(session, wishes)
    session.release()
    return seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu, ranks, first = args.device == "cuda", dist.get_world_size(), dist.get_rank() == 0
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    config = MODELS[args.model](args.layers) if on_gpu else tiny_llama(args.layers or 2)
    workload = Workload() if on_gpu else SMALL
    has_steps = on_gpu and not args.no_steps
    rows: dict[str, Any] = {f"{b}x{c}": {} for b, c in CASES if has_steps}
    model = compiled(split(config, device))
    seconds = {}
    if args.workload:
        seconds[f"{ranks} ranks"] = seconds_of(model, workload, args.device)
    if has_steps:
        ours, caches = steps(model)
        shape = part_of(Shape.of(config), ranks)
        weights = Weights(shape)
        for case, ms, row in zip(CASES, ours, rows.values(), strict=True):
            graph = floor_graph(shape, weights, caches, *case, reduce=one_shot)
            dist.barrier()
            row |= {"ours": ms, "floor": median_ms(graph.replay)}
        del graph, weights, caches
    del model
    torch._dynamo.reset()
    free()
    if first and not args.no_single:
        whole = compiled(build(config, "attn_ops", str(device)))
        if args.workload:
            seconds["one"] = seconds_of(whole, workload, args.device)
        if has_steps:
            for ms, row in zip(steps(whole)[0], rows.values(), strict=True):
                row["one GPU"] = ms
    command = f"torchrun --nproc-per-node {ranks} -m benchmarks.tensor_parallel"
    note = f"{args.model}, {config.num_hidden_layers} layers, {ranks} ranks; ms of a decode step."
    given = " --workload" * args.workload + " --no-steps" * args.no_steps
    if args.workload:
        rows["workload, s"] = seconds
    found = {"command": f"{command} --model {args.model}{given}", "note": note}
    return found | origin(args) | {"rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", action="store_true", help="512 requests as well")
    parser.add_argument("--no-steps", action="store_true", help="the workload alone")
    parser.add_argument("--no-single", action="store_true", help="without one GPU's figures")
    args = model_of(parser)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    integration.register()
    torch.manual_seed(0)
    result = measure(args)
    if dist.get_rank() == 0:
        finish(args, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
