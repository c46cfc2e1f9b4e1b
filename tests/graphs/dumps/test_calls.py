"""Calls of Inductor's code beside their graph."""

from graphs.dumps.calls import beside_graph


def node(name, kind, inputs=(), target="", module=""):
    return {
        "name": name, "op": name, "type": kind, "inputs": list(inputs), "target": target,
        "module": module,
    }  # fmt: skip


NODES = [
    node("cache", "bfloat16[100, 8, 16, 2, 128]"),
    node("mm", "bfloat16[s0, 1024]", [], "aten.mm.default", "model.layers.0.q Linear"),
    node("q", "bfloat16[s0, 32, 128]", ["mm"], "aten.view.default"),
    node("attention", "bfloat16[s0, 32, 128]", ["q", "cache"], "attn_ops.attention.default"),
]


def call(name, group, read=None, written=None, source="", nodes=()):
    return {
        "name": name, "group": group, "bytes_read": read, "bytes_written": written,
        "source": source, "graph_nodes": list(nodes), "aten": ["by.comment"],
    }  # fmt: skip


def test_bytes_of_a_decode_step():
    calls = [
        call("mm", "products", {"T": 8192, "": 100}, {"s9": 2048}),
        call("attention", "attention"),
        call("triton_poi_fused_0", "attention", source="def"),
        call("other", "other"),
    ]
    origins = {"mm:1": ["q", "mm"], "attention:2": ["attention"], "other:4": ["gone"]}
    found = beside_graph(calls, NODES, origins, 16)
    assert [one["bytes"] for one in found] == [
        {"fixed": 100, "per_token": 8192 + 2048, "per_cached_token": 0},
        # q and the output; a key and a value of 8 heads of 128 for every token in the cache
        {"fixed": 0, "per_token": 2 * 32 * 128 * 2, "per_cached_token": 2 * 8 * 2 * 128},
        None,
        None,
    ]
    assert [one["graph_nodes"] for one in found] == [["mm", "q"], ["attention"], [], ["gone"]]
    assert [one["aten"] for one in found][:2] == [["aten.mm", "aten.view"], ["attn_ops.attention"]]
    assert [one["module"] for one in found] == ["model.layers.0.q", "", "", ""]
    assert found[2]["aten"] == ["by.comment"]


def test_comments_of_the_code_come_first():
    (found,) = beside_graph([call("k", "other", nodes=["q"])], NODES, {"k:1": ["mm"]}, 16)
    assert found["graph_nodes"] == ["q"]
