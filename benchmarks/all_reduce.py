"""Sums over ranks: `torchrun --nproc-per-node 2 -m benchmarks.all_reduce`.

    ours        `attn_ops::all_reduce`
    nccl        `torch.distributed.all_reduce`, which changes its input
    one shot    PyTorch's kernel that reads all ranks' memory, of rows that lie there already
    two shots   the one that sums a part on each rank and writes it to all, likewise

Microseconds of one among many in a CUDA graph. `--stress N` then makes N sums of random sizes,
while one rank at a time is late by up to a millisecond, and counts those that are wrong.
"""

import argparse
import functools
import os
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from attn_ops.ops import collectives  # noqa: F401  registers the operator
from benchmarks.harness import capture, finish, median_ms, origin, parser_of

SIZES = [8 << 10, 64 << 10, 512 << 10, 2 << 20, 16 << 20]
IN_A_GRAPH = 20


# Cached: allocated once, as a captured graph needs it.
@functools.cache
def symmetric_bytes(group: str, device: torch.device) -> torch.Tensor:
    """As many as the largest sum has, where PyTorch's kernels of all ranks can read them."""
    shared = symmetric_memory.empty(SIZES[-1], dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(shared, group)
    return shared


def ways(x: torch.Tensor, group: str) -> dict[str, Callable[[], Any]]:
    place = symmetric_bytes(group, x.device)[: x.nbytes].view(x.dtype)
    return {
        "ours": lambda: torch.ops.attn_ops.all_reduce(x, group),
        "nccl": lambda: dist.all_reduce(x),
        "one shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(place, "sum", group),
        "two shots": lambda: torch.ops.symm_mem.two_shot_all_reduce_(place, "sum", group),
    }


def microseconds(run: Callable[[], Any]) -> float:
    def many() -> None:
        for _ in range(IN_A_GRAPH):
            run()

    dist.barrier()
    return round(1000 * median_ms(capture(many).replay) / IN_A_GRAPH, 2)


def num_wrong(number: int, group: str, device: torch.device) -> int:
    """Of sums of whole numbers, of random sizes, with one rank late."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    choose, wrong = random.Random(0), torch.zeros((), dtype=torch.int64, device=device)
    for i in range(number):
        length = 8 * choose.randint(1, choose.choice((64, 4096, 1 << 17)))
        late, cycles = choose.randrange(ranks), choose.choice((0, 0, 10_000, 1_000_000))
        x = torch.arange(length, device=device, dtype=torch.float32) % 509 + rank * (i % 7)
        if rank == late and cycles:
            torch.cuda._sleep(cycles)
        total = torch.ops.attn_ops.all_reduce(x, group)
        others = sum(range(ranks)) * (i % 7)
        wrong += (total != ranks * (torch.arange(length, device=device) % 509) + others).any()
    return int(wrong)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device, group = torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD.group_name  # type: ignore
    rows = {}
    for size in SIZES:
        x = torch.zeros(size // 2, device=device, dtype=torch.bfloat16)
        rows[f"{size >> 10} KB"] = {name: microseconds(run) for name, run in ways(x, group).items()}
    note = f"{dist.get_world_size()} ranks; microseconds of a sum of so many bytes of bfloat16."
    if args.stress:
        note += f" Wrong of {args.stress} sums: {num_wrong(args.stress, group, device)}."
    command = "torchrun --nproc-per-node 2 -m benchmarks.all_reduce"
    return {"command": command, "note": note, **origin(args), "rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--stress", type=int, default=0)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    result = measure(args)
    if dist.get_rank() == 0:
        finish(args, result)
        print(result["note"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
