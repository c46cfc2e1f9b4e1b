"""Calls of graphs to which the kernels of a timeline belong, as a GPU's profiler names them."""

import pytest

from graphs.dumps.assigned import beside_calls
from graphs.dumps.groups import ATTENTION, PRODUCTS, group_of


def call(name, num_bytes=None, module=""):
    group = group_of(name)
    kind = {PRODUCTS: "product", ATTENTION: "attention"}.get(group, "operator")
    kind = "kernel" if "fused" in name else kind
    return {"name": name, "kind": kind, "bytes": num_bytes, "group": group, "module": module}


LAYER = [
    call("triton_red_fused_0"),
    call("extern_kernels.mm", 48_000_008),
    call("triton_poi_fused_index_put_1", 1080),
    call("torch.ops.attn_ops.attention.default", 5080),
    call("extern_kernels.mm"),
    call("triton_red_fused_2"),
]
GRAPHS = [[call("triton_poi_fused_embedding_0")], LAYER,
          [call("triton_red_fused_0"), call("extern_kernels.mm")]]  # fmt: skip
IN_LAYER = [
    ("triton_red_fused_0", 2.0, 0),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 15.0, 1),
    ("void cublasLt::splitKreduce_kernel<32, 16>", 2.0, 1),
    ("triton_poi_fused_index_put_1", 2.0, 2),
    ("cutlass::device_kernel<flash::FlashAttnFwdSm90<x>>", 6.0, 3),
    ("void flash::FlashAttnFwdCombine<y>", 2.0, 3),
    ("nvjet_tst_64x8_64x16_1x1_h_bz_TNT", 5.0, 4),
    ("triton_red_fused_2", 2.0, 5),
]
BEFORE = [("prepare_varlen_num_blocks_kernel", 1.0, -1), ("triton_poi_fused_embedding_0", 1.0, 0)]
AFTER = [("triton_red_fused_0", 2.0, 0), ("nvjet_tst_192x8", 40.0, 1), ("_argmax_kernel", 3.0, -1)]
TIMELINE = {
    "device": "cuda:0", "kind": "replay", "what": "replay of a captured step",
    "num_reqs": 8, "num_tokens": 8, "seq_len": 125,
    "bandwidth": 4.8e12, "replay_us": 152.0, "sum_us": 155.0,
}  # fmt: skip


def step(num_layers=3, gap=0.5):
    kernels, rows, now = [*BEFORE, *IN_LAYER * num_layers, *AFTER], [], 0.0
    for name, us, _ in kernels:
        rows.append({"name": name, "start_us": now, "us": us})
        now += us + gap
    return {**TIMELINE, "kernels": rows}, kernels


def test_kernels_are_assigned_to_calls_and_layers():
    given, kernels = step()
    found = beside_calls(given, GRAPHS, [1, 3, 1])
    wanted = [number for _, _, number in kernels]
    assert [row[4] for row in found["rows"]] == wanted
    graphs = [-1, 0, *[1] * 24, 2, 2, -1]
    assert [row[3] for row in found["rows"]] == graphs
    assert [row[5] for row in found["rows"]][2:26] == [1] * 8 + [2] * 8 + [3] * 8
    assert [found["names"][row[2]] for row in found["rows"]] == [name for name, _, _ in kernels]


def test_times_and_bandwidth():
    given, kernels = step()
    found = beside_calls(given, GRAPHS, [1, 3, 1])
    first, second = found["calls"][:2]
    assert (first["graph"], first["call"], first["num"], first["total_us"]) == (1, 1, 3, 51.0)
    assert first["bytes"] == 48_000_008
    assert first["of_bandwidth"] == pytest.approx(48_000_008 / (17e-6 * 4.8e12))
    assert (second["graph"], second["call"], second["num"]) == (2, 1, 1)
    attention = next(one for one in found["calls"] if one["call"] == 3)
    assert attention["bytes"] == 5080
    assert first["of_step"] == pytest.approx(51 / 155)
    assert sum(one["total_us"] for one in found["calls"]) == sum(us for _, us, _ in kernels) == 155
    assert sum(one["of_step"] for one in found["calls"]) == pytest.approx(1)


def timeline_of(names):
    rows = [{"name": n, "start_us": 10.0 * i, "us": 5.0} for i, n in enumerate(names)]
    more = {"device": "cpu", "bandwidth": None, "sum_us": 5.0 * len(names), "kernels": rows}
    return {**TIMELINE, **more}


def test_operators_of_a_cpu_leave_out_its_kernels():
    names = ["aten::zeros", "aten::mm", "attn_ops::attention", "aten::mm", "attn_ops::advance_step"]
    found = beside_calls(timeline_of(names), [LAYER], [1])
    assert [row[4] for row in found["rows"]] == [-1, 1, 3, 4, -1]
    empty = beside_calls(timeline_of([]), [LAYER], [1])
    assert (empty["rows"], empty["calls"]) == ([], [])


def test_the_head_of_a_cpu_is_no_part_of_the_last_layer():
    head = [call("cpp_fused_0"), call("extern_kernels.mm", module="lm_head")]
    names = ["aten::mm", "attn_ops::attention", "aten::mm"] * 2 + ["aten::mm", "aten::argmax"]
    found = beside_calls(timeline_of(names), [LAYER, head], [2, 1])
    assert [row[3:6] for row in found["rows"]] == [
        [0, 1, 1], [0, 3, 1], [0, 4, 1], [0, 1, 2], [0, 3, 2], [0, 4, 2], [1, 1, 0], [-1, -1, 0],
    ]  # fmt: skip


def layer_of(number):
    at = f"model.layers.{number}"
    return [
        call("extern_kernels.mm", module=f"{at}.self_attn.q_proj"),
        call("torch.ops.attn_ops.attention.default", module=f"{at}.self_attn"),
        call("extern_kernels.mm"),  # of a pass: without a module
    ]


def test_layers_of_graphs_that_are_called_once_are_those_of_modules():
    """Layer 0 alone, layers 1 and 2 by one graph, layers 3 and 4 in the graph of the head."""
    first = call("extern_kernels.mm", module="model.projections.0")
    last = call("extern_kernels.mm", module="lm_head")
    code = [[first, *layer_of(0)], layer_of(1), [*layer_of(3), *layer_of(4), last]]
    layer = ["aten::mm", "attn_ops::attention", "aten::mm"]
    names = ["aten::mm", *layer * 5, "aten::mm", "attn_ops::advance_step"]
    found = beside_calls(timeline_of(names), code, [1, 2, 1])
    wanted = [0, *(number for number in range(1, 6) for _ in layer), 0, 0]
    assert [row[5] for row in found["rows"]] == wanted


def test_layers_go_on_after_one_that_is_called_alone():
    layer = ["aten::mm", "attn_ops::attention", "aten::mm"]
    code = [layer_of(0), [call("extern_kernels.bmm"), *layer_of(2)]]
    names = [*layer * 2, "aten::bmm", *layer * 2]
    found = beside_calls(timeline_of(names), code, [3, 1])
    assert [row[5] for row in found["rows"] if row[4] >= 0][-6:] == [3, 3, 3, 4, 4, 4]
