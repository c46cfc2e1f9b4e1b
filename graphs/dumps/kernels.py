"""The calls in Inductor's output code: kernel, source, nodes it computes, and bytes it moves.

Inductor logs which nodes of the graph each call computes (see `graphs.dumps.trace`). The graph has
the sizes, so nothing is read from the code but the source of a kernel. A call is a dict:

    "name": "triton_poi_fused_add_0", "extern_kernels.mm", "torch.ops.attn_ops.attention.default".
    "kind": "kernel" that Inductor wrote, else "product", "attention" or "operator".
    "group": see `graphs.dumps.groups`.
    "call", "source": its line in the code, and the kernel's definition.
    "graph_nodes", "aten", "module": nodes, their operators, and the module of the last one.
    "bytes": that it reads and writes in the recorded decode step; null: not known.

A tensor counts whole, and once for each call. An embedding, a selection of rows and a write into
the cache count as many rows as they have indices.
"""

import dataclasses
import re
from typing import Any

from graphs.dumps.groups import ATTENTION, KV_WRITE, PRODUCTS, group_of

VIEWS = frozenset((
    "view", "reshape", "permute", "expand", "unsqueeze", "squeeze", "transpose", "t", "alias",
    "as_strided", "_unsafe_view", "slice", "select", "split_with_sizes", "getitem",
))  # fmt: skip
_TAKES_ROWS = frozenset(("embedding", "index", "index_select", "gather"))
_SYMBOL = re.compile(r"\b[su]\d+\b")
_OUTSIDE = ("extern_kernels.", "torch.ops.", "aten.")

Node = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the recorded step makes of symbolic sizes; None: not known."""

    num_tokens: int | None = 1
    num_cached: int = 0  # cached tokens of each request
    num_reqs: int = 1
    block_size: int = 16  # of the KV cache


def calls_of(
    code: str, origins: dict[str, list[str]], nodes: list[Node], sizes: Sizes
) -> list[dict[str, Any]]:
    """The calls, in the order in which the graph makes them.

    Args:
        code: Inductor's output code.
        origins: names of nodes by `kernel:number`, as Inductor logs them.
        nodes: of the graph, as `graphs.dumps.nodes` describes them; empty: not known.
        sizes: of the recorded step.
    """
    graph = _Graph(nodes, origins)
    return [_call(code, key, names, graph, sizes) for key, names in graph.computed.items()]


def _call(code: str, key: str, names: list[str], graph: "_Graph", sizes: Sizes) -> dict[str, Any]:
    name = key.rpartition(":")[0]
    known = [graph.nodes[one] for one in names if one in graph.nodes]
    modules = [node["module"].split(" ")[0] for node in known if node["module"]]
    operators = [node["target"].rpartition(".")[0] for node in known if "." in node["target"]]
    writes_cache = not _is_outside(name) and any(n["op"].startswith("index_put") for n in known)
    group = KV_WRITE if writes_cache else group_of(name)
    kinds = {PRODUCTS: "product", ATTENTION: "attention"}
    return {
        "name": name,
        "kind": kinds.get(group, "operator") if _is_outside(name) else "kernel",
        "group": group,
        "call": code.partition(f"[Provenance debug handles] {key}\n")[2].partition("\n")[0].strip(),
        "source": "" if _is_outside(name) else _source(code, name),
        "graph_nodes": names,
        "aten": list(dict.fromkeys(operators)),
        "module": modules[-1] if modules else "",
        "bytes": graph.moved(key, sizes),
    }


def _is_outside(name: str) -> bool:
    return name.startswith(_OUTSIDE)


def _source(code: str, name: str) -> str:
    """The definition of a kernel, with the comments above it."""
    begin = code.find(f"\n{name} = async_compile.") + 1
    if not begin:
        return ""
    end = re.compile(r"^('''|\"\"\").*\)$", re.MULTILINE).search(code, begin)
    return code[code.rfind("\n\n\n", 0, begin) + 1 : end.end() if end else None].strip()


class _Graph:
    """A graph, and the nodes that each call of its code computes.

    Attributes:
        nodes: by name, in order.
        computed: names by `kernel:number`, in the order of calls.
    """

    def __init__(self, nodes: list[Node], origins: dict[str, list[str]]) -> None:
        self.nodes = {node["name"]: node for node in nodes}
        order = {name: i for i, name in enumerate(self.nodes)}
        outside = {
            name
            for key, names in origins.items()
            if _is_outside(key)
            for name in names
            if self.nodes.get(name, {"op": ""})["op"] not in VIEWS
        }
        keys = sorted(origins, key=lambda key: int(key.rpartition(":")[2] or 0))
        self.computed = {}
        for key in keys:  # Inductor counts a product's result among the nodes of who reads it
            own = [n for n in origins[key] if _is_outside(key) or n not in outside]
            self.computed[key] = sorted(own, key=lambda n: order.get(n, -1))
        self._made = {name for names in self.computed.values() for name in names}
        self._reads = {key: self._read(names) for key, names in self.computed.items()}
        ends = [n for node in nodes if node["op"] == "output" for n in node["inputs"]]
        self._returned = {self._base(name)[0] for name in ends}
        self._used = {name for node in nodes for name in node["inputs"]}

    def moved(self, key: str, sizes: Sizes) -> int | None:
        """Bytes that a call reads and writes; None: not known."""
        names = self.computed[key]
        if not names or not all(name in self.nodes for name in names):
            return None
        found = [*self._reads[key].values(), *self._written(key)]
        fixed, per_token = (sum(one[i] for one in found) for i in (0, 1))
        if per_token and sizes.num_tokens is None:
            return None
        cached = self._cached(self.nodes[names[-1]], sizes) if _is_outside(key) else 0
        return None if cached is None else fixed + per_token * (sizes.num_tokens or 0) + cached

    def _base(self, name: str) -> tuple[str, list[int] | None]:
        """The tensor that a node is a view of, and how many of its bytes the view shows."""
        node = self.nodes[name]
        shown = node["bytes"]
        while node["op"] in VIEWS and node["inputs"]:
            name = node["inputs"][0]
            node = self.nodes[name]
            shown = node["bytes"] if shown is None else min(shown, node["bytes"] or shown)
        return name, shown

    def _read(self, names: list[str]) -> dict[str, list[int]]:
        """Bytes of each tensor that nodes read and that is made elsewhere."""
        found: dict[str, list[int]] = {}
        for node in (self.nodes[name] for name in names if name in self.nodes):
            for place, read in enumerate(node["inputs"]):
                base, shown = self._base(read)
                if place == 0 and node["op"].startswith("index_put"):
                    continue
                if place == 1 and "attention" in node["op"]:
                    continue  # the cache, see `_cached`
                if place == 0 and node["op"] in _TAKES_ROWS:
                    shown = node["bytes"]
                is_there = base in self._made or self.nodes[base]["op"] == "placeholder"
                if base not in names and is_there and shown is not None:
                    sums = zip(found.get(base, [0, 0]), shown, strict=True)
                    found[base] = min([a + b for a, b in sums], self.nodes[base]["bytes"] or shown)
        return found

    def _written(self, key: str) -> list[list[int]]:
        """Bytes of the results that others read, that are returned, or that change an input."""
        read = {base for other, reads in self._reads.items() if other != key for base in reads}
        found = []
        for node in (self.nodes[name] for name in self.computed[key]):
            name, result = node["name"], node["bytes"]
            if node["op"].startswith("index_put"):
                result = self.nodes[node["inputs"][-1]]["bytes"]
            elif not (name in read | self._returned or name not in self._used or _is_outside(key)):
                continue
            found += [result] if result else []
        return found

    def _cached(self, node: Node, sizes: Sizes) -> int | None:
        """Bytes of the cached tokens that attention reads; None: not known, or a layout decides."""
        if "attention" not in node["op"] or len(node["inputs"]) < 2:
            return 0
        options, cache = node["keywords"], self.nodes[node["inputs"][1]]
        in_block = cache["bytes"][1] if cache["bytes"] else 0  # [P, 2, B, K, H] or [P, B, L]
        is_known = in_block and sizes.num_tokens is not None
        if not is_known or options.get("sparse_block_size") is not None:
            return None
        num_cached = sizes.num_cached
        if options.get("attention_chunk_size") is not None and num_cached:
            num_cached = (num_cached - 1) % options["attention_chunk_size"] + 1
        if options.get("sliding_window") is not None:
            num_cached = min(num_cached, options["sliding_window"])
        is_any_block = len(_SYMBOL.findall(cache["type"])) > 1  # B is a symbol, and counts as 1
        return sizes.num_reqs * num_cached * (in_block // (1 if is_any_block else sizes.block_size))
