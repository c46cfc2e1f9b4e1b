"""`DecodeSession`: a Transformers model on a paged KV cache, decode steps captured whole.

add -> Scheduler.next_step -> StepTensors.fill, upload -> model, sampling -> Request.append
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from tqdm import tqdm

from attn_ops import Backend, PagedKVCache
from attn_ops.integrations.merged import check_merged
from attn_ops.integrations.transformers import attention_specs, check_lengths, dynamic_batch
from attn_ops.metadata import KVCacheLayoutType
from fx_passes.backend import start_compile_workers
from fx_passes.observe import Recorder, recorders, recording
from graphs.admission import check_positive, checked_drafts, checked_request, stop_list
from graphs.capture import CapturedStep, StepGraphs
from graphs.collector import paused_collector
from graphs.counters import CompileCounters
from graphs.flight import Flight, Pilot
from graphs.modes import CUDAGraphMode, Sampling, checked_capture_sizes
from graphs.planning import CapturePlan, selected
from graphs.runner import StepRunner
from graphs.sampling import SamplingParams
from graphs.scheduler import Generation, Request, Scheduled, Scheduler, StepOutput
from graphs.step import ModelInputs
from graphs.verify import Verifier

if TYPE_CHECKING:
    from graphs.session_report import SessionReport


class DecodeSession:
    """Continuous batching over one model, its paged KV cache and its captured steps.

    Args:
        model: a causal model of Transformers with
            `attn_implementation="attn_ops"`, compiled or not.
        max_batch_size: requests that run at a time; more wait.
        max_tokens: tokens of one request that the cache may hold; a longer prompt is refused.
        cudagraph_mode: see `CUDAGraphMode`. If it cannot be had, `graph_mode_why` says why.
        backend: an attention backend, or its name; None lets `select_backend` choose.
        block_size: tokens a block of the cache holds.
        cache_tokens: tokens the cache holds; default: every request of the batch at its longest.
        max_tokens_per_step: token budget of a step; longer prompts are computed in chunks.
        capture_sizes: captured batch sizes; default `default_capture_sizes(max_batch_size)`.
        mixed_capture_sizes: tokens of captured steps with prompts in them, where the mode has any.
        seed: of the random numbers of requests that bring no seed of their own.
        kv_cache_dtype: auto, the model's; or fp8_e4m3, fp8_e5m2, scaled by the [1] float32 tensors
            `k_scale` and `v_scale` that attention modules may have.
        cache_layout: of `PagedKVCache`.
        decode_steps: decode steps that the device runs without the host; the tokens are those of 1.
        num_draft_tokens: k of `verify_draft`; batches of 1 + k tokens a request are captured too.
        verify: compare replays with calls: "first" of every graph, an int for every so many replays
            of a graph, "always"; None: never. A difference raises `VerificationError`.
        debug: "eager_replay" runs every step through the capture path, but calls it anew instead of
            replaying a graph; None.
        strict: a mode that cannot be had is a ValueError.
        lazy_capture: capture a size when it is first needed, not all before the first step.
        on_capture_failure: "raise", or "continue": such steps run uncaptured, and are reported.

    Attributes:
        backend_selection: the backend, why, and the reasons against the others.
        graph_mode: the mode in use; `graph_mode_why` says why where it is not the one asked for.
        compile_record: what the passes did when the model was compiled.
        num_steps: steps that were replayed ("captured") and called.

    Raises:
        ValueError: an argument is out of range, or no backend supports the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_batch_size: int,
        max_tokens: int,
        cudagraph_mode: CUDAGraphMode | str = CUDAGraphMode.FULL_DECODE_ONLY,
        backend: str | Backend | None = None,
        block_size: int = 16,
        cache_tokens: int | None = None,
        max_tokens_per_step: int = 2048,
        capture_sizes: Sequence[int] | None = None,
        mixed_capture_sizes: Sequence[int] | None = None,
        seed: int = 0,
        kv_cache_dtype: str = "auto",
        cache_layout: KVCacheLayoutType | None = None,
        decode_steps: int = 1,
        num_draft_tokens: int = 0,
        verify: str | int | None = None,
        debug: str | None = None,
        strict: bool = False,
        lazy_capture: bool = False,
        on_capture_failure: str = "raise",
    ) -> None:
        check_positive(max_batch_size=max_batch_size, max_tokens=max_tokens)
        check_positive(max_tokens_per_step=max_tokens_per_step, block_size=block_size)
        check_positive(decode_steps=decode_steps)
        verifier = None if verify is None else Verifier(verify, kv_cache_dtype=kv_cache_dtype)
        self.model = model
        self.original: Any = getattr(model, "_orig_mod", model)
        self.vocab_size = self.original.config.get_text_config().vocab_size
        self.device = next(self.original.parameters()).device
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        check_lengths(self.original, max_tokens)
        check_merged(self.original)
        self.specs = attention_specs(self.original, kv_cache_dtype)
        self.backend_selection = selected(self.specs, block_size, self.device, backend)
        chosen = self.backend_selection.backend
        self.builder = chosen.builder(chosen, self.specs, block_size, self.device)
        self.plan = CapturePlan.of(
            CUDAGraphMode.parse(cudagraph_mode),
            chosen,
            self.specs,
            self.device,
            decode_sizes=checked_capture_sizes(capture_sizes, max_batch_size),
            mixed_sizes=mixed_capture_sizes,
            max_batch_size=max_batch_size,
            max_tokens_per_step=max_tokens_per_step,
            num_draft_tokens=num_draft_tokens,
            debug=debug,
            strict=strict,
            lazy=lazy_capture,
            on_failure=on_capture_failure,
        )
        tokens_per_request = math.ceil(max_tokens / block_size) * block_size
        self.cache = PagedKVCache(
            self.specs,
            num_tokens=cache_tokens or max_batch_size * tokens_per_request,
            block_size=block_size,
            device=self.device,
            cache_layout=cache_layout,
        )
        self.scheduler = Scheduler(self.cache, max_batch_size, max_tokens_per_step)
        self.decode_steps = decode_steps
        self.runner = StepRunner(
            model,
            ModelInputs(self.original, kv_cache_dtype),
            self.cache,
            self.builder,
            max_batch_size=max_batch_size,
            max_tokens=max_tokens + num_draft_tokens,
            vocab_size=self.vocab_size,
            num_steps=decode_steps,
            verifier=verifier,
        )
        self.pilot = Pilot(self.runner, always_fills=verify is not None)
        self.plan.start(self.runner, self.original)
        self.seed = seed
        self.compile_record = Recorder()
        self.counters = CompileCounters()
        self.compile_seconds = 0.0
        self.num_steps = {"captured": 0, "called": 0}
        self._flight: Flight | None = None
        self._next_id = 0
        self._requests: dict[int, Request] = {}
        self._warm = False
        if self.device.type == "cuda":
            start_compile_workers()

    @property
    def graphs(self) -> StepGraphs | None:
        """`StepGraphs`; None where nothing is captured."""
        return self.runner.graphs

    @property
    def capture_sizes(self) -> list[int]:
        """Batch sizes of captured decode steps."""
        return self.plan.decode_sizes

    @property
    def graph_mode_asked(self) -> CUDAGraphMode:
        return self.plan.asked

    @property
    def graph_mode(self) -> CUDAGraphMode:
        """The mode in use."""
        return self.plan.used

    @property
    def graph_mode_why(self) -> str:
        return self.plan.why

    # -- requests ----------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 16,
        *,
        eos: int | Iterable[int] | None = None,
        **sampling: Any,
    ) -> int:
        """Queue a prompt; returns the request's id.

        Args:
            prompt: token ids, 1 to `max_tokens` of them.
            max_new_tokens: tokens to generate at most.
            eos: token or tokens that end the generation.
            sampling: fields of `SamplingParams`: temperature, top_k, top_p, min_p,
                repetition_penalty, presence_penalty, frequency_penalty, seed.

        Raises:
            ValueError: the prompt is empty, too long or holds an unknown token, the request can
                never fit into the cache, or a parameter is out of range. Nothing is queued.
        """
        request = self._request(prompt, max_new_tokens, sampling, eos)
        self._next_id += 1
        self._requests[request.id] = request
        self.scheduler.waiting.append(request)
        return request.id

    def result(self, request_id: int) -> Generation | None:
        """The result of a finished request, None while it runs; kept until `discard`.

        Raises:
            ValueError: no request has that id.
        """
        if request_id not in self._requests:
            raise ValueError(f"request_id must come from add(), got {request_id!r}")
        request = self._requests[request_id]
        if not request.finish_reason:
            return None
        return Generation(list(request.token_ids), request.finish_reason)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 16,
        *,
        eos: int | Iterable[int] | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Generate for all prompts: one result a prompt, in order.

        Arguments and errors as in `add`. A prompt that is refused refuses the call before
        anything is queued.
        """
        eos = stop_list(eos)
        checked = [self._request(p, max_new_tokens, sampling, eos) for p in prompts]
        ids = [self.add(r.prompt, max_new_tokens, eos=eos, **sampling) for r in checked]
        bar = tqdm(total=len(ids), desc="generate", unit="request", disable=None, leave=False)
        try:
            with bar:
                remaining = set(ids)
                while remaining:
                    done = {o.request_id for o in self.step() if o.finish_reason} & remaining
                    remaining -= done
                    bar.update(len(done))
            return [cast(Generation, self.result(i)) for i in ids]
        finally:  # also when interrupted: nothing of this call stays behind
            for i in ids:
                self.discard(i)

    def discard(self, request_id: int) -> None:
        """Forget a request, finished or not; its blocks go back to the cache.

        An unknown or discarded id changes nothing.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request in self.scheduler.running:
            self.scheduler.finish(request)
        elif request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)

    # -- steps -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """Run the next step, or `decode_steps` of them, of all running requests; their new tokens.

        Empty while prompts are computed only in part, and when nothing is
        left: `num_unfinished` tells. Where nothing speaks against it, the device has begun with
        what comes next when this returns.
        """
        self.warm_up()
        flight = self._flight
        if flight is None:
            step = self.scheduler.next_step()
            if not step:
                return []
            captured = self._captured(step)
            if captured is None or captured.key.query_len != 1:
                return self._run_alone(step, captured)
            num_steps = self._num_steps(captured, [s.request for s in step])
            flight = self._flight = self.pilot.launch(captured, step, num_steps)
        followed = self._followed(flight)  # refused: the flight is still there to be landed
        try:
            outputs = self._land(flight)
        except BaseException:  # interrupted while waiting: nothing follows what lands later
            self.pilot.land()
            raise
        self._flight = followed
        return outputs

    @torch.no_grad()
    def verify_draft(self, drafts: Mapping[int, Sequence[int]]) -> list[StepOutput]:
        """One step in which decoding requests bring tokens that they may generate next.

        A request keeps those that it would have generated without them, and one more; a request
        without a draft, or with a shorter one, takes part too. Prompts come first, as in `step`.

        Args:
            drafts: by request id, up to `num_draft_tokens` tokens.

        Returns:
            Every request's new tokens, in order: one to 1 + k each.

        Raises:
            ValueError: no drafts were asked for when the session was made, a request is not known,
                has a penalty or a draft that is too long or holds an unknown token.
        """
        k = self.plan.num_draft_tokens
        checked = checked_drafts(drafts, k, self._requests, self.vocab_size)
        self.warm_up()
        outputs = [] if self._flight is None else self.step()
        outputs += self._settle()
        step = self.scheduler.next_step()
        if not step or not all(s.num_tokens == 1 and s.wants_token for s in step):
            return outputs + self.step()
        drafted = []
        for s in step:
            stale = any(o.request_id == s.request.id for o in outputs)
            known = () if stale else checked.get(s.request.id, ())
            draft = (*known, *[0] * (k - len(known)))
            drafted.append(dataclasses.replace(s, num_tokens=1 + k, draft=draft))
        return outputs + self._run_alone(drafted, self._captured(drafted))

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    def warm_up(self) -> None:
        """Compile the model and capture the decode steps, largest first.

        Runs by itself before the first step. Inside `graphs.dump` a model that was compiled before
        is compiled once more, so that the dump sees it.
        """
        unseen = [r for r in recorders() if r.texts and self not in r.sessions]
        for recorder in unseen:
            recorder.sessions.add(self)
        if self._warm:
            if unseen:
                self._compile_again()
            return
        bar = tqdm(total=1, desc="compile", unit="model", disable=None, leave=False)
        with bar, recording(self.compile_record), self.counters.watching():
            self._compile()
            bar.update()
        self.counters.warm()
        if self.graphs is not None and not self.plan.lazy:
            keys = self.plan.first_keys()
            for mode, key in tqdm(keys, desc="capture", disable=None, leave=False):
                with torch.no_grad():
                    self.runner.captured(key, mode)
        self._warm = True  # last: what was interrupted is done again

    def report(self) -> "SessionReport":
        """What was asked, what is used and why, graphs and their memory, steps and checks."""
        from graphs.session_report import SessionReport

        return SessionReport.of(self)

    def release(self) -> None:
        """Give captured graphs and their memory back; the session goes on uncaptured."""
        if self.graphs is not None:
            self._settle()
            self.pilot.mailbox.clear()
            self.runner.release()
            self.runner.graphs = None
            self.plan.stop("release() was called")

    # -- inside ------------------------------------------------------------------------------------

    def _request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Mapping[str, Any],
        eos: int | Iterable[int] | None,
    ) -> Request:
        params = SamplingParams(**sampling)
        if params.seed is None:
            params = dataclasses.replace(params, seed=_seed(self.seed, self._next_id))
        return checked_request(
            self._next_id,
            prompt,
            max_new_tokens,
            params,
            eos,
            vocab_size=self.vocab_size,
            max_tokens=self.max_tokens,
            cache_tokens=self.cache.num_usable_tokens,
        )

    def _captured(self, step: list[Scheduled]) -> CapturedStep | None:
        """The graph that holds the step, captured if need be; None: it is called."""
        if self.graphs is None:
            return None
        rows = 1 + len(step[0].draft)  # of each, where only decodes are in the step
        uniform = all(s.num_tokens == rows and s.wants_token for s in step)
        mode, key = self.plan.dispatcher.dispatch(
            sum(s.num_tokens for s in step), len(step), rows if uniform else None, _kind(step)
        )
        if key is None or (rows > 1 and not key.uniform):  # mixed keys have logits of last rows
            return None
        return self.runner.captured(key, mode)

    def _run_alone(self, step: list[Scheduled], captured: CapturedStep | None) -> list[StepOutput]:
        """A step that ends with its tokens on the host."""
        self.pilot.land()
        if captured is None:
            return self._take(step, self._call(step))
        self.runner.fill(captured.tensors, step, captured.key.sampling)
        self.runner.launch(captured)
        self.num_steps["captured"] += 1
        tokens = captured.tensors.device["tokens"][0].tolist()
        rows = len(step[0].draft) + 1
        return self._take(step, [tokens[i * rows : (i + 1) * rows] for i in range(len(step))])

    def _call(self, step: list[Scheduled]) -> list[list[int]]:
        self.num_steps["called"] += 1
        with self.counters.watching():
            return self.runner.call(step, _kind(step))

    def _num_steps(
        self, captured: CapturedStep, requests: Sequence[Request], begun: int = 0
    ) -> int:
        """Steps to launch: no more than the longest of the requests still needs."""
        if not self.pilot.may_stay(captured):
            return 1
        return min(self.decode_steps, max(r.remaining - begun for r in requests))

    def _followed(self, flight: Flight) -> Flight | None:
        """The next flight of the same requests, launched before the tokens of this one are read.

        None where the batch changes: a request ends, or another one can run.
        """
        going = all(r.remaining > flight.num_steps for r in flight.requests)
        same = flight.requests == self.scheduler.running and not self.scheduler.can_admit
        captured = flight.captured
        if not (going and same and self.pilot.may_follow(flight)):
            return None
        num_steps = self._num_steps(captured, flight.requests, flight.num_steps)
        return self.pilot.follow(flight, num_steps)

    def _land(self, flight: Flight) -> list[StepOutput]:
        """Read a flight's tokens; what a request drew behind its end is dropped."""
        self.num_steps["captured"] += flight.num_steps
        outputs = []
        for tokens in flight.wait():
            live = [
                (Scheduled(request, 1), [token])
                for request, token in zip(flight.requests, tokens, strict=True)
                if request.id in self._requests and not request.finish_reason
            ]
            outputs += self._take([s for s, _ in live], [t for _, t in live])
        return outputs

    def _settle(self) -> list[StepOutput]:
        """Land what is in the air, and let nothing follow; its tokens are taken in any case."""
        flight, self._flight = self._flight, None
        self.pilot.land()
        return [] if flight is None else self._land(flight)

    def _take(self, step: list[Scheduled], tokens: list[list[int]]) -> list[StepOutput]:
        outputs = []
        for scheduled, drawn in zip(step, tokens, strict=True):
            request, wanted = scheduled.request, scheduled.wants_token
            request.num_computed += scheduled.num_tokens - len(scheduled.draft)
            if not wanted:
                continue
            for draft, token in zip((*scheduled.draft, None), drawn, strict=True):
                request.append(token)
                outputs.append(StepOutput(request.id, token, request.finish_reason))
                if request.finish_reason:
                    self.scheduler.finish(request)
                    break
                if token != draft:
                    break
                request.num_computed += 1
        return outputs

    def _compile_again(self) -> None:
        """Forget what was compiled and compile it anew; graphs are captured again when needed."""
        if self.graphs is not None:
            self._settle()
            self.pilot.mailbox.clear()
            self.runner.release()
        torch._dynamo.reset()
        self._compile()

    def _compile(self) -> None:
        with paused_collector(), torch.no_grad():
            self.compile_seconds = self.runner.compile(dynamic_batch)


def _kind(step: Sequence[Scheduled]) -> Sampling:
    return max(s.request.sampling.kind for s in step)


def _seed(session_seed: int, request_id: int) -> int:
    """Seeds of requests that bring none: far apart for sessions and requests (SplitMix64)."""
    x = (session_seed * 0x9E3779B97F4A7C15 + request_id * 0xBF58476D1CE4E5B9 + 1) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) % 2**63
