"""`DecodeSession`: a Transformers model on a paged KV cache, decode steps captured whole.

add -> waiting requests -> StepLoop -> TokenStream -> step's outputs
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn, TypeVar, cast

import torch
from tqdm import tqdm

from attn_ops.integrations.transformers import (
    Contract,
    attention_specs,
    prepare_model,
    state_specs,
    write_weights,
)
from attn_ops.integrations.transformers.rotary import rope_boundary
from fx_passes.backend import start_compile_workers
from graphs.cache_size import made_cache, no_attention
from graphs.capture.memory import sizes_of
from graphs.capture.plan import CapturePlan, builder_of, selected
from graphs.capture.store import StepGraphs
from graphs.capture.verified import verified
from graphs.compilation import Compilation, invariant_options, is_compiled
from graphs.context import exclusive, surroundings, uninterrupted
from graphs.loop import StepLoop
from graphs.model_changes import ModelState
from graphs.modes import CUDAGraphMode
from graphs.options import SessionOptions
from graphs.report import SessionReport
from graphs.requests.drafts import checked_drafts
from graphs.requests.embeds import media_tokens
from graphs.requests.outputs import TokenStream
from graphs.requests.requests import Limits, Request, RequestBook, Wanted, known_request
from graphs.requests.results import Generation, RequestError, StepOutput
from graphs.requests.scheduler import Scheduler
from graphs.requests.scores import Score, most_scored, queue_scored
from graphs.requests.tokens import Tokens
from graphs.requests.weight_versions import WeightVersions
from graphs.runner import LogitsObserver, ModelInputs, StepRunner
from graphs.step.ranks import ranks_of

Prompt = Sequence[int] | Mapping[str, Any] | str
"""Token ids, a tokenizer's mapping of one prompt, or text where the session has a tokenizer."""

Result = TypeVar("Result")


class DecodeSession:
    """Continuous batching over one model, its paged KV cache and its captured steps.

    Args:
        model: a causal model with `attn_implementation="attn_ops"`, compiled or not.
        options: how the session runs; None: the defaults.
        tokenizer: of Transformers; with it prompts may be text, and results have text.
        changes: fields of `SessionOptions`, in place of those of `options`. `max_batch_size` and
            `max_tokens` have no default.

    Attributes:
        backend_selection: the backend, why, and the reasons against the others.
        graph_mode: the mode in use; `graph_mode_why` says why where it is not the one asked for.
        counters: graphs, breaks and recompilations of the model.
        compile_record: what the passes did when the model was compiled.
        products: which projections were merged, or why none.
        num_steps: steps that were replayed ("captured") and called.
        verifier: compares replays with calls; None: never.

    Raises:
        ValueError: an argument is out of range, or no backend supports the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: SessionOptions | None = None,
        *,
        tokenizer: Any = None,
        **changes: Any,
    ) -> None:
        self.tokenizer = tokenizer
        options = SessionOptions.of(options, changes)
        self.model, self.original = model, cast(Any, getattr(model, "_orig_mod", model))
        compiled = isinstance(model, torch.nn.Module) and is_compiled(model)
        self.products = prepare_model(self.original, options, compiled=compiled)
        self.device = next(self.original.parameters()).device
        self.ranks = ranks_of(self.original, options)
        with surroundings(self.device):
            self._set_up(options, compiled)

    def _set_up(self, options: SessionOptions, compiled: bool) -> None:
        self.verifier, kv_cache_dtype = options.verifier(), options.kv_cache_dtype
        self.vocab_size = self.original.config.get_text_config().vocab_size
        self.max_batch_size, self.max_tokens = options.max_batch_size, options.max_tokens
        self.decode_steps, block_size = options.decode_steps, options.block_size
        if options.batch_invariant:
            options = invariant_options(options, self.device, compiled=compiled)
        self.specs = attention_specs(self.original, kv_cache_dtype) or [no_attention(self.original)]
        inputs = ModelInputs(self.original, kv_cache_dtype)
        longest = self.max_tokens + options.num_draft_tokens
        contract = Contract(self.original, self.specs, inputs.probe, self.vocab_size, longest)
        self.state = ModelState(self.original, contract, compiled=compiled)
        self.state_specs = state_specs(self.original)
        options.check_states(self.state_specs)
        sizes = sizes_of(self.original, compiled=compiled)
        self.backend_selection = selected(self.specs, block_size, self.device, options.backend)
        chosen = self.backend_selection.backend
        self.builder = builder_of(chosen, self.specs, options, self.device)
        split = self.ranks is not None
        self.plan = CapturePlan.of(options, chosen, self.specs, self.device, sizes, split=split)
        runner_of = functools.partial(
            StepRunner,
            inputs=inputs,
            builder=self.builder,
            max_batch_size=self.max_batch_size,
            max_tokens=longest,
            vocab_size=self.vocab_size,
            num_steps=self.decode_steps,
            logprobs_mode=options.logprobs_mode,
            logits_function=options.logits_function,
            batch_invariant=options.batch_invariant,
            max_query_len=max(options.query_lens),
        )
        self.cache_size, self.cache = made_cache(self, options, runner_of)
        num_tokens = self.cache.num_usable_tokens
        media, boundary = media_tokens(self.original.config), rope_boundary(self.original)
        self.limits = Limits(
            self.vocab_size, self.max_tokens, num_tokens, options.seed, media, boundary
        )
        self.runner = runner_of(model=self.model, cache=self.cache)
        recorders = self.plan.recorders(self.builder)
        if self.verifier is not None:
            recorders = verified(recorders, self.verifier, self.builder)
        if recorders:
            keep_failures = options.on_capture_failure == "continue"
            self.runner.start_capturing(recorders, self.original, keep_failures)
        self._make_loop(options)
        if self.device.type == "cuda":
            start_compile_workers()

    def _make_loop(self, options: SessionOptions) -> None:
        weights = WeightVersions(self.original) if options.share_prefixes else None
        scored = most_scored(self.vocab_size, self.original.dtype)
        limits = (options.max_tokens_per_step, weights, options.lookahead, scored)
        self.scheduler = Scheduler(self.cache, self.max_batch_size, *limits)
        tokens_of = Tokens(self.tokenizer, self.vocab_size)
        self.book = RequestBook(self.original, self.limits, self.scheduler.waiting, tokens_of)
        self._requests = self.book.requests
        self.token_stream = TokenStream(self.scheduler, self._requests)
        warns = options.any_mode or self.plan.asked is not CUDAGraphMode.NONE
        self.compilation = Compilation(self.runner, self, options, warns_uncompiled=warns)
        self.counters, self.compile_record = self.compilation.counters, self.compilation.record
        self.loop = StepLoop(
            self.runner,
            self.scheduler,
            self.token_stream,
            self.plan,
            self.state,
            self.compilation,
            ranks=self.ranks,
            always_fills=self.verifier is not None,
        )
        self.num_steps = self.loop.num_steps
        self.lock = threading.Lock()  # of `exclusive`
        self._left: list[int] = []  # requests of streams that were closed while another call ran

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: Any) -> "DecodeSession":
        """A session of a saved model, compiled, with its tokenizer.

        Args:
            path: a folder that Transformers' `from_pretrained` takes, or a name on the hub.
            options: those of `graphs.pretrained.load`, and those of a session.
        """
        from graphs.pretrained import load  # it imports Transformers' model classes

        model, options = load(path, options)
        return cls(model, **options)

    @property
    def graphs(self) -> StepGraphs | None:
        """`StepGraphs`; None where nothing is captured."""
        return self.runner.graphs

    @property
    def compile_seconds(self) -> float:
        """That the last compilation took."""
        return self.compilation.seconds

    @property
    def capture_sizes(self) -> list[int]:
        """Batch sizes of captured decode steps."""
        return self.plan.decode_sizes

    @property
    def graph_mode_asked(self) -> CUDAGraphMode:
        return self.plan.asked

    @property
    def graph_mode(self) -> CUDAGraphMode:
        return self.plan.used

    @property
    def graph_mode_why(self) -> str:
        return self.plan.why

    # -- requests ----------------------------------------------------------------------------------

    @exclusive
    def add(self, prompt: Prompt, max_new_tokens: int | None = None, **wanted: Any) -> int:
        """Queue a prompt; returns the request's id. As `generate`, but for `n`."""
        asked = Wanted.of(max_new_tokens, wanted)
        if asked.n != 1:
            raise ValueError(f"n must be 1, got {asked.n!r}; supported: more with generate")
        with uninterrupted():
            return self.book.queue_all([prompt], asked)[0].id

    def result(self, request_id: int) -> Generation | None:
        """The result of a finished request, None while it runs; kept until `discard`.

        Raises:
            ValueError: no request has that id.
        """
        request = known_request("request_id", request_id, self._requests)
        if not request.finish_reason:
            return None
        return Generation.of(request)

    @exclusive
    def generate(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Any] | str,
        max_new_tokens: int | None = None,
        **wanted: Any,
    ) -> list[Generation]:
        """Generate for all prompts: `n` results a prompt, in order.

        Args:
            prompts: texts, where the session has a tokenizer, and lists of 1 to `max_tokens` token
                ids; or a tokenizer's mapping, whose attention_mask says what padding is; or an
                array [S, L], in which `pad_token_id` of the model's generation_config is padding.
                Also `{"inputs_embeds": rows}`, and what a processor makes of images.
            max_new_tokens: tokens to generate at most; None: max_new_tokens or max_length of the
                model's generation_config, else 16.
            wanted: fields of `SamplingParams`, and these:
                eos, eos_token_id: token or tokens that end a request; None: those of the model's
                    generation_config, which also gives `SamplingParams` their defaults.
                ignore_eos: no eos token ends it.
                stop_token_ids: token or tokens that end it too, with the reason "stop".
                stop: text or texts that end it; its text is cut there, behind it with
                    `include_stop_str_in_output`.
                min_tokens: neither ends it before so many tokens.
                logit_bias: by token, what is added to its logit.
                bad_words: texts or lists of tokens that are not generated.
                allowed_token_ids: the only tokens that are.
                structured_outputs: {"json": schema}, {"regex": ...}, {"choice": [...]} or
                    {"grammar": ...}, which the text follows; needs `attn-ops[structured]`.
                logits_processor: Transformers' `LogitsProcessorList`, or any function of tokens
                    [1, T] and logits [1, V]; such steps are called, not captured.
                prompt_logprobs: log-probabilities of the prompt's tokens and of so many of the most
                    likely ones.
                stream: outputs of `step` have the text of the tokens.
                n: results of a prompt; the seed is that of the first, others have those after it.
                generation_config: in place of the model's, whose eos it has where it names none.
                share_prefix: False: its blocks are its own, where the session shares prefixes.

        Raises:
            ValueError: a prompt is empty, too long or holds an unknown token, a request can never
                fit into the cache, or an argument is out of range. Nothing is queued.

        Tokens of other requests are kept for the next `step`.
        """
        asked = Wanted.of(max_new_tokens, wanted)
        return self._finish(lambda: self.book.queue_all(prompts, asked), Generation.of)

    @exclusive
    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Prompt] | None = None,
        *,
        logprobs: int = 0,
        token_ids: Sequence[int] = (),
    ) -> list[Score]:
        """Log-probabilities of given tokens; nothing is drawn.

        Args:
            prompts: texts or token ids, as of `generate`.
            continuations: of each prompt, the tokens to score; None: those of the prompts, but for
                the first of each.
            logprobs: most likely tokens whose log-probabilities are wanted beside, 0 to 64.
            token_ids: tokens of which every place gets the log-probabilities too.

        Raises:
            ValueError: as `generate`.

        If the session shares prefixes, what stands before the scored tokens is computed once.
        """
        return self._finish(
            lambda: queue_scored(self.book, prompts, continuations, logprobs, token_ids), Score.of
        )

    def chat(self, messages: Any, max_new_tokens: int | None = None, **wanted: Any) -> Generation:
        """The answer to a conversation, by the tokenizer's chat template.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            max_new_tokens, wanted: as of `generate`.

        Raises:
            ValueError: there is no tokenizer; and as `generate`.
        """
        if wanted.get("n", 1) != 1:
            raise ValueError(f"n must be 1, got {wanted['n']!r}; supported: more with generate")
        prompt = self.book.tokens_of.chat(messages)
        return self.generate([prompt], max_new_tokens, **wanted)[0]

    def stream(
        self, prompt: Prompt, max_new_tokens: int | None = None, **wanted: Any
    ) -> Iterator[StepOutput]:
        """Yield the tokens of a prompt as they come; arguments as those of `generate`.

        Each has the text that it completes: never half a character, and nothing that may be the
        beginning of a stop string. A caller that stops iterating ends the request. Tokens of other
        requests are kept for the next `step`.
        """
        wanted |= {"stream": True}
        request = self._requests[self.add(prompt, max_new_tokens, **wanted)]
        try:
            while request.id in self._requests:
                yield from self._outputs_of(request.id)
                if request.finish_reason and request.id not in self.token_stream:
                    break
        finally:
            try:
                self.discard(request.id)
            except RuntimeError:  # it is closed while another call runs
                self._left.append(request.id)

    @exclusive
    def discard(self, request_id: int) -> None:
        """Forget a request, finished or not; its blocks go back to the cache.

        Tokens of it that `step` has not handed out are dropped. An unknown or discarded id changes
        nothing.

        Raises:
            ValueError: `request_id` is no int.
        """
        if not isinstance(request_id, Integral):
            raise ValueError(f"request_id must come from add(), got {request_id!r}")
        request = self._requests.get(int(request_id))
        if request is not None:
            with uninterrupted():
                self._forget(request)

    # -- steps -------------------------------------------------------------------------------------

    @exclusive
    def step(self) -> list[StepOutput]:
        """Run the next step, or `decode_steps` of them, of all running requests.

        The device may have begun with the next steps when this returns.

        Raises:
            RequestError: a request has ended by an error of its own; said once, tokens come with
                the next step.

        Returns:
            New tokens, also those that `release` or `generate` has taken meanwhile. None while
            prompts are computed in part, where launched steps were those of requests that have
            ended, and when nothing is left; `num_unfinished` tells.
        """
        self._run(self.loop.step)
        return self._handed_out()

    @exclusive
    def verify_draft(self, drafts: Mapping[int, Sequence[int]]) -> list[StepOutput]:
        """One step in which decoding requests bring tokens that they may generate next.

        A request keeps those that it would have generated without them, and one more. Requests
        without a draft, or with a shorter one, take part too. Prompts come first, as in `step`. A
        step takes requests, of 1 + k tokens each, up to `max_tokens_per_step`; if that is less than
        1 + k, it is a step without drafts.

        Args:
            drafts: by request id, up to `num_draft_tokens` tokens. Those of requests that have
                finished are ignored, and of requests with tokens that this call hands out besides.

        Returns:
            New tokens, those of a request in order: first what `step` has launched or another call
            has taken; then one to 1 + k tokens of requests that brought a draft, or what `step`
            returns where it is a step without drafts.

        Raises:
            ValueError: no drafts were asked for when the session was made, a request is not known,
                or a draft is too long or holds an unknown token.
        """
        k = self.plan.num_draft_tokens
        checked = checked_drafts(drafts, k, self._requests, self.vocab_size)
        self._run(self.loop.step_drafted, checked)
        return self._handed_out()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, or whose last tokens `step` has yet to hand out."""
        scheduler = self.scheduler
        return len(scheduler.waiting) + len(scheduler.running) + self.token_stream.num_ended

    @exclusive
    def warm_up(self) -> None:
        """Compile the model and capture the decode steps, largest first.

        Runs by itself before the first step. Inside `graphs.dump` a model that was compiled before
        is compiled once more, so that the dump sees it.
        """
        self._prepare()
        self.loop.check_model()

    @contextlib.contextmanager
    def observe_logits(self, observer: LogitsObserver) -> Iterator[None]:
        """Hand logits to `observer` inside the block, of steps that are called, not of replays.

        Args:
            observer: called in every such step that wants logits, with its requests in the order of
                the batch, and logits [R, V]: a row a request, 1 + k of one that brings a draft of k
                tokens. A request's `wants_token` says whether a token is drawn from them. It must
                not change the logits, and copy what it keeps. An outer block's observer pauses.
        """
        outer, self.runner.on_logits = self.runner.on_logits, observer
        try:
            yield
        finally:
            self.runner.on_logits = outer

    def report(self) -> SessionReport:
        """What was asked, what is used and why, graphs and their memory, steps and checks."""
        return SessionReport.of(self)

    @exclusive
    def forget_prefixes(self) -> None:
        """Compute every prompt anew from here on, as after weights have changed.

        A session sees changes that torch counts by itself: not those through `weight.data`.
        """
        with uninterrupted():
            self.scheduler.prefixes.forget()

    @exclusive
    def release(self) -> None:
        """Give captured graphs and their memory back; the session goes on uncaptured.

        The tokens of launched steps come with the next `step`.
        """
        if self.graphs is not None:
            with uninterrupted():
                self.loop.drop_graphs()
                self.plan.stop("release() was called")
                self.runner.graphs = None

    @property
    def weight_version(self) -> int:
        """Times that `update_weights` was called."""
        return self.book.weight_version

    @exclusive
    def update_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Write weights in place, between steps: graphs stay, and requests go on with them.

        Kept prefixes are forgotten. Keys and values of running requests stay those of the weights
        that computed them; `Generation.weight_versions` says which weights drew each token.

        Args:
            weights: by the names of `model.state_dict()`, of the same shapes and dtypes.

        Raises:
            ValueError: a name is unknown, or a tensor does not fit; nothing is written.
        """
        with uninterrupted():
            self.loop.collect_all()
            write_weights(self.original, weights)
            self.scheduler.prefixes.refresh(idle=False)
            self.book.weight_version += 1
            for request in self._requests.values():
                request.versions.append((len(request.token_ids), self.weight_version))

    @exclusive
    def sleep(self) -> None:
        """Give the cache's memory back; graphs stay, prefixes do not. Steps are refused meanwhile.

        Raises:
            ValueError: the session was made without `can_sleep`, or has unfinished requests.
        """
        if self.num_unfinished:
            raise ValueError(f"session must have nothing unfinished, got {self.num_unfinished}")
        with uninterrupted():
            self.cache.sleep()
            self.scheduler.prefixes.forget()

    @exclusive
    def wake(self) -> None:
        """Take the cache's memory again, at the same addresses; harmless if it is awake.

        Raises:
            torch.OutOfMemoryError: the device has too little left; it sleeps on.
        """
        with uninterrupted():
            self.cache.wake()

    # -- inside ------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a DecodeSession cannot be pickled or copied: its graphs, cache and threads belong to "
            "this process; keep the SessionOptions, and make a new one of model and options"
        )

    def _begin(self, name: str, *arguments: Any) -> None:
        """Before each `exclusive` method: forget requests that were left, tell other ranks."""
        tell = (lambda *call: None) if self.ranks is None else self.ranks.tell
        while self._left:
            if (request := self._requests.get(self._left.pop())) is not None:
                tell("discard", (request.id,), {})
                self._forget(request)
        tell(name, *arguments)

    def _prepare(self) -> None:
        if self.cache.is_asleep:
            raise RuntimeError("the session sleeps; wake() comes before steps")
        if self.ranks is not None:
            self.ranks.meet()
        self.loop.prepare()

    def _run(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step whole; Ctrl-C waits for its end, but not for the model to be compiled."""
        self._prepare()
        with uninterrupted():
            step(*args)

    def _handed_out(self) -> list[StepOutput]:
        """New tokens; first, each once, the errors of requests that have ended by one."""
        if self.token_stream.failed:
            request = self.token_stream.failed.pop(0)
            raise RequestError(request) from request.error
        return self.token_stream.hand_out()

    @exclusive
    def _outputs_of(self, request_id: int) -> list[StepOutput]:
        """Its new tokens, after a step where there are none; those of others are kept."""
        request = self._requests[request_id]
        if request.id not in self.token_stream and not request.finish_reason:
            self._run(self.loop.step)
        self._raise_errors([request])
        return self.token_stream.hand_out(request)

    def _raise_errors(self, requests: Sequence[Request]) -> None:
        """Raise the error of a request that has ended by one."""
        for request in requests:
            if request.error is not None:
                raise RequestError(request) from request.error

    def _finish(
        self, queue: Callable[[], list[Request]], result_of: Callable[[Request], Result]
    ) -> list[Result]:
        """Queue requests, step until they have ended, and forget them."""
        requests: list[Request] = []
        silent = self.ranks and self.ranks.is_silent
        try:
            with tqdm(desc="generate", unit="request", disable=silent, leave=False) as bar:
                with uninterrupted():
                    requests = queue()
                bar.reset(len(requests))
                going = requests
                while going:
                    self._run(self.loop.step)
                    self._raise_errors(going)
                    still = [r for r in going if not r.finish_reason]
                    if not bar.disable:  # a step may take minutes, as with interpreted kernels
                        bar.set_postfix(tokens=sum(len(r.token_ids) for r in requests))
                    bar.update(len(going) - len(still))
                    going = still
            self._raise_errors(requests)
            return [result_of(request) for request in requests]
        finally:  # also when interrupted: nothing of this call is left
            with uninterrupted():
                for request in requests:
                    self._forget(request)

    def _forget(self, request: Request) -> None:
        self.scheduler.leave(request)
        self.token_stream.forget(request.id)
        del self._requests[request.id]
