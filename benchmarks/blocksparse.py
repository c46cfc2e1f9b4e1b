"""Block-sparse attention at Phi-3-small's shape: `python -m benchmarks.blocksparse` on a GPU.

    ours        the operator on BLOCKSPARSE, in a CUDA graph
    fa3         dense attention: FlashAttention 3 by hand over the same paged cache, in a graph
    flex        compiled FlexAttention with the same BlockMask, keys in one piece; prompts only
    flashinfer  `BlockSparseAttentionWrapper`, keys in one piece; it takes one pattern for all
                heads, which is that of the first

32 query heads, 8 KV heads of size 128, bf16; blocks of 64 tokens, 16 local blocks, stride 8, head
sliding. Microseconds a layer, medians of runs that take turns. `% of ideal` is, of a prompt, the
time of fa3 times the share of blocks that are listed; of a decode, the bytes of the blocks that any
head of a KV head sees over the measured copy bandwidth; each by our time.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops import AttentionSpec, get_backend
from attn_ops.backends.measure import (
    Layers,
    default_layout,
    interleaved_us,
    l2_bytes,
    make_layers,
    make_step,
    repeat_layers,
)
from attn_ops.block_layout import BlockLayout, BlockTables, flex_block_mask
from benchmarks.attention import after_itself_us, copy_rate
from benchmarks.attention_cases import Case
from benchmarks.direct import flash_attn
from benchmarks.harness import free, origin, parser_of, write

CASES = {
    "cuda": [
        "4096", "8192", "16384", "32768", "65536", "131072",
        "1x4096", "64x4096", "1x32768", "8x32768", "64x32768", "1x131072", "16x131072",
    ],
    "cpu": ["80", "2x100"],
}  # fmt: skip
SPECS = {
    "cuda": AttentionSpec(32, 8, 128, torch.bfloat16, blocksparse=64),
    "cpu": AttentionSpec(4, 2, 16, torch.float32, blocksparse=16),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """What all cases share."""

    device: torch.device
    block_size: int  # of the KV cache
    rounds: int
    bytes_per_second: float
    kv_cache_dtype: str = "auto"

    @property
    def spec(self) -> AttentionSpec:
        spec = SPECS[self.device.type]
        return dataclasses.replace(spec, kv_cache_dtype=self.kv_cache_dtype)


def active_bytes(layout: BlockLayout, case: Case, spec: AttentionSpec) -> int:
    """Bytes of the keys and values that a decode must read: of blocks that any head sees."""
    tables = BlockTables(layout)
    row = (case.shape.seq_len - 1) // layout.block_size
    last = (row + 1) * layout.block_size - case.shape.seq_len  # tokens that the last block misses
    tokens = 0
    for starts in tables.unit_starts:
        begin, end = starts[row : row + 2].tolist()
        own = end > begin and int(tables.unit_entries[end - 1, 0]) == row
        tokens += (end - begin) * layout.block_size - own * last
    item = torch.empty(0, dtype=spec.cache_dtype).itemsize
    return 2 * case.shape.num_reqs * tokens * spec.head_size * item


def room(case: Case, spec: AttentionSpec, device: torch.device) -> int:
    """Bytes that all caches exceed: the L2 cache twice; of decodes 32 layers, or 4 GiB."""
    tokens = case.shape.num_reqs * case.shape.seq_len
    item = torch.empty(0, dtype=spec.cache_dtype).itemsize
    one = 2 * tokens * spec.num_kv_heads * spec.head_size * item
    many = min(32 * one, 4 << 30) if case.kind == "decode" and device.type == "cuda" else 0
    return max(2 * l2_bytes(device), many)


def dense(layers: Layers) -> Layers:
    """The same caches and queries, for layers that see every block."""
    spec = dataclasses.replace(layers.spec, blocksparse=None)
    options = {n: v for n, v in layers.options.items() if "sparse" not in n and "layout" not in n}
    return dataclasses.replace(layers, spec=spec, options=options)


Attend = Callable[[int], Any]


def by_flex(layers: Layers, layout: BlockLayout) -> Attend:
    """FlexAttention over keys in one piece."""
    from torch.nn.attention.flex_attention import flex_attention

    spec, common = layers.spec, layers.common
    mask = flex_block_mask(layout, common.max_seq_len, common.device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    k, v = (
        torch.randn(
            1, spec.num_kv_heads, common.max_seq_len, spec.head_size,
            dtype=spec.dtype, device=common.device,
        )
        for _ in range(2)
    )  # fmt: skip
    tiles: Any = {"BLOCK_M": layout.block_size, "BLOCK_N": layout.block_size}

    def attend(layer: int) -> Any:
        q = layers.queries[layer].transpose(0, 1)[None]
        return compiled(
            q, k, v, block_mask=mask, scale=layers.scale, enable_gqa=True, kernel_options=tiles
        )

    return attend


def by_flashinfer(layers: Layers, layout: BlockLayout) -> Attend:
    """FlashInfer's wrapper: rows of blocks, with the pattern of head 0; of a decode, one a request.

    A block of a decode's rows is its one query; its keys are the request's part of all keys.
    """
    library = importlib.import_module("flashinfer")
    spec, common, size = layers.spec, layers.common, layout.block_size
    device, num_reqs = common.device, common.num_reqs
    blocks = -(-common.max_seq_len // size)
    decode = common.max_query_len == 1
    if decode:
        listed = [
            [request * blocks + column for column in layout.row(0, blocks - 1)]
            for request in range(num_reqs)
        ]
    else:
        listed = [layout.row(0, row) for row in range(blocks)]
    counts = torch.tensor([0, *map(len, listed)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indices = torch.tensor([c for row in listed for c in row], dtype=torch.int32)
    wrapper = library.BlockSparseAttentionWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device)
    )
    num_rows = num_reqs if decode else blocks * size
    wrapper.plan(
        counts.to(device), indices.to(device), num_rows, num_reqs * blocks * size,
        1 if decode else size, size, spec.num_heads, spec.num_kv_heads, spec.head_size,
        causal=not decode, sm_scale=layers.scale, q_data_type=spec.dtype, kv_data_type=spec.dtype,
        o_data_type=spec.dtype,
    )  # fmt: skip
    shape = (num_reqs * blocks * size, spec.num_kv_heads, spec.head_size)
    k, v = (torch.randn(shape, dtype=spec.dtype, device=device) for _ in range(2))
    return lambda layer: wrapper.run(layers.queries[layer], k, v)


def prepared(
    layers: Layers, layout: BlockLayout, case: Case, others: bool
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Runs by name, each over all layers, and why others are missing."""
    runs: dict[str, Callable[[], object]] = {}
    missing: dict[str, str] = {}
    step = make_step(get_backend("BLOCKSPARSE"), layers)
    on_gpu = layers.common.device.type == "cuda"
    runs["ours"] = repeat_layers(layers, lambda i: layers.attend(step.meta, i), step.captured)
    if not others or not on_gpu:
        return runs, missing
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "fa3": lambda: repeat_layers(layers, flash_attn(dense(layers), True), True),
        "flashinfer": lambda: repeat_layers(layers, by_flashinfer(layers, layout), False),
    }
    if case.kind == "prefill":
        makers["flex"] = lambda: repeat_layers(layers, by_flex(layers, layout), False)
    for name, make in makers.items():
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            runs[name] = run
        except Exception as error:  # a library's own; the others are still measured
            missing[name] = f"{type(error).__name__}: {error}"[:300]
    return runs, missing


def measure_case(case: Case, setting: Setting, others: bool = True) -> dict[str, Any]:
    """Microseconds a layer of everything, at one shape."""
    spec, device = setting.spec, setting.device
    layout = default_layout(spec, case.shape.seq_len)
    lengths, least = case.shape.lengths(), room(case, spec, device)
    layers = make_layers(spec, lengths, setting.block_size, device, least)
    runs, missing = prepared(layers, layout, case, others)
    for run in runs.values():
        run()
    times = interleaved_us(runs, setting.rounds, lambda run: after_itself_us(run, device))
    us = {name: time / len(layers.caches) for name, time in times.items()}
    density = layout.density(-(-case.shape.seq_len // layout.block_size))
    found: dict[str, Any] = {
        "case": case.name, "kind": case.kind, "us": us, "missing": missing, "density": density,
        "layers": len(layers.caches), "active_bytes": None, "ideal_us": None,
    }  # fmt: skip
    if case.kind == "decode":
        found["active_bytes"] = active_bytes(layout, case, spec)
        found["ideal_us"] = found["active_bytes"] / setting.bytes_per_second * 1e6
    elif "fa3" in us:
        found["ideal_us"] = us["fa3"] * density
    if found["ideal_us"] is not None:
        found["percent_of_ideal"] = 100 * found["ideal_us"] / us["ours"]
    return found


# -- the command -----------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="microseconds a layer")
    names = ("ours", "fa3", "flex", "flashinfer")
    for column in ("case", *names, "density", "ideal", "% of ideal", "note"):
        table.add_column(column, justify="left" if column in ("case", "note") else "right")
    for row in rows:
        times = [f"{row['us'][n]:.1f}" if n in row["us"] else "-" for n in names]
        ideal, percent = row["ideal_us"], row.get("percent_of_ideal")
        table.add_row(
            row["case"], *times, f"{row['density']:.3f}",
            "-" if ideal is None else f"{ideal:.1f}",
            "-" if percent is None else f"{percent:.0f}",
            "; ".join(f"{n}: {reason[:60]}" for n, reason in row["missing"].items()),
        )  # fmt: skip
    console.print(table)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="*", default=[], help="REQUESTSxCONTEXT, or TOKENS")
    parser.add_argument("--block-size", type=int, default=64, help="of the KV cache")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8_e4m3 or fp8_e5m2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only-ours", action="store_true", help="without the other libraries")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(args.device)
    setting = Setting(device, args.block_size, args.rounds, copy_rate(device), args.kv_cache_dtype)
    rows, console = [], Console(width=200)
    for text in args.shapes or CASES[args.device]:
        rows.append(measure_case(Case.parse(text), setting, not args.only_ours))
        show(rows[-1:], console)
        free()
    show(rows, console)
    result = {
        **origin(args),
        "block_size": args.block_size,
        "kv_cache_dtype": args.kv_cache_dtype,
        "copy_bytes_per_second": setting.bytes_per_second,
        "rows": rows,
    }
    write(args.json, result)
    return result


if __name__ == "__main__":
    # Every prompt compiles FlexAttention again; past Dynamo's limit of 8 it would run uncompiled.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        main()
