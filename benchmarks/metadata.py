"""Host time of building a step's metadata: `python -m benchmarks.metadata`.

Microseconds until the call returns, medians, the device idle before each call. Beside it, what one
would write first: a loop over requests and their tokens, one tensor per list. On a GPU also the
device time of the step's own kernels, captured.
"""

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from attn_ops.metadata import (
    CommonAttentionMetadata,
    MetadataBuffers,
    UBatchSlice,
    advance_step,
    compute_causal_conv1d_metadata,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    positions_and_slots,
    split_attn_metadata,
    split_decodes_and_prefills,
)
from benchmarks.figures import write
from benchmarks.timing import capture, median_ms

SIZES = (1, 16, 64, 256, 1024)
BLOCK_SIZE, CONTEXT = 16, 1024
PREFILL_TOKENS = 2048  # of a mixed step in all: one request in eight is a prefill


class Step:
    """One step's input as an engine holds it: lengths on the host, block table on the device."""

    def __init__(self, num_reqs: int, mixed: bool, device: str) -> None:
        self.num_reqs, self.mixed, self.device = num_reqs, mixed, device
        generator = np.random.default_rng(num_reqs)
        self.query = np.ones(num_reqs, dtype=np.int32)
        if mixed:
            prefills = max(1, num_reqs // 8)
            self.query[num_reqs - prefills :] = PREFILL_TOKENS // prefills
        self.seq = self.query + generator.integers(1, CONTEXT, num_reqs, dtype=np.int32)
        width = -(-(CONTEXT + PREFILL_TOKENS) // BLOCK_SIZE)
        table = generator.permutation(num_reqs * width).astype(np.int32) + 1
        self.table_cpu = torch.from_numpy(table.reshape(num_reqs, width))
        self.num_tokens = int(self.query.sum())
        self.out = MetadataBuffers.allocate(num_reqs, self.num_tokens, width, device)
        self.out.block_table.copy_(self.table_cpu)  # where an engine keeps it
        self.rows = torch.from_numpy(np.cumsum(self.query) - 1)
        self.rows_device = self.rows.to(device)

    def build(self, out: MetadataBuffers | None = None) -> CommonAttentionMetadata:
        return CommonAttentionMetadata.from_lengths(
            self.query, self.seq, self.out.block_table, BLOCK_SIZE, self.device, out=out
        )

    def with_logits(self) -> CommonAttentionMetadata:
        return self.build().replace(
            logits_indices_padded=self.rows_device,
            num_logits_indices=self.num_reqs,
            logits_indices_cpu=self.rows,
        )

    def loop(self) -> CommonAttentionMetadata:
        """Request by request in Python, for comparison. The table's host copy is at hand."""
        starts, positions, slots, computed = [0], [], [], []
        for request in range(self.num_reqs):
            query, seq = int(self.query[request]), int(self.seq[request])
            starts.append(starts[-1] + query)
            computed.append(seq - query)
            blocks = self.table_cpu[request].tolist()
            for position in range(seq - query, seq):
                positions.append(position)
                slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts_cpu = torch.tensor(starts, dtype=torch.int32)
        seq_cpu = torch.tensor(self.seq.tolist(), dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts_cpu.to(self.device),
            query_start_loc_cpu=starts_cpu,
            seq_lens=seq_cpu.to(self.device),
            seq_lens_cpu=seq_cpu,
            num_computed_tokens_cpu=torch.tensor(computed, dtype=torch.int32),
            num_reqs=self.num_reqs,
            num_actual_tokens=starts[-1],
            max_query_len=max(self.query.tolist()),
            max_seq_len=max(self.seq.tolist()),
            block_table_tensor=self.out.block_table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64).to(self.device),
            positions=torch.tensor(positions, dtype=torch.int64).to(self.device),
        )


def median_us(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median microseconds until `run` returns."""
    times = []
    for _ in range(repeats + 10):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[10:]) * 1e6


def host_times(step: Step, repeats: int) -> dict[str, float]:
    """Microseconds of each function on one step."""
    common, logits, device = step.build(), step.with_logits(), step.device
    middle = step.num_reqs // 2
    token = int(common.query_start_loc_cpu[middle])
    halves = [
        UBatchSlice(slice(0, middle), slice(0, token)),
        UBatchSlice(slice(middle, step.num_reqs), slice(token, step.num_tokens)),
    ]
    starts_cpu = common.query_start_loc_cpu
    runs = {
        "build": step.build,
        "build, buffers": lambda: step.build(step.out),
        "loop": step.loop,
        "split decodes": lambda: split_decodes_and_prefills(common, 1),
        "two micro-batches": lambda: split_attn_metadata(halves if middle else halves[1:], common),
        "virtual batches": lambda: make_local_attention_virtual_batches(256, common),
        "virtual, on device": lambda: make_local_attention_virtual_batches(
            256, common, on_device=True
        ),
        "fast prefill": lambda: make_kv_sharing_fast_prefill_common_attn_metadata(logits),
        "conv1d": lambda: compute_causal_conv1d_metadata(
            common.query_start_loc, query_start_loc_cpu=starts_cpu
        ),
    }
    few = max(10, repeats // 10)
    return {n: median_us(run, device, few if n == "loop" else repeats) for n, run in runs.items()}


def device_times(step: Step) -> dict[str, float]:
    """Microseconds on the device, each captured 20 times in one graph."""
    common = step.build(step.out)
    sampled = torch.zeros(step.num_reqs, dtype=torch.int64, device="cuda")
    tokens, places, slots = (torch.zeros_like(sampled) for _ in range(3))
    seq_lens = torch.full_like(sampled, 2, dtype=torch.int32)
    table = common.block_table_tensor

    def positions() -> None:
        positions_and_slots(
            common.query_start_loc,
            common.seq_lens,
            table,
            BLOCK_SIZE,
            step.num_tokens,
            positions=common.positions,
            slot_mapping=common.slot_mapping,
        )

    runs = {
        "positions and slots": positions,
        "advance_step": lambda: advance_step(
            sampled, tokens, places, seq_lens, slots, table, BLOCK_SIZE
        ),
        "virtual batches": lambda: make_local_attention_virtual_batches(
            256, common, on_device=True
        ),
    }
    return {
        name: median_ms(capture(lambda run=run: [run() for _ in range(20)]).replay) * 1e3 / 20
        for name, run in runs.items()
    }


def growth(device: str, num_steps: int) -> dict[str, float]:
    """Bytes that `num_steps` builds leave behind, after as many as warm everything up."""
    step = Step(64, True, device)

    def run(count: int) -> None:
        for i in range(count):
            step.build(step.out if i % 2 else None)
            make_local_attention_virtual_batches(256, step.build(step.out))

    run(200)
    gc.collect()
    on_device = torch.cuda.memory_reserved() if device == "cuda" else 0
    tracemalloc.start()
    run(10)
    before = tracemalloc.get_traced_memory()[0]
    run(num_steps)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    reserved = torch.cuda.memory_reserved() if device == "cuda" else 0
    return {"steps": num_steps, "host bytes": after - before, "device bytes": reserved - on_device}


def show(result: dict) -> None:
    console = Console(width=170)
    for kind, rows in result["microseconds"].items():
        table = Table(title=f"{kind} step, microseconds ({result['device']})")
        columns = list(next(iter(rows.values())))
        for column in ["requests", *columns]:
            table.add_column(column, justify="right")
        for size, row in rows.items():
            table.add_row(str(size), *(f"{row[c]:.1f}" for c in columns))
        console.print(table)
    console.print(f"growth from 64 to 1024 requests: {result['growth 64 to 1024']}")
    console.print(f"allocation over steps: {result['allocation']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the allocation check")
    parser.add_argument("--json", default=None, help="write the result here")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    times: dict[str, dict[int, dict[str, float]]] = {}
    for kind in ("decode", "mixed"):
        times[kind] = {}
        for size in SIZES:
            step = Step(size, kind == "mixed", args.device)
            times[kind][size] = host_times(step, args.repeats)
            if args.device == "cuda":
                on_device = device_times(step)
                times[kind][size] |= {f"gpu: {n}": us for n, us in on_device.items()}
    result = {
        "device": name,
        "torch": torch.__version__,
        "microseconds": times,
        "growth 64 to 1024": {
            f"{kind}, {n}": round(rows[1024][n] / rows[64][n], 2)
            for kind, rows in times.items()
            for n in ("build", "build, buffers")
        },
        "allocation": growth(args.device, args.steps),
    }
    show(result)
    print(json.dumps(result))
    write(args.json, result)


if __name__ == "__main__":
    main()
