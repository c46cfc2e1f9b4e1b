"""Choosing a backend by time: who is timed, who wins, what the file remembers."""

import contextlib
import dataclasses
import functools
import json
import time
import types
from typing import Any

import pytest
import torch

from attn_ops import AttentionSpec, LatentShape, get_backend, register_backend
from attn_ops import select_backend as select
from attn_ops.backends import measure, measurements, registry
from attn_ops.backends.measure import MeasuredShape, Measurement

TORCH = get_backend("TORCH")
PLAIN = AttentionSpec(4, 2, 16, torch.float32)
TINY: list = [MeasuredShape(2, 1, 8), ([3, 1], [5, 9])]
OPTIONS: dict = {"block_size": 16, "device": "cpu", "measure": True}


def forward_later(*arguments, seconds):
    time.sleep(seconds)
    return TORCH.forward(*arguments)


def sleeping(name, seconds, **support):
    """TORCH, later."""
    changed = dataclasses.replace(TORCH.support, **support)
    forward = functools.partial(forward_later, seconds=seconds)
    return dataclasses.replace(TORCH, name=name, forward=forward, support=changed)


def raising_forward(*arguments):
    raise RuntimeError("no such kernel")


@pytest.fixture(autouse=True)
def only_torch(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_BUILT_IN", {"TORCH": "attn_ops.backends.torch_backend"})


@pytest.fixture
def counted(monkeypatch):
    """How often backends were timed."""
    calls = []

    def counting(*arguments):
        calls.append(arguments)
        return real(*arguments)

    real = measurements.measure
    monkeypatch.setattr(measurements, "measure", counting)
    return calls


def test_the_fastest_wins_and_why_gives_the_times():
    register_backend(sleeping("SLOW", 0.02))
    selection = select(PLAIN, shapes=TINY, **OPTIONS)
    assert selection.backend is TORCH
    assert selection.why.startswith("fastest of 2 measured: TORCH ")
    assert " us, SLOW " in selection.why
    assert " us at 2 x 1 of 8; TORCH " in selection.why
    assert selection.why.endswith(" us at 2 x 3 of 9 at most")
    assert selection.reasons_against == {"SLOW": ["applies, but TORCH was faster"]}


def test_a_faster_backend_than_the_preferred_one_is_chosen(monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    register_backend(sleeping("SLOW", 0.02))
    register_backend(sleeping("FAST", 0.0))
    assert select(PLAIN, block_size=16, device="cpu").backend.name == "SLOW"
    assert select(PLAIN, shapes=TINY, **OPTIONS).backend.name == "FAST"


def test_times_are_normalized_by_shape():
    """A shape of long times does not outvote the others: B loses by 2 ms and wins by a factor."""
    times = {"A": [10_000.0, 30.0], "B": [12_000.0, 10.0]}
    assert Measurement(times, {}).fastest() == "B"
    assert Measurement({"A": times["A"], "B": [31_000.0, 10.0]}, {}).fastest() == "A"


def test_layers_count_by_their_number(monkeypatch):
    """Three layers with a window, one without: the mean over the layers."""
    taken = {None: 8.0, 4: 2.0}
    monkeypatch.setattr(
        measure,
        "_time_layers",
        lambda backends, spec, *rest: {b.name: taken[spec.sliding_window] for b in backends},
    )
    windowed = dataclasses.replace(PLAIN, sliding_window=4)
    found = measure.measure(
        [TORCH], [windowed, PLAIN, windowed, windowed], 16, torch.device("cpu"), [((1,), (1,))]
    )
    assert found.times == {"TORCH": [3.5]}


def test_all_declared_features_can_be_timed():
    for change in (
        {"alibi": True, "sinks": True, "soft_cap": 5.0, "sliding_window": 3},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"causal": False},
    ):
        spec = dataclasses.replace(PLAIN, **change)
        assert select([PLAIN, spec], shapes=TINY, **OPTIONS).backend is TORCH


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_latent_layers_are_timed(monkeypatch, kv_cache_dtype):
    monkeypatch.setitem(registry._BUILT_IN, "TORCH_MLA", "attn_ops.backends.mla.torch_mla")
    latent = LatentShape(16, 8, 4, 6)
    spec = AttentionSpec.of_latent(2, latent, torch.float32, kv_cache_dtype=kv_cache_dtype)
    shapes = [([1, 1], [5, 9]), ([20], [20])]
    found = select([spec], block_size=16, device="cpu", measure=True, shapes=shapes)
    assert found.backend.support.latent
    assert found.backend.name in found.why


def test_who_fails_is_out_with_the_reason():
    register_backend(dataclasses.replace(TORCH, name="BROKEN", forward=raising_forward))
    selection = select(PLAIN, shapes=TINY, **OPTIONS)
    assert selection.backend is TORCH
    assert selection.reasons_against["BROKEN"] == [
        "failed when it was timed: RuntimeError: no such kernel"
    ]


def test_nobody_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    register_backend(dataclasses.replace(TORCH, name="BROKEN", forward=raising_forward))
    path = tmp_path / "times.json"
    with pytest.raises(ValueError, match=r"got none: BROKEN: failed .* no such kernel"):
        select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    assert not path.exists()


def test_who_quantizes_the_query_is_no_candidate(monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    register_backend(sleeping("ROUNDS", 0.0, quantizes_query=True))
    register_backend(sleeping("SLOW", 0.02))
    fp8 = dataclasses.replace(PLAIN, kv_cache_dtype="fp8_e4m3")
    selection = select(fp8, shapes=TINY, **OPTIONS)
    assert selection.backend.name == "SLOW"
    assert "quantizes q to FP8" in selection.reasons_against["ROUNDS"][0]
    assert select(PLAIN, shapes=TINY, **OPTIONS).backend.name == "ROUNDS"


def test_layers_are_captured_on_their_device(monkeypatch):
    """Which need not be the current one."""
    current = []

    @contextlib.contextmanager
    def device(which):
        current.append(which)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(measure, "capture", lambda run: list(current))
    layers = measure.make_layers(PLAIN, ((1,), (4,)), 16, torch.device("cpu"), 0)
    elsewhere = torch.device("cuda", 1)
    common: Any = types.SimpleNamespace(device=elsewhere)
    layers = dataclasses.replace(layers, common=common)
    assert measure.repeat_layers(layers, print, captured=True) == [elsewhere]
    monkeypatch.setattr(measure, "_time_layers", lambda *rest: {"TORCH": float(len(current))})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = measure.measure([TORCH], [PLAIN], 16, elsewhere, [((1,), (4,))])
    assert found.times == {"TORCH": [1.0]}
    assert not current


def test_a_hit_runs_nothing(tmp_path, counted):
    register_backend(sleeping("SLOW", 0.02))
    path = tmp_path / "times.json"
    first = select(PLAIN, shapes=TINY, measurements=path, **OPTIONS)
    again = select(PLAIN, shapes=TINY, measurements=str(path), **OPTIONS)
    assert (again.backend, again.why) == (first.backend, first.why)
    assert again.reasons_against == first.reasons_against
    assert len(counted) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"specs": [dataclasses.replace(PLAIN, soft_cap=2.0)]},
        {"specs": [PLAIN, PLAIN]},
        {"block_size": 4},
        {"shapes": TINY[:1]},
        {"candidate": sleeping("NEW", 0.0)},
        {"torch": "another"},
    ],
    ids=["spec", "layers", "block_size", "shapes", "candidate", "torch"],
)
def test_what_a_measurement_depends_on(tmp_path, counted, monkeypatch, change):
    path = tmp_path / "times.json"
    asked = {"specs": [PLAIN], "shapes": TINY, "measurements": path} | OPTIONS
    select(**asked)
    if "candidate" in change:
        register_backend(change.pop("candidate"))
    if "torch" in change:
        versions = {"torch": change.pop("torch")}
        monkeypatch.setattr(measurements, "library_versions", lambda: versions)
    select(**asked | change)
    assert len(counted) == 2
    assert len(json.loads(path.read_text())["entries"]) == 2


def test_arguments_that_contradict_each_other(tmp_path):
    for asked, message in (
        ({"backend": "TORCH"}, "backend must be None with measure=True, got 'TORCH'"),
        ({"measure": False, "shapes": TINY}, "shapes must be None without measure=True"),
        ({"measure": False, "measurements": tmp_path / "times.json"}, "None without measure=True"),
    ):
        with pytest.raises(ValueError, match=message):
            select(PLAIN, **OPTIONS | asked)


@pytest.mark.parametrize(
    "shape", [([], []), ([1], [1, 2]), ([2], [1]), ([0], [1]), 3, MeasuredShape(0, 1, 1)]
)
def test_shapes_that_are_no_batches(shape):
    for shapes, message in (([TINY[0], shape], "be batches"), ([], "hold at least one batch")):
        with pytest.raises(ValueError, match=f"shapes must {message}"):
            select(PLAIN, shapes=shapes, **OPTIONS)


def test_default_shapes_are_a_decode_and_a_prefill():
    why = select(PLAIN, **OPTIONS).why
    assert "at 2 x 1 of 64; " in why
    assert why.endswith("at 1 x 32 of 32")


def test_interpreted_triton_is_timed(monkeypatch):
    from attn_ops.backends.triton import BACKEND

    if missing := BACKEND.unavailable():
        pytest.skip(missing)
    monkeypatch.setattr(
        registry, "_BUILT_IN", registry._BUILT_IN | {"TRITON": "attn_ops.backends.triton"}
    )
    selection = select(PLAIN, shapes=[([1, 2], [3, 5])], **OPTIONS)
    assert "TRITON " in selection.why
    assert "TORCH " in selection.why


def test_interleaving_takes_turns_and_medians():
    order = []
    fake = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 5.0, 4.0])}

    def interval(run):
        return next(fake[run()])

    def named(name):
        return lambda: (order.append(name), name)[1]

    taken = measure.interleaved_us({"a": named("a"), "b": named("b")}, 3, interval)
    assert taken == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b"] * 3


def test_metadata_for_a_capture_comes_from_prepare_capture_where_there_is_one(make_batch):
    meta = make_batch([1], [3]).meta
    builder = TORCH.builder(TORCH, [AttentionSpec(4, 2, 8, torch.float32)], 4, "cpu")
    builder.prepare_capture = lambda common: meta
    assert measure.capture_metadata(builder, meta.common) is meta
    builder.prepare_capture = lambda common: None
    assert measure.capture_metadata(builder, meta.common).common is meta.common


def test_layers_outgrow_the_cache():
    layers = measure.make_layers(PLAIN, ((1,), (40,)), 16, torch.device("cpu"), 0)
    assert len(layers.caches) == 2
    one = layers.caches[0].nbytes
    layers = measure.make_layers(PLAIN, ((1,), (40,)), 16, torch.device("cpu"), 5 * one)
    assert len(layers.caches) == len(layers.queries) == 6
    assert sum(cache.nbytes for cache in layers.caches) > 5 * one


def test_the_callers_random_numbers_stay(tmp_path):
    state = torch.get_rng_state()
    select(PLAIN, shapes=TINY, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, counted, monkeypatch):
    built_in = {"FLASH_ATTN": "attn_ops.backends.flash_attn", "TRITON": "attn_ops.backends.triton"}
    monkeypatch.setattr(registry, "_BUILT_IN", built_in)
    spec = AttentionSpec(32, 8, 128, torch.bfloat16)
    path = tmp_path / "times.json"
    options: dict = {"block_size": 16, "device": "cuda", "measure": True, "measurements": path}
    first = select(spec, **options)
    assert "TRITON " in first.why
    assert " us at 32 x 1 of 2048; " in first.why
    assert select(spec, **options).why == first.why
    assert len(counted) == 1


@pytest.mark.gpu
def test_on_a_gpu_that_is_not_the_current_one(monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(registry, "_BUILT_IN", {"TRITON": "attn_ops.backends.triton"})
    spec = AttentionSpec(8, 2, 128, torch.bfloat16)
    with torch.cuda.device(0):
        selection = select(
            spec, block_size=16, device="cuda:1", measure=True, shapes=[MeasuredShape(2, 1, 64)]
        )
        assert torch.cuda.current_device() == 0
    assert selection.why.startswith("fastest of 1 measured: TRITON ")
