"""Steps of a session, one after the other: what runs next, in which graph, and what follows it.

Scheduler.next_step -> StepTensors.fill, upload -> model, sampling -> TokenStream

What is launched, and its states: `graphs.ahead`.
"""

import dataclasses
import logging
from collections.abc import Mapping

from tqdm import tqdm

from graphs.ahead import DecodeLauncher, LaunchedSteps
from graphs.capture.gains import MixedGains, gpu_ms
from graphs.capture.memory import human
from graphs.capture.plan import CapturePlan
from graphs.capture.store import CapturedStep, StepGraphs
from graphs.compilation import Compilation
from graphs.context import StreamOrder
from graphs.model_changes import ModelState
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.requests.batch import Rows
from graphs.requests.outputs import TokenStream
from graphs.requests.scheduler import Scheduler
from graphs.runner import StepRunner
from graphs.sampling.params import Sampling

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the steps of a session. One thread at a time, in its `surroundings`.

    Every method may be interrupted anywhere and called again.

    Args:
        runner: runs steps on the device.
        scheduler: says which requests run next.
        token_stream: takes what they draw.
        plan: what is captured.
        state: what of the model may not change unseen.
        compilation: compiles the model before the first step.
        always_fills: every step is filled by the host, none goes on from the one before.

    Attributes:
        num_steps: steps that were replayed ("captured") and called.
        num_launches: of steps, or of `decode_steps` of them: launched before the tokens of the last
            ones were read ("ahead"), or after ("waited").
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        token_stream: TokenStream,
        plan: CapturePlan,
        state: ModelState,
        compilation: Compilation,
        *,
        always_fills: bool,
    ) -> None:
        self.runner, self.scheduler, self.token_stream = runner, scheduler, token_stream
        self.plan, self.state, self.compilation = plan, state, compilation
        self.launcher = DecodeLauncher(runner, always_fills)
        times = runner.device.type == "cuda" and plan.chooses_mixed and not always_fills
        mixed_sizes, timer = plan.dispatcher.mixed_sizes, gpu_ms if times else None
        self.gains = MixedGains(mixed_sizes, runner.builder, timer)
        self.num_steps = {"captured": 0, "called": 0}
        self.num_launches = {"ahead": 0, "waited": 0}
        self.streams = StreamOrder(runner.device)
        self._replays_only = plan.debug is None and not always_fills  # no Python of the model
        on_gpu = runner.device.type == "cuda" or plan.debug is not None  # debugging acts as on one
        in_turn = always_fills or runner.builder.plans_in_turn
        self._goes_ahead = on_gpu and not in_turn
        self._launched: LaunchedSteps | None = None
        self._warm = False
        self._checked = False  # the model, in this step
        self._checks_late = False  # in the next one

    @property
    def graphs(self) -> StepGraphs | None:
        """`StepGraphs`; None where nothing is captured."""
        return self.runner.graphs

    @property
    def is_idle(self) -> bool:
        """Whether nothing is launched whose tokens nobody has taken."""
        return self._launched is None

    # -- steps -------------------------------------------------------------------------------------

    def step(self, *, ahead: bool = True) -> None:
        """A step, or `decode_steps` of them; the token stream takes their tokens.

        Launched steps stay until all of their tokens are taken. What was launched after them counts
        only once it has taken their place; the launcher goes on from nothing else.

        Args:
            ahead: launch the next ones too, before these tokens are read.
        """
        self._checked = False
        self._keep_order()
        self._drop_unobserved()
        if not self._checks_late or self.scheduler.may_share:
            self._check_model()
        self.warm_up()
        if self._launched is None:
            self._launched = self._launch_next()
            if self._launched is None:
                return
        # Refused: these can still be collected.
        followed = self._launch_ahead(self._launched) if ahead else None
        if not self._checked and self._check_late(self._launched):
            return
        self._checks_late = followed is None and self._plans_replays(self._launched)
        self._collect(self._launched)
        self._launched = followed

    def step_drafted(self, drafts: Mapping[int, list[int]]) -> None:
        """A step with drafts, or without where a prompt comes first or the budget is too small."""
        k = self.plan.num_draft_tokens
        self._keep_order()
        self._drop_unobserved()
        self._check_model()
        self.warm_up()
        self.collect_all()
        step = self.scheduler.next_step()
        room = self.scheduler.max_tokens_per_step // (1 + k)
        if not room or not step or step.query_len != 1:
            self.step(ahead=False)
            return
        rows = []
        for s in step[:room]:
            known = () if s.request.id in self.token_stream else drafts.get(s.request.id, ())
            draft = (*known, *[0] * (k - len(known)))
            rows.append(dataclasses.replace(s, num_tokens=1 + k, draft=draft))
        drafted = Rows(rows)
        self._run_alone(drafted, self._captured(drafted))

    def warm_up(self) -> None:
        """Compile and capture what comes before the first step; for a new dump, compile again."""
        joins_dump = self.compilation.joins_dump()
        if self._warm:
            if joins_dump:
                if self.graphs is not None:
                    self.drop_graphs()
                self.compilation.run_again()
            return
        self.compilation.run()
        if self.graphs is not None and not self.plan.lazy:
            self._capture_first()
        self._warm = True  # last: what was interrupted is done again

    def collect_all(self) -> None:
        """Take the tokens of what is launched; nothing goes on from there."""
        self.launcher.invalidate()
        if self._launched is not None:
            self._collect(self._launched)
            self._launched = None

    def drop_graphs(self) -> None:
        """Collect what is launched, then give all graphs back; they are captured when needed."""
        self.collect_all()
        self.launcher.buffers.clear()
        self.gains.clear()
        self.runner.release()

    # -- the model ---------------------------------------------------------------------------------

    def _check_model(self) -> None:
        """Refuse a model that has changed, or drop its graphs, before anything is launched.

        The device computes meanwhile what was launched before.
        """
        if self.state.check():
            self.scheduler.prefixes.forget()
            self.compilation.model_changed()
            if self.graphs is not None:
                self.drop_graphs()
        self.state.stale = False
        self._checked = True

    def _check_late(self, launched: LaunchedSteps) -> bool:
        """The same after a replay was launched; whether it is dropped, as the model has changed."""
        # Where the host plans every replay, the device has nothing to do while the host checks
        # first: 0.4 of 5.5 ms a step of PIECEWISE at batch 1 (one H200, 2026-11-22).
        changed = True
        try:
            changed = self.state.check()
        finally:
            if changed:
                launched.wait()
                self.launcher.invalidate()
                self._launched, self._checks_late = None, False
        if changed:
            self.scheduler.prefixes.forget()
            self.compilation.model_changed()
            self.drop_graphs()
            self.state.stale = False
        return changed

    # -- graphs ------------------------------------------------------------------------------------

    def _capture_first(self) -> None:
        if self.runner.drops_rows:
            self.plan.add_chunks(self.scheduler.max_tokens_per_step)
        keys, guess = self.plan.first_keys(), self.plan.estimated_bytes
        if guess is not None:
            logger.info("capturing %d graphs, estimated at %s", len(keys), human(guess))
        for mode, key in tqdm(keys, desc="capture", disable=None, leave=False):
            self._capture(key, mode)

    def _captured(self, step: Rows) -> CapturedStep | None:
        """The graph that holds the step, captured if need be; None: it is called."""
        shared = self.runner.shared_prefixes(step) if self.scheduler.prefixes.is_on else None
        step.shared = shared
        if self.graphs is None:
            return None
        mode, key = self.plan.dispatcher.dispatch(
            step.num_tokens,
            len(step),
            step.query_len,
            self._kind(step),
            logits=self._wants_logits(step),
            groups=0 if shared is None else shared.num_groups,
        )
        if key is None or (step.num_draft and not key.uniform):  # mixed: logits of last rows only
            return None
        captured = self._capture(key, mode)  # first: a new graph is timed
        if captured is None or not self.gains.pays(key, step.num_tokens):
            return None
        if key.query_len != 1 or (mode is CUDAGraphMode.FULL and not key.groups):
            step.shared = None  # padding has more rows than one, or the graph sees all keys at once
        return captured

    def _capture(self, key: BatchDescriptor, mode: CUDAGraphMode) -> CapturedStep | None:
        if not self._checked and not self.runner.is_captured(key):
            self._check_model()
        with self.compilation.counters.watching():
            captured = self.runner.captured(key, mode)
            if captured is not None and self.graphs is not None:
                self.gains.measure(captured, self.graphs)
            return captured

    # -- drafts: their tokens are read at once -----------------------------------------------------

    def _run_alone(self, step: Rows, captured: CapturedStep | None) -> None:
        if not self._checked:
            self._check_model()
            captured = self._captured(step)  # dropped, if the model has changed
        self._checks_late = False
        self.launcher.invalidate()
        if captured is None:
            self.num_steps["called"] += 1
            with self.compilation.counters.watching():
                tokens = self.runner.call(step, self._kind(step)).tolist()
        else:
            self.runner.fill(captured.tensors, step, captured.key.sampling)
            self.runner.launch(captured)
            self.num_steps["captured"] += 1
            tokens = captured.tensors.device["tokens"][0].tolist()
        self.num_launches["waited"] += 1
        rows = step.num_draft + 1
        drawn = [tokens[i * rows : (i + 1) * rows] for i in range(len(step))]
        self.token_stream.take(step, drawn)

    # -- what a step computes ----------------------------------------------------------------------

    def _wants_logits(self, step: Rows) -> bool:
        """Whether any are computed: not of chunks of prompts, if the model then does less."""
        return not self.runner.drops_rows or step.any_logits

    def _kind(self, step: Rows) -> Sampling:
        if not self._wants_logits(step):
            return Sampling.GREEDY
        return step.kind

    # -- launched steps ----------------------------------------------------------------------------

    def _launch_next(self) -> LaunchedSteps | None:
        """The next steps, where the host knows all tokens; None: nothing is left to do."""
        step = self.scheduler.next_step()
        if not step:
            return None
        captured = self._captured(step)
        if not self._checked and (captured is None or captured.key.query_len != 1):
            self._check_model()
            captured = self._captured(step)  # dropped, if the model has changed
        return self._launch(step, captured)

    def _launch_ahead(self, launched: LaunchedSteps) -> LaunchedSteps | None:
        """The next steps, before the tokens of these are read.

        None where they cannot be scheduled before, or nothing is left to do.
        """
        if self._batch_stays(launched):
            begun = launched.after.num_steps
            num_steps = self._num_steps(launched.captured, launched.rows.most - begun)
            if launched.rows.reach >= begun + num_steps:  # the device's tables have the blocks
                return self.launcher.follow(launched, num_steps)
        if not (self._goes_ahead and self._checked and self.launcher.is_last(launched)):
            return None
        if self.runner.on_logits is not None:
            return None  # an observer sees no step that may count for nothing
        step = self.scheduler.next_step(launched.after)
        if not step:
            return None
        if self._kind(step) is Sampling.PENALIZED and step.takes_tokens:
            return None  # counts come from tokens that the host knows
        captured = self._captured(step)
        if captured is not None and captured.plans_in_place:
            return None
        return self._launch(step, captured, launched)

    def _batch_stays(self, launched: LaunchedSteps) -> bool:
        """Whether the next steps are those of the same rows, none of which ends, by replays."""
        return (
            self.launcher.may_follow(launched)
            and launched.rows.least > launched.after.num_steps
            and self.scheduler.stays(launched.rows, launched.after)
        )

    def _launch(
        self,
        step: Rows,
        captured: CapturedStep | None,
        last: LaunchedSteps | None = None,
    ) -> LaunchedSteps:
        if captured is None:
            with self.compilation.counters.watching():
                logits = self._wants_logits(step)
                return self.launcher.call(step, self._kind(step), logits=logits, last=last)
        num_steps = 1
        if captured.key.query_len == 1:
            num_steps = self._num_steps(captured, step.most)
        return self.launcher.launch(captured, step, num_steps, last)

    def _num_steps(self, captured: CapturedStep | None, most: int) -> int:
        """Steps to launch: no more than the longest of the requests still needs."""
        if captured is None or not self.launcher.can_chain(captured):
            return 1
        return min(self.runner.num_steps, most)

    def _collect(self, launched: LaunchedSteps) -> None:
        self.token_stream.collect(launched.rows, launched.begun, launched.wait())
        kind = "called" if launched.captured is None else "captured"
        self.num_steps[kind] += launched.num_steps
        self.num_launches["ahead" if launched.is_ahead else "waited"] += 1

    def _keep_order(self) -> None:
        """In another stream nothing goes on from tokens that the last one has drawn."""
        if self.streams.changed():
            self.launcher.invalidate()

    def _drop_unobserved(self) -> None:
        """Drop a called step whose logits an observer is to see, and has not; it is done again."""
        launched, observer = self._launched, self.runner.on_logits
        if launched is None or launched.captured is not None or observer is None:
            return
        if launched.observer is not observer:
            self.launcher.invalidate()
            self._launched = None

    def _plans_replays(self, launched: LaunchedSteps) -> bool:
        """Whether the host plans such replays and has nothing else to do for them."""
        captured = launched.captured
        return captured is not None and captured.needs_host and self._replays_only
