"""`AsyncSession`: one thread steps a `DecodeSession`, and serves asyncio tasks and other threads.

submit, stream, generate, abort -> commands -> the thread: session.add, step, discard -> Handle

The thread alone calls the session, and runs the commands that have come between two steps. Tokens
wait in their request's `Handle`, so a slow reader holds nobody up. An event loop is called once a
step for all its requests.
"""

import asyncio
import atexit
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from numbers import Integral
from typing import Any, TypeVar, cast

from graphs.requests.requests import Wanted
from graphs.requests.results import Generation, RequestError, StepOutput
from graphs.sampling.params import check_positive
from graphs.session import DecodeSession, Prompt

T = TypeVar("T")


class QueueFullError(RuntimeError):
    """`max_waiting` requests wait for their first token; nothing was queued."""


class SessionClosedError(RuntimeError):
    """The `AsyncSession` was closed before the request had ended."""


class Handle:
    """A request for threads. Iterating yields its tokens as they come, each to one reader.

    `result` and iterating raise what ended the request early: `concurrent.futures.CancelledError`
    after an abort, the error of a step, `SessionClosedError`, the ValueError of a refused prompt.
    """

    def __init__(
        self,
        owner: "AsyncSession",
        loop: asyncio.AbstractEventLoop | None = None,
        each_token: bool = False,
        on_output: Callable[[StepOutput], None] | None = None,
    ) -> None:
        self.request_id: int | None = None  # None: the session has yet to take it
        self._owner, self._loop, self._each_token = owner, loop, each_token
        self._outputs: queue.SimpleQueue[StepOutput | None] = queue.SimpleQueue()  # None: its end
        self._put = on_output or self._outputs.put
        self._future: Future[Generation] = Future()
        self._arrived = asyncio.Event()  # for its loop: its end, or with `each_token` any token

    def result(self, timeout: float | None = None) -> Generation:
        """The result, when the request has ended; a TimeoutError after `timeout` seconds."""
        return self._future.result(timeout)

    def when_done(self, call: Callable[[Future[Generation]], object]) -> None:
        """Call a function when the request has ended, in the session's thread, or now if it has."""
        self._future.add_done_callback(call)

    def __iter__(self) -> Iterator[StepOutput]:
        while (output := self._outputs.get()) is not None:
            yield output
        self._outputs.put(None)  # for other readers
        self._future.result()  # raises what ended it early

    def abort(self) -> None:
        """As `AsyncSession.abort`."""
        self._owner.abort(self)


class Stream:
    """A request for an asyncio task: its tokens as they come, and the errors of `Handle`.

    It is aborted by `aclose`, when a task that waits for a token is cancelled, and when nobody
    refers to the stream any longer, as after a `break` out of its loop.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> StepOutput:
        handle = self._handle
        try:
            while handle._outputs.empty():
                handle._arrived.clear()  # by this loop, which sets it again after what comes now
                await handle._arrived.wait()
        except BaseException:
            handle.abort()
            raise
        output = handle._outputs.get_nowait()
        if output is not None:
            return output
        handle._outputs.put(None)  # for the next call
        handle.result()  # raises what ended it early
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        self._handle.abort()

    def __del__(self) -> None:
        self._handle.abort()


class AsyncSession:
    """One thread steps a DecodeSession; prompts come from any thread or asyncio task.

    While it is open the session is used through it alone. As the session takes one call at a time,
    another call is refused with a RuntimeError now and then, or a step is, beside the other call.

    An error of one request, such as one of its processor, ends that one. An error of a step ends
    all requests of that moment with it, and new ones are taken. Prompts
    must not change before their first token has come. Steps run in the default CUDA stream.

    Args:
        session: without unfinished requests.
        max_waiting: requests that wait for their first token, at most; one more is a
            `QueueFullError`. None: any number.
    """

    def __init__(self, session: DecodeSession, *, max_waiting: int | None = None) -> None:
        if not isinstance(session, DecodeSession):
            raise ValueError(f"session must be a DecodeSession, got {session!r:.80}")
        if session.num_unfinished:
            raise ValueError(f"session must have nothing unfinished, got {session.num_unfinished}")
        if max_waiting is not None:
            check_positive(max_waiting=max_waiting)
        self._session, self._max_waiting = session, max_waiting
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of `_closing` and `_waiting`, where requests come
        self._closing = False
        self._waiting: set[Handle] = set()  # for their first token
        self._calls: set[Future[Any]] = set()  # that have not begun
        self._compiler = ThreadPoolExecutor(1, "AsyncSession grammars")
        # The thread's own:
        self._handles: dict[int, Handle] = {}  # that the session knows, by request id
        self._left: list[int] = []  # requests that have ended and are not discarded yet
        self._wakes: dict[asyncio.AbstractEventLoop, set[Handle]] = {}
        # A daemon, as Python waits for other threads before it calls what `atexit` knows.
        self._thread = threading.Thread(target=self._work, name="AsyncSession", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        on_output: Callable[[StepOutput], None] | None = None,
        **wanted: Any,
    ) -> Handle:
        """Queue a prompt, with the arguments of `DecodeSession.add`; returns at once.

        Args:
            on_output: is called with every token, in the session's thread, and must be quick; then
                the handle yields none. Its error ends the request.

        Raises:
            QueueFullError: `max_waiting` requests wait.
            SessionClosedError: it was closed.
        """
        wanted |= {"stream": True}
        add = partial(self._session.add, prompt, max_new_tokens, **wanted)
        return self._queued(Handle(self, on_output=on_output), add, wanted)

    def stream(self, prompt: Prompt, max_new_tokens: int | None = None, **wanted: Any) -> Stream:
        """As `submit`, for the running event loop: `async for output in opened.stream(...)`.

        Leaving the loop early aborts the request.
        """
        wanted |= {"stream": True}
        add = partial(self._session.add, prompt, max_new_tokens, **wanted)
        return Stream(self._queued(Handle(self, asyncio.get_running_loop(), True), add, wanted))

    async def generate(
        self, prompt: Prompt, max_new_tokens: int | None = None, **wanted: Any
    ) -> Generation:
        """As `submit`, and waits for the result; a cancelled task aborts the request."""
        add = partial(self._session.add, prompt, max_new_tokens, **wanted)
        handle = self._queued(Handle(self, asyncio.get_running_loop()), add, wanted)
        try:
            await handle._arrived.wait()
        finally:
            handle.abort()
        return handle.result()

    def call(self, function: Callable[[DecodeSession], T]) -> T:
        """Call a function with the session, between two steps, and wait for what it returns.

        Requests go on: `opened.call(lambda session: session.update_weights(weights))`. It runs in
        the session's thread, which must not call this.

        Raises:
            SessionClosedError: it was closed.
            Exception: what the function raises; requests go on.
        """
        future: Future[T] = Future()

        def run() -> None:
            self._calls.discard(future)
            try:
                future.set_result(function(self._session))
            except BaseException as error:  # the thread goes on
                future.set_exception(error)

        with self._lock:
            if self._closing:
                raise SessionClosedError("the AsyncSession was closed")
            self._calls.add(future)
            self._commands.put(run)
        return future.result()

    def abort(self, request: Handle | Stream | int) -> None:
        """End a request, by its handle, stream or id; one that has ended changes nothing.

        Returns at once; the request ends when the running step is over.
        """
        request = request._handle if isinstance(request, Stream) else request
        if not isinstance(request, (Handle, Integral)):
            supported = "supported: Handle, Stream, int"
            raise ValueError(f"request must be a request, got {request!r:.80}; {supported}")
        if not (isinstance(request, Handle) and request._future.done()):
            self._commands.put(partial(self._abort, request))

    def close(self) -> None:
        """End all requests with a `SessionClosedError`, and the thread after the running step.

        Waits for it, unless the thread itself calls. The session is free for other use then.
        """
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    async def aclose(self) -> None:
        """As `close`; the event loop goes on meanwhile."""
        self._stop()  # now: all threads for `to_thread` may wait for results
        await asyncio.to_thread(self.close)

    def __enter__(self) -> "AsyncSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _stop(self) -> None:
        self._closing = True
        self._commands.put(lambda: None)  # wakes the thread

    def _queued(self, handle: Handle, add: Callable[[], int], wanted: dict[str, Any]) -> Handle:
        with self._lock:
            if self._closing:
                raise SessionClosedError("the AsyncSession was closed")
            if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
                raise QueueFullError(f"max_waiting={self._max_waiting} requests wait already")
            self._waiting.add(handle)
            command = partial(self._commands.put, partial(self._add, handle, add))
            if wanted.get("structured_outputs") is None:
                command()
            else:  # a grammar takes up to seconds, in which the others go on
                self._compiler.submit(self._compile, wanted).add_done_callback(lambda _: command())
        return handle

    def _compile(self, wanted: dict[str, Any]) -> None:
        """Compile a request's grammar, which the session finds when the request is added."""
        self._session.book.compile_grammar(Wanted.of(None, wanted))

    # -- the thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._closing:
                for _ in range(self._commands.qsize() or not self._handles):
                    self._commands.get()()  # without requests, waits for one
                self._discard_left()
                if self._handles and not self._closing:
                    self._step()
                self._wake()
        finally:  # also after an error that nobody expects: nobody waits for ever
            with self._lock:
                self._closing = True  # no request comes after this
            closed = SessionClosedError("the AsyncSession was closed before the request had ended")
            closed.__cause__ = sys.exception()
            self._compiler.shutdown(wait=False, cancel_futures=True)
            self._end_all({*self._waiting, *self._handles.values()}, closed)
            for future in self._calls:
                future.set_exception(closed)
            self._discard_left()
            self._wake()

    def _add(self, handle: Handle, add: Callable[[], int]) -> None:
        if handle._future.done():
            return  # aborted before its grammar was compiled
        try:
            handle.request_id = add()
        except Exception as error:
            self._end(handle, error)
        else:
            self._handles[handle.request_id] = handle

    def _abort(self, request: Handle | Integral) -> None:
        number = request.request_id if isinstance(request, Handle) else int(request)
        handle = request if request in self._waiting else self._handles.get(cast(int, number))
        if handle is not None and request in (handle, number):  # not of another session
            self._end(handle, CancelledError("the request was aborted"))

    def _step(self) -> None:
        try:
            outputs = self._session.step()
        except RequestError as error:
            if (handle := self._handles.get(error.request_id)) is not None:
                self._end(handle, error)
            return
        except Exception as error:
            self._end_all(self._handles.values(), error)
            return
        for output in outputs:
            handle = self._handles.get(output.request_id)
            if handle is None:
                continue  # one of `_left`
            self._waiting.discard(handle)
            try:
                handle._put(output)
            except BaseException as error:  # of `on_output`: the others go on
                self._end(handle, error)
                continue
            if handle._each_token:
                self._wake_later(handle)
            if output.finish_reason:
                self._end(handle, cast(Generation, self._session.result(output.request_id)))
        if not self._session.num_unfinished:
            lost = RuntimeError("another call of the session has taken the request's tokens")
            self._end_all(self._handles.values(), lost)

    def _end_all(self, handles: Iterable[Handle], error: BaseException) -> None:
        for handle in list(handles):
            self._end(handle, error)

    def _end(self, handle: Handle, end: Generation | BaseException) -> None:
        self._waiting.discard(handle)
        if handle.request_id is not None:
            del self._handles[handle.request_id]
            self._left.append(handle.request_id)
            self._discard_left()
        if isinstance(end, BaseException):
            handle._future.set_exception(end)
        else:
            handle._future.set_result(end)
        handle._outputs.put(None)
        self._wake_later(handle)

    def _discard_left(self) -> None:
        """One that is refused, as beside another call, stays until the next time."""
        with contextlib.suppress(Exception):
            while self._left:
                self._session.discard(self._left[-1])
                self._left.pop()

    def _wake_later(self, handle: Handle) -> None:
        if handle._loop is not None:
            self._wakes.setdefault(handle._loop, set()).add(handle)

    def _wake(self) -> None:
        """Call every event loop once, for all its requests that have news."""
        wakes, self._wakes = self._wakes, {}
        for loop, handles in wakes.items():
            try:
                loop.call_soon_threadsafe(_wake_all, handles)
            except RuntimeError:  # the loop is closed: nobody reads them
                for handle in handles:
                    self._abort(handle)


def _wake_all(handles: Iterable[Handle]) -> None:
    for handle in handles:
        handle._arrived.set()
