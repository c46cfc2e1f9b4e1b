"""The vLLM plug-in on a CPU: vLLM's own layer, batch and registry, with the backend TORCH inside.

They skip without vLLM. Its Python files on the path are enough, without its kernels.
S requests, T rows, N query heads, K kv heads, H head size, B block size.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

api: Any = pytest.importorskip("vllm.v1.attention.backend", exc_type=ImportError)

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from attn_ops import AttentionSpec, CommonAttentionMetadata, get_backend  # noqa: E402
from attn_ops.backends.torch_backend import reference_attention  # noqa: E402
from attn_ops.integrations.vllm import plugin, register  # noqa: E402
from attn_ops.integrations.vllm.backend import backend_class  # noqa: E402
from attn_ops.integrations.vllm.versions import our_cache  # noqa: E402
from attn_ops.ops.write_kv import index_put_kv, stored  # noqa: E402
from tests.kit.batches import Batch, build_batch  # noqa: E402

N, K, H, B = 4, 2, 16, 4
NAME = "model.layers.0.attn"
RAGGED = ([5, 1, 0, 3, 1], [5, 1, 0, 12, 9])

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def custom():
    """vLLM's registry, as it was afterwards."""
    yield AttentionBackendEnum.CUSTOM
    AttentionBackendEnum.CUSTOM.clear_override()


class Model:
    """vLLM's attention layers with our backend, and a builder for them."""

    def __init__(self, *layers: dict[str, Any], backend: str = "TORCH", **cache: Any) -> None:
        self.config = VllmConfig(device_config=DeviceConfig("cpu"))
        for name, value in cache.items():
            setattr(self.config.cache_config, name, value)
        kind = backend_class(backend)
        with set_current_vllm_config(self.config):
            self.layers = [
                Attention(
                    N, H, 0.25, num_kv_heads=K, attn_backend=kind, prefix=f"model.layers.{i}.attn",
                    cache_config=self.config.cache_config, **layer,
                )
                for i, layer in enumerate(layers or ({},))
            ]  # fmt: skip
        seen = SimpleNamespace(
            compilation_config=self.config.compilation_config,
            model_config=SimpleNamespace(dtype=torch.float32, max_model_len=64),
        )
        spec, names = SimpleNamespace(block_size=B), [layer.layer_name for layer in self.layers]
        self.builder = kind.get_builder_cls()(spec, names, seen, torch.device("cpu"))

    def run(self, batch: Batch, metadata: Any, layer: int = 0) -> torch.Tensor:
        """The layer writes keys and values, and attends: [T, N, H]."""
        called = self.layers[layer]
        context = set_forward_context(
            {called.layer_name: metadata},
            self.config,
            slot_mapping={called.layer_name: batch.common.slot_mapping},
        )
        with set_current_vllm_config(self.config), context:
            return called(batch.q.clone(), batch.k, batch.v).view(-1, N, H)


def common_of(common: CommonAttentionMetadata, **changes: Any) -> Any:
    """The batch as vLLM describes it."""
    names = {field.name for field in dataclasses.fields(api.CommonAttentionMetadata)}
    known = {name: getattr(common, name) for name in names if hasattr(common, name)}
    if "_seq_lens_cpu" in names:
        known["_seq_lens_cpu"] = common.seq_lens_cpu
    wanted = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "_seq_lens_cpu", "num_reqs")
    wanted += ("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor")
    wanted += ("slot_mapping", "causal")
    return api.CommonAttentionMetadata(**{n: known[n] for n in wanted if n in known} | changes)


def batch_of(lens: tuple[list[int], list[int]] = RAGGED, **options: Any) -> Batch:
    sizes = {"num_heads": N, "num_kv_heads": K, "head_size": H, "block_size": B}
    return build_batch(*lens, **sizes, written=False, **options)


def give(layer: Any, cache: torch.Tensor, newest: bool) -> None:
    """Bind a cache [P, 2, B, K, H] to a layer, in the form of vLLM 0.24 or of 0.33."""
    layer.kv_cache = cache.permute(0, 3, 2, 1, 4).flatten(3).contiguous() if newest else cache


def expected(batch: Batch, **options: Any) -> torch.Tensor:
    """The oracle in float64, over the cache with this step's keys and values."""
    cache, rows = batch.kv_cache.clone(), batch.common.num_actual_tokens
    slots = batch.common.slot_mapping
    index_put_kv(batch.k, batch.v, cache, slots)
    return reference_attention(batch.q[:rows], cache, batch.common, 0.25, **options)


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"per_layer_sliding_window": 3}, {"sliding_window": 3}),
    "soft cap": ({"logits_soft_cap": 2.0}, {"soft_cap": 2.0}),
    "no soft cap": ({"logits_soft_cap": 0.0}, {}),
    "alibi": (
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    ),
    "sinks": ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},) * 2,
}
"""By name: what vLLM gives a layer, and the oracle."""


@pytest.mark.parametrize("newest", [False, True], ids=["cache of 0.24", "cache of 0.33"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_layer_writes_and_attends(feature, newest):
    asked, options = FEATURES[feature]
    model, batch = Model(asked), batch_of()
    give(model.layers[0], batch.kv_cache.clone(), newest)
    out_TNH = model.run(batch, model.builder.build(0, common_of(batch.common)))
    torch.testing.assert_close(out_TNH.double(), expected(batch, **options), atol=2e-5, rtol=1e-4)
    written = our_cache(model.layers[0].kv_cache)
    for slot, k_KH, v_KH in zip(batch.common.slot_mapping, batch.k, batch.v, strict=True):
        assert torch.equal(written[slot // B, 0, slot % B], k_KH)
        assert torch.equal(written[slot // B, 1, slot % B], v_KH)


@pytest.mark.parametrize("newest", [False, True], ids=["cache of 0.24", "cache of 0.33"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_cache(kv_cache_dtype, newest):
    model, batch = Model(cache_dtype=kv_cache_dtype), batch_of()
    layer = model.layers[0]
    layer._k_scale.fill_(0.5)
    layer._v_scale.fill_(2.0)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    finite = batch.kv_cache.nan_to_num(0.0)
    ours = kv_cache_dtype if kv_cache_dtype == "fp8_e5m2" else "fp8_e4m3"
    cache = torch.stack(
        [stored(finite[:, i], ours, s) for i, s in enumerate(scales.values())], dim=1
    )
    give(layer, cache.clone(), newest)
    out_TNH = model.run(batch, model.builder.build(0, common_of(batch.common)))
    k, v = (stored(x, ours, s) for x, s in zip((batch.k, batch.v), scales.values(), strict=True))
    index_put_kv(k, v, cache, batch.common.slot_mapping)
    wanted = reference_attention(batch.q, cache, batch.common, 0.25, kv_cache_dtype=ours, **scales)
    torch.testing.assert_close(out_TNH.double(), wanted, atol=2e-5, rtol=1e-4)


def test_rows_behind_the_batch_are_zero():
    """As in vLLM's piecewise graphs: q has more rows than the batch has tokens."""
    model, batch = Model(), batch_of(num_padding_rows=3)
    give(model.layers[0], batch.kv_cache.clone(), newest=False)
    out_TNH = model.run(batch, model.builder.build(0, common_of(batch.common)))
    torch.testing.assert_close(out_TNH[:10].double(), expected(batch), atol=2e-5, rtol=1e-4)
    assert torch.equal(out_TNH[10:], torch.zeros(3, N, H))


def test_padding_requests_of_a_captured_step():
    """As in vLLM's whole graphs: padding requests without a query, whose rows count as tokens."""
    model, batch = Model(), batch_of(([1, 1, 1], [7, 1, 4]), num_padding_rows=2)
    common = batch.common
    more = dict.fromkeys(
        ("query_start_loc", "query_start_loc_cpu"), torch.tensor([0, 1, 2, 3, 3, 3])
    )
    changes = {name: value.int() for name, value in more.items()}
    changes["seq_lens"] = torch.tensor([7, 1, 4, 0, 0], dtype=torch.int32)
    changes["block_table_tensor"] = torch.nn.functional.pad(common.block_table_tensor, (0, 0, 0, 2))
    if hasattr(common_of(common), "_seq_lens_cpu"):
        changes["_seq_lens_cpu"] = changes["seq_lens"]
    padded = common_of(common, **changes, num_reqs=5, num_actual_tokens=5)
    batch.q[3:] = 0.0
    for build in (lambda c: model.builder.build(0, c), model.builder.build_for_cudagraph_capture):
        give(model.layers[0], batch.kv_cache.clone(), newest=False)
        metadata = build(padded)
        out_TNH = model.run(batch, metadata)
        torch.testing.assert_close(out_TNH[:3].double(), expected(batch), atol=2e-5, rtol=1e-4)
        assert torch.equal(out_TNH[3:], torch.zeros(2, N, H))


def test_metadata_for_a_capture_has_bounds_and_no_mirrors():
    model, batch = Model(), batch_of()
    captured = model.builder.build_for_cudagraph_capture(common_of(batch.common)).ours.common
    assert (captured.max_seq_len, captured.seq_lens_cpu, captured.query_start_loc_cpu) == (
        64, None, None,
    )  # fmt: skip
    called = model.builder.build(0, common_of(batch.common)).ours.common
    assert called.max_seq_len == 12
    assert called.seq_lens_cpu.tolist() == [5, 1, 0, 12, 9]


def test_a_graph_makes_its_metadata_inside(monkeypatch):
    """Also where a layer has run with the same object before the capture."""
    model, batch = Model(), batch_of()
    model.builder.on_gpu = True
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    step = model.builder.build(0, common_of(batch.common))
    before = step.ours
    assert step.ours is before
    capturing[0] = True
    inside = step.ours
    assert inside is not before
    assert step.ours is inside
    assert inside.common.max_seq_len == 64


def test_every_geometry_runs_before_a_capture(monkeypatch):
    """With the bounds of the capture, so that no kernel is compiled in it."""
    model, batch = Model({}, {"per_layer_sliding_window": 3}, {}), batch_of()
    seen = []
    impl = type(model.layers[0].impl)
    attend = impl.attend

    def counted(self, layer, query, kv_cache, step):
        seen.append((self.asked["sliding_window"], step.ours.common.max_seq_len))
        return attend(self, layer, query, kv_cache, step)

    monkeypatch.setattr(impl, "attend", counted)
    model.builder.build_for_cudagraph_capture(common_of(batch.common))
    assert seen == [], "vLLM has not made the caches"
    for layer in model.layers:
        give(layer, batch.kv_cache.nan_to_num(0.0), newest=False)
    model.builder.build_for_cudagraph_capture(common_of(batch.common))
    assert sorted(seen, key=str) == [(3, 64), (None, 64)]


def test_a_batch_whose_lengths_only_the_device_knows():
    model, batch = Model(), batch_of()
    give(model.layers[0], batch.kv_cache.clone(), newest=False)
    common = common_of(batch.common)
    if hasattr(common, "_seq_lens_cpu"):
        common._seq_lens_cpu = None
    out_TNH = model.run(batch, model.builder.build(0, common))
    torch.testing.assert_close(out_TNH.double(), expected(batch), atol=2e-5, rtol=1e-4)


def test_layers_of_several_geometries_share_one_batch():
    """Made by the first layer that runs; changes of vLLM's object come too late for it."""
    model, batch = Model({}, {"per_layer_sliding_window": 3}), batch_of()
    common = common_of(batch.common)
    step = model.builder.build(0, common)
    common.num_actual_tokens = 1
    made = []
    for layer, options in enumerate(({}, {"sliding_window": 3})):
        give(model.layers[layer], batch.kv_cache.clone(), newest=False)
        out_TNH = model.run(batch, step, layer)
        torch.testing.assert_close(
            out_TNH.double(), expected(batch, **options), atol=2e-5, rtol=1e-4
        )
        assert step.ours.common.num_actual_tokens == 10
        made.append(step.ours)
    assert made[0] is made[1]


def test_chunks_by_virtual_batches_of_vllm(monkeypatch):
    """Llama 4: vLLM wraps our class, and describes each chunk as a request of its own."""
    from vllm.model_executor.layers.attention import chunked_local_attention as chunked
    from vllm.utils import torch_utils

    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False)
    kind = chunked.create_chunked_local_attention_backend(backend_class("TORCH"), 8)
    model, batch = Model(), batch_of()
    seen, spec = model.builder.vllm_config, SimpleNamespace(block_size=B)
    builder = kind.get_builder_cls()(spec, [NAME], seen, torch.device("cpu"))
    give(model.layers[0], batch.kv_cache.clone(), newest=False)
    out_TNH = model.run(batch, builder.build(0, common_of(batch.common)))
    backend = get_backend("TORCH")
    spec = AttentionSpec(N, K, H, torch.float32, attention_chunk_size=8)
    meta = backend.builder(backend, [spec], B, "cpu").build(0, batch.common)
    cache = batch.kv_cache.clone()
    index_put_kv(batch.k, batch.v, cache, batch.common.slot_mapping)
    virtual = meta.views.chunked[8].common
    wanted = reference_attention(batch.q, cache, virtual, 0.25)
    torch.testing.assert_close(out_TNH.double(), wanted, atol=2e-5, rtol=1e-4)


def test_the_run_that_measures_memory_attends_to_nothing():
    model, batch = Model(), batch_of()
    out_TNH = torch.full((10, N, H), float("nan"))
    layer = model.layers[0]
    layer.impl.forward(layer, batch.q, batch.k, batch.v, layer.kv_cache, None, out_TNH)
    assert torch.equal(out_TNH, torch.zeros(10, N, H))


def test_by_preference_the_backend_is_chosen_for_the_layers():
    model, batch = Model(backend="PREFERRED"), batch_of()
    assert model.builder.build(0, common_of(batch.common)).ours.backend.name == "TORCH"


# -- registry --------------------------------------------------------------------------------------


def test_registered_under_the_backend_that_runs(custom):
    register("TRITON")
    kind = custom.get_class()
    assert kind is backend_class("TRITON")
    assert kind.get_name() == "CUSTOM"
    register()
    assert custom.get_class() is backend_class("PREFERRED")
    with pytest.raises(ValueError, match=r"backend must be a known name, got 'FASTEST'; supported"):
        register("FASTEST")
    assert custom.get_class() is backend_class("PREFERRED")


def test_the_plugin_leaves_what_others_have_registered(custom):
    register("TRITON")
    plugin()
    assert custom.get_class() is backend_class("TRITON")
    custom.clear_override()
    plugin()
    assert custom.get_class() is backend_class("PREFERRED")


def reasons(backend: str, **changes: Any) -> list[str]:
    """Why vLLM does not take the backend for a layer."""
    asked = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "attn_type": "decoder",
        "device_capability": SimpleNamespace(major=9, minor=0),
    }  # fmt: skip
    return backend_class(backend).validate_configuration(**(asked | changes))


def test_vllm_is_told_what_a_backend_takes():
    assert reasons("PREFERRED", has_sink=True) == []
    assert reasons("FLASH_ATTN", has_sink=True, block_size=64) == []
    assert reasons("TRITON", kv_cache_dtype="fp8_e5m2") == []
    assert reasons("FLASH_ATTN", kv_cache_dtype="fp8_e5m2") == ["kv_cache_dtype not supported"]
    assert reasons("FLASH_ATTN", head_size=80) == ["head_size not supported"]
    assert reasons("FLASH_ATTN", dtype=torch.float32)[0] == "dtype not supported"
    assert reasons("TRITON", block_size=8) == ["block_size not supported"]
    assert reasons("TRITON", use_mla=True) == ["MLA not supported"]
    assert reasons("FLASHINFER", has_sink=True) == ["attention sinks not supported"]
    assert reasons("TRITON", attn_type="encoder_only") == [
        "attention type encoder_only not supported"
    ]
    assert "plain attention" in reasons("TRITON_MLA")[-1]
    assert reasons("TRITON", kv_cache_dtype="bfloat16") == []
    assert reasons("TRITON", kv_cache_dtype="float16") == [
        "kv_cache_dtype must be auto or FP8 for a model in torch.bfloat16, got float16"
    ]


def test_levels_of_cuda_graphs():
    """None for a backend that plans on the host; vLLM says not which graph it replays."""
    levels = {"TRITON": "ALWAYS", "PREFERRED": "ALWAYS", "FLASH_ATTN": "ALWAYS", "TORCH": "NEVER"}
    for backend, level in (levels | {"FLASHINFER": "NEVER"}).items():
        builder = backend_class(backend).get_builder_cls()
        assert builder.get_cudagraph_support(None, None).name == level


def test_block_sizes_of_a_kernel():
    kinds = {name: backend_class(name) for name in ("PREFERRED", "FLASH_ATTN", "TRITON")}
    sizes = {name: kind.get_supported_kernel_block_sizes() for name, kind in kinds.items()}
    assert sizes["PREFERRED"] == sizes["FLASH_ATTN"] == [16, 32, 64]
    assert sizes["TRITON"][-1] == 256


def test_layers_that_are_refused():
    impl = backend_class("TORCH").get_impl_cls()
    with pytest.raises(ValueError, match="attn_type must be decoder, got encoder_only"):
        impl(N, H, 0.25, K, attn_type="encoder_only")
    with pytest.raises(ValueError, match="arguments of a layer must be known, got chunk_lookback"):
        impl(N, H, 0.25, K, chunk_lookback=2)
    layer, x = impl(N, H, 0.25, K), torch.zeros(1, N, H)
    with pytest.raises(ValueError, match="output_scale must be None"):
        layer.forward(None, x, x, x, x, None, x, output_scale=x)
    model, batch = Model(), batch_of()
    mixed = common_of(batch.common, causal=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="causal must be a bool, got a tensor"):
        _ = model.builder.build(0, mixed).ours


def test_a_layer_that_the_backend_does_not_take_is_named():
    with pytest.raises(ValueError, match=r"backend FLASH_ATTN cannot be used: .*alibi_slopes"):
        Model({"alibi_slopes": [0.5] * N}, backend="FLASH_ATTN")


@pytest.mark.skipif(not hasattr(api.AttentionBackend, "get_kv_cache_shape"), reason="vLLM 0.24")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_as_vllm_makes_them(layout, monkeypatch):
    from vllm.v1.attention.backends import utils

    monkeypatch.setattr(utils, "get_kv_cache_layout", lambda: layout)
    kind = backend_class("TORCH")
    shape, order = kind.get_kv_cache_shape(7, B, K, H), kind.get_kv_cache_stride_order()
    made = torch.zeros([shape[i] for i in order]).permute(*[order.index(i) for i in range(5)])
    assert made.shape == (7, 2, B, K, H)
    assert made[0, 0].transpose(0, 1).is_contiguous() == (layout == "HND")
    assert kind.get_kv_cache_block_dim(B, K, H) == 0
    assert kind.indexes_kv_by_block_stride()
