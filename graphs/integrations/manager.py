"""`Manager`: requests in and results out of a session that a thread steps, as Transformers' own."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from graphs.async_session import AsyncSession, Handle, QueueFullError
from graphs.integrations.batching import MOST_TOKENS, Asked, result_of
from graphs.integrations.trained import TrainedModel
from graphs.requests.results import StepOutput

Handler = Callable[[GenerationOutput], object]

NUM_REQUESTS = 64
"""That run at a time, where nobody says."""

PATIENCE = 10.0
"""Seconds that `add_request` waits for room in a full queue, as in Transformers."""


class Manager:
    """Takes requests from any thread while it runs.

    Between `start` and `stop` the model is in eval mode, with our attention.

    Args:
        trained: the model.
        asked: of every request, where it does not say.
        hints: Transformers' `WorkloadHints`, which size the session; None: `MOST_TOKENS` a request,
            or as many as the model has positions.
    """

    def __init__(self, trained: TrainedModel, asked: Asked, hints: Any = None) -> None:
        self.model, self._trained, self._asked = trained.original, trained, asked
        self.generation_config = asked.wanted["generation_config"]
        self._hints = hints
        self._open = contextlib.ExitStack()  # while it runs
        self._session: AsyncSession | None = None
        self._handles: dict[str, Handle] = {}
        self._handlers: dict[str, tuple[Handler, asyncio.AbstractEventLoop]] = {}
        self._results: queue.Queue[GenerationOutput] = queue.Queue()
        self._lock = threading.Lock()  # of the numbers, the handles and what waits for `start`
        self._number = self._num_samples = 0
        self._early: list[tuple[_Running, dict[str, Any]]] = []

    # -- its life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Run requests from here on; one that runs changes nothing.

        Raises:
            RuntimeError: another manager or call uses the model's session.
        """
        if self.is_running():
            return
        with contextlib.ExitStack() as opened:
            session = opened.enter_context(
                self._trained.held(*self._sizes(), **self._asked.options)
            )
            most = self._asked.max_queue_size
            self._session = opened.enter_context(AsyncSession(session, max_waiting=most))
            self._open = opened.pop_all()
        with self._lock:
            early, self._early = self._early, []
            self._submit_all(early)

    def _sizes(self) -> tuple[int, int]:
        hinted = [
            getattr(self._hints, name, None) or 0
            for name in ("num_requests", "max_prompt_length", "max_generated_length")
        ]
        config = self.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or MOST_TOKENS
        return hinted[0] or NUM_REQUESTS, hinted[1] + hinted[2] or min(MOST_TOKENS, positions)

    def is_running(self) -> bool:
        return self._session is not None

    def warmup(self) -> None:
        """Nothing: the first step compiles and captures."""

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests, and let those that run end.

        Args:
            block: change nothing; it always waits, as the model is given back.
            timeout: seconds to wait; what runs then is ended with an error.
            keep_for_next_session: changes nothing; the session is kept.
            hard_stop: end all requests now.
        """
        if self._session is None:
            return
        handles = [] if hard_stop else list(self._handles.values())
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for handle in handles:
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                with contextlib.suppress(Exception):  # it comes with the request's result
                    handle.result(left)
        finally:  # also when interrupted
            self._session = None
            self._open.close()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Nothing: `stop` waits."""

    def destroy(self) -> None:
        """End all requests now."""
        self.stop(hard_stop=True)

    # -- requests ----------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **wanted: Any,
    ) -> str:
        """Queue a prompt; returns the request's id at once.

        Args:
            input_ids: token ids.
            request_id: None: "req_0" and so on.
            max_new_tokens, eos_token_id: None: as the generation config says.
            streaming: a result comes with every token, of all tokens until then.
            record_timestamps: results have the time of each token.
            wanted: as of `DecodeSession.add`.

        Requests that come before `start` wait for it.

        Raises:
            QueueFullError: its queue has been full for `PATIENCE` seconds.
            ValueError: the id is taken by a request that runs.
        """
        with self._lock:
            if request_id is None:
                request_id = f"req_{self._number}"
                self._number += 1
            names = self._asked.names(request_id)
            if taken := self._handles.keys() & names:
                raise ValueError(f"request_id must be new, got {min(taken)!r}, which runs")
            wanted = {**self._asked.wanted, **wanted, "max_new_tokens": max_new_tokens}
            if eos_token_id is not None:
                wanted["eos"] = () if eos_token_id == -1 else eos_token_id
            new = []
            for name in names:
                running = _Running(self, name, list(input_ids), streaming, record_timestamps)
                new.append((running, self._asked.seeded(wanted, self._num_samples)))
                self._num_samples += 1
            if self._session is None:
                self._early += new
            else:
                self._submit_all(new)
        return request_id

    def _submit_all(self, new: Sequence[tuple["_Running", dict[str, Any]]]) -> None:
        """Submit the samples of prompts: all of them, or none where the queue stays full."""
        assert self._session is not None, "it runs"
        made: list[Handle] = []
        deadline = time.monotonic() + PATIENCE
        for running, wanted in new:
            while True:
                try:
                    handle = self._session.submit(running.prompt, on_output=running.take, **wanted)
                    break
                except QueueFullError:
                    if time.monotonic() > deadline:
                        for one in made:
                            one.abort()
                        raise
                    time.sleep(0.005)
            made.append(handle)
            self._handles[running.name] = handle
            handle.when_done(running.end)

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **wanted: Any,
    ) -> list[str]:
        """As `add_request`, of several prompts."""
        return [
            self.add_request(ids, None, max_new_tokens, streaming, record_timestamps, **wanted)
            for ids in inputs
        ]

    def cancel_request(self, request_id: str) -> None:
        """End a request; it has no result. An unknown id changes nothing."""
        handle = self._handles.get(request_id)
        if handle is not None:
            handle.abort()

    # -- results -----------------------------------------------------------------------------------

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next result, or None after `timeout` seconds, or where nothing can come any more.

        One of another request than `request_id` goes back to the end of the queue, for None.
        """
        if self._results.empty() and self._session is None:
            return None
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            return None
        if request_id not in (None, result.request_id):
            self._results.put(result)
            return None
        return result

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, while it runs."""
        while self.is_running():
            if (result := self.get_result(timeout=0.1)) is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Results of one request, until it has ended."""
        while self.is_running():
            result = self.get_result(request_id, timeout=0.1)
            if result is not None:
                yield result
                if result.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Handler) -> None:
        """Call `callback` in the running event loop with every result of a request, not the queue.

        It may be registered before the request is added, and is forgotten with its last result.
        """
        self._handlers[request_id] = callback, asyncio.get_running_loop()

    def _hand_out(self, result: GenerationOutput) -> None:
        """In the session's thread."""
        find = self._handlers.pop if result.is_finished() else self._handlers.get
        handler = find(result.request_id, None)
        if handler is None:
            self._results.put(result)
        else:
            callback, loop = handler
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(callback, result)


class _Running:
    """What the session's thread does with a request's tokens and its end."""

    def __init__(
        self, manager: Manager, name: str, prompt: list[int], streaming: bool, timed: bool
    ) -> None:
        self._manager, self.name, self.prompt = manager, name, prompt
        self._streaming, self._begin = streaming, time.perf_counter()
        self._times: list[float] | None = [] if timed else None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def take(self, output: StepOutput) -> None:
        self._tokens.append(output.token_id)
        if self._times is not None:
            self._times.append(time.perf_counter())
        if not self._streaming or output.finish_reason:
            return
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs[output.token_id].logprob)
        result = GenerationOutput(self.name, self.prompt, list(self._tokens))
        result.logprobs, result.status = list(self._logprobs), RequestStatus.DECODING
        self._manager._hand_out(result)

    def end(self, future: Any) -> None:
        error = future.exception()
        self._manager._handles.pop(self.name, None)
        if isinstance(error, CancelledError):
            return
        end = future.result() if error is None else error
        times = self._begin, time.perf_counter()
        parts = (self._times, self._tokens)
        self._manager._hand_out(result_of(self.name, self.prompt, end, times, *parts))
