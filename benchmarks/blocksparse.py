"""Block-sparse attention at Phi-3-small's shape: `python -m benchmarks.blocksparse` on a GPU.

    ours            the operator on BLOCKSPARSE, in a CUDA graph
    fa3             dense: FlashAttention 3 by hand over the same paged cache, in a graph
    FlexAttention   compiled, with the same BlockMask, keys in one piece; prompts only
    FlashInfer      `BlockSparseAttentionWrapper`, keys in one piece; it takes one pattern for all
                    heads, which is that of the first

32 query heads, 8 KV heads of size 128, bf16; blocks of 64 tokens, 16 local blocks, stride 8, head
sliding. Microseconds a layer, medians of runs that take turns. listed: part of the blocks. ideal:
of a prompt fa3 times that part; of a decode, the bytes of the blocks that any head of a KV head
sees over the measured copy bandwidth.
"""

import argparse
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops import AttentionSpec
from attn_ops.backends.measure import Layers, MeasuredShape, default_layout, make_layers
from attn_ops.block_layout import BlockLayout, BlockTables, flex_block_mask
from benchmarks.attention import by_operator, bytes_of_layers, command_of, copy_rate, layer_us
from benchmarks.direct import Attend, flash_attn
from benchmarks.harness import brief, finish, free, origin, parser_of, write
from graphs.app.bench import shape_of

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


def active_bytes(layout: BlockLayout, shape: MeasuredShape, spec: AttentionSpec) -> int:
    """Bytes of the keys and values that a decode must read: of blocks that any head sees."""
    tables = BlockTables(layout)
    row = (shape.seq_len - 1) // layout.block_size
    last = (row + 1) * layout.block_size - shape.seq_len  # tokens that the last block misses
    tokens = 0
    for starts in tables.unit_starts:
        begin, end = starts[row : row + 2].tolist()
        own = end > begin and int(tables.unit_entries[end - 1, 0]) == row
        tokens += (end - begin) * layout.block_size - own * last
    item = torch.empty(0, dtype=spec.cache_dtype).itemsize
    return 2 * shape.num_reqs * tokens * spec.head_size * item


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


def measure(
    shape: MeasuredShape, args: argparse.Namespace, bytes_per_second: float
) -> dict[str, float]:
    spec, device = SPECS[args.device], torch.device(args.device)
    layout = default_layout(spec, shape.seq_len)
    num_bytes = bytes_of_layers(shape, spec, device)
    layers = make_layers(spec, shape.lengths(), args.block_size, device, num_bytes)
    makers: dict[str, Any] = {"ours": functools.partial(by_operator, "BLOCKSPARSE", layers)}
    if args.device == "cuda":
        makers["fa3"] = lambda: (flash_attn(layers, True), True)
        if shape.query_len > 1:
            makers["FlexAttention"] = lambda: (by_flex(layers, layout), False)
        makers["FlashInfer"] = lambda: (by_flashinfer(layers, layout), False)
    us = layer_us(layers, makers, args.rounds, alike=False)
    row = {"listed": layout.density(-(-shape.seq_len // layout.block_size)), **us}
    if shape.query_len == 1:
        row["ideal"] = active_bytes(layout, shape, spec) / bytes_per_second * 1e6
    elif "fa3" in us:
        row["ideal"] = us["fa3"] * row["listed"]
    if "ideal" in row and "ours" in us:
        row["ideal / ours"] = row["ideal"] / us["ours"]
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", help="REQUESTSxCONTEXT, or TOKENS")
    parser.add_argument("--block-size", type=int, default=64, help="of the KV cache")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    rate, rows = copy_rate(torch.device(args.device)), {}
    command = command_of("blocksparse", arguments)
    result = {"command": command, **origin(args), "copy_bytes_per_second": rate, "rows": rows}
    for text in args.shapes or CASES[args.device]:
        print(text, flush=True)
        free()
        try:
            rows[text] = measure(shape_of(text), args, rate)
        except Exception as error:  # the other shapes can still be measured
            print(brief(error))
        write(args.json, result)  # kept if the time runs out
    finish(args, result)


if __name__ == "__main__":
    # Every prompt compiles FlexAttention again; past Dynamo's limit of 8 it would run uncompiled.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        main()
