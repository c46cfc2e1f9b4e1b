"""Sessions whose steps go through graphs: on a CPU a graph runs its step's Python again.

Everything else is as on a GPU: static tensors, padding, keys, launched steps, checks.
"""

import pytest

from graphs.modes import CUDAGraphMode
from tests.kit.sessions import captured, uncaptured

PROMPTS = [[3], [5, 9], list(range(1, 18)), [1, 2, 3, 4], [7] * 9, [60, 61]]
MODES = [m for m in CUDAGraphMode if m is not CUDAGraphMode.NONE]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decode_steps", [1, 3, 8])
def test_modes_and_steps(model, mode, decode_steps):
    """More requests than the batch holds; they end in the middle of launched steps."""
    want = uncaptured(model, max_tokens_per_step=24).generate(PROMPTS, 11)
    session = captured(
        model, cudagraph_mode=mode, decode_steps=decode_steps, max_tokens_per_step=24
    )
    assert session.generate(PROMPTS, 11) == want
    assert session.num_steps["captured"] > 10
    mixed = mode in (CUDAGraphMode.FULL_DECODE_ONLY,)
    assert (session.num_steps["called"] > 0) == mixed
    assert session.generate(PROMPTS[:1], 3) == uncaptured(model).generate(PROMPTS[:1], 3)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_stop_tokens(model, decode_steps):
    free = uncaptured(model).generate(PROMPTS, 20)
    stops = sorted({t for r in free for t in r.token_ids[3:9]})
    for eos in (stops[:2], stops):  # more than the device watches
        want = uncaptured(model).generate(PROMPTS, 20, eos=eos)
        assert {r.finish_reason for r in want} >= {"eos"}
        session = captured(model, decode_steps=decode_steps)
        assert session.generate(PROMPTS, 20, eos=eos) == want


SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 7},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 1.0},
]


@pytest.mark.parametrize("kinds", [SAMPLED[:2], SAMPLED[:4], SAMPLED])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_sampling_in_graphs(model, kinds, decode_steps):
    """The same seeds give the same tokens, replayed or called, whatever else is in the batch."""

    def run(session, chosen):
        ids = [session.add(PROMPTS[i], 12, **kinds[i]) for i in chosen]
        while session.num_unfinished:
            session.step()
        return {i: session.result(n).token_ids for i, n in zip(chosen, ids, strict=True)}

    everyone = list(range(len(kinds)))
    want = run(uncaptured(model, seed=3), everyone)
    assert run(captured(model, seed=3, decode_steps=decode_steps), everyone) == want
    seeded = next((i for i in everyone if "seed" in kinds[i]), None)
    if seeded is not None:
        assert run(captured(model, seed=99), [seeded]) == {seeded: want[seeded]}


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_every_replay_verified(model, mode):
    session = captured(model, cudagraph_mode=mode, verify="always", max_tokens_per_step=16)
    got = session.generate(PROMPTS, 6, temperature=0.8)
    assert got == uncaptured(model, max_tokens_per_step=16).generate(PROMPTS, 6, temperature=0.8)


def test_swapped_weights_are_named(make_model):
    model = make_model()
    session = captured(model)
    session.generate(PROMPTS[:1], 3)
    weight = next(model.parameters())
    weight.data = weight.data.clone()
    with pytest.raises(ValueError, match="must stay where they were"):
        session.generate(PROMPTS[:1], 3)
