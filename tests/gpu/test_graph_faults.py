"""Captured sessions on a GPU when something is wrong: it is caught and named, and they go on.

Models are uncompiled and in float32, where the tokens of all modes are equal. A test takes 2 to 6 s
on one H200 (predicted). The capture itself: test_capture_failures.py.
"""

import pytest
import torch

from attn_ops import get_backend
from attn_ops.backends import registry
from graphs.capture.failures import CaptureError, Failure
from graphs.capture.verifier import VerificationError
from tests.gpu import graph_cases as cases
from tests.gpu.graph_cases import PROMPTS, small, tokens, uncaptured

pytestmark = pytest.mark.gpu


@pytest.fixture
def model(make_model):
    return cases.wide(make_model, dtype=torch.float32)


def under_way(model, **options):
    """A session in the middle of decoding two requests."""
    session = small(model, **options)
    ids = [session.add(prompt, 40) for prompt in PROMPTS[:2]]
    for _ in range(3):
        session.step()
    return session, ids


def finished(session, ids):
    while session.num_unfinished:
        session.step()
    return [session.result(request).token_ids for request in ids]


REFUSED = "must stay where they were, got .*"


# -- what moved ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("named", cases.MOVES)
def test_moved_tensor_is_refused_and_the_session_goes_on(model, named, decode_steps):
    """When the tensor is back, the requests end as if nothing had been."""
    session, ids = under_way(model, decode_steps=decode_steps)
    undo = cases.MOVES[named](session)
    try:
        with pytest.raises(ValueError, match=REFUSED + named):
            session.step()
    finally:
        undo()
    assert finished(session, ids) == uncaptured(model, PROMPTS[:2], 40)


def test_freed_cache_is_refused(model):
    session, _ = under_way(model)
    cases.free_cache(session)
    with pytest.raises(ValueError, match=REFUSED + r"kv_caches\[0\]"):
        session.step()


def test_moved_plan_is_refused(make_model):
    """What FLASHINFER plans on the host before every replay."""
    session, _ = under_way(cases.wide(make_model), backend=cases.available("FLASHINFER"))
    for captured in session.graphs or ():
        assert captured.graph.metadata is not None
        for plan in captured.graph.metadata.plans.values():
            plan.captured.is_empty = plan.captured.is_empty.clone()
    with pytest.raises(ValueError, match=REFUSED + r"metadata\.plans.*is_empty"):
        session.step()


# -- what was frozen -------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["always", "first", 3])
def test_frozen_length_is_caught(model, monkeypatch, tmp_path, verify):
    """A backend that freezes in the graph what it last saw of the lengths."""
    frozen = cases.frozen_backend(get_backend("TRITON"), "FROZEN")
    monkeypatch.setattr(registry, "_registered", registry._registered | {"FROZEN": frozen})
    options = {"backend": "FROZEN", "lazy_capture": True}
    unnoticed = small(model, **options)
    assert tokens(unnoticed.generate(PROMPTS, 16)) != uncaptured(model), "nobody looked"
    session = small(model, verify=verify, **options)
    assert session.verifier is not None
    session.verifier.directory = tmp_path
    with pytest.raises(VerificationError, match="replay of BatchDescriptor") as caught:
        session.generate(PROMPTS, 16)
    error = caught.value
    assert getattr(error.key, "query_len", None) == 1
    assert error.tensor.startswith("kv_caches[1]"), error
    assert 0.0 < error.difference < float("inf")
    assert error.dump is not None
    assert error.dump.parent == tmp_path
    names = {path.name for path in error.dump.iterdir()}
    assert names == {"inputs.pt", "replay.pt", "eager.pt", "report.json"}


# -- what cannot be captured -----------------------------------------------------------------------

MODES = ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


def check_explained(error, fault):
    assert error.failure is Failure[fault.failure], error
    assert error.operator == fault.operator, error
    assert f"in {fault.how.__name__}" in error.line, error
    assert cases.__file__ in error.line, error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", cases.FAULTS)
def test_failed_capture_leaves_the_session_working(model, monkeypatch, place, mode):
    """Twice, beside a graph that is there already; when the fault is gone all is captured."""
    want, fault = uncaptured(model), cases.FAULTS[place]
    session = small(model, cudagraph_mode=mode, lazy_capture=True, capture_sizes=[1, 4])
    assert tokens(session.generate(PROMPTS[:1], 4)) == [want[0][:4]]
    assert session.graphs is not None
    good = list(session.graphs)
    assert len(good) == 1
    remove = fault.install(monkeypatch, session, place)
    for _ in range(2):
        with pytest.raises(CaptureError) as caught:
            session.generate(PROMPTS, 16)
        check_explained(caught.value, fault)
        assert list(session.graphs) == good, "nothing half-captured is kept"
        assert not session.num_unfinished
        assert tokens(session.generate(PROMPTS[:1], 4)) == [want[0][:4]], "the good one still works"
    remove()
    assert tokens(session.generate(PROMPTS, 16)) == want
    assert len(session.graphs) > len(good)
    assert session.graphs.failures == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", cases.FAULTS)
def test_failed_capture_runs_uncaptured_if_asked(model, monkeypatch, place, mode):
    """And is reported; keys that have not failed are captured all the same."""
    want, fault = uncaptured(model), cases.FAULTS[place]
    session = small(
        model, cudagraph_mode=mode, capture_sizes=[1, 4], mixed_capture_sizes=[32],
        on_capture_failure="continue",
    )  # fmt: skip
    remove = fault.install(monkeypatch, session, place)
    assert tokens(session.generate(PROMPTS, 16)) == want
    graphs = session.graphs
    assert graphs is not None
    assert len(graphs) == 0
    assert session.num_steps["captured"] == 0
    assert len(graphs.failures) == (3 if mode == "FULL_AND_PIECEWISE" else 2)
    for key, error in graphs.failures.items():
        assert error.key == key
        check_explained(error, fault)
    reported = [line.operator for line in session.report().failures]
    assert reported == [error.operator for error in graphs.failures.values()]
    remove()
    drawn = session.generate(PROMPTS, 16, temperature=1.0, seed=1)
    assert session.num_steps["captured"] > 10
    plain = small(model, cudagraph_mode="NONE")
    assert plain.generate(PROMPTS, 16, temperature=1.0, seed=1) == drawn
