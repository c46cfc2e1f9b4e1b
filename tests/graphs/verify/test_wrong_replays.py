"""The verifier on a CPU: fake replays that are wrong in one thing each, and are found.

S requests, V vocabulary, P blocks, B block size, K kv heads, H head size.
"""

import json
import math

import pytest
import torch

from graphs.capture.verifier import Verifier
from tests.graphs.verify.fake_step import (
    KEY,
    LAYERS,
    FakeStep,
    V,
    equal,
    infinite_logit,
    nan_key,
    next_slot,
    one_key,
    one_logit,
    one_token,
    one_value,
    takes_the_second,
    tied_step,
)


@pytest.fixture
def verifier(tmp_path):
    return Verifier("always", directory=tmp_path)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("damage", "tensor", "difference", "where"),
    [
        (one_token, "tokens", 1, [1]),
        (next_slot, "slot_mapping", 1, [2]),
        (one_key, "kv_caches[1].keys", 0.5, [1, 1, 2]),
        (one_value, "kv_caches[2].values", 0.5, [2, 0, 7]),
        (nan_key, "kv_caches[0].keys", math.inf, [0, 0, 0]),
        (one_logit, "logits", 1.0, [2, 5]),
        (infinite_logit, "logits", math.inf, [0, 9]),
    ],
)
def test_one_wrong_thing_is_found(damage, tensor, difference, where, layout, tmp_path):
    step, verifier = FakeStep(layout=layout), Verifier("first", directory=tmp_path)
    before = step.snapshot()
    assert verifier.should(KEY)
    error = step.wrong(verifier, step.damaged(damage))
    assert error.dump is not None
    assert (error.key, error.tensor) == (KEY, tensor)
    assert error.difference == pytest.approx(difference, abs=1e-5)
    assert equal(step.snapshot(), before), "the session may call the step instead"
    for part in (str(KEY), f"{tensor} differing by", str(where), str(error.dump)):
        assert part in str(error)
    report = json.loads((error.dump / "report.json").read_text())
    assert [f["tensor"] for f in report["differing"]] == [tensor]
    assert report["differing"][0]["where"] == where
    assert report["differing"][0]["num_differing"] == 1
    assert len(report["equal"]) == 2 * LAYERS + 4 - 1
    assert verifier.should(KEY), "a key that was wrong is checked again"
    assert not verifier.should(KEY)


def test_the_first_tensor_in_the_order_of_the_step_is_named(verifier):
    step = FakeStep()
    replay = step.damaged(one_token, one_logit, one_value, one_key)
    error = step.wrong(verifier, replay, "3 more tensors differ")
    assert error.tensor == "kv_caches[1].keys"


def test_other_shapes_and_dtypes_are_found(verifier):
    step = FakeStep()
    for wrong, text in (
        (lambda t: t.int(), r"torch.int32 \[3\] instead of torch.int64 \[3\]"),
        (lambda t: t[:2], r"torch.int64 \[2\] instead of torch.int64 \[3\]"),
    ):
        replies = iter([wrong, lambda t: t])

        def outputs(replies=replies):
            found = FakeStep.outputs(step)
            return {**found, "tokens": next(replies)(found["tokens"])}

        step.outputs = outputs
        assert step.wrong(verifier, step.run, text).difference == math.inf


@pytest.mark.parametrize("right", [True, False])
def test_nan_on_both_sides_is_equal_and_the_rest_still_compared(right, verifier):
    step = FakeStep()
    run = step.run

    def with_nan():
        run()
        step.logits[0, 1] = math.nan
        step.logits[1, 2] = math.inf
        step.caches[0][2, 0, 1, 0, 0] = math.nan

    def replay():
        with_nan()
        one_key(step)
        step.logits[0, 2] = math.nan

    step.run = with_nan
    if right:
        step.check(verifier, with_nan)
        return
    step.wrong(verifier, replay, r"kv_caches\[1\].keys .* 1 more tensors differ")


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("num_steps", "right"), [(1, True), (4, False)])
def test_fp8_passes_one_step_of_the_format(kv_cache_dtype, num_steps, right, tmp_path):
    step = FakeStep(torch.bfloat16, "HND", kv_cache_dtype)
    verifier = Verifier("first", kv_cache_dtype=kv_cache_dtype, directory=tmp_path)

    def replay():
        step.run()
        row_KH = step.caches[1][5, 1, 3]
        largest = torch.unravel_index((row_KH & 127).argmax(), row_KH.shape)
        row_KH[largest] -= num_steps

    if right:
        step.check(verifier, replay)
        return
    error = step.wrong(verifier, replay)
    assert error.tensor == "kv_caches[1].values"
    assert error.dump is not None
    row = torch.load(error.dump / "eager.pt")["kv_caches"][1][1, 1]
    assert 0 < error.difference < row.view(verifier._fp8).float().abs().max()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "stored_as", "difference"),
    [
        ("fp8_e4m3", 0x08, None),  # 1/64: within the tolerance, beside 1
        ("fp8_e4m3", 0x28, 0.25),
        ("fp8_e4m3", 0x7F, math.inf),  # NaN
        ("fp8_e5m2", 0x34, 0.25),
        ("fp8_e5m2", 0x7C, math.inf),
    ],
)
def test_fp8_is_compared_as_the_values_that_it_means(
    kv_cache_dtype, stored_as, difference, tmp_path
):
    step = FakeStep(torch.bfloat16, "NHD", kv_cache_dtype)
    step.embedding[:] = 1.0
    step.embedding[3, 0, 0] = 0.0
    verifier = Verifier("first", kv_cache_dtype=kv_cache_dtype, directory=tmp_path)

    def replay():
        step.run()
        step.caches[0][2, 0, 1, 0, 0] = stored_as

    if difference is None:
        step.check(verifier, replay)
        return
    error = step.wrong(verifier, replay)
    assert (error.tensor, error.difference) == ("kv_caches[0].keys", difference)


@pytest.mark.parametrize(("gap", "right"), [(1e-5, True), (0.5, False)])
def test_another_token_passes_only_if_its_logit_is_as_good(gap, right, verifier):
    step = tied_step(gap)
    if not right:
        error = step.wrong(verifier, lambda: takes_the_second(step))
        assert (error.tensor, error.difference) == ("tokens", 2)
        return
    step.check(verifier, lambda: takes_the_second(step))
    assert verifier.num_forgiven == 1
    assert step.views["tokens"][0] == step.views["input_ids"][0] == 6, (
        "the replay's, not the call's"
    )


def test_another_row_is_not_forgiven_with_it(verifier):
    step = tied_step(1e-5)

    def replay():
        takes_the_second(step)
        step.views["input_ids"][3] = 30

    error = step.wrong(verifier, replay)
    assert error.tensor == "input_ids"
    assert error.dump is not None
    report = json.loads((error.dump / "report.json").read_text())
    assert report["differing"][0]["where"] == [2]


@pytest.mark.parametrize("token", [-1, V, V + 100])
def test_tokens_that_do_not_exist_are_not_forgiven(token, verifier):
    step = tied_step(1e-5)
    replay = step.damaged(lambda step: step.views["tokens"].index_fill_(0, torch.tensor(0), token))
    assert step.wrong(verifier, replay).tensor == "tokens"


def test_wrong_logits_forgive_nothing(verifier):
    step = tied_step(1e-5)
    replay = lambda: (takes_the_second(step), one_logit(step))  # noqa: E731
    step.wrong(verifier, replay, r"logits differing .*; 2 more tensors differ")


def test_without_logits_tokens_are_exact(verifier):
    step = tied_step(1e-5)
    results = step.outputs
    step.outputs = lambda: {"tokens": results()["tokens"]}
    step.wrong(verifier, lambda: takes_the_second(step))


@pytest.mark.parametrize(("drawn", "right"), [(6, True), (4, False)])
def test_drawn_tokens_pass_if_the_replays_logits_give_them(drawn, right, verifier):
    """Of a draw at a temperature two logits say nothing; the state is the one before the step."""
    step = tied_step(0.5)
    before = step.snapshot()

    def draw(logits_RV):
        assert equal(step.snapshot(), before)
        step.views["tokens"].fill_(9)  # what it changes is undone
        tokens_R = logits_RV.argmax(1)
        tokens_R[0] = drawn
        return tokens_R

    if right:
        step.check(verifier, lambda: takes_the_second(step), draw=draw)
        assert step.views["tokens"][0] == 6
        return
    step.wrong(verifier, lambda: takes_the_second(step), draw=draw)
    assert equal(step.snapshot(), before)


# -- writes outside the slots ----------------------------------------------------------------------


def other_block(cache):
    cache[4, 1, 2, 1, 3] = 9


def other_row_of_an_owned_block(cache):
    cache[5, 0, 2, 0, 0] = 9


def two_elements_trade_places(cache):
    row = cache[8, 0, 1, 1]
    row[[2, 5]] = row[[5, 2]]


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (other_block, [4, 1, 2]),
        (other_row_of_an_owned_block, [5, 0, 2]),
        (two_elements_trade_places, [8, 0, 1]),
    ],
)
@pytest.mark.parametrize(
    ("layout", "dtype", "kv_cache_dtype"),
    [
        ("NHD", torch.float32, "auto"),
        ("HND", torch.bfloat16, "auto"),
        ("HND", torch.bfloat16, "fp8_e4m3"),
    ],
)
def test_strict_writes_find_rows_of_others(layout, dtype, kv_cache_dtype, damage, where, tmp_path):
    for strict in (True, False):
        step = FakeStep(dtype, layout, kv_cache_dtype)
        verifier = Verifier(
            "first", kv_cache_dtype=kv_cache_dtype, directory=tmp_path, strict_writes=strict
        )
        replay = step.damaged(lambda step: damage(step.caches[2]))
        if not strict:
            step.check(verifier, replay)
            continue
        error = step.wrong(verifier, replay, "1 rows written outside the step's slots")
        assert (error.tensor, error.difference) == ("kv_caches[2]", math.inf)
        assert str(where) in str(error)


def test_nan_does_not_hide_writes_and_the_null_block_may_change(tmp_path):
    step = FakeStep()
    for cache in step.caches:
        cache.fill_(math.nan)
    verifier = Verifier("always", directory=tmp_path, strict_writes=True)
    step.check(verifier, lambda: (step.run(), step.caches[0][0].zero_()))
    step.wrong(verifier, step.damaged(lambda step: other_block(step.caches[1])), "written outside")


def test_caches_of_latents(tmp_path):
    """[P, B, W]: they have no keys and values apart."""
    step, verifier = FakeStep(layout="latent"), Verifier("always", directory=tmp_path)
    error = step.wrong(verifier, step.damaged(lambda step: step.caches[1][5, 3, 10].add_(0.5)))
    assert (error.tensor, error.difference) == ("kv_caches[1].latents", 0.5)
    verifier = Verifier("always", directory=tmp_path, strict_writes=True)
    error = step.wrong(verifier, step.damaged(lambda step: step.caches[2][4, 2, 3].fill_(9)))
    assert error.tensor == "kv_caches[2]"
