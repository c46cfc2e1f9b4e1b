"""Models whose layers keep states: sessions give what Transformers' `generate` gives."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false
import contextlib
import random

import pytest
import torch

import fx_passes
from graphs.app.parity import Reference, compare, keeping_logits
from graphs.capture.verifier import VerificationError
from tests.fuzz.sessions import results_alone, run_session
from tests.fuzz.states import FAMILIES
from tests.kit.marks import long, slow
from tests.kit.models import generated
from tests.kit.sessions import (
    captured_lazily,
    drafted,
    drain,
    is_empty,
    make_session,
    poisoned,
    tokens_of,
    uncaptured,
)
from tests.kit.state_models import RULES, STATE_CONFIGS, build_state_model

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = torch.randint(3, 64, (60,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [NUMBERS[:13], NUMBERS[13:18], NUMBERS[20:29], [NUMBERS[30]], NUMBERS[30:60]]
"""More than run at a time, so that slots are handed on."""


@pytest.fixture(scope="module")
def make(request):
    models: dict[str, torch.nn.Module] = {}

    def build(name: str):
        if name not in models:
            models[name] = build_state_model(name)
        return models[name]

    return build


@pytest.mark.parametrize("name", STATE_CONFIGS)
def test_tokens_and_logits_are_those_of_transformers(make, name):
    """Chunks of prompts run beside decodes; states are NaN until their requests begin."""
    model = make(name)
    reference = Reference(model)
    session = poisoned(uncaptured(model, max_batch_size=3, max_tokens_per_step=7))
    with keeping_logits(session) as logits:
        results = session.generate(PROMPTS, 8)
    parity = compare(reference, PROMPTS, results, [rows for _, rows in sorted(logits.items())])
    assert parity.num_identical == len(PROMPTS)
    # Zamba's logits are less exact in float32, in Transformers too.
    assert parity.max_logits_difference < (5e-4 if name == "zamba" else 2e-4)
    assert parity.num_distinct_tokens > 8
    assert is_empty(session)
    states = session.cache.states
    assert all(tensor[0].isnan().all() for tensor in states.tensors.values())  # the null slot


@pytest.mark.parametrize("name", RULES)
def test_a_state_that_is_not_the_requests_own_shows(make, name):
    """What the test above would miss if states did not matter."""
    model = make(name)
    want = tokens_of(make_session(model).generate(PROMPTS, 8))
    session = make_session(model, max_batch_size=3, max_tokens_per_step=7)
    session.cache.states.slots = lambda request: (1,)
    assert tokens_of(session.generate(PROMPTS, 8)) != want


@pytest.mark.parametrize("name", RULES)
def test_preempted_requests_get_their_tokens(make, name):
    model = make(name)
    want = make_session(model).generate(PROMPTS[:4], 20)
    session = poisoned(make_session(model, cache_tokens=40, max_tokens=40, max_tokens_per_step=9))
    assert session.generate(PROMPTS[:4], 20) == want
    assert session.report().preemptions.num_preemptions > 0
    assert is_empty(session)


def test_warming_up_and_capturing_changes_no_state(make):
    session = poisoned(captured_lazily(make("bamba"), decode_steps=2, lazy_capture=False))
    session.warm_up()
    assert session.graphs
    assert all(t.isnan().all() for t in session.cache.states.tensors.values())
    want = tokens_of(make_session(make("bamba")).generate(PROMPTS, 8))
    assert tokens_of(session.generate(PROMPTS, 8)) == want
    assert session.num_steps["captured"] > 0


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_verified_replays_advance_states_once(make, name):
    model = make(name)
    want = make_session(model).generate(PROMPTS, 8)
    session = poisoned(captured_lazily(model, verify="always"))
    assert session.generate(PROMPTS, 8) == want
    assert session.verifier.num_checked > 5


@pytest.mark.parametrize(
    ("dtype", "factor", "found"),
    [(torch.float32, 1.01, True), (torch.bfloat16, 1.001, False), (torch.bfloat16, 1.1, True)],
)
def test_a_replay_that_leaves_another_state_is_found(dtype, factor, found):
    """A float32 state of a model in bfloat16 may differ as its inputs do."""
    model = build_state_model("qwen3_next").to(dtype)
    session = captured_lazily(model, verify="always", cudagraph_mode="FULL_DECODE_ONLY")
    session.add(PROMPTS[0], 8)
    session.step()
    session.step()
    graph = next(iter(session.graphs)).graph
    run = graph.graph.replay

    def stale(metadata=None):
        run(metadata)
        session.cache.states.tensors["recurrent", 1, 0][1:].mul_(factor)

    graph.graph.replay = stale
    finds = pytest.raises(VerificationError, match="recurrent state 0 of layer 1")
    with finds if found else contextlib.nullcontext():
        session.step()


PIECES = {"lfm2": 3, "kimi_linear": 3}
SLOW_PIECES = {"qwen3_next": 3, "bamba": 3, "jamba": 2, "mamba": 4}
LONG_PIECES = {
    "qwen3_5_text": 3,
    "qwen3_5_moe_text": 3,
    "olmo_hybrid": 3,
    "bailing_hybrid": 3,
    "lfm2_moe": 2,
}
LONG_PIECES |= {"lfm3": 3, "granitemoehybrid": 3, "nemotron_h": 2, "falcon_h1": 4}
LONG_PIECES |= {"mamba2": 4, "falcon_mamba": 4}
"""Layers of four that are equal, and compiled as one."""


@pytest.mark.parametrize(
    ("name", "number"),
    [*PIECES.items(), *slow(*SLOW_PIECES.items()), *long(*LONG_PIECES.items())],
)
def test_compiled_once(make, name, number):
    """One graph for all batches and for sessions of other sizes; equal layers are one piece."""
    model = make(name)
    want = tokens_of(make_session(model).generate(PROMPTS, 8))
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = captured_lazily(compiled, max_tokens_per_step=7, merge_projections=True)
    poisoned(session)
    assert tokens_of(session.generate(PROMPTS, 8)) == want
    counters = session.counters
    assert (counters.num_graphs, counters.num_breaks, counters.num_recompiles) == (1, 0, 0)
    assert session.report().matches["outline_layers"] == number
    other = poisoned(make_session(compiled, max_batch_size=7, max_tokens=50))
    assert tokens_of(other.generate(PROMPTS, 8)) == want
    counters = other.counters
    assert (counters.num_graphs, counters.num_breaks, counters.num_recompiles) == (0, 0, 0)


@pytest.mark.slow
def test_compilations_are_saved(make, tmp_path):
    want = tokens_of(make_session(make("lfm2")).generate(PROMPTS, 8))
    for outcome in ("saved in", "loaded from"):
        torch._dynamo.reset()
        model = torch.compile(build_state_model("lfm2"), backend="attn_ops", fullgraph=True)
        session = make_session(model, compile_cache=tmp_path)
        assert tokens_of(session.generate(PROMPTS, 8)) == want
        assert outcome in str(session.report().compile_cache)
        assert session.counters.num_recompiles == 0


SHARED = NUMBERS[:19]
SHARING = [[*SHARED, *rest] for rest in ([3], [], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10], [3])]
"""Prompts with one beginning; the fourth goes on behind the third."""


@pytest.mark.parametrize(
    "name", [*RULES, *slow("mamba"), *long("nemotron_h", "falcon_h1", "mamba2")]
)
def test_prompts_begin_behind_kept_states(make, name):
    """One after the other: behind the prompts before, and where those have parted."""
    model = make(name)
    want = tokens_of(make_session(model).generate(SHARING, 8))
    session = poisoned(make_session(model, share_prefixes=True, max_tokens_per_step=11))
    shared = []
    for prompt, tokens in zip(SHARING, want, strict=True):
        before = session.report().prefixes.num_shared_tokens
        assert tokens_of(session.generate([prompt], 8)) == [tokens]
        shared.append(session.report().prefixes.num_shared_tokens - before)
    # Blocks of 4 tokens. The second computes the state behind 16 again, and keeps it.
    assert shared == [0, 16, 16, 20, 16]
    assert is_empty(session)
    session.forget_prefixes()
    assert tokens_of(session.generate(SHARING, 8)) == want
    assert is_empty(session)


def test_requests_wait_for_a_state_that_an_older_one_will_keep(make):
    model = make("qwen3_next")
    want = make_session(model, max_tokens=80).generate([NUMBERS], 8)
    session = make_session(model, share_prefixes=True, max_tokens_per_step=16, max_tokens=80)
    assert session.generate([NUMBERS] * 3, 8) == want * 3
    assert session.report().prefixes.num_shared_tokens == 2 * 56  # of 60, in blocks of 4


def test_a_preempted_request_goes_on_behind_its_whole_prompt(make):
    """Where a longer one has left a state, the prompt's last token need not be computed again."""
    model = make("lfm2")
    want = tokens_of(make_session(model).generate([NUMBERS[:16]], 12))[0]
    session = poisoned(make_session(model, share_prefixes=True))
    session.generate([NUMBERS[:20]], 1)
    request = session.add(NUMBERS[:16], 12)
    outputs = [*session.step(), *session.step()]
    session.scheduler._preempt(session._requests[request])
    assert drain(session, outputs)[request] == want
    assert session.report().preemptions.num_recomputed_tokens < 4
    assert is_empty(session)


def test_generated_tokens_are_found_by_no_prompt():
    """A model that clamps step sizes in prompts alone has other keys behind generated tokens."""
    model = build_state_model("nemotron_h", time_step_floor=1.0, time_step_min=1.0)
    session, alone = (make_session(model, share_prefixes=on, max_tokens=80) for on in (True, False))
    (first,) = session.generate([NUMBERS[:8]], 17)
    for more in ([1, 2, 3], [4, 5], [6, 7, 8]):
        prompt = [*NUMBERS[:8], *first.token_ids, *more]
        assert tokens_of(session.generate([prompt], 8)) == tokens_of(alone.generate([prompt], 8))
    assert session.report().prefixes.num_shared_tokens > 24


def test_states_of_other_weights_are_forgotten(make):
    model = build_state_model("lfm2")
    session = make_session(model, share_prefixes=True)
    session.generate(SHARING[:1], 8)
    name = "model.layers.0.conv.in_proj.weight"
    changed = model.state_dict()[name] * 1.5
    session.update_weights({name: changed})
    found = session.generate(SHARING[:1], 8)
    assert found == make_session(model).generate(SHARING[:1], 8)
    assert session.report().prefixes.num_shared_tokens == 0


def by_drafts(session, want, seed):
    """Tokens by `verify_draft`, of right, partly right, short and wrong drafts; calls it took."""
    numbers = random.Random(seed)

    def propose(following):
        draft = [t if numbers.random() < 0.8 else (t + 1) % 64 for t in following[:3]]
        return draft[: numbers.choice([3, 3, 3, 1])]

    results, num_calls = drafted(session, PROMPTS, want, propose)
    return tokens_of(results), num_calls


@pytest.mark.parametrize("options", [{"debug": "eager_replay"}, {}], ids=["captured", "called"])
@pytest.mark.parametrize(
    "name", [*RULES, *slow("mamba"), *long("nemotron_h", "falcon_h1", "mamba2")]
)
def test_drafts_change_nothing(make, name, options):
    """A request goes on from the state that has seen no rejected token."""
    model = make(name)
    want = tokens_of(make_session(model).generate(PROMPTS, 16))
    session = poisoned(make_session(model, max_batch_size=3, num_draft_tokens=3, **options))
    found, num_calls = by_drafts(session, want, 0)
    assert found == want
    assert num_calls < 20  # two batches of 16 tokens without drafts
    assert is_empty(session)
    report = str(session.report())
    assert "12 slots, 4 a request for drafts of 3 and the null slot" in report


def test_the_wrong_state_of_a_draft_shows(make, monkeypatch):
    model = make("qwen3_next")
    want = tokens_of(make_session(model).generate(PROMPTS, 16))
    session = make_session(model, num_draft_tokens=3)
    monkeypatch.setattr(session.cache.states, "choose", lambda request, num_rows: None)
    assert by_drafts(session, want, 0)[0] != want


def test_drafts_are_verified(make):
    """A replay leaves the states that a call leaves."""
    model = make("bamba")
    want = tokens_of(make_session(model).generate(PROMPTS, 16))
    session = poisoned(captured_lazily(model, verify="always", num_draft_tokens=3))
    assert by_drafts(session, want, 1)[0] == want
    assert session.verifier.num_checked > 3


@pytest.mark.parametrize("name", [*slow("qwen3_next"), *long("kimi_linear", "lfm2", "bamba")])
def test_drafts_are_compiled_once(make, name):
    model = make(name)
    want = tokens_of(make_session(model).generate(PROMPTS, 16))
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = poisoned(captured_lazily(compiled, max_tokens_per_step=13, num_draft_tokens=3))
    assert by_drafts(session, want, 2)[0] == want
    counters = session.counters
    assert (counters.num_graphs, counters.num_breaks, counters.num_recompiles) == (1, 0, 0)


def test_a_state_that_moved_is_not_replayed(make):
    """A graph would write where it was."""
    session = captured_lazily(make("lfm2"))
    session.add(PROMPTS[0], 8)
    session.step()
    session.step()
    tensors = session.cache.states.tensors
    tensors["conv", 0, 0] = tensors["conv", 0, 0].clone()
    with pytest.raises(ValueError, match="states"):
        session.step()


def test_models_go_on_as_before(make):
    """A model with a session still generates by itself, and trains."""
    model = build_state_model("lfm2")
    session = make_session(model)
    want = tokens_of(session.generate(PROMPTS[:1], 8))
    assert [generated(model, PROMPTS[0], 8, "sdpa", do_sample=False)] == want
    model.set_attn_implementation("sdpa")
    ids = torch.tensor(PROMPTS[:1])
    model.requires_grad_(True).train()
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].conv.in_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, 6) for name in FAMILIES),
        *long(*((name, 150) for name in FAMILIES)),
    ],
)
def test_random_sessions(make, name, number):
    """Chunks of every size, preemption, drafts, stops, discards, interrupts, checked replays.

    `python -m tests.fuzz states` runs thousands.
    """
    model = make(name)
    alone, first = results_alone(model), 10_000 * FAMILIES.index(name)
    for seed in range(first, first + number):
        run_session(model, alone, seed)
