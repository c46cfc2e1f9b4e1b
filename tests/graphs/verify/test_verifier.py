"""The verifier on a CPU: when it looks, replays that are right, dumps and failures.

S requests, V vocabulary, P blocks, B block size, K kv heads, H head size.
"""

import contextlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.capture.verifier import (
    States,
    VerificationError,
    Verifier,
    compare,
    excused_rows,
    row_sums,
)
from tests.graphs.verify.fake_step import (
    KEY,
    SLOTS,
    B,
    FakeStep,
    P,
    S,
    V,
    equal,
    one_key,
    takes_the_second,
    tied_step,
)


@pytest.fixture
def verifier(tmp_path):
    return Verifier("always", directory=tmp_path)


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        (None, [0] * 7),
        ("first", [1, 0, 0, 0, 0, 0, 0]),
        ("always", [1] * 7),
        (1, [1] * 7),
        (3, [1, 0, 0, 1, 0, 0, 1]),
    ],
)
def test_each_key_is_counted_by_itself(mode, want):
    verifier = Verifier(mode)
    seen = [(verifier.should("a"), verifier.should("b")) for _ in range(7)]
    assert seen == [(bool(w), bool(w)) for w in want]


@pytest.mark.parametrize("mode", ["last", 0, -1, True, 1.5, "", [1]])
def test_other_modes_are_refused(mode):
    with pytest.raises(ValueError, match=r"verify must be known, got .*; supported: first, always"):
        Verifier(mode)


def test_other_arguments_are_refused():
    with pytest.raises(ValueError, match=r"^directory must be a path without NUL, got 'a\\x00b'$"):
        Verifier("first", directory="a\0b")
    with pytest.raises(ValueError, match="kv_cache_dtype must be known, got 'fp4'"):
        Verifier("first", kv_cache_dtype="fp4")
    for tolerance in (-1.0, math.nan, math.inf, {torch.int32: 1.0}):
        with pytest.raises(ValueError, match="tolerance must be finite and not negative"):
            Verifier("first", tolerance=tolerance)
    step = FakeStep()
    step.views["slot_mapping"][0] = P * B
    with pytest.raises(ValueError, match=f"slots must be below {P * B}, .* got {P * B}"):
        step.check(Verifier("first"), step.run)
    assert step.num_runs == 0


@pytest.mark.parametrize("layout", ["NHD", "HND", "latent"])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        (torch.float32, "auto"),
        (torch.float64, "auto"),
        (torch.bfloat16, "auto"),
        (torch.float16, "auto"),
        (torch.bfloat16, "fp8_e4m3"),
        (torch.bfloat16, "fp8_e5m2"),
    ],
)
def test_right_replays_pass_and_stay(dtype, kv_cache_dtype, layout, tmp_path):
    step, alone = (FakeStep(dtype, layout, kv_cache_dtype) for _ in range(2))
    verifier = Verifier(
        "always", kv_cache_dtype=kv_cache_dtype, directory=tmp_path, strict_writes=True
    )
    for _ in range(3):
        step.check(verifier, step.run)
        alone.run()
        assert equal(step.snapshot(), alone.snapshot())
    assert (step.num_runs, verifier.num_checked, verifier.num_forgiven) == (6, 3, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_call_sees_the_state_and_the_rows_that_the_replay_saw(layout, verifier):
    step, seen = FakeStep(layout=layout), []
    run = step.run

    def watched():
        seen.append(step.snapshot())
        run()

    step.run = watched
    step.check(verifier, watched)
    assert len(seen) == 2
    assert equal(*seen)


def test_what_the_replay_computed_stays_where_the_call_differs_a_little(verifier):
    step, replayed = FakeStep(), []

    def replay():
        step.run(noise=1e-5)
        replayed.extend(step.snapshot())

    step.check(verifier, replay)
    assert equal(step.snapshot(), replayed)


def test_more_tensors_are_restored_for_the_call_and_then_the_replays(verifier):
    step, counts, seen = FakeStep(), torch.zeros(S, V, dtype=torch.int32), []
    run = step.run

    def counted():
        seen.append(counts.clone())
        run()
        counts[torch.arange(S), step.views["tokens"]] += 1

    step.run = counted
    step.check(verifier, counted, more={"counts": counts})
    assert torch.equal(seen[0], seen[1])
    assert counts.sum() == S


def test_steps_of_padding_alone_and_models_without_caches(verifier):
    step = FakeStep()
    step.views["slot_mapping"].fill_(-1)
    step.check(verifier, step.run)
    step.views["slot_mapping"].fill_(B - 1)  # of the null block
    step.check(verifier, lambda: (step.run(), step.caches[0][0].fill_(3)))
    verifier.check(KEY, step.state, [], step.views["slot_mapping"], step.run, step.run, dict)


@pytest.mark.parametrize("slot", [0, 1, 2, 3])
def test_states_that_are_wanted_are_compared_and_all_restored(verifier, slot):
    """Slots 1 and 2 are the step's, 2 behind a row that nobody wants; 3 is somebody else's."""
    step, pool, seen = FakeStep(), torch.zeros(4, 5), []
    run = step.run
    slots, wanted = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([True, True, False])

    def called():
        seen.append(pool.clone())
        run()

    def replayed():
        run()
        pool[slot] += 1

    step.run, states = called, States({"states": pool}, slots, wanted)
    if slot == 1:
        step.wrong(verifier, replayed, "states", states=states)
    else:
        step.check(verifier, replayed, states=states)
    assert not seen[0][1:3].any(), "the call reads what the replay has read"
    assert pool[slot].any() == (slot != 1), "what a right replay leaves stays"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_no_cache_is_copied(layout, verifier):
    class Largest(TorchDispatchMode):
        num_elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in inputs:
                self.num_elements = max(self.num_elements, out.numel())
            return out

    step = FakeStep(layout=layout)
    with Largest() as largest:
        step.check(verifier, step.run)
    assert 0 < largest.num_elements < step.caches[0].numel()


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"),
    [
        (torch.float64, 5e-10, 2e-9),
        (torch.float32, 5e-5, 2e-4),
        (torch.bfloat16, 1e-2, 4e-2),
        (torch.float16, 1e-2, 4e-2),
    ],
)
def test_tolerance_is_relative_to_the_largest_magnitude(dtype, passes, fails, tmp_path):
    theirs = torch.tensor([-100.0, 0.0, 1.0, math.inf, math.nan], dtype=dtype)
    bound = Verifier("first")._tolerances[dtype]
    for part, right in ((passes, True), (fails, False)):
        mine = theirs.clone()
        mine[1] = 100 * part
        assert compare("x", mine, theirs, bound).ok is right
    step = FakeStep(dtype)
    own = Verifier("first", tolerance={dtype: 0.2}, directory=tmp_path)
    step.check(own, lambda: step.run(noise=0.1))
    for tolerance in (None, 0.05):
        verifier = Verifier("first", tolerance=tolerance, directory=tmp_path)
        step.wrong(verifier, lambda: step.run(noise=0.1))


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "tolerance", "right"),
    [
        (torch.bfloat16, "auto", None, True),
        (torch.bfloat16, "fp8_e4m3", None, True),
        (torch.bfloat16, "auto", {torch.bfloat16: 0.1}, True),
        (torch.bfloat16, "auto", {torch.float32: 1e-6}, False),
        (torch.float32, "fp8_e4m3", None, False),
        (torch.float32, "auto", None, False),
    ],
)
def test_float32_logits_are_no_more_exact_than_the_model(
    dtype, kv_cache_dtype, tolerance, right, tmp_path
):
    """Nemotron-H and Mamba hand out float32 in any dtype."""
    step = FakeStep(dtype, kv_cache_dtype)
    verifier = Verifier(
        "always", tolerance=tolerance, kv_cache_dtype=kv_cache_dtype, directory=tmp_path
    )
    found = step.outputs
    step.outputs = lambda: found() | {"logits": step.logits[[0, 1, 3]].float()}  # type: ignore[method-assign]
    with contextlib.nullcontext() if right else pytest.raises(VerificationError):
        step.check(verifier, lambda: step.run(noise=0.01), dtypes=[dtype])


def test_dump_holds_both_results(tmp_path):
    step, verifier = FakeStep(), Verifier("first", directory=tmp_path / "new" / "dumps")
    state, rows = step.state.clone(), [c[[2, 5, 7], :, [1, 3, 0]].clone() for c in step.caches]
    counts = torch.arange(4)

    replay = step.damaged(one_key, lambda step: counts.add_(1))
    dumps = []
    for _ in range(2):
        counts.copy_(torch.arange(4))
        dumps.append(step.wrong(verifier, replay, more={"counts": counts}).dump)
        assert dumps[-1] is not None
    assert dumps[0] != dumps[1]
    assert {d.parent for d in dumps} == {tmp_path / "new" / "dumps"}
    files = {f.name for f in dumps[0].iterdir()}
    assert files == {"inputs.pt", "replay.pt", "eager.pt", "report.json"}
    inputs, replayed, called = (
        torch.load(dumps[0] / f"{name}.pt", weights_only=True)
        for name in ("inputs", "replay", "eager")
    )
    assert torch.equal(inputs["state"], state)
    assert inputs["slots"].tolist() == [s for s in SLOTS if s >= 0]
    assert equal(inputs["kv_caches"], rows)
    assert torch.equal(inputs["more"]["counts"], torch.arange(4))
    assert torch.equal(replayed["more"]["counts"], torch.arange(1, 5))
    change = replayed["kv_caches"][1] - called["kv_caches"][1]
    assert change.nonzero().tolist() == [[1, 0, 1, 2]]
    assert torch.equal(replayed["outputs"]["tokens"], called["outputs"]["tokens"])


def test_dumps_go_to_the_systems_directory_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    step = FakeStep()
    error = step.wrong(Verifier("first"), step.damaged(one_key))
    assert error.dump is not None
    assert error.dump.parent == tmp_path


def test_a_dump_that_cannot_be_written_hides_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    step = FakeStep()
    verifier = Verifier("first", directory=tmp_path / "file")
    assert step.wrong(verifier, lambda: one_key(step), "no dump: ").dump is None


@pytest.mark.parametrize("which", ["replay", "eager", "outputs", "draw"])
def test_what_raises_leaves_the_step_as_it_was(which, verifier):
    step = tied_step(0.5)
    before, run, results = step.snapshot(), step.run, step.outputs

    def fail(*_):
        raise KeyError("own")

    def replay():
        takes_the_second(step)
        if which == "replay":
            fail()
        if which == "eager":
            step.run = fail
        if which == "outputs":
            step.outputs = fail

    with pytest.raises(KeyError, match="own"):
        verifier.check(
            KEY, step.state, step.caches, step.views["slot_mapping"], replay,
            lambda: step.run(), lambda: step.outputs(), draw=fail,
        )  # fmt: skip
    assert equal(step.snapshot(), before)
    assert verifier.num_checked == 0
    step.run, step.outputs = run, results
    step.check(verifier, run)


# -- comparing tensors, and sums of rows


def test_bytes_that_are_not_fp8_are_integers():
    mine = torch.tensor([250, 3], dtype=torch.uint8)
    assert compare("x", mine, mine.clone(), 0.5).ok
    wrong = compare("x", mine, torch.tensor([3, 3], dtype=torch.uint8), 0.5)
    assert (wrong.difference, wrong.where) == (247, (0,))


def test_zeros_must_be_equal():
    zeros = torch.zeros(3)
    assert compare("x", zeros, zeros.clone(), 0.1).ok
    assert not compare("x", torch.tensor([0.0, 1e-30, 0.0]), zeros, 0.1).ok


def test_tokens_outside_the_vocabulary_have_no_logit():
    logits = torch.tensor([[2.0, 2.0, 0.0]]).repeat(3, 1)
    mine, theirs = torch.tensor([-1, 1, 5]), torch.tensor([0, 0, 2])
    excused = excused_rows({"tokens": mine}, {"tokens": theirs, "logits": logits}, 0.1, None)
    assert excused is not None
    assert excused.tolist() == [False, True, False]


def test_sums_taken_in_parts_are_those_of_the_whole():
    cache = torch.randint(0, 255, (17, 2, 256, 16, 256), dtype=torch.uint8)
    parts = row_sums(cache)
    assert parts.shape == (17, 2, 256)
    for block in (0, 7, 8, 16):
        assert torch.equal(row_sums(cache[block : block + 1])[0], parts[block])
