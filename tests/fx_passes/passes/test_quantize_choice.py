"""quantize_output with "auto": batches that gain are fused, by times or by what is known."""

import json

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_ops.backends import measure_quant
from attn_ops.backends.measure import MeasuredShape
from attn_ops.backends.measure_quant import Pair
from attn_ops.output_quant.schemes import SCHEMES
from fx_passes import PassConfig, PassError, attn_ops, recording
from fx_passes.analysis import quantize_gains
from fx_passes.analysis.graph_ops import ATTENTION
from fx_passes.analysis.quantize_gains import Choice, Gain, table
from fx_passes.inductor_slot import AtenPipeline
from fx_passes.passes.quantize_output import QuantizeOutput
from tests.fx_passes.passes.quantize_models import SCALE, Behind, given, row

DECODES = [MeasuredShape(rows, 1, 1024) for rows in (1, 8, 64, 256)]
PROMPTS = [MeasuredShape(1, rows, rows) for rows in (512, 2048)]
KINDS = ("decodes_apart", "prompts_apart")


def operator_of(graph):
    target = torch.ops.attn_ops.attention_quant.default
    return next(iter(graph.find_nodes(op="call_function", target=target)), None)


@pytest.fixture
def timer(monkeypatch):
    """Replaces the timer: batches of `slow` rows are slower fused. `calls` are its arguments."""

    class Timer:
        def __init__(self):
            self.slow, self.fails, self.calls = set(), set(), []

        def __call__(self, setting, lengths):
            self.calls.append((setting, lengths))
            rows = sum(lengths[0])
            if rows in self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory\nand more")
            return Pair(12.0, 10.0) if rows in self.slow else Pair(9.0, 10.0)

    made = Timer()
    monkeypatch.setattr(measure_quant, "time_pair", made)
    monkeypatch.setattr(measure_quant, "SHAPES", {"cpu": (*DECODES, *PROMPTS)})
    return made


@pytest.fixture
def path(tmp_path):
    return tmp_path / "times.json"


def run(batch, path, function=row, *more):
    behind = Behind(batch(), function, *more)
    one = QuantizeOutput.of(PassConfig(measurements=path))
    one.run(behind.graph)
    return one, operator_of(behind.graph)


# -- decisions -------------------------------------------------------------------------------------


def test_all_batches_gain(batch, timer, path):
    one, node = run(batch, path)
    assert not set(KINDS) & set(node.kwargs)
    choice = one.facts["choices"]["attention"]
    assert choice["decision"] == "all batches"
    assert [t["batch"] for t in choice["times"]] == [
        "1x1024", "8x1024", "64x1024", "256x1024", "512", "2048"
    ]  # fmt: skip
    assert one.summary() == f"attention writes fp8_row for all batches ({choice['reason']})"
    assert "measured on this cpu: 9.0 for 10.0 us at 1x1024, " in one.summary()
    setting, lengths = timer.calls[0]
    spec = setting.spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (4, 2, 64)
    assert (spec.dtype, setting.block_size, lengths) == (torch.bfloat16, 4, ((1,), (1024,)))


@pytest.mark.skipped_when(QuantizeOutput, '`attn_quant` is "auto", and a kernel behind')
def test_no_batch_gains(batch, timer, path):
    timer.slow = {1, 8, 64, 256, 512, 2048}
    one, node = run(batch, path)
    assert node is None
    assert one.facts == {}
    assert one.summary() is None
    (reason,) = one.reasons
    assert reason.startswith("a kernel behind attention is faster, measured on this cpu: 12.0 for")


MIXED = {
    "large decodes": ({64, 256}, {"decodes_apart": [23]}, "decodes of 23 rows and more"),
    "small decodes": ({1, 8}, {"decodes_apart": [0, 23]}, "decodes of 0 to 22 rows"),
    "some decodes": ({8}, {"decodes_apart": [3, 23]}, "decodes of 3 to 22 rows"),
    "all prompts": ({512, 2048}, {"prompts_apart": [0]}, "prompts of any number of rows"),
    "both": (
        {1, 2048}, {"decodes_apart": [0, 3], "prompts_apart": [1024]},
        "decodes of 0 to 2 rows and prompts of 1024 rows and more",
    ),
    "two ranges": (
        {8, 256}, {"decodes_apart": [3, 23, 128]}, "decodes of 3 to 22 rows and 128 rows and more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_some_batches_gain(batch, timer, path, name):
    """What loses is left to a kernel behind; results are those of the graph as it was."""
    timer.slow, keywords, words = MIXED[name]
    behind = Behind(batch(), row)
    wanted = behind.run()
    one = QuantizeOutput.of(PassConfig(measurements=path))
    assert one.run(behind.graph) == 1
    node = operator_of(behind.graph)
    assert {k: list(v) for k, v in node.kwargs.items() if k in KINDS} == keywords
    assert one.facts["choices"]["attention"]["decision"] == f"all but {words}"
    assert f"fp8_row for all but {words} (measured on" in one.summary()
    assert all(torch.equal(a, b) for a, b in zip(behind.run(), wanted, strict=True))
    assert QuantizeOutput.of(PassConfig(measurements=path)).run(behind.graph) == 0


@pytest.mark.parametrize(("fused", "loses"), [(10.04, False), (10.06, True), (9.0, False)])
def test_noise(fused, loses):
    assert Gain.of(DECODES[0], Pair(fused, 10.0)).loses == loses


def test_sizes_that_cannot_be_timed_are_left_out(batch, timer, path):
    """Their neighbours decide; none at all is as if nothing was known."""
    timer.slow, timer.fails = {64}, {256, 512}
    one, node = run(batch, path)
    assert list(node.kwargs["decodes_apart"]) == [23]
    assert "none at 256x1024, OutOfMemoryError: CUDA out of memory, none at 512" in one.summary()
    timer.fails = {1, 8, 64, 256, 512, 2048}
    path.unlink()
    one, node = run(batch, path)
    assert node is not None
    assert not set(KINDS) & set(node.kwargs)


# -- where times come from -------------------------------------------------------------------------


def test_a_second_compilation_reads_the_file(batch, timer, path):
    timer.slow = {64, 256}
    first, _ = run(batch, path)
    assert len(timer.calls) == 6
    timer.slow = set()
    second, _ = run(batch, str(path))
    assert len(timer.calls) == 6
    assert second.facts == first.facts
    run(batch, path, given, SCALE)
    assert len(timer.calls) == 12, "another scheme"


@pytest.mark.parametrize("field", ["device", "versions"])
def test_times_of_another_device_or_version_are_not_taken(batch, timer, path, field):
    run(batch, path)
    content = json.loads(path.read_text())
    other = "NVIDIA H300" if field == "device" else {"torch": "1.0"}
    moved = {json.dumps(json.loads(k) | {field: other}, sort_keys=True): v
             for k, v in content["entries"].items()}  # fmt: skip
    path.write_text(json.dumps(content | {"entries": moved}))
    run(batch, path)
    assert len(timer.calls) == 12
    assert len(json.loads(path.read_text())["entries"]) == 12


def test_a_file_that_cannot_be_used(batch, timer, path):
    path.write_text("{")
    with pytest.raises(ValueError, match="measurements must be a file that select_backend wrote"):
        run(batch, path)
    assert path.read_text() == "{"
    with pytest.raises(ValueError, match="measurements must be a file that can be written"):
        run(batch, path.parent / "missing" / "times.json")
    for wrong in (3, True, ["a"]):
        with pytest.raises(ValueError, match=r"options\['measurements'\] must be a path or None"):
            PassConfig.split({"measurements": wrong})


def test_the_table_decides_on_its_gpu(batch, timer, monkeypatch):
    """Nothing is timed there, unless a file is named; another GPU is measured once a process."""
    graph = Behind(batch(), row).graph
    (attention,) = graph.find_nodes(op="call_function", target=ATTENTION[0])

    class Value:
        device = torch.device("cuda")

    how = quantize_gains.OutputQuant("fp8_row")
    real = quantize_gains.value_of
    spec = quantize_gains.geometry_of(attention)
    fake = {attention: Value()}
    monkeypatch.setattr(quantize_gains, "value_of", lambda node: fake.get(node) or real(node))
    monkeypatch.setattr(quantize_gains, "geometry_of", lambda node: spec)
    names = iter(["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    selected = measure_quant.select_backend(spec[0], block_size=4, device="cpu")
    monkeypatch.setattr(measure_quant, "select_backend", lambda *a, **k: selected)
    measure_quant.SHAPES["cuda"] = measure_quant.SHAPES["cpu"]
    measure_quant._in_this_process.cache_clear()
    choice = quantize_gains.choose(attention, how, None)
    assert choice.source == "table of NVIDIA H200"
    assert (choice.decision(), choice.gains) == ("all batches", table("fp8_row"))
    assert not timer.calls
    for _ in range(2):
        choice = quantize_gains.choose(attention, how, None)
        assert choice.source == "measured on this NVIDIA H100 80GB HBM3"
        assert len(timer.calls) == 6
    measure_quant._in_this_process.cache_clear()


def test_sizes_that_are_symbols(batch, timer, path):
    """The table is taken, and it says so."""
    behind = Behind(batch(), row)
    (attention,) = behind.graph.find_nodes(op="call_function", target=ATTENTION[0])
    cache = attention.args[1]
    shape = list(cache.meta["val"].shape)
    shape[3] = ShapeEnv().create_unbacked_symint()
    cache.meta["val"] = type("Value", (), {"shape": tuple(shape)})()
    choice = quantize_gains.choose(attention, quantize_gains.OutputQuant("fp8_row"), path)
    assert choice.source == "table of NVIDIA H200, as the cache's sizes are symbols"
    assert choice.gains == table("fp8_row")
    assert not timer.calls


def test_a_cpu_is_not_measured_unasked(batch, timer):
    one, node = run(batch, None)
    assert node is not None
    assert not timer.calls
    reason = "declared by a backend; nothing was measured on cpu"
    assert one.facts["choices"]["attention"]["reason"] == reason


def test_the_table_has_every_scheme_that_is_fused():
    assert {s for s in SCHEMES if table(s)} == {*SCHEMES} - {"fp8_tensor", "nvfp4"}
    assert all(not Choice("", table(s)).keywords() for s in SCHEMES)


# -- compiled --------------------------------------------------------------------------------------


def test_the_key_has_no_path():
    keys = {AtenPipeline(PassConfig(measurements=p)).uuid() for p in (None, "a.json", "b.json")}
    assert len(keys) == 2, "whether it is measured counts, not where it is written"
    assert repr(PassConfig(measurements="a.json")) == repr(PassConfig())


def test_measured_while_it_compiles(batch, path):
    """Nothing is replaced: real tensors, inside a compilation whose tensors are fake."""
    made = batch()

    def attend(q, kv_cache):
        out = torch.ops.attn_ops.attention(q, kv_cache, made.meta, 0.125)
        return row(out.view(1, -1, 256))

    wanted = attend(made.q, made.kv_cache)
    for _ in range(2):
        torch._dynamo.reset()
        with recording() as recorder, torch.no_grad():
            options = {"measurements": str(path), "emulate_precision_casts": True}
            compiled = torch.compile(attend, backend=attn_ops, fullgraph=True, options=options)
            got = compiled(made.q, made.kv_cache)
        (record,) = [r for r in recorder.passes if r.pass_name == "quantize_output"]
        assert record.matches == 1
        assert "measured on this cpu: " in record.summary
        same = [torch.equal(a.float().nan_to_num(), b.float().nan_to_num())
                for a, b in zip(got, wanted, strict=True)]  # fmt: skip
        assert all(same)
        assert len(json.loads(path.read_text())["entries"]) == 2
    path.write_text("{")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="measurements must be a file") as error:
        torch.compile(attend, backend=attn_ops, options=options)(made.q, made.kv_cache)
    inner = getattr(error.value, "inner_exception", error.value)
    assert isinstance(inner, PassError)
