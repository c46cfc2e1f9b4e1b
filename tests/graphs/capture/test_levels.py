"""What of a mode is used, for every mode, level and kind of batch, and what is said about it."""

import itertools
import logging

import pytest
import torch

from attn_ops import AttentionCGSupport, AttentionSpec, get_backend
from graphs.capture.plan import CapturePlan, resolve
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.options import SessionOptions

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
NEVER, SINGLE = AttentionCGSupport.NEVER, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM, ALWAYS = AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.ALWAYS

QUERY_LENS = (1, 4)

TAKES = {
    # level: query lengths 1, 4, mixed
    NEVER: (False, False, False),
    SINGLE: (True, False, False),
    UNIFORM: (True, True, False),
    ALWAYS: (True, True, True),
}

USED = {
    # (mode, level of the weakest group): modes for query lengths 1, 4, mixed; as one name
    **{(m, level): (m,) * 4 for m in (NONE, PIECEWISE) for level in AttentionCGSupport},
    (FULL, NEVER): (PIECEWISE, PIECEWISE, PIECEWISE, PIECEWISE),
    (FULL, SINGLE): (FULL, PIECEWISE, PIECEWISE, PIECEWISE),
    (FULL, UNIFORM): (FULL, FULL, PIECEWISE, BOTH),
    (FULL, ALWAYS): (FULL, FULL, FULL, FULL),
    (DECODE_ONLY, NEVER): (PIECEWISE, PIECEWISE, NONE, PIECEWISE),
    (DECODE_ONLY, SINGLE): (FULL, PIECEWISE, NONE, PIECEWISE),
    (DECODE_ONLY, UNIFORM): (FULL, FULL, NONE, DECODE_ONLY),
    (DECODE_ONLY, ALWAYS): (FULL, FULL, NONE, DECODE_ONLY),
    (BOTH, NEVER): (PIECEWISE, PIECEWISE, PIECEWISE, PIECEWISE),
    (BOTH, SINGLE): (FULL, PIECEWISE, PIECEWISE, PIECEWISE),
    (BOTH, UNIFORM): (FULL, FULL, PIECEWISE, BOTH),
    (BOTH, ALWAYS): (FULL, FULL, PIECEWISE, BOTH),
}

EVERY = list(itertools.product(CUDAGraphMode, AttentionCGSupport))


@pytest.mark.parametrize(("mode", "level"), EVERY)
def test_every_mode_and_level(mode, level):
    one, four, mixed, name = USED[mode, level]
    found = resolve(mode, {"all": level}, "cuda", QUERY_LENS)
    assert found.asked is mode
    assert found.decode_modes == {1: one, 4: four}
    assert found.mixed_mode is mixed
    assert found.used is name
    asked = (mode.decode_mode(), mode.decode_mode(), mode.mixed_mode())
    assert found.lowered is ((one, four, mixed) != asked)
    assert (found.why == "asked for") is not found.lowered
    alone = resolve(mode, {"all": level}, "cuda")
    assert alone.decode_modes == {1: one}
    assert (alone.decode_mode, alone.mixed_mode) == (one, mixed)
    assert alone.used is CUDAGraphMode.of(one, mixed)


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_a_model_without_attention_has_every_mode(mode):
    found = resolve(mode, {}, "cuda", QUERY_LENS)
    assert (found.used, found.lowered, found.why) == (mode, False, "asked for")
    assert not any(found.broken.values())


@pytest.mark.parametrize(
    ("mode", "full", "sliding"),
    list(itertools.product(CUDAGraphMode, *[AttentionCGSupport] * 2)),
)
def test_the_graph_is_broken_around_weak_groups_only(mode, full, sliding):
    groups = {"full": full, "sliding": sliding}
    found = resolve(mode, groups, "cuda", QUERY_LENS)
    weakest = min(full, sliding, key=lambda level: level.value)
    kinds = (*QUERY_LENS, None)
    assert tuple(found.modes[kind] for kind in kinds) == USED[mode, weakest][:3]
    for at, kind in enumerate(kinds):
        asked = mode.mixed_mode() if kind is None else mode.decode_mode()
        weak = {name for name, level in groups.items() if not TAKES[level][at]}
        broken = {FULL: weak, PIECEWISE: set(groups), NONE: set()}[asked]
        assert found.broken[kind] == broken
        assert (found.modes[kind] is PIECEWISE) == bool(broken)


def test_groups_of_a_key():
    found = resolve(FULL, {"full": ALWAYS, "sliding": SINGLE, "odd": NEVER}, "cuda", QUERY_LENS)
    assert found.broken_for(BatchDescriptor(8, 8, uniform=True)) == {"odd"}
    assert found.broken_for(BatchDescriptor(32, 8, uniform=True)) == {"odd", "sliding"}
    assert found.broken_for(BatchDescriptor(32, 9)) == {"odd", "sliding"}


@pytest.mark.parametrize(("mode", "level"), EVERY)
def test_nothing_is_captured_on_the_cpu(mode, level):
    found = resolve(mode, {"all": level}, "cpu", QUERY_LENS)
    assert found.used is NONE
    assert set(found.modes.values()) == {NONE}
    assert not any(found.broken.values())
    assert found.lowered is (mode is not NONE)
    said = "the model is on cpu; CUDA graphs need a model on cuda"
    assert found.why == (said if found.lowered else "asked for")


def said_at(caplog) -> list[tuple[str, str]]:
    return [
        (r.levelname, r.getMessage()) for r in caplog.records if r.name == "graphs.capture.plan"
    ]


def test_a_mode_that_can_be_had_is_logged_once_as_information(caplog):
    caplog.set_level(logging.INFO, "graphs")
    resolve(BOTH, {"all": UNIFORM, "more": ALWAYS}, "cuda", QUERY_LENS)
    assert said_at(caplog) == [("INFO", "cudagraph_mode FULL_AND_PIECEWISE asked for and used")]


def test_a_lowered_mode_is_logged_once_with_what_would_change_it(caplog):
    caplog.set_level(logging.INFO, "graphs")
    found = resolve(FULL, {"sliding": SINGLE, "full": ALWAYS, "odd": NEVER}, "cuda", QUERY_LENS)
    assert found.why == (
        "sliding has level UNIFORM_SINGLE_TOKEN_DECODE and runs between graphs in uniform batches "
        "of 4 tokens a request and mixed batches; choose a backend of at least level ALWAYS for it"
        "; odd has level NEVER and runs between graphs in decode batches and uniform batches of 4 "
        "tokens a request and mixed batches; choose a backend of at least level ALWAYS for it"
    )
    text = f"cudagraph_mode FULL asked for, PIECEWISE used: {found.why}"
    assert said_at(caplog) == [("WARNING", text)]


@pytest.mark.parametrize(
    ("level", "query_lens", "needed"),
    [
        (NEVER, (1,), "UNIFORM_SINGLE_TOKEN_DECODE"),
        (NEVER, (1, 4), "UNIFORM_BATCH"),
        (SINGLE, (1, 4), "UNIFORM_BATCH"),
    ],
)
def test_the_level_that_would_do_is_named(level, query_lens, needed):
    found = resolve(DECODE_ONLY, {"all": level}, "cuda", query_lens)
    assert found.why.endswith(f"choose a backend of at least level {needed} for it")


@pytest.mark.parametrize(("mode", "level"), USED)
def test_strict_refuses_to_lower(mode, level, caplog):
    if not resolve(mode, {"all": level}, "cuda", QUERY_LENS).lowered:
        assert not resolve(mode, {"all": level}, "cuda", QUERY_LENS, strict=True).lowered
        return
    caplog.clear()
    with pytest.raises(ValueError, match=f"^cudagraph_mode must be .*, got {mode.name}; supp"):
        resolve(mode, {"all": level}, "cuda", QUERY_LENS, strict=True)
    assert not said_at(caplog)


def test_strict_on_the_cpu():
    with pytest.raises(ValueError, match="got FULL; supported: NONE, because the model is on cpu"):
        resolve(FULL, {"all": ALWAYS}, "cpu", strict=True)
    assert resolve(NONE, {"all": ALWAYS}, "cpu", strict=True).used is NONE


@pytest.mark.parametrize("query_lens", [(), (0,), (1, -1)])
def test_bad_query_lengths_are_refused(query_lens):
    with pytest.raises(ValueError, match=r"^uniform_query_lens must be at least 1 each, got"):
        resolve(FULL, {}, "cuda", query_lens)


def test_a_stopped_plan_has_no_keys():
    options = SessionOptions(
        max_batch_size=4, max_tokens=32, cudagraph_mode="PIECEWISE", debug="eager_replay"
    )
    specs = [AttentionSpec(4, 2, 8, torch.float32)]
    plan = CapturePlan.of(options, get_backend("TORCH"), specs, torch.device("cpu"), None)
    assert plan.first_keys()
    plan.stop("enough")
    assert (plan.used, plan.why) == (NONE, "enough")
    assert plan.dispatcher.dispatch(2, 2, 1)[1] is None
    assert not plan.first_keys()
