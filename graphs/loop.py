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

Of grammars and bad words, the model alone is launched ahead: what may follow the tokens is uploaded
while it runs, and a second graph draws (`BatchDescriptor.late_edits`).

These wait for the tokens first: drafts, `verify`, an observer of logits, penalties in a batch that
changes or beside grammars, grammars in steps that hold prompts or are not captured whole, plans
that are part of a graph (`CapturedStep.plans_in_place`) or share memory (`plans_in_turn` of a
builder), and everything on a CPU.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from fx_passes.observe import joins_dump
from graphs.capture.gains import MixedGains, gpu_ms
from graphs.capture.plan import CapturePlan
from graphs.capture.store import CapturedStep, StepGraphs
from graphs.compilation import Compilation
from graphs.context import StreamOrder
from graphs.launcher import DecodeLauncher, LaunchedSteps
from graphs.model_changes import ModelState
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.requests.batch import Rows
from graphs.requests.outputs import TokenStream
from graphs.requests.scheduler import Scheduler
from graphs.requests.state_slots import accept_drafts
from graphs.runner import StepRunner
from graphs.sampling.edits import Editing, num_biases
from graphs.sampling.logprobs import width_of
from graphs.sampling.params import Sampling
from graphs.step.ranks import Ranks

logger = logging.getLogger(__name__)


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
        self._warm = self._unchecked = False

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
        launched = self._launched or self._launch_next()
        self.check_model()  # where it raises, what is new is dropped
        self._launched = launched
        if launched is None:
            return
        followed = self._launch_ahead(launched) if ahead else None
        self._collect(launched)
        self._launched = None  # its tokens are taken
        if followed is not None and followed.needs_edits:
            followed = self.launcher.finish(followed)
        self._launched = followed

    def step_drafted(self, drafts: Mapping[int, list[int]]) -> None:
        """A step with drafts; without, where a prompt, a processor or the budget forbids them."""
        k = self.plan.num_draft_tokens
        self.check_model()
        self._drop_unobserved()
        self.collect_all()
        step = self.scheduler.next_step()
        room = self.scheduler.max_tokens_per_step // (1 + k)
        if not room or not step or step.query_len != 1 or step.editing is Editing.CALLED:
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

        An idle device begins first, if with a graph; what it computes is dropped where this raises.

        Raises:
            ValueError: the model has changed; see `ModelState.check`.
        """
        if self.streams.changed():  # nothing takes tokens that another stream has drawn
            self.launcher.invalidate()
        joins = joins_dump(self.compilation.session())
        self._unchecked = True
        if joins or not (self._warm and self._goes_ahead and self.is_idle) or self.plan.debug:
            self.check_model()
        if not self._warm:
            self.compilation.run()
            if self.graphs is not None and not self.plan.lazy:
                self._capture_first(self.graphs)
            self._warm = True
        elif joins:
            if self.graphs is not None:
                self.drop_graphs()
            self.compilation.run_again()

    def check_model(self) -> None:
        """Once for each `prepare`."""
        if self._unchecked:
            self._unchecked = False
            self.state.check(captured=self.graphs is not None)

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

    def _capture_first(self, graphs: StepGraphs) -> None:
        if self.runner.drops_rows:
            self.plan.add_chunks(self.scheduler.max_tokens_per_step)
        keys = self.plan.first_keys()
        logger.info("capturing %d graphs", len(keys))
        if self.ranks is None and self.runner.device.type == "cuda":
            with self.compilation.counters.watching():
                graphs.rehearse(keys)
        for mode, key in tqdm(keys, desc="capture", disable=None, leave=False):
            self._capture(graphs, key, mode)

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
            late_edits=self._goes_ahead and step.editing is Editing.BY_TOKENS,
        )
        if key is None or (step.num_draft and not key.uniform):  # mixed: logits of last rows only
            return None
        captured = self._capture(self.graphs, key, mode)  # first: a new graph is timed
        if captured is None or not self.gains.pays(key, step.num_tokens):
            return None
        if key.query_len != 1 or (mode is CUDAGraphMode.FULL and not key.groups):
            step.shared = None  # padding has more rows than one, or the graph sees all keys at once
        return captured

    def _capture(
        self, graphs: StepGraphs, key: BatchDescriptor, mode: CUDAGraphMode
    ) -> CapturedStep | None:
        if key in graphs:
            return graphs.get(key)
        self.check_model()
        with self.compilation.counters.watching():
            if (captured := graphs.get(key, mode)) is not None:
                self.gains.measure(captured, graphs)
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
        accept_drafts(step, self.runner.cache.states)

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
        return self._launch(step, self._captured(step)) if step else None

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
        knows_all = not (step.any_logits and step.takes_tokens)
        if step.kind is Sampling.PENALIZED and not knows_all:
            return None  # counts come from tokens that the host knows
        captured = self._captured(step)
        if captured is not None and captured.plans_in_place:
            return None
        late = captured is not None and captured.key.late_edits
        if step.editing >= Editing.BY_TOKENS and not (knows_all or late):
            return None  # so do edits
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
            self.check_model()
            with self.compilation.counters.watching():
                return self.launcher.call(step, **self._wanted(step), last=last)
        return self.launcher.launch(captured, step, self._num_steps(captured, step), last)

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
