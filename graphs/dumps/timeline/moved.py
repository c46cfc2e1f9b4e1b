"""Bytes that the kernels of a timeline have to move, by what is known of the step.

Products: in the order of Inductor's calls. Attention: cached tokens of the layer's geometry, with q
and the output. Kernels of Inductor: by their name. S requests, L cached tokens of each.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from attn_ops import AttentionSpec
from graphs.dumps.output_code.groups import ATTENTION, KV_WRITE, PRODUCTS
from graphs.dumps.output_code.sizes import total, value

_PART_OF_PRODUCT = re.compile(r"reduce", re.IGNORECASE)
_SYMBOL = re.compile(r"\b(?:T|[su]\d+)\b")

Row = dict[str, Any]


def note_products(rows: Sequence[Row], graphs: Sequence[Row], num_tokens: int) -> str:
    """Give each product its bytes and shapes; why not, if they are not known.

    Args:
        rows: of the timeline, in order.
        graphs: {"calls", "num_calls"} of each compiled graph, in order.
    """
    expected = _products(graphs)
    if expected is None:
        return "layers differ in their products"
    found = [
        row for row in rows if row["group"] == PRODUCTS and not _PART_OF_PRODUCT.search(row["name"])
    ]
    if len(found) != len(expected):
        return f"{len(expected)} products are called, {len(found)} kernels have their names"
    for row, call in zip(found, expected, strict=True):
        row["bytes"] = _bytes(call, num_tokens)
        row["detail"] = _SYMBOL.sub(str(num_tokens), call["detail"])
    return ""


def note_kernels(rows: Sequence[Row], graphs: Sequence[Row], num_tokens: int) -> None:
    """Give each kernel of Inductor its group and bytes, where its name tells which one it is."""
    for row in rows:
        repeated = row["layer"] is not None
        calls = [
            call
            for graph in graphs
            if len(graphs) == 1 or (graph["num_calls"] > 1) == repeated
            for call in graph["calls"]
            if call["name"] == row["name"] and call["source"]
        ]
        groups, known = {c["group"] for c in calls}, {_bytes(c, num_tokens) for c in calls}
        if len(groups) == 1:
            row["group"] = groups.pop()
        if len(known) == 1 and row["bytes"] is None:
            row["bytes"] = known.pop()


def note_attention(
    rows: Sequence[Row], specs: Sequence[AttentionSpec], num_reqs: int, seq_len: int
) -> str:
    """Give the largest attention kernel of each layer its bytes; why not, if they are not known.

    Args:
        specs: of every layer that attends, those that read another one's cache included.
    """
    layers: dict[int, list[Row]] = {}
    attending = [row for row in rows if row["group"] == ATTENTION]
    for row in attending:
        if row["layer"] is not None:
            layers.setdefault(row["layer"], []).append(row)
    if len(attending) == len(specs):
        layers = {layer: [row] for layer, row in enumerate(attending)}
    if len(layers) != len(specs):
        return f"{len(specs)} layers attend, attention was found in {len(layers)}"
    for layer, spec in enumerate(specs):
        row = max(layers[layer], key=lambda one: one["us"])
        read = cached_bytes(spec, seq_len)
        if read is None:
            continue
        row["bytes"] = num_reqs * (read + _query_bytes(spec))
        row["detail"] = f"{num_reqs} requests of {seq_len} cached tokens"
    return ""


def note_writes(rows: Sequence[Row], specs: Sequence[AttentionSpec], num_reqs: int) -> None:
    """Say what the writes of each layer put into its cache."""
    layers: dict[int, list[Row]] = {}
    for row in rows:
        if row["layer"] is not None and row["group"] == KV_WRITE:
            layers.setdefault(row["layer"], []).append(row)
    for layer, found in layers.items():
        if layer >= len(specs):
            continue
        written = num_reqs * token_bytes(specs[layer])
        for row in found:
            row["detail"] = f"{written} bytes into the layer's cache"
            if row["bytes"] is None and len(found) == 1:
                row["bytes"] = 2 * written  # read, and written


def token_bytes(spec: AttentionSpec) -> int:
    """Of a token in the layer's cache."""
    return math.prod(spec.cache_shape(1, 1)) * spec.cache_dtype.itemsize


def cached_bytes(spec: AttentionSpec, seq_len: int) -> int | None:
    """That a request's newest token reads of the layer's cache; None: a layout decides."""
    if spec.blocksparse is not None:
        return None
    num_tokens = seq_len
    if spec.sliding_window is not None:
        num_tokens = min(num_tokens, spec.sliding_window)
    if spec.attention_chunk_size is not None:
        num_tokens = (seq_len - 1) % spec.attention_chunk_size + 1
    return num_tokens * token_bytes(spec)


def _query_bytes(spec: AttentionSpec) -> int:
    """Of a token's queries and outputs."""
    return 2 * spec.num_heads * spec.head_size * spec.dtype.itemsize


def _products(graphs: Sequence[Row]) -> list[Row] | None:
    """Calls of products in the order of a step; None: the order of layers is not known."""
    by_graph = [(_parts(graph["calls"]), graph["num_calls"]) for graph in graphs]
    kinds = {
        tuple((call["detail"], str(call["bytes_read"])) for call in calls)
        for calls, number in by_graph
        if number > 1
    }
    if len(kinds) > 1:
        return None
    return [call for calls, number in by_graph for _ in range(number) for call in calls]


def _parts(calls: Sequence[Row]) -> list[Row]:
    """Products, each of a call that is several."""
    products = (call for call in calls if call["group"] == PRODUCTS)
    return [part for call in products for part in call.get("parts") or (call,)]


def _bytes(call: Row, num_tokens: int) -> int | None:
    """Read and written, with `num_tokens` for every symbol: a decode has a row a request."""
    size = total((call["bytes_read"], call["bytes_written"]))
    return None if size is None else value(size, dict.fromkeys(set(size) - {""}, num_tokens))
