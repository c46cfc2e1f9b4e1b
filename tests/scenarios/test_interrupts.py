"""What a review of sessions found, a test each: interrupts, lost tokens, edges."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import contextlib
import random
import sys

import pytest
import torch

import graphs
from attn_ops.backends.grouped import grouped_backend
from graphs import CUDAGraphMode, DecodeSession
from graphs.verify.verifier import Verifier

PROMPTS = [[1, 2, 3], [4, 5], [7] * 6]
PENALIZED = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(autouse=True)
def one_thread():
    """Small models run faster on it, and these tests run hundreds of steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(model, **options) -> DecodeSession:
    sizes = {"max_batch_size": 4, "max_tokens": 64, "block_size": 4, "debug": "eager_replay"}
    return DecodeSession(model, **(sizes | {"lazy_capture": True} | options))


def plain(model, **options) -> DecodeSession:
    return make(model, debug=None, cudagraph_mode="NONE", **options)


def drain(session, outputs=None) -> dict[int, list[int]]:
    """Step to the end; tokens by request, as they were handed out."""
    outputs = list(outputs or ())
    for _ in range(200):
        if not session.num_unfinished:
            break
        outputs += session.step()
    assert session.num_unfinished == 0
    streamed: dict[int, list[int]] = {}
    for output in outputs:
        streamed.setdefault(output.request_id, []).append(output.token_id)
    return streamed


def is_empty(session) -> bool:
    return session.cache.num_free_blocks == session.cache.num_blocks - 1


# -- interrupts ------------------------------------------------------------------------------------


class Interrupt:
    """Raises at the n-th line that runs in the session's own files."""

    NAMES = (
        "session loop ahead runner requests/requests requests/scheduler requests/stream "
        "step/tensors verify/model_state"
    )
    FILES = tuple(f"graphs/{name}.py" for name in NAMES.split())

    def __init__(self, at: int) -> None:
        self.at, self.num_lines = at, 0

    def __call__(self, frame, event, argument):
        return (
            self.line if frame.f_code.co_filename.endswith((*self.FILES, "kv_cache.py")) else None
        )

    def line(self, frame, event, argument):
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                raise KeyboardInterrupt
        return self.line

    def during(self, run):
        sys.settrace(self)
        try:
            return run()
        except KeyboardInterrupt:
            return []
        finally:
            sys.settrace(None)


@pytest.mark.parametrize("sampling", [{}, PENALIZED])
def test_interrupted_anywhere(model, sampling):
    """Between any two lines of a step: the same tokens, none twice, no block lost."""
    want = plain(model, max_batch_size=2).generate(PROMPTS, 12, **sampling)

    def begun():
        session = make(model, max_batch_size=2, decode_steps=4)
        session.generate(PROMPTS[:1], 3, **sampling)
        return session, [session.add(p, 12, **sampling) for p in PROMPTS]

    session, _ = begun()
    count = Interrupt(0)
    while session.num_unfinished:
        count.during(session.step)
    assert count.num_lines > 4000  # a file that moves away is missed here
    for at in random.Random(0).sample(range(1, count.num_lines), 20):
        session, ids = begun()
        interrupt, outputs = Interrupt(at), []
        for _ in range(60):
            if session.num_unfinished:
                outputs += interrupt.during(session.step)
        assert [session.result(i) for i in ids] == want, at
        for request, result in zip(ids, want, strict=True):
            streamed = [o.token_id for o in outputs if o.request_id == request]
            assert len(streamed) <= len(result.token_ids), at
            session.discard(request)
        assert is_empty(session), at


@pytest.mark.parametrize("number", range(1, 12, 2))
def test_interrupted_while_tokens_are_taken(model, number, monkeypatch):
    want = plain(model).generate(PROMPTS[:1], 20)
    session = make(model, decode_steps=8)
    request, take, taken = session.add(PROMPTS[0], 20), session.intake._take, []

    def interrupted(*arguments):
        take(*arguments)
        taken.append(1)
        if len(taken) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(session.intake, "_take", interrupted)
    outputs = []
    with contextlib.suppress(KeyboardInterrupt):
        while session.num_unfinished:
            outputs += session.step()
    assert len(taken) == number
    assert drain(session, outputs)[request] == want[0].token_ids
    assert session.result(request) == want[0]


def test_an_interrupted_generate_leaves_nothing(model):
    want = plain(model).generate(PROMPTS, 6)
    session = make(model, decode_steps=4)
    count = Interrupt(0)
    count.during(lambda: session.generate(PROMPTS, 6))
    for at in random.Random(1).sample(range(1, count.num_lines), 15):
        session = make(model, decode_steps=4)
        Interrupt(at).during(lambda session=session: session.generate(PROMPTS, 6))
        assert session.num_unfinished == 0, at
        assert is_empty(session), at
        assert session.generate(PROMPTS, 6) == want, at


# -- tokens that other calls take ------------------------------------------------------------------


def begun(model, **options):
    """A request whose next tokens are in the air, and what was handed out."""
    session = make(model, decode_steps=4, **options)
    request, outputs = session.add([1, 2], 12), []
    for _ in range(2):
        outputs += session.step()
    assert session._flight is not None
    return session, request, outputs


def others():
    def release(session):
        session.release()

    def generate(session):
        session.generate([[3, 4]], 20)

    def failing_drafts(session):
        session._run_alone = None
        with pytest.raises(TypeError):
            session.verify_draft({})
        del session._run_alone

    return [release, generate, failing_drafts]


@pytest.mark.parametrize("call", others())
def test_no_token_of_the_stream_is_lost(model, call):
    want = plain(model).generate([[1, 2]], 12)[0].token_ids
    session, _, outputs = begun(model, num_draft_tokens=2)
    call(session)
    assert session.num_unfinished == 1
    while session.num_unfinished:
        outputs += session.step()
    assert [o.token_id for o in outputs] == want
    assert [o.finish_reason for o in outputs] == [None] * 11 + ["length"]


def test_a_dump_in_the_middle_loses_no_token(model, tmp_path):
    session, request, outputs = begun(model)
    with graphs.dump(tmp_path):
        outputs += session.step()
    assert drain(session, outputs)[request] == session.result(request).token_ids


def test_tokens_of_discarded_requests_are_not_handed_out(model):
    session, request, _ = begun(model)
    session.release()
    session.discard(request)
    assert session.num_unfinished == 0
    assert session.step() == []


# -- drafts ----------------------------------------------------------------------------------------

SHORT = {
    "gpt2": {},  # its positions are rows of a table
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}


def short_model(make_model, kind):
    if kind != "gpt2":
        return make_model(max_position_embeddings=32, rope_parameters=SHORT[kind])
    transformers = pytest.importorskip("transformers")
    make_model()  # registers attention
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops")
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("options", [{}, {"debug": None, "cudagraph_mode": "NONE"}])
def test_drafts_stay_within_the_positions_of_the_model(make_model, kind, options):
    model = short_model(make_model, kind)
    prompts = [[1, 2, 3], [5] * 10, [9] * 28]
    want = plain(model, max_tokens=32).generate(prompts, 100)
    session = make(model, max_tokens=32, num_draft_tokens=3, **options)
    ids = [session.add(p, 100) for p in prompts]
    while session.num_unfinished:
        session.verify_draft({})
    assert [session.result(i) for i in ids] == want


def test_finished_requests_do_not_block_drafts(model):
    session = make(model, num_draft_tokens=2)
    done = session.add([1, 2], 1, repetition_penalty=1.5)
    drain(session)
    request = session.add([3, 4], 6)
    while session.num_unfinished:
        session.verify_draft({done: [1, 2], request: [5]})
    assert session.result(request) == plain(model).generate([[3, 4]], 6)[0]
    going = session.add([1, 2], 3, repetition_penalty=1.5)
    with pytest.raises(ValueError, match=f"penalties must be neutral .* request {going}"):
        session.verify_draft({})


@pytest.mark.parametrize("budget", [3, 4, 9])
def test_drafts_keep_to_the_token_budget(model, budget, monkeypatch):
    session = make(model, num_draft_tokens=3, max_tokens_per_step=budget)
    ids, fill, sizes = [session.add(p, 9) for p in PROMPTS], session.runner.fill, []

    def watched(tensors, step, kind):
        sizes.append(sum(s.num_tokens for s in step))
        fill(tensors, step, kind)

    monkeypatch.setattr(session.runner, "fill", watched)
    while session.num_unfinished:
        session.verify_draft({})
    assert max(sizes) <= budget
    assert [session.result(i) for i in ids] == plain(model).generate(PROMPTS, 9)


# -- modes and surroundings ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [m for m in CUDAGraphMode if m is not CUDAGraphMode.NONE])
def test_debugging_lowers_grouped_backends(make_model, mode, caplog):
    model = make_model("gemma2")
    sliding = grouped_backend({(lambda s: s.sliding_window is not None): "TORCH"}, default="FLEX")
    session = make(model, backend=sliding, cudagraph_mode=mode, max_tokens=32)
    assert session.graph_mode is CUDAGraphMode.PIECEWISE
    assert session.graph_mode_why.startswith("debug='eager_replay'")
    if mode is not CUDAGraphMode.PIECEWISE:
        assert f"{mode.name} asked for" in session.graph_mode_why
        assert "TORCH has level NEVER" in session.graph_mode_why
    assert "asked for and used" not in caplog.text
    assert session.generate([[1, 2, 3]], 6) == plain(model).generate([[1, 2, 3]], 6)


def test_debugging_is_logged_as_such(model, caplog):
    caplog.set_level("INFO", "graphs")
    session = make(model, cudagraph_mode="FULL")
    assert session.graph_mode is CUDAGraphMode.FULL
    assert "FULL asked for, run by debug='eager_replay'" in caplog.text


def test_inside_and_outside_of_inference_mode(model):
    want = plain(model).generate(PROMPTS, 9, **PENALIZED)
    for first_inside in (True, False):
        with torch.inference_mode(first_inside):
            session = make(model, decode_steps=4)
            assert session.generate(PROMPTS, 9, **PENALIZED) == want
        with torch.inference_mode(not first_inside):
            assert session.generate(PROMPTS, 9, **PENALIZED) == want
    with torch.inference_mode():
        session = plain(model)
    assert session.generate(PROMPTS, 9, **PENALIZED) == want


def test_default_devices_and_dtypes_change_nothing(model):
    want = plain(model).generate(PROMPTS, 9, top_p=0.9, **PENALIZED)
    session = make(model, decode_steps=4)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        assert session.generate(PROMPTS, 9, top_p=0.9, **PENALIZED) == want
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_replaced_submodules_are_refused(make_model):
    model = make_model()
    session = make(model)
    session.generate(PROMPTS, 3)
    old, model.lm_head = model.lm_head, torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(ValueError, match=r"must stay where they were, got weights\.lm_head"):
        session.generate(PROMPTS, 3)
    model.lm_head = old
    session.generate(PROMPTS, 3)
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()  # no weight in it
    with pytest.raises(ValueError, match=r"got weights.model.layers.1.mlp.act_fn"):
        session.generate(PROMPTS, 3)


def test_a_verifier_of_ones_own(model, tmp_path):
    verifier = Verifier("always", strict_writes=True, directory=tmp_path)
    session = make(model, verify=verifier)
    assert session.generate(PROMPTS, 4) == plain(model).generate(PROMPTS, 4)
    assert session.runner.verifier is verifier
    assert verifier.num_checked > 0
    assert make(model, verify=Verifier(None)).runner.verifier is None
    with pytest.raises(ValueError, match="verify must be made for kv_cache_dtype='auto'"):
        make(model, verify=Verifier("first", kv_cache_dtype="fp8_e4m3"))


def test_exports():
    for name in ("CudagraphDispatcher", "Verifier", "VerificationError", "CaptureError"):
        assert name in graphs.__all__
    assert graphs.SamplingParams(temperature=1).temperature == 1
