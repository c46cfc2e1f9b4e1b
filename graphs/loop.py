"""Steps of a session, one after the other: what runs next, in which graph, and what follows it.

Scheduler.next_step -> StepTensors.fill, upload -> model, sampling -> TokenStream

Steps are launched ahead: the device runs them while the host reads the tokens of the ones before.
The host schedules by lengths, which it knows before the tokens. A row whose last token is not read
takes it from the steps before on the device (`graphs.step.finish`). A request that ends by its
length takes no part in the next steps. One that ends by a stop token does, as the host finds that
later: its token is dropped then, and its blocks are given back. Whatever writes to those blocks is
launched after that step.

`StepLoop` holds the launched steps whose tokens are not read. A launch that raises, or that an
observer makes void, drops only itself: its requests are scheduled again from what the host knows,
and draw the same tokens. `DecodeLauncher.invalidate` says that nothing is the last launch: the
device may have overwritten tokens that a next step would take. Every other use of a graph's tensors
calls it first, and so does every launch until it is complete.

These wait for the tokens first: drafts, `verify`, an observer of logits, grammars, penalties in a
batch that changes, plans that are part of a graph (`CapturedStep.plans_in_place`) or share memory
(`plans_in_turn` of a builder), and everything on a CPU, where a step is over when it is launched.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from graphs.capture.gains import MixedGains, gpu_ms
from graphs.capture.memory import human
from graphs.capture.plan import CapturePlan
from graphs.capture.store import CapturedStep, StepGraphs
from graphs.compilation import Compilation
from graphs.context import StreamOrder
from graphs.model_changes import ModelState
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.requests.batch import After, Rows
from graphs.requests.outputs import TokenStream
from graphs.requests.scheduler import Scheduler
from graphs.runner import LogitsObserver, StepRunner
from graphs.sampling.edits import Editing, num_biases
from graphs.sampling.logprobs import width_of
from graphs.sampling.params import Sampling
from graphs.step.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class LaunchedSteps:
    """A step, or replays of one decode graph, and where the tokens arrive."""

    captured: CapturedStep | None  # None: it was called
    rows: Rows  # of the batch, as they were scheduled
    begun: int  # decode steps of these rows before the first of these
    num_steps: int
    first_row: int  # of the ring of tokens: the row of the first step
    drawn: torch.Tensor  # [N, R] int64, the ring on the device; the next launch may overwrite it
    tokens: torch.Tensor  # [N, R] int64, a copy of the ring; pinned where the device is a GPU
    logprobs: torch.Tensor | None  # [N, R, 1 + k] int64, the same of `StepTensors`' logprobs
    arrived: torch.cuda.Event | None  # None: nothing to wait for
    scores: torch.Tensor | None = None  # [R, 1 + k + M] int64, of prompts; see `scored`
    is_ahead: bool = False  # launched before the tokens of the step before were read
    observer: LogitsObserver | None = None  # that has seen the logits

    @property
    def after(self) -> After:
        """Where the steps leave their requests."""
        return After(self.rows, self.begun + self.num_steps)

    @property
    def last_R(self) -> torch.Tensor:
        """Tokens [R] of the last of the steps, on the device."""
        return self.drawn[(self.first_row + self.num_steps - 1) % self.drawn.shape[0]]

    def wait(self) -> list[list[int]]:
        """Tokens of every step, row by row; waits until they are there.

        Of a step that wants no logits, zeros that nobody takes.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        if not self.tokens.shape[1]:
            return [[0] * len(self.rows)]
        return self._steps(self.tokens[:, : len(self.rows)].tolist())

    def logprobs_of_steps(self) -> list[np.ndarray] | None:
        """[S, 1 + k] of every step, when `wait` has returned; None: nobody asked for any."""
        return None if self.logprobs is None else self._steps(self.logprobs.numpy())

    def _steps(self, ring: Any) -> list[Any]:
        return [ring[(self.first_row + i) % len(ring)] for i in range(self.num_steps)]


def on_its_way(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, pinned where the device is a GPU, without waiting for it."""
    pinned = x.device.type == "cuda"
    copied = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned)
    return copied.copy_(x, non_blocking=True)


class TokenBuffers:
    """Where tokens arrive on the host.

    Every graph has two buffers in turn, as steps are launched before the last tokens are read; so
    have all steps together that are called.

    Args:
        max_rows: tokens of a called step at most.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._pairs: dict[int, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        """Graphs that have buffers."""
        return len(self._pairs.keys() - {0})

    def copy(
        self, captured: CapturedStep | None, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.cuda.Event | None]:
        """Copy what steps have drawn after what is launched, without waiting.

        Returns copies of `tokens` and `logprobs`, and the event after them on a GPU.
        """
        drawn, logprobs = tensors["tokens"], tensors.get("logprobs")
        on_gpu = drawn.device.type == "cuda"
        copied = self._next(captured, drawn, on_gpu)
        copied.copy_(drawn, non_blocking=True)
        logprobs = None if logprobs is None else on_its_way(logprobs)
        if not on_gpu:
            return copied, logprobs, None
        arrived = torch.cuda.Event()
        arrived.record()
        return copied, logprobs, arrived

    def clear(self) -> None:
        """Forget the buffers of graphs that are gone."""
        self._pairs.clear()

    def _next(
        self, captured: CapturedStep | None, drawn: torch.Tensor, pinned: bool
    ) -> torch.Tensor:
        key = 0 if captured is None else id(captured)
        if key not in self._pairs:
            shape = (1, self._max_rows) if captured is None else drawn.shape
            self._pairs[key] = [
                torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
                for _ in range(2)
            ]
        pair = self._pairs[key]
        pair.reverse()
        return pair[0][:, : drawn.shape[1]]


class DecodeLauncher:
    """Launches steps: filled anew, or decodes that go on from what the last ones left.

    Args:
        runner: calls steps and replays the graphs.
        always_fills: fill the tensors before every step.
    """

    def __init__(self, runner: StepRunner, always_fills: bool) -> None:
        self.runner = runner
        self.always_fills = always_fills
        self.buffers = TokenBuffers(runner.max_batch_size)
        self._last: LaunchedSteps | None = None  # nothing was launched since, not in part either
        self._num_launched = 0  # steps since the tensors were filled

    def can_chain(self, captured: CapturedStep) -> bool:
        """Whether a step can go on from what the step before left on the device."""
        return not (self.always_fills or captured.needs_host)

    def launch(
        self,
        captured: CapturedStep,
        rows: Rows,
        num_steps: int,
        last: LaunchedSteps | None = None,
    ) -> LaunchedSteps:
        """Launch a captured step, or `num_steps` decode steps of the rows.

        Args:
            captured: the graph.
            rows: of the batch.
            num_steps: replays of the graph.
            last: steps after which the rows were scheduled, and whose tokens they may take.
        """
        assert last is None or self.is_last(last), "its tokens are still on the device"
        self.invalidate()
        self.runner.fill(captured.tensors, rows, captured.key.sampling)
        if last is not None:
            self.runner.take_tokens(captured.tensors, rows, last.last_R)
        self._num_launched = 0
        return self._replay(captured, rows, 0, num_steps, last is not None)

    def call(
        self, rows: Rows, *, last: LaunchedSteps | None = None, **wanted: Any
    ) -> LaunchedSteps:
        """Call a step of the rows; arguments as those of `launch`, and of `StepRunner.call`."""
        assert last is None or self.is_last(last), "its tokens are still on the device"
        self.invalidate()
        observer = self.runner.on_logits
        last_R = None if last is None else last.last_R
        tensors = self.runner.call(rows, **wanted, last_R=last_R)
        scores = on_its_way(tensors["scores"]) if "scores" in tensors else None
        copied, ahead = self.buffers.copy(None, tensors), last is not None
        launched = LaunchedSteps(
            None, rows, 0, 1, 0, tensors["tokens"], *copied, scores, ahead, observer
        )
        self._last = launched
        return launched

    def is_last(self, launched: LaunchedSteps) -> bool:
        """Whether nothing was launched after these: the device still has their tokens."""
        return self._last is launched

    def may_follow(self, launched: LaunchedSteps) -> bool:
        """Whether the tensors hold what these steps leave, and the next can go on from there."""
        captured = launched.captured
        if captured is None or captured.key.query_len != 1:
            return False
        return self.can_chain(captured) and self.is_last(launched)

    def follow(self, launched: LaunchedSteps, num_steps: int) -> LaunchedSteps:
        """Launch the next steps of the same rows before the tokens of these are read."""
        assert self.may_follow(launched), "nothing came in between"
        assert launched.captured is not None, "called steps leave no tensors"
        begun = launched.begun + launched.num_steps
        return self._replay(launched.captured, launched.rows, begun, num_steps, True)

    def invalidate(self) -> None:
        """The device has nobody's next step, nor tokens for it: the next launch fills anew."""
        self._last = None

    def _replay(
        self,
        captured: CapturedStep,
        rows: Rows,
        begun: int,
        num_steps: int,
        is_ahead: bool,
    ) -> LaunchedSteps:
        """If a replay is refused, those before it are dropped: the next launch fills anew."""
        self.invalidate()
        self.runner.advance_states(rows, begun + num_steps)
        drawn = captured.tensors.device["tokens"]
        first_row = self._num_launched % drawn.shape[0]
        self.runner.launch(captured, num_steps=num_steps)
        self._num_launched += num_steps
        copied = self.buffers.copy(captured, captured.tensors.device)
        launched = LaunchedSteps(
            captured, rows, begun, num_steps, first_row, drawn, *copied, is_ahead=is_ahead
        )
        self._last = launched
        return launched


class StepLoop:
    """Runs the steps of a session, in its `surroundings`, each after `prepare`.

    Args:
        runner: runs steps on the device.
        scheduler: says which requests run next.
        token_stream: takes what they draw.
        plan: what is captured.
        state: of the model, as it must stay.
        compilation: compiles the model before the first step.
        ranks: of a model that is split over several; None: it is whole.
        always_fills: every step is filled by the host, none goes on from the one before.

    Attributes:
        num_steps: steps that were replayed ("captured") and called.
        num_launches: of steps: before the last tokens were read ("ahead"), or after ("waited").
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
        ranks: Ranks | None,
        always_fills: bool,
    ) -> None:
        self.ranks, self.runner, self.scheduler = ranks, runner, scheduler
        self.token_stream = token_stream
        self.plan, self.state, self.compilation = plan, state, compilation
        self.launcher = DecodeLauncher(runner, always_fills)
        times = plan.chooses_mixed and not (always_fills or ranks)  # ranks' times would differ
        timer = gpu_ms if times and runner.device.type == "cuda" else None
        mixed_sizes = plan.dispatcher.mixed_sizes
        self.gains = MixedGains(mixed_sizes, runner.builder, timer)
        self.num_steps = {"captured": 0, "called": 0}
        self.num_launches = {"ahead": 0, "waited": 0}
        self.streams = StreamOrder(runner.device)
        on_gpu = runner.device.type == "cuda" or plan.debug is not None  # debugging acts as on one
        in_turn = always_fills or runner.builder.plans_in_turn
        self._goes_ahead = on_gpu and not in_turn
        self._launched: LaunchedSteps | None = None
        self._warm = False

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

        Launched steps stay until all of their tokens are taken: a launch that raises loses none.

        Args:
            ahead: launch the next ones too, before these tokens are read.
        """
        self._drop_unobserved()
        if self._launched is None:
            self._launched = self._launch_next()
        if self._launched is None:
            return
        followed = self._launch_ahead(self._launched) if ahead else None
        self._collect(self._launched)
        self._launched = followed

    def step_drafted(self, drafts: Mapping[int, list[int]]) -> None:
        """A step with drafts, or without where a prompt comes first or the budget is too small."""
        k = self.plan.num_draft_tokens
        self._drop_unobserved()
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

    def prepare(self) -> None:
        """Before every step: check the model, and compile and capture what is not, as for a dump.

        Raises:
            ValueError: the model has changed; see `ModelState.check`.
        """
        if self.streams.changed():  # nothing takes tokens that another stream has drawn
            self.launcher.invalidate()
        self.state.check(captured=self.graphs is not None)
        joins_dump = self.compilation.joins_dump()
        if not self._warm:
            self.compilation.run()
            if self.graphs is not None and not self.plan.lazy:
                self._capture_first()
            self._warm = True
        elif joins_dump:
            if self.graphs is not None:
                self.drop_graphs()
            self.compilation.run_again()

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
        if self.ranks is not None:
            self.ranks.check(step)
        shared = self.runner.shared_prefixes(step) if self.scheduler.prefixes.is_on else None
        step.shared = shared
        is_called = step.num_logits is not None or step.editing is Editing.CALLED or step.embeds
        if self.graphs is None or is_called:
            return None
        mode, key = self.plan.dispatcher.dispatch(
            step.num_tokens,
            len(step),
            step.query_len,
            **self._wanted(step),
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
        with self.compilation.counters.watching():
            captured = self.runner.captured(key, mode)
            if captured is not None and self.graphs is not None:
                self.gains.measure(captured, self.graphs)
            return captured

    # -- drafts: their tokens are read at once -----------------------------------------------------

    def _run_alone(self, step: Rows, captured: CapturedStep | None) -> None:
        self.launcher.invalidate()
        if captured is None:
            self.num_steps["called"] += 1
            with self.compilation.counters.watching():
                tensors = self.runner.call(step, **self._wanted(step))
        else:
            self.runner.fill(captured.tensors, step, captured.key.sampling)
            self.runner.launch(captured)
            self.num_steps["captured"] += 1
            tensors = captured.tensors.device
        self.num_launches["waited"] += 1
        rows = step.num_draft + 1
        tokens, found = tensors["tokens"][0].tolist(), tensors.get("logprobs")
        drawn = [tokens[i * rows : (i + 1) * rows] for i in range(len(step))]
        self.token_stream.take(step, drawn, None if found is None else found[0].cpu().numpy())

    # -- what a step computes ----------------------------------------------------------------------

    def _wanted(self, step: Rows) -> dict[str, Any]:
        """What it computes of logits: none of chunks of prompts, if the model then does less."""
        unscored = step.num_logits is None
        if self.runner.drops_rows and unscored and not step.any_logits:
            return {"sampling": Sampling.GREEDY, "logits": False, "logprobs": -1, "edits": -1}
        edits = -1 if step.editing is Editing.NONE else num_biases(step.num_biases)
        most = step.logprobs
        logprobs = -1 if most < 0 else width_of(most, self.runner.vocab_size)
        return {"sampling": step.kind, "logits": True, "logprobs": logprobs, "edits": edits}

    # -- launched steps ----------------------------------------------------------------------------

    def _launch_next(self) -> LaunchedSteps | None:
        """The next steps, where the host knows all tokens; None: nothing is left to do."""
        step = self.scheduler.next_step()
        if not step:
            return None
        return self._launch(step, self._captured(step))

    def _launch_ahead(self, launched: LaunchedSteps) -> LaunchedSteps | None:
        """The next steps, before the tokens of these are read.

        None where they cannot be scheduled before, or nothing is left to do.
        """
        if self._batch_stays(launched):
            begun = launched.after.num_steps
            num_steps = self._num_steps(launched.captured, launched.rows, begun)
            if launched.rows.reach >= begun + num_steps:  # the device's tables have the blocks
                return self.launcher.follow(launched, num_steps)
        if not (self._goes_ahead and self.launcher.is_last(launched)):
            return None
        if self.runner.on_logits is not None:
            return None  # an observer sees no step that may count for nothing
        step = self.scheduler.next_step(launched.after)
        if not step:
            return None
        by_host = step.kind is Sampling.PENALIZED or step.editing >= Editing.BY_TOKENS
        if by_host and step.any_logits and step.takes_tokens:
            return None  # counts and masks come from tokens that the host knows
        captured = self._captured(step)
        if captured is not None and captured.plans_in_place:
            return None
        return self._launch(step, captured, launched)

    def _batch_stays(self, launched: LaunchedSteps) -> bool:
        """Whether the next steps are those of the same rows, none of which ends, by replays."""
        return (
            launched.rows.editing < Editing.BY_TOKENS
            and self.launcher.may_follow(launched)
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
                return self.launcher.call(step, **self._wanted(step), last=last)
        num_steps = 1
        if captured.key.query_len == 1:
            num_steps = self._num_steps(captured, step)
        return self.launcher.launch(captured, step, num_steps, last)

    def _num_steps(self, captured: CapturedStep | None, rows: Rows, begun: int = 0) -> int:
        """Steps to launch: no more than the longest of the requests still needs."""
        chains = captured is not None and self.launcher.can_chain(captured)
        if not chains or rows.editing >= Editing.BY_TOKENS:
            return 1
        return min(self.runner.num_steps, rows.most - begun)

    def _collect(self, launched: LaunchedSteps) -> None:
        tokens = launched.wait()
        scores = None if launched.scores is None else launched.scores.numpy()
        self.token_stream.collect(launched.rows, tokens, launched.logprobs_of_steps(), scores)
        kind = "called" if launched.captured is None else "captured"
        self.num_steps[kind] += launched.num_steps
        self.num_launches["ahead" if launched.is_ahead else "waited"] += 1

    def _drop_unobserved(self) -> None:
        """Drop a called step whose logits an observer is to see, and has not; it is done again."""
        launched, observer = self._launched, self.runner.on_logits
        if launched is None or launched.captured is not None or observer is None:
            return
        if launched.observer is not observer:
            self.launcher.invalidate()
            self._launched = None
