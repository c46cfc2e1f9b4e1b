"""Calls of Inductor's code: the nodes that they compute, and the bytes that they move."""

import ast
from pathlib import Path

import pytest
import torch

import fx_passes
import graphs
from graphs.dumps.groups import group_of
from graphs.dumps.kernels import Sizes, calls_of
from graphs.dumps.page import whole

STEP = Sizes(num_tokens=4, num_cached=100, num_reqs=4, block_size=16)

CODE = """\
# AOT ID: ['0_inference']


# kernel path: /tmp/x.py
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
def triton_poi_fused_0(in_ptr0): pass
''', device_str='cuda')


def call(args):
        # [Provenance debug handles] triton_poi_fused_0:1
        triton_poi_fused_0.run(arg0_1, buf0, 8, stream=stream0)
"""


def node(name, op, per_token=0, inputs=(), fixed=0, module="", **keywords):
    is_ours = op in ("attention", "skinny_mm")
    target = op if op in ("placeholder", "output") else f"{('aten', 'attn_ops')[is_ours]}.{op}.d"
    size = [fixed, per_token] if per_token or fixed else None
    return {
        "name": name, "op": op, "target": target, "inputs": list(inputs), "module": module,
        "bytes": size, "keywords": keywords, "type": "f32[s22, 2, 16, 2, 16]" * (per_token > 0),
    }  # fmt: skip


NODES = [
    node("ids", "placeholder", 8),
    node("slots", "placeholder", 8),
    node("table", "placeholder", fixed=50000 * 256),
    node("weight", "placeholder", fixed=8192),
    node("cache", "placeholder", 4096),  # a block of 16 tokens has 4096 bytes
    node("meta", "placeholder"),
    node("embedding", "embedding", 256, ["table", "ids"]),
    node("permute", "permute", fixed=8192, inputs=["weight"]),
    node("mm", "mm", 512, ["embedding", "permute"], module="model.layers.0.q_proj Linear"),
    node("q", "slice", 256, ["mm"]),
    node("kv", "slice", 256, ["mm"]),
    node("mul", "mul", 256, ["q"]),
    node("index_put", "index_put", 4096, ["cache", "slots", "kv"]),
    node("attention", "attention", 256, ["mul", "index_put", "meta"], module="model.layers.0 A"),
    node("neg", "neg", 256, ["attention"]),
    node("copy_", "copy_", 4096, ["cache", "index_put"]),
    node("output", "output", inputs=["neg"]),
]
ORIGINS = {
    "cpp_fused_embedding_0:1": ["embedding"],
    "extern_kernels.mm:2": ["mm"],
    # Inductor lists the product and the attention here, too.
    "triton_poi_fused_0:3": ["mul", "index_put", "q", "kv", "attention"],
    "torch.ops.attn_ops.attention.default:4": ["attention"],
    "cpp_fused_neg_1:5": ["neg"],
}


def moved(nodes=NODES, sizes=STEP) -> list[int | None]:
    return [call["bytes"] for call in calls_of("", ORIGINS, nodes, sizes)]


def test_bytes_by_hand():
    """Rows of an embedding and of a cache count as often as there are indices."""
    assert moved() == [
        4 * (8 + 256 + 256),
        4 * (256 + 512) + 8192,
        4 * (512 + 8 + 256 + 256),  # both halves of the product
        4 * (256 + 256) + 4 * 100 * 256,  # q and the output, and the cached tokens
        4 * (256 + 256),
    ]


def test_options_of_attention_and_sizes_that_are_not_known():
    def cached(sizes=STEP, **options):
        nodes = [{**one, "keywords": options} if one["op"] == "attention" else one for one in NODES]
        found = moved(nodes, sizes)[3]
        return found if found is None else (found - 4 * 512) // 256

    assert cached(sliding_window=10) == 4 * 10
    assert cached(attention_chunk_size=64) == 4 * 36
    assert cached(sparse_block_size=64) is None
    nodes = [{**one, "type": one["type"].replace("16,", "s9,", 1)} for one in NODES]
    assert moved(nodes)[3] == moved()[3] + 4 * 100 * 256 * 15, "a symbol for the size of a block"
    assert cached(Sizes(num_tokens=None)) is None
    assert moved(sizes=Sizes(num_tokens=None)) == [None] * 5
    assert moved([]) == [None] * 5


def test_what_a_call_is():
    calls = calls_of(CODE, ORIGINS, NODES, STEP)
    assert [one["kind"] for one in calls] == ["kernel", "product", "kernel", "attention", "kernel"]
    assert [one["group"] for one in calls] == [
        "norm, pointwise", "products", "KV write", "attention", "norm, pointwise",
    ]  # fmt: skip
    assert [one["module"] for one in calls][1:4] == ["model.layers.0.q_proj", "", "model.layers.0"]
    fused = calls[2]
    assert fused["graph_nodes"] == ["q", "kv", "mul", "index_put"], "those of the graph, in order"
    assert fused["aten"] == ["aten.slice", "aten.mul", "aten.index_put"]
    assert fused["source"].startswith("# kernel path: /tmp/x.py\ntriton_poi_fused_0 = async")
    assert fused["source"].endswith("device_str='cuda')")


def test_the_line_of_a_call():
    (call,) = calls_of(CODE, {"triton_poi_fused_0:1": ["mul"]}, NODES, STEP)
    assert call["call"] == "triton_poi_fused_0.run(arg0_1, buf0, 8, stream=stream0)"


def test_of_what_inductor_writes_now(tmp_path):
    function = torch.compile(lambda x, w: torch.relu(x @ w), backend=fx_passes.attn_ops)
    x = torch.randn(8, 16)
    torch._dynamo.mark_dynamic(x, 0)
    with graphs.dump(tmp_path) as directory:
        function(x, torch.randn(16, 32))
    (code,) = whole(directory)["kernels"]
    product, relu = code["calls"]
    assert (product["aten"], relu["aten"]) == (["aten.mm"], ["aten.relu"])
    assert product["bytes"] == 16 * 4 + 16 * 32 * 4 + 32 * 4  # of one row
    assert relu["bytes"] == 2 * 32 * 4
    text = (directory / code["file"]).read_text()
    assert all(one["call"] in text and one["source"] in text for one in code["calls"])
    assert relu["source"]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("skinny_kernel", "products"),
        ("aten::mm", "products"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("void flash::FlashAttnFwdCombine", "attention"),
        ("flash::prepare_varlen_num_blocks_kernel", "attention"),
        ("BatchDecodeWithPagedKVCacheKernel", "attention"),
        ("decode_kernel", "attention"),
        ("triton_poi_fused_add_attention_index_put_mul_3", "KV write"),
        ("triton_red_fused_add_mean_mul_rsqrt_2", "norm, pointwise"),
        ("cpp_fused_add_attention_mul_3", "norm, pointwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float>>", "sampling"),
        ("race_kernel", "sampling"),
        ("finish_step_kernel", "sampling"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("torch.ops.attn_ops.norm_mm.default", "products"),
        ("attn_ops::gated_mlp", "products"),
        ("torch.ops.attn_ops.attention.default", "attention"),
        ("attn_ops::write_kv", "KV write"),
        ("attn_ops::slot_mapping", "other"),
        ("fused_kernel", "products"),
    ],
)
def test_groups(name, group):
    assert group_of(name) == group


@pytest.mark.parametrize("folder", ["sampling", "step"])
def test_all_kernels_around_the_model_are_sampling(folder):
    found = {
        node.name: group_of(node.name)
        for path in Path(graphs.__file__).parent.glob(f"{folder}/triton/*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert len(found) > 1
    assert set(found.values()) == {"sampling"}, found
