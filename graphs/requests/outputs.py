"""The token stream: from the device to the caller, each token taken once and handed out once."""

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from graphs.requests.batch import Rows, Scheduled
from graphs.requests.requests import Request
from graphs.requests.results import StepOutput
from graphs.requests.scheduler import Scheduler


class TokenStream:
    """Appends tokens to their requests, and remembers which ones the caller has not seen.

    Args:
        scheduler: where requests leave that have ended.
        known: ids of the requests that have not been discarded; its owner changes it.
    """

    def __init__(self, scheduler: Scheduler, known: Collection[int]) -> None:
        self.scheduler, self.known = scheduler, known
        self.failed: list[Request] = []  # whose errors nobody has been told
        self._unseen: dict[int, tuple[Request, int]] = {}  # by id: its first unseen token

    def __contains__(self, request_id: int) -> bool:
        """Whether tokens of the request wait to be handed out."""
        request, first = self._unseen.get(request_id, (None, 0))
        return request is not None and len(request.token_ids) > first

    @property
    def num_ended(self) -> int:
        """Requests that have ended, with tokens or an error that wait to be handed out."""
        errors = sum(request.id not in self for request in self.failed)
        ended = sum(bool(r.finish_reason) and i in self for i, (r, _) in self._unseen.items())
        return errors + ended

    def take(
        self,
        step: Sequence[Scheduled],
        tokens: Sequence[Sequence[int]],
        logprobs: np.ndarray | None = None,
    ) -> None:
        """Take what a step has drawn; of a draft what was right, and one token more.

        `logprobs` [R, 1 + k]: rows of `packed`, of all requests one after the other.
        """
        for scheduled, drawn in zip(step, tokens, strict=True):
            wanted = len(scheduled.draft) + 1 if scheduled.wants_token else None
            assert wanted in (None, len(drawn)), f"a step draws {wanted} tokens, got {drawn}"
        for number, (scheduled, drawn) in enumerate(zip(step, tokens, strict=True)):
            request, wanted = scheduled.request, scheduled.wants_token
            if not wanted:
                request.num_computed = scheduled.num_computed + scheduled.num_tokens
                continue
            pairs = zip((*scheduled.draft, None), drawn, strict=True)
            for place, (draft, token) in enumerate(pairs):
                row = number * len(drawn) + place
                self._take(request, token, None if logprobs is None else logprobs[row], place)
                if token != draft or request.finish_reason:
                    break

    def collect(
        self,
        rows: Rows,
        steps: Sequence[Sequence[int]],
        logprobs: Sequence[np.ndarray] | None = None,
        scores: np.ndarray | None = None,
    ) -> None:
        """Take the tokens of launched steps; what a request drew after its end is dropped.

        Args:
            rows: of the batch, as they were scheduled.
            steps: tokens of every step, row by row.
            logprobs: of every step, rows of `packed`.
            scores: of a step that scores prompts, [R, 1 + k + M]; see `scored`.
        """
        if scores is not None:
            self._keep_scores(rows, scores)
        columns = rows.columns
        computed = (columns.num_computed + columns.num_tokens).tolist()
        wanted = columns.wants_token.tolist()
        for number, tokens in enumerate(steps):
            found = itertools.repeat(None) if logprobs is None else logprobs[number]
            parts = zip(rows.requests, tokens, wanted, computed, found, strict=False)
            for request, token, wants_token, num_computed, row in parts:
                if request.id not in self.known or not request.room:
                    continue  # without room it was preempted since: the token is drawn again
                if request.finish_reason and request.error is None:
                    continue
                if wants_token:
                    self._take(request, token, row)
                else:
                    request.num_computed = num_computed

    def _keep_scores(self, rows: Rows, scores: np.ndarray) -> None:
        """Of each request its own columns, in the order of its prompt, each once."""
        counts, scorings = rows.num_logits, [r.scoring for r in rows.requests]
        assert counts is not None, "something is scored"
        most = max(s.num_top for s in scorings if s is not None)
        ends = np.cumsum(counts).tolist()
        for row, count, end, scoring in zip(rows, counts.tolist(), ends, scorings, strict=True):
            request = row.request
            if scoring is None or not request.room or request.id not in self.known:
                continue
            first = row.num_computed + row.num_tokens - count
            skipped, last = request.first_unscored() - first, len(scoring.given) - first
            found_NK = scores[end - count :][max(skipped, 0) : min(count, last)]
            top, others = found_NK[:, : 1 + scoring.num_top], found_NK[:, 1 + most :]
            request.scores.append(np.hstack([top, others[:, : len(scoring.token_ids)]]))

    def hand_out(self, only: Request | None = None) -> list[StepOutput]:
        """What the caller has not seen, the first token of every request before the second.

        `only`: of this request; the others are kept.
        """
        unseen, self._unseen = self._unseen, {}
        if only is not None:
            self._unseen = {i: pair for i, pair in unseen.items() if i != only.id}
            unseen = {i: pair for i, pair in unseen.items() if i == only.id}
        rows = [(r, r.token_ids[first:], first) for r, first in unseen.values()]
        outputs = [
            self._output(request, tokens[i], first + i)
            for i in range(max((len(tokens) for _, tokens, _ in rows), default=0))
            for request, tokens, first in rows
            if i < len(tokens)
        ]
        return outputs

    def forget(self, request_id: int) -> None:
        """Hand out nothing more of a request."""
        self._unseen.pop(request_id, None)
        self.failed = [request for request in self.failed if request.id != request_id]

    def _take(
        self, request: Request, token: int, logprobs: np.ndarray | None, place: int = 0
    ) -> None:
        """`place`: of the token among those that its step has drawn of the request."""
        self._unseen.setdefault(request.id, (request, len(request.token_ids)))
        try:  # an error of one request must not leave the others half taken
            if place == request.nothing_from:
                raise ValueError(
                    "structured_outputs, allowed_token_ids, bad_words and min_tokens must leave a "
                    f"token that can be drawn, got none after {len(request.token_ids)} tokens"
                )
            if request.error is None:
                request.append(token, logprobs)
        except Exception as error:
            request.error = error
        if request.error is not None:
            self.failed.append(request)
        if request.finish_reason:
            self.scheduler.leave(request)

    def _output(self, request: Request, token: int, index: int) -> StepOutput:
        is_last = index == len(request.token_ids) - 1
        reason, text = request.finish_reason if is_last else None, ""
        if is_last and request.streams and request.text is not None:
            text = request.text.take(finished=reason is not None)
        row = request.logprobs[index] if request.logprobs else None
        return StepOutput(request.id, token, reason, text, row)
