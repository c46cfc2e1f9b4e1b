"""The scheduler and the session on a CPU, uncompiled unless a test says otherwise."""

import logging
import threading

import pytest
import torch

import fx_passes
from graphs import CUDAGraphMode
from graphs.app.parity import Reference
from tests.kit.sessions import chunked, poisoned, tokens_of

PROMPTS = [[3], [5, 9], list(range(17)), [60] * 5, list(range(40)), [1, 2, 3, 4], [63, 0, 63]]


@pytest.fixture(scope="module")
def wanted(model):
    """Eight greedy tokens of Transformers for each prompt."""
    reference = Reference(model)
    return [reference.generate(p, 8)[0] for p in PROMPTS]


@pytest.mark.parametrize("max_batch_size", [1, 2, 7])
def test_more_requests_than_the_batch_holds(model, wanted, max_batch_size):
    session = poisoned(chunked(model, max_batch_size=max_batch_size))
    free = session.cache.num_free_blocks
    assert tokens_of(session.generate(PROMPTS, 8)) == wanted
    assert len({t for tokens in wanted for t in tokens}) > 16
    assert session.cache.num_free_blocks == free
    assert session.step() == []


@pytest.mark.parametrize("max_tokens_per_step", [1, 3, 16, 1000])
def test_chunked_prefill(model, wanted, max_tokens_per_step):
    session = poisoned(chunked(model, max_tokens_per_step=max_tokens_per_step))
    sizes = []
    with session.observe_logits(lambda step, _: sizes.append(sum(s.num_tokens for s in step))):
        assert tokens_of(session.generate(PROMPTS, 8)) == wanted
    assert max(sizes) <= max_tokens_per_step
    assert session.num_steps == {"captured": 0, "called": len(sizes)}


def test_requests_join_a_running_batch(model, wanted):
    session = poisoned(chunked(model))
    first = session.add(PROMPTS[2], 8)
    for _ in range(4):
        session.step()
    assert session.result(first) is None
    later = [session.add(p, 8) for p in PROMPTS[3:6]]
    outputs = []
    while any(session.result(i) is None for i in later):
        outputs += session.step()
    assert tokens_of(map(session.result, [first, *later])) == wanted[2:6]
    for request, tokens in zip([first, *later], wanted[2:6], strict=True):
        streamed = [o.token_id for o in outputs if o.request_id == request]
        assert streamed == tokens[-len(streamed) :]
    assert session.generate([], 4) == []


def test_results_are_in_the_order_of_the_prompts(model, wanted):
    """The second prompt stops at once and the first one last."""
    eos = wanted[1][0]
    results = poisoned(chunked(model)).generate(PROMPTS, 8, eos=eos)
    assert results[1].token_ids == [eos]
    for result, tokens in zip(results, wanted, strict=True):
        stop = tokens.index(eos) + 1 if eos in tokens else 8
        assert result.token_ids == tokens[:stop]
        assert result.finish_reason == ("eos" if eos in tokens else "length")


def test_several_eos_tokens(model, wanted):
    eos = {wanted[4][2], wanted[4][5]}
    stop = next(i for i, t in enumerate(wanted[4]) if t in eos) + 1
    (result,) = poisoned(chunked(model)).generate([PROMPTS[4]], 8, eos=iter(eos))
    assert (result.token_ids, result.finish_reason) == (wanted[4][:stop], "eos")


def test_a_prompt_of_exactly_max_tokens(model, wanted):
    session = poisoned(chunked(model, max_tokens=40, max_batch_size=2))
    results = session.generate([PROMPTS[4], PROMPTS[2]], 8)
    assert results[0].token_ids == wanted[4][:1]  # the next one would not fit into the cache
    assert results[0].finish_reason == "max_tokens"
    assert results[1].token_ids == wanted[2]


def test_requests_wait_for_the_cache(model, wanted):
    """The cache holds one long request at a time, though the batch has room for four."""
    session = poisoned(chunked(model, cache_tokens=48))
    ids = [session.add(p, 8) for p in (PROMPTS[4], PROMPTS[2], PROMPTS[4], PROMPTS[0])]
    most = 0
    while any(session.result(i) is None for i in ids):
        session.step()  # hands out no token while only a part of a prompt is computed
        most = max(most, len(session.scheduler.running))
        assert session.cache.num_free_blocks >= 0
    assert most == 1
    results = [session.result(i) for i in ids]
    assert tokens_of(results) == [wanted[4], wanted[2], wanted[4], wanted[0]]


def test_compiled_is_the_same(model, wanted):
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = poisoned(chunked(compiled))
    assert tokens_of(session.generate(PROMPTS, 8)) == wanted
    counters = session.counters
    assert (counters.num_graphs, counters.num_breaks, counters.num_recompiles) == (1, 0, 0)
    assert session.compile_record.matches()["outline_layers"] == 2
    report = session.report()
    assert (report.compiler, report.no_passes_why) == ("attn_ops", None)
    assert report.matches == session.compile_record.matches()
    assert "compiled by attn_ops: 1 graphs" in " ".join(str(report).split())
    assert "outline_layers" in str(report)


def test_seeds(model):
    def generate(seed):
        return tokens_of(poisoned(chunked(model, seed=seed)).generate(PROMPTS, 8, temperature=1.5))

    assert generate(1) == generate(1)
    assert generate(1) != generate(2)


@pytest.mark.parametrize("options", [{}, {"cudagraph_mode": "AUTO"}])
def test_nobody_is_warned_of_graphs_that_nobody_asked_for(model, caplog, options):
    with caplog.at_level(logging.INFO, "graphs"):
        session = poisoned(chunked(model, **options))
    assert session.graph_mode is CUDAGraphMode.NONE
    assert session.graph_mode_why == "the model is on cpu; CUDA graphs need a model on cuda"
    assert [r.levelname for r in caplog.records if "NONE used" in r.getMessage()] == ["INFO"]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1, 64], {}, "prompt must hold token ids from 0 to 63, got 64"),
        (
            [1] * 30,
            {"max_new_tokens": 20},
            "prompt and max_new_tokens must fit into the cache of 48 tokens, got 30 and 20",
        ),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(model, wanted, prompt, options, message):
    session = poisoned(chunked(model, cache_tokens=48))
    with pytest.raises(ValueError, match=f"^{message}"):
        session.add(prompt, **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        session.generate([[1, 2], prompt], **options)  # the good one is not queued either
    assert not session.scheduler.waiting
    assert not session._requests
    assert session.step() == []
    assert all(cache[1:].isnan().all() for cache in session.cache.tensors)
    assert tokens_of(session.generate(PROMPTS[:4], 8)) == wanted[:4]


def test_prompts_of_a_generator(model, wanted):
    session = poisoned(chunked(model))
    assert tokens_of(session.generate((iter(p) for p in PROMPTS[:4]), 8)) == wanted[:4]
    assert not session._requests


def test_calls_from_inside_of_a_step_are_refused(model):
    session, found = poisoned(chunked(model)), []

    def observe(*_):
        calls = [session.step, lambda: session.generate([[1]], 2), lambda: session.add([1])]
        for call in calls:
            with pytest.raises(RuntimeError, match="and not from inside of a step"):
                call()
        found.append(list(session._requests))

    with session.observe_logits(observe):
        session.generate([[1, 2]], 2)
    assert found == [[0], [0]]
    assert not session._requests


def test_another_thread_beside_a_step_is_refused(model, wanted):
    session, errors = poisoned(chunked(model)), []

    def elsewhere():
        try:
            session.add([1])
        except RuntimeError as error:
            errors.append(str(error))

    def observe(*_):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with session.observe_logits(observe):
        assert tokens_of(session.generate(PROMPTS[:4], 8)) == wanted[:4]
    assert "add() must be called by one thread at a time" in errors[0]
    thread = threading.Thread(target=session.generate, args=(PROMPTS[:1], 2))
    thread.start()
    thread.join()  # one after the other is fine
    assert tokens_of(session.generate(PROMPTS[:4], 8)) == wanted[:4]
