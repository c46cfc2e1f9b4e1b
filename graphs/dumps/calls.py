"""The calls of Inductor's code beside their graph: nodes that they compute, attention's bytes."""

import math
import re
from typing import Any

from graphs.dumps.output_code.buffers import item_size
from graphs.dumps.output_code.groups import ATTENTION

_TYPE = re.compile(r"^(\w+)\[(.*)\]$")


def beside_graph(
    calls: list[dict[str, Any]],
    nodes: list[dict[str, Any]],
    origins: dict[str, list[str]],
    block_size: int,
) -> list[dict[str, Any]]:
    """The calls with "graph_nodes", "aten", "module" and "bytes" as far as they are known.

    "module" is that of the last node that has one.

    "bytes" are {"fixed", "per_token", "per_cached_token"}, of a decode step: every symbol of a size
    counts its tokens, which are as many as its requests and its rows of logits.

    Args:
        calls: as `kernels` finds them.
        nodes: of the graph, as `nodes_of` describes them.
        origins: nodes by `kernel:call`, as torch's structured trace has them.
        block_size: tokens of a block of the KV cache.
    """
    found = {node["name"]: node for node in nodes}
    order = {name: i for i, name in enumerate(found)}
    full = []
    for number, call in enumerate(calls, 1):
        names = call["graph_nodes"] or origins.get(f"{call['name']}:{number}", [])
        names = sorted((n for n in names if n in order), key=order.__getitem__) or names
        targets = [found[name]["target"] for name in names if name in found]
        modules = [m for name in names if name in found if (m := found[name]["module"])]
        operators = [one.rpartition(".")[0] for one in targets if "." in one]
        full.append(
            {
                **call,
                "graph_nodes": names,
                "module": modules[-1].split(" ")[0] if modules else "",
                "aten": list(dict.fromkeys(operators)) or call["aten"],
                "bytes": _bytes(call, names, found, block_size),
            }
        )
    return full


def _bytes(
    call: dict[str, Any], names: list[str], nodes: dict[str, dict[str, Any]], block_size: int
) -> dict[str, int] | None:
    read, written = call["bytes_read"], call["bytes_written"]
    if read is not None and written is not None:
        sums = [*read.items(), *written.items()]
        per_token = sum(n for symbol, n in sums if symbol)
        fixed = sum(n for symbol, n in sums if not symbol)
        return {"fixed": fixed, "per_token": per_token, "per_cached_token": 0}
    if call["source"] or call["group"] != ATTENTION or not names or names[-1] not in nodes:
        return None
    return _attention_bytes(nodes[names[-1]], nodes, block_size)


def _attention_bytes(
    node: dict[str, Any], nodes: dict[str, dict[str, Any]], block_size: int
) -> dict[str, int] | None:
    """Of `attention(q, kv_cache, ...)`: q and the output, and what the cache has of each token."""
    if len(node["inputs"]) < 2:
        return None
    q, cache = (_shape(nodes.get(name)) for name in node["inputs"][:2])
    out = _shape(node)
    if q is None or cache is None or out is None or not cache[1]:
        return None
    per_token = sum(math.prod(sizes) * item for item, sizes in (q, out))
    in_block = math.prod(cache[1][1:]) * cache[0]
    return {"fixed": 0, "per_token": per_token, "per_cached_token": in_block // block_size}


def _shape(node: dict[str, Any] | None) -> tuple[int, list[int]] | None:
    """Bytes of an element and sizes; symbols are 1."""
    match = _TYPE.match(node["type"]) if node is not None else None
    item = item_size(match[1]) if match else None
    if match is None or item is None:
        return None
    sizes = [one.strip() for one in match[2].split(",") if one.strip()]
    return item, [int(one) if one.isdigit() else 1 for one in sizes]
