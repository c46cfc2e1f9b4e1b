"""Bytes of Inductor's calls, read from its output code: on the CPU as it is, of Triton as saved."""

import ast
from pathlib import Path

import pytest
import torch

import fx_passes
import graphs
from graphs.dumps.data import read
from graphs.dumps.kernels import kernels, kernels_of
from graphs.dumps.output_code.groups import group_of
from graphs.dumps.output_code.sizes import in_words, read_size, value
from graphs.dumps.timeline.moved import note_kernels, note_products

TRITON = (Path(__file__).parent / "texts" / "triton_layer.txt").read_text()

CPP = """\
cpp_fused_embedding_0 = async_compile.cpp_pybinding(['const int64_t*', 'const float*', 'float*', 'const int64_t'], r'''
extern "C"  void  kernel(const int64_t* in_ptr0,
                       const float* in_ptr1,
                       float* out_ptr0,
                       const int64_t ks0)
{
    auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
    auto tmp4 = at::vec::Vectorized<float>::loadu(in_ptr1 + static_cast<int64_t>(x1 + 64L*tmp0), 16);
    tmp4.store(out_ptr0 + static_cast<int64_t>(x1 + 64L*x0));
}
''')


cpp_fused_index_put_1 = async_compile.cpp_pybinding(['const float*', 'const int64_t*', 'float*', 'const int64_t'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       const int64_t* in_ptr1,
                       float* out_ptr0,
                       const int64_t ks0)
{
    auto tmp0 = in_ptr1[static_cast<int64_t>(x0)];
    auto tmp5 = in_ptr0[static_cast<int64_t>(x1 + 32L*x0)];
    out_ptr0[static_cast<int64_t>(x1 + 32L*(tmp3 % 16L) + 1024L*(tmp4))] = tmp5;
    out_ptr0[static_cast<int64_t>(512L + x1 + 32L*(tmp3 % 16L) + 1024L*(tmp4))] = tmp5;
}
''')


async_compile.wait(globals())

class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1, arg3_1, arg4_1 = args
        arg0_1_size = arg0_1.size()
        s27 = arg0_1_size[1]
        s70 = s27
        assert_size_stride(arg0_1, (1, s27), (s27, 1), 'input')
        assert_size_stride(arg1_1, (50000, 64), (64, 1), 'input')
        buf0 = empty_strided_cpu((1, s70, 64), (64*s70, 64, 1), torch.float32)
        cpp_fused_embedding_0(arg0_1, arg1_1, buf0, s27)
        assert_size_stride(arg2_1, (32, 64), (64, 1), 'input')
        buf1 = empty_strided_cpu((s27, 32), (32, 1), torch.float32)
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.t, aten.mm]
        extern_kernels.mm(reinterpret_tensor(buf0, (s27, 64), (64, 1), 0), reinterpret_tensor(arg2_1, (64, 32), (1, 64), 0), out=buf1)
        buf2 = reinterpret_tensor(buf1, (s27, 32), (32, 1), 0); del buf1  # reuse
        assert_size_stride(arg3_1, (s27, ), (1, ), 'input')
        assert_size_stride(arg4_1, (500, 2, 16, 2, 16), (1024, 512, 32, 16, 1), 'input')
        cpp_fused_index_put_1(buf2, arg3_1, arg4_1, s27)
        buf3 = torch.ops.attn_ops.skinny_mm.default(buf0, arg2_1, None, out_dtype=torch.bfloat16)
        buf4 = torch.ops.attn_ops.attention.default(buf3, arg4_1, 0.25)
        return (buf4, )


def get_args():
    arg2_1 = rand_strided((32, 64), (64, 1), device='cpu', dtype=torch.bfloat16)
"""  # noqa: E501


COMBINED = """\
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
@triton_heuristics.pointwise(
    triton_meta={'signature': {'in_ptr0': '*bf16', 'in_ptr1': '*i64', 'out_ptr0': '*bf16', 'out_ptr2': '*bf16', 'ks0': 'i64', 'XBLOCK': 'constexpr'}},
)
@triton.jit
def triton_poi_fused_0(in_ptr0, in_ptr1, out_ptr0, out_ptr2, ks0, XBLOCK : tl.constexpr):
    if pid < num_xblocks_0:
        tmp0 = tl.load(in_ptr0 + (x3 + 768*x2), xmask)
        tl.store(out_ptr0 + (x4), tmp0, xmask)
    elif pid < num_xblocks_1:
        tmp60 = tl.load(in_ptr1 + (x7), xmask, eviction_policy='evict_last')
        tmp58 = tl.load(in_ptr0 + (640 + x5 + 768*x7), xmask)
        tl.store(out_ptr2 + (x8 + 128*tmp96 + 2048*x9 + 4096*tmp83), tmp58, xmask)
''', device_str='cuda')


async_compile.wait(globals())

class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        assert_size_stride(arg0_1, (s27, 768), (768, 1), 'input')
        assert_size_stride(arg1_1, (s27, ), (1, ), 'input')
        assert_size_stride(arg2_1, (s22, 2, 16, 2, 64), (4096, 2048, 128, 64, 1), 'input')
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((s27, 8, 64), (512, 64, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [q, index_put_], Original ATen: [aten.mul, aten.stack, aten.index_put]
            raw_stream0 = get_raw_stream(0)
            triton_poi_fused_0.run(arg0_1, arg1_1, buf0, arg2_1, s27, stream=raw_stream0)
            return (buf0, )
"""  # noqa: E501


def sizes(call: dict) -> tuple:
    return call["name"], call["bytes_read"], call["bytes_written"], call["detail"]


def test_of_cpp_kernels():
    """Rows of an embedding and of a cache count as often as there are indices."""
    found = [sizes(call) for call in kernels(CPP)]
    assert found == [
        ("cpp_fused_embedding_0", {"T": 8 + 64 * 4}, {"T": 64 * 4}, ""),
        ("extern_kernels.mm", {"T": 64 * 4, "": 64 * 32 * 2}, {"T": 32 * 4}, "[T, 64] x [64, 32]"),
        # The cache: a key and a value of 2 heads of 16 a token.
        ("cpp_fused_index_put_1", {"T": 32 * 4 + 8}, {"T": 2 * 32 * 4}, ""),
        (
            "torch.ops.attn_ops.skinny_mm.default",
            {"T": 64 * 4, "": 64 * 32 * 2},
            {"T": 64 * 2},
            "[1, T, 64] x [32, 64]",
        ),
        ("torch.ops.attn_ops.attention.default", None, None, ""),
    ]
    groups = [call["group"] for call in kernels(CPP)]
    assert groups == ["norm, pointwise", "products", "KV write", "products", "attention"]


def test_of_combined_kernels():
    """They have no name and no comment of their own. One store writes keys and values."""
    (found,) = kernels(COMBINED, "s27")
    assert sizes(found)[:3] == (
        "triton_poi_fused_0", {"T": 768 * 2 + 8}, {"T": 512 * 2 + 2 * 128 * 2},
    )  # fmt: skip
    assert found["aten"] == ["aten.mul", "aten.stack", "aten.index_put"]
    assert found["group"] == "KV write"


def test_a_timeline_takes_groups_from_the_code():
    (call,) = kernels(COMBINED, "s27")
    other = {**call, "group": "norm, pointwise", "bytes_written": {"T": 4}}
    graphs_ = [{"calls": [call], "num_calls": 2}, {"calls": [other], "num_calls": 1}]
    rows = [
        {"name": call["name"], "group": "norm, pointwise", "bytes": None, "layer": layer}
        for layer in (None, 0)
    ]
    note_kernels(rows, graphs_, 4)
    assert [row["group"] for row in rows] == ["norm, pointwise", "KV write"]
    assert [row["bytes"] for row in rows] == [4 * (1544 + 4), 4 * (1544 + 1536)]


def test_of_triton_kernels():
    first, gate, up, last = kernels(TRITON)
    rows, weight = 4 * 64 * 4, 64 * 64 * 4
    assert sizes(first) == ("triton_per_fused_0", {"": rows + 64 * 4}, {"": rows}, "")
    for product in (gate, up):
        assert sizes(product)[1:] == ({"": rows + weight}, {"": rows}, "[4, 64] x [64, 64]")
    assert sizes(last) == ("triton_per_fused_1", {"": 3 * rows + 64 * 4}, {"": rows}, "")
    assert "mul_2" in first["graph_nodes"]
    assert first["group"] == "norm, pointwise"


def test_the_number_of_tokens_has_one_name_in_all_graphs():
    later = CPP.replace("arg0_1, (1, s27), (s27, 1)", "arg0_1, (s27, 1), (1, 1)")
    assert kernels(later)[0]["bytes_written"] == {"s27": 256}
    assert kernels_of([CPP, later])[1][0]["bytes_written"] == {"T": 256}


def test_assertions_of_several_tensors():
    """As torch 2.15 writes them."""
    one = """assert_size_stride(arg0_1, (1, s27), (s27, 1), 'input')
        assert_size_stride(arg1_1, (50000, 64), (64, 1), 'input')"""
    names, shapes, strides = "(arg1_1, arg0_1)", "((50000, 64), (1, s27))", "((64, 1), (s27, 1))"
    both = f"assert_size_stride_grouped({names}, {shapes}, {strides}, 'input')"
    last = """assert_size_stride(arg3_1, (s27, ), (1, ), 'input')"""
    grouped = """assert_size_stride_grouped((arg3_1,), ((s27, ),), ((1, ),), 'input')"""
    assert one in CPP
    assert last in CPP
    assert kernels(CPP.replace(one, both).replace(last, grouped)) == kernels(CPP)


@pytest.mark.parametrize(
    "line",
    [
        "buf0 = empty_strided_cpu((1, s70, s70), (1, 1, 1), torch.float32)",
        "buf0 = empty_strided_cpu(shape, (1, 1, 1), torch.float32)",
        "buf0 = make(1)",
        "buf0 = ((",
    ],
)
def test_what_is_not_known_is_none(line):
    """No sum of symbols, no shape, no buffer, no Python."""
    code = CPP.replace(
        "buf0 = empty_strided_cpu((1, s70, 64), (64*s70, 64, 1), torch.float32)", line
    )
    assert kernels(code)[0]["bytes_written"] is None


@pytest.mark.parametrize(
    ("text", "words", "at_3"),
    [
        ("64*s27", "64*T", 192),
        ("2*(s27 + 1)", "2*T + 2", 8),
        ("(4*s27) // 2", "2*T", 6),
        ("s27 // 2", "?", None),
        ("s27*s27", "?", None),
        ("__import__('os')", "?", None),
    ],
)
def test_sizes(text, words, at_3):
    size = read_size(ast.parse(text, mode="eval").body, {"s27": "T"})
    assert in_words(size) == words
    if size is not None:
        assert value(size, {"T": 3}) == at_3
        assert value(size, {}) is None


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
        ("torch.ops.attn_ops.skinny_mm.default", "products"),
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


def test_of_what_inductor_writes_now(tmp_path):
    function = torch.compile(lambda x, w: torch.relu(x @ w), backend=fx_passes.attn_ops)
    x = torch.randn(8, 16)
    torch._dynamo.mark_dynamic(x, 0)
    with graphs.dump(tmp_path) as directory:
        function(x, torch.randn(16, 32))
    (code,) = read(directory)["kernels"]
    assert code["calls"] == kernels((directory / code["file"]).read_text())
    product, relu = code["calls"]
    (symbol,) = set(product["bytes_written"])
    assert sizes(product)[1:3] == ({symbol: 16 * 4, "": 16 * 32 * 4}, {symbol: 32 * 4})
    assert (relu["bytes_read"], relu["bytes_written"]) == ({symbol: 128}, {symbol: 128})


FUSED = """
async_compile.wait(globals())
        assert_size_stride(arg0_1, (1, s27), (s27, 1), 'input')
        assert_size_stride(arg1_1, (s27, 64), (64, 1), 'input')
        assert_size_stride(arg2_1, (64, ), (1, ), 'input')
        assert_size_stride(arg3_1, (96, 64), (64, 1), 'input')
        assert_size_stride(arg4_1, (256, 64), (64, 1), 'input')
        assert_size_stride(arg5_1, (64, 128), (128, 1), 'input')
        buf0 = torch.ops.attn_ops.norm_mm.default(arg1_1, arg2_1, 1e-06, reinterpret_tensor(arg3_1, (64, 96), (1, 64), 0))
        buf1 = torch.ops.attn_ops.gated_mlp.default(arg1_1, arg1_1, arg2_1, 1e-06, reinterpret_tensor(arg4_1, (64, 256), (1, 64), 0), reinterpret_tensor(arg5_1, (128, 64), (1, 128), 0))
        buf2 = torch.ops.attn_ops.gated_mlp.default(arg1_1, buf1, arg2_1, 1e-06, u, v)


def get_args():
    arg1_1 = rand_strided((4, 64), (64, 1), device='cpu', dtype=torch.bfloat16)
    arg2_1 = rand_strided((64, ), (1, ), device='cpu', dtype=torch.bfloat16)
    arg3_1 = rand_strided((96, 64), (64, 1), device='cpu', dtype=torch.bfloat16)
    arg4_1 = rand_strided((256, 64), (64, 1), device='cpu', dtype=torch.bfloat16)
    arg5_1 = rand_strided((64, 128), (128, 1), device='cpu', dtype=torch.bfloat16)
"""  # noqa: E501


def test_of_fused_products():
    """A gated MLP is two products; what is between them is written and read."""
    norm, mlp, unknown = kernels(FUSED)
    assert sizes(norm)[1:] == ({"T": 128, "": 128 + 96 * 128}, {"T": 192}, "[T, 64] x [64, 96]")
    up, down = mlp["parts"]
    assert [part["detail"] for part in (up, down)] == [
        "[T, 64] x [64, 256]",
        "[T, 128] x [128, 64]",
    ]
    assert up["bytes_read"] == {"T": 256, "": 128 + 256 * 128}
    assert up["bytes_written"] == {"T": 256}
    assert down["bytes_read"] == {"T": 256 + 256, "": 128 * 128}
    assert down["bytes_written"] == {"T": 128}
    assert mlp["bytes_read"] == {"T": 768, "": 128 + 256 * 128 + 128 * 128}
    assert mlp["group"] == unknown["group"] == "products"
    assert not unknown["parts"]
    rows = [{"name": "fused_kernel", "group": "products"} for _ in range(3)]
    assert note_products(rows, [{"calls": [norm, mlp], "num_calls": 1}], 4) == ""
    assert [row["bytes"] for row in rows] == [13696, 34944, 18944]
