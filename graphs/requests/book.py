"""The requests of a session by id: those of a call are queued all, or none."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphs.requests.defaults import Defaults
from graphs.requests.requests import Limits, Request, Wanted, checked_requests
from graphs.requests.tokens import listed


class RequestBook:
    """Knows every request until it is discarded.

    Args:
        model: whose generation config gives requests their defaults.
        limits: what the session takes.
        waiting: where requests queue.
    """

    def __init__(self, model: Any, limits: Limits, waiting: deque[Request]) -> None:
        self._model, self._limits, self._waiting = model, limits, waiting
        self.requests: dict[int, Request] = {}
        self.next_id = 0
        self._adding = threading.Lock()

    def queue_all(self, requests: list[Request], prompts: Iterable[Any], wanted: Wanted) -> None:
        """Queue all prompts, or none; `requests` gets what they have become.

        A step may run meanwhile: it takes requests from the queue's other end.
        """
        # First, as generators run the caller's code, which may add requests too.
        if not isinstance(prompts, Mapping) and not hasattr(prompts, "ndim"):
            prompts = listed("prompts", prompts, "prompts")
            prompts = [list(one) if isinstance(one, Iterator) else one for one in prompts]
        with self._adding:
            limits = self._limits
            defaults = Defaults.of(self._model)
            requests += checked_requests(self.next_id, prompts, wanted, defaults, limits)
            for request in requests:
                self.next_id = request.id + 1
                self.requests[request.id] = request  # first: a discard knows what is queued
                self._waiting.append(request)
