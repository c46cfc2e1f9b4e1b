"""One program: its session driven to the end, and every token that it hands out judged."""

import contextlib
import dataclasses
import random
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.programs import changes, truth
from benchmarks.programs.draw import CHANGES, STEPS, Program
from benchmarks.programs.models import build
from benchmarks.programs.surgeries import Box, Inapplicable

MAX_STEPS = 300
"""Calls of `step` after which a session hangs."""

OURS = ("attn_ops", "fx_passes", "graphs")
REFUSALS = (ValueError, TypeError, RuntimeError)
AS_GENERATE = "as generate would"
"""Said of wrong tokens that the model draws by itself too, over a cache of Transformers."""

SLACK = 2
"""How many times `decode_steps` steps may already be launched at a change."""


@dataclasses.dataclass
class Outcome:
    """equal, refused, uncompilable, crash, WRONG or invalid."""

    kind: str
    message: str = ""
    did: list[str] = dataclasses.field(default_factory=list)  # surgeries and changes, in words
    seconds: float = 0.0


@dataclasses.dataclass
class Served:
    """What a session has given: tokens by prompt, and how far it was at the changes."""

    tokens: list[list[int]]
    before: list[int]  # tokens handed out before the changes
    computed: list[int]  # positions in the cache then
    error: BaseException | None = None
    changed: bool = False  # a session may end before its changes come
    stuck: bool = False
    finished: bool = False
    stream_differs: str = ""


def made(program: Program, implementation: str, changed: bool, box: Box) -> tuple[Any, list[str]]:
    """The program's model after its surgeries, and after its changes too."""
    model, did = build(program.family, program.model_seed, implementation), []
    for name, seed in program.surgeries:
        torch.manual_seed(seed)
        did.append(f"{name}: {STEPS[name](model, random.Random(seed), box)}")
    if implementation == "eager":
        model.eval()
        if changed:
            apply_changes(program, model, for_truth=True)
    return model, did


def apply_changes(program: Program, model: Any, for_truth: bool) -> tuple[list[str], list[Any]]:
    """What the changes did, in words, and the surroundings of later steps."""
    did, around = [], []
    same = {f.__name__ for f in changes.SAME}
    for name, seed in program.changes:
        if name in changes.DRIVERS or (for_truth and name in same):
            continue
        torch.manual_seed(seed)
        done = CHANGES[name](model, random.Random(seed))
        if isinstance(done, tuple):
            around.append(done[1])
        did.append(f"{name}: {done if isinstance(done, str) else done[0]}")
    return did, around


def run(program: Program) -> Outcome:
    """Run the program and judge it; what the session raises becomes an outcome."""
    try:
        expected = _expected(program)
        if program.changes:  # they must be possible
            new, _ = made(program, "eager", True, Box())
            truth.recomputed(new, program.prompts[0])(len(program.prompts[0]))
    except Exception as error:  # no truth, no program
        return Outcome("invalid", f"{type(error).__name__}: {error}"[:200])
    did: list[str] = []
    try:
        served = _serve(program, did)
    except Inapplicable as error:
        return Outcome("invalid", str(error))
    try:
        wrong = _judged(program, served, expected)
    except truth.BadTruth as error:
        return Outcome("invalid", str(error), did)
    except Exception as error:
        return Outcome("crash", f"of the judge: {_told(error)}", did)
    if wrong:
        return Outcome("WRONG", wrong, did)
    if served.stuck:
        return Outcome("crash", "stuck: the session does not end", did)
    if served.error is not None:
        kind = _kind(served.error)
        return Outcome(kind, _told(served.error), did)
    return Outcome("equal", "", did)


def _expected(program: Program) -> list[list[int]]:
    """The old model's own tokens."""
    model, _ = made(program, "eager", False, Box())
    expected = []
    for prompt in program.prompts:
        ids = list(prompt)
        for _ in range(program.max_new_tokens):
            ids.append(int(truth.recomputed(model, ids)(len(ids)).argmax()))
        expected.append(ids[len(prompt) :])
    return expected


# -- the session -----------------------------------------------------------------------------------


def _serve(program: Program, did: list[str]) -> Served:
    import graphs
    from attn_ops.integrations.merged import merge_projections

    count = len(program.prompts)
    served = Served([[] for _ in range(count)], [0] * count, [0] * count)
    box = Box()
    try:
        model, done = made(program, "attn_ops", False, box)
        did += done
        if program.merged:
            merge_projections(model)
        called = model
        if program.compiled:
            called = torch.compile(model, backend="attn_ops", fullgraph=True)
        session = graphs.DecodeSession(called, **program.session_options())
        box.session = session
        driver = _Driver(program, session, served, did, box)
        try:
            driver.drive()
        finally:
            driver.order_tokens()
    except Inapplicable:
        raise
    except Exception as error:  # refused, or worse: the caller tells
        served.error = error
    finally:
        torch.set_default_dtype(torch.float32)
    return served


class _Driver:
    """Adds the prompts, steps, changes things in between, and collects."""

    def __init__(
        self, program: Program, session: Any, served: Served, did: list[str], box: Box
    ) -> None:
        self.program, self.session, self.served, self.did = program, session, served, did
        self.box = box
        self.ids: list[int] = []
        self.around: list[Any] = []
        self.lock = threading.Lock()

    def drive(self) -> None:
        program, session = self.program, self.session
        num_first = len(program.prompts) - program.late
        self._add(program.prompts[:num_first])
        num_steps = 0
        drivers = [name for name, _ in program.changes if name in changes.DRIVERS]
        while session.num_unfinished or len(self.ids) < len(program.prompts):
            if num_steps == min(2, program.change_after):
                self._add(program.prompts[len(self.ids) :])
            if num_steps == program.change_after:
                self._change(drivers)
            self._step()
            num_steps += 1
            if num_steps > MAX_STEPS:
                self.served.stuck = True
                return
        self.order_tokens()
        self._compare_streams()
        self.served.finished = True

    def _add(self, prompts: Any) -> None:
        for prompt in prompts:
            self.ids.append(self.session.add(list(prompt), self.program.max_new_tokens))

    def _step(self) -> None:
        with contextlib.ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around())
            outputs = self.session.step()
        with self.lock:
            outputs, self.box.outputs = self.box.outputs + outputs, []
            for output in outputs:
                if output.request_id in self.ids:
                    self.served.tokens[self.ids.index(output.request_id)].append(output.token_id)

    def _change(self, drivers: list[str]) -> None:
        served = self.served
        served.changed = True
        served.before = [len(tokens) for tokens in served.tokens]
        for i, prompt in enumerate(self.program.prompts[: len(self.ids)]):
            request = self.session._requests[self.ids[i]]
            held = len(prompt) + served.before[i] - 1
            served.computed[i] = held if served.before[i] else request.num_computed
        did, self.around = apply_changes(self.program, self.session.original, for_truth=False)
        self.did += [*did, *drivers]
        if "default dtype" in drivers:
            torch.set_default_dtype(torch.float64)
        if "release" in drivers:
            self.session.release()
        if "two threads" in drivers:
            self._in_threads(self._steps_alone, self._steps_alone)
        if "a thread generates" in drivers:
            self._in_threads(self._steps_alone, self._generates)

    def _steps_alone(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.session.num_unfinished:
                return
            self._step()

    def _generates(self) -> None:
        prompt = list(self.program.prompts[0])
        count = self.program.max_new_tokens
        (result,) = self.session.generate([prompt], count)
        wanted = self.session.generate([prompt], count)[0].token_ids
        if list(result.token_ids) != list(wanted):
            self.served.stream_differs = f"generate in a thread: {result.token_ids}, not {wanted}"

    def _in_threads(self, *bodies: Any) -> None:
        errors: list[BaseException] = []

        def guarded(body: Any) -> None:
            try:
                body()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(b,), daemon=True) for b in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        if any(thread.is_alive() for thread in threads):
            self.served.stuck = True
        for error in errors:
            if _kind(error) != "refused":
                raise error
        if len(errors) == len(bodies):
            raise errors[0]

    def order_tokens(self) -> None:
        """Where two step at a time, which was first is nobody's: put as the request has them."""
        names = [name for name, _ in (*self.program.changes, *self.program.surgeries)]
        if not any("thread" in name or "stepping" in name for name in names):
            return
        for i, request in enumerate(self.ids):
            handed, kept = self.served.tokens[i], list(self.session._requests[request].token_ids)
            if sorted(handed) == sorted(kept[: len(handed)]):
                self.served.tokens[i] = kept[: len(handed)]

    def _compare_streams(self) -> None:
        for i, request in enumerate(self.ids):
            result = self.session.result(request)
            handed = self.served.tokens[i]
            kept = None if result is None else list(result.token_ids)
            if kept != handed:
                self.served.stream_differs = f"prompt {i}: step gave {handed}, result has {kept}"


# -- the judge -------------------------------------------------------------------------------------


def _judged(program: Program, served: Served, expected: list[list[int]]) -> str:
    """What is wrong with the tokens, the worst first; empty if nothing is."""
    if served.stream_differs:
        return served.stream_differs
    same = {f.__name__ for f in changes.SAME} | set(changes.DRIVERS)
    changes_truth = served.changed and any(name not in same for name, _ in program.changes)
    found = []
    for i, tokens in enumerate(served.tokens):
        if served.finished and len(tokens) != program.max_new_tokens:
            return f"prompt {i}: {len(tokens)} tokens, not {program.max_new_tokens}"
        as_old = tokens == expected[i][: len(tokens)]
        if as_old and (not changes_truth or len(tokens) <= served.before[i]):
            continue
        if changes_truth:
            wrong = _wrong_after_change(program, served, i)
        else:
            wrong = _wrong_for_old(program, i, tokens)
        if wrong:
            found.append(f"prompt {i}: {wrong}: {tokens}; the old model: {expected[i]}")
    return min(found, key=lambda wrong: AS_GENERATE in wrong, default="")


def _wrong_for_old(program: Program, i: int, tokens: list[int]) -> str:
    old = made(program, "eager", False, Box())[0]
    prompt = program.prompts[i]
    ids = [*prompt, *tokens]
    found = truth.first_wrong(truth.recomputed(old, ids), prompt, tokens)
    if found is None:
        return ""
    at, top = found

    def again() -> Any:
        return made(program, "eager", False, Box())[0]

    if truth.unstable(again, ids[: len(prompt) + at], top):
        return ""
    return f"token {at} should be {top}" + _as_cached(program, i, tokens)


def _as_cached(program: Program, i: int, tokens: list[int]) -> str:
    """Whether the model with a cache of Transformers would have drawn the same wrong tokens."""
    prompt = program.prompts[i]
    ids = [*prompt, *tokens]
    try:
        old = made(program, "eager", False, Box())[0]
        from transformers import DynamicCache

        cache, rows = DynamicCache(), []
        with torch.no_grad():
            for part in (list(prompt), *([t] for t in tokens)):
                out = old(input_ids=torch.tensor([part]), past_key_values=cache, use_cache=True)
                rows.append(out.logits[0, -1])
        found = truth.first_wrong(lambda n: rows[n - len(prompt)], prompt, tokens)
        return f" ({AS_GENERATE})" if found is None and ids else ""
    except Exception:  # nothing to compare with
        return ""


def _wrong_after_change(program: Program, served: Served, i: int) -> str:
    """Tokens before the change by the old model, and after by what `changes` says."""
    prompt, tokens, before = program.prompts[i], served.tokens[i], served.before[i]
    early = _wrong_for_old(program, i, tokens[:before])
    if early:
        return f"before the change, {early}"
    slack = SLACK * program.decode_steps if program.debug else 0
    begin = served.computed[i]
    near = 3e-2 if any(name == "autocast" for name, _ in program.changes) else truth.NEAR
    best = -1
    for at in range(begin, begin + slack + 1):
        for rows in _truths(program, (*prompt, *tokens), len(prompt), at):
            try:
                found = truth.first_wrong(rows, prompt, tokens, before, near)
            except Exception:  # that truth cannot be had
                continue
            if found is None:
                return ""
            best = max(best, found[0])
    return f"after the change, token {best} is no model's"


def _truths(program: Program, ids: tuple[int, ...], num_prompt: int, at: int) -> Any:
    """Of a change when `at` positions were in the cache: over that cache, or all computed anew."""
    old = made(program, "eager", False, Box())[0]
    new = made(program, "eager", True, Box())[0]
    around = contextlib.nullcontext
    if any(name == "autocast" for name, _ in program.changes):
        around = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    try:
        yield truth.switched(old, new, ids, min(at, len(ids)), around)
    except truth.BadTruth:  # no truth to judge by
        raise
    except Exception:
        pass
    by_old, by_new = truth.recomputed(old, ids), truth.recomputed(new, ids)

    def rows(num_tokens: int) -> torch.Tensor:
        if num_tokens <= at:
            return by_old(num_tokens)
        with around():
            return by_new(num_tokens)

    yield rows


# -- errors ----------------------------------------------------------------------------------------


def _kind(error: BaseException) -> str:
    """Whether our code refused, torch would not compile, or something broke."""
    if type(error).__module__.startswith("torch._dynamo"):
        return "uncompilable"
    frames = traceback.extract_tb(error.__traceback__)
    parts = Path(frames[-1].filename).parts if frames else ()
    inside = any(name in parts for name in OURS) and "site-packages" not in parts
    named = isinstance(error, REFUSALS) or type(error).__name__ == "CaptureError"
    return "refused" if inside and named else "crash"


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__} at {where}: {text[0] if text else ''}"[:300]
