"""A program's session, driven to the end, and what it has given."""

import contextlib
import dataclasses
import threading
from typing import Any

import torch

from benchmarks.programs import changes
from benchmarks.programs.draw import Program
from benchmarks.programs.errors import kind_of
from benchmarks.programs.made import apply_changes, made
from benchmarks.programs.surgeries import Box, Inapplicable

MAX_STEPS = 300
"""Calls of `step` after which a session hangs."""


@dataclasses.dataclass
class Served:
    """What a session has given: tokens by prompt, and how far it was at the changes."""

    tokens: list[list[int]]
    before: list[int]  # tokens handed out before the changes
    computed: list[int]  # positions in the cache then
    launched: list[int]  # the same when what was launched before the changes is over
    error: BaseException | None = None
    changed: bool = False  # a session may end before its changes come
    stuck: bool = False
    finished: bool = False
    stream_differs: str = ""


def serve(program: Program, did: list[str]) -> Served:
    """Run the session; what it raises becomes `error`, and `did` gets what was done, in words."""
    import graphs
    from attn_ops.integrations.merged import merge_projections

    count = len(program.prompts)
    served = Served([[] for _ in range(count)], [0] * count, [0] * count, [0] * count)
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
        driver = Driver(program, session, served, did, box)
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


class Driver:
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
            self.ids.append(self.session.add(list(prompt), self.program.max_new_tokens, eos=()))

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
            steps = self.session.loop._launched
            place = None if steps is None else steps.after.place(request)
            served.launched[i] = served.computed[i] if place is None else place[0]
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
        (result,) = self.session.generate([prompt], count, eos=())
        wanted = self.session.generate([prompt], count, eos=())[0].token_ids
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
            if kind_of(error) != "refused":
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
