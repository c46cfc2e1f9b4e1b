"""Which graph a step runs in: the smallest key that holds it, or none."""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphs.modes import RUNTIME_MODES, BatchDescriptor, CUDAGraphMode, checked_sizes
from graphs.sampling.params import Sampling


class CudagraphDispatcher:
    """Keys of all graphs, and the one for a batch.

    Uniform batches, in which every request brings q tokens, have keys for every q; any other batch
    is mixed and never gets one of those, because their graphs take every query to be q long. All
    keys of one q, and all mixed keys, have one runtime mode: a key names one graph.

    Args:
        mode: what is captured; see `initialize_keys` for a finer choice.
        decode_sizes: requests of uniform keys.
        mixed_sizes: tokens of mixed keys.
        max_num_reqs: requests of a batch at most.
        uniform_query_lens: every q: 1, and 1 + k where k tokens are drafted.

    Raises:
        ValueError: `mode` is none, or a size or query length is out of range.
    """

    def __init__(
        self,
        mode: CUDAGraphMode,
        decode_sizes: Sequence[int],
        mixed_sizes: Sequence[int],
        max_num_reqs: int,
        uniform_query_lens: Sequence[int] = (1,),
    ) -> None:
        _check_type("mode", mode, CUDAGraphMode)
        (self.max_num_reqs,) = checked_sizes("max_num_reqs", [max_num_reqs])
        self.mode = mode
        self.decode_sizes = checked_sizes(
            "decode_sizes", decode_sizes, "max_num_reqs", max_num_reqs
        )
        self.mixed_sizes = checked_sizes("mixed_sizes", mixed_sizes)
        self.uniform_query_lens = checked_sizes("uniform_query_lens", uniform_query_lens)
        self.initialize_keys()

    def initialize_keys(
        self,
        decode_modes: Mapping[int, CUDAGraphMode] | None = None,
        mixed_mode: CUDAGraphMode | None = None,
    ) -> None:
        """Make all keys anew, sampling greedy; those of other kinds follow when they are asked for.

        Args:
            decode_modes: runtime mode by query length, as `plan.resolve` finds it; those left out
                have the mode's own.
            mixed_mode: runtime mode of mixed keys; None: the mode's own.

        Raises:
            ValueError: a query length is not one of `uniform_query_lens`, or a mode is none that a
                step can run under. The keys stay as they were.
        """
        decode = dict.fromkeys(self.uniform_query_lens, self.mode.decode_mode())
        decode.update(decode_modes or {})
        mixed = self.mode.mixed_mode() if mixed_mode is None else mixed_mode
        _check_modes([*decode.values(), mixed])
        if set(decode) - set(self.uniform_query_lens):
            raise ValueError(
                f"decode_modes must be of uniform_query_lens={self.uniform_query_lens}, "
                f"got {sorted(decode)}"
            )
        self._modes: dict[int | None, CUDAGraphMode] = {**decode, None: mixed}
        self._tables = {q: self._table(q) for q in self._modes}
        self._tokens = {q: [k.num_tokens for k in table] for q, table in self._tables.items()}
        self._keys = {m: set[BatchDescriptor]() for m in RUNTIME_MODES}
        for q, m in self._modes.items():
            self._keys[m].update(self._tables[q])

    def keys(self, mode: CUDAGraphMode) -> list[BatchDescriptor]:
        """Keys that run under this runtime mode, largest first.

        In that order, later captures reuse the memory of the first.

        Raises:
            ValueError: `mode` is none.
        """
        _check_type("mode", mode, CUDAGraphMode)
        return sorted(self._keys.get(mode, ()), reverse=True)

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_query_len: int | None = None,
        sampling: Sampling = Sampling.GREEDY,
        *,
        logits: bool = True,
        logprobs: int = -1,
        edits: int = -1,
        late_edits: bool = False,
        groups: int = 0,
    ) -> tuple[CUDAGraphMode, BatchDescriptor | None]:
        """Runtime mode and key of a batch; NONE without a key if no key holds it.

        FULL comes before PIECEWISE; under either, the smallest uniform key of the query length
        comes before the smallest mixed one.

        Args:
            num_tokens: of all requests.
            num_reqs: requests, none of them padding.
            uniform_query_len: tokens of every request; None: a mixed batch.
            sampling: the strongest kind that a request wants; the key has the same.
            logits: whether any row's are wanted; if not, the key of a mixed batch says so.
            logprobs, edits: of the key; see `BatchDescriptor`.
            late_edits: the same; only of single tokens under FULL.
            groups: of requests that share prefixes; the key of single tokens under FULL has room
                for as many, and one of padding: a power of two.

        Raises:
            ValueError: the numbers contradict each other, `sampling` is no `Sampling`, or `logits`
                is no bool or False for a uniform batch.
        """
        _check_type("sampling", sampling, Sampling)
        _check_batch(num_tokens, num_reqs, uniform_query_len)
        if type(logits) is not bool or (uniform_query_len is not None and not logits):
            supported = "True or False" if uniform_query_len is None else "True in a uniform batch"
            raise ValueError(f"logits must be {supported}, got {logits!r}")
        tables = (None,) if uniform_query_len is None else (uniform_query_len, None)
        for mode in RUNTIME_MODES[:-1]:
            for query_len in tables:
                if self._modes.get(query_len) is not mode:
                    continue
                key = self._smallest(query_len, num_tokens, num_reqs)
                if key is not None:
                    apart = key.query_len == 1 and mode is CUDAGraphMode.FULL
                    room = 1 << groups.bit_length() if groups and apart else 0
                    wanted = {"logprobs": logprobs, "edits": edits, "groups": room}
                    wanted["late_edits"] = late_edits and apart
                    return mode, self._for(key, mode, sampling=sampling, logits=logits, **wanted)
        return CUDAGraphMode.NONE, None

    def _table(self, query_len: int | None) -> list[BatchDescriptor]:
        """Keys of a query length, or mixed ones, smallest first."""
        if self._modes[query_len] is CUDAGraphMode.NONE:
            return []
        if query_len is not None:
            return [BatchDescriptor(s * query_len, s, uniform=True) for s in self.decode_sizes]
        # One request more than a batch has: it owns the padding rows, which would otherwise be
        # part of another request's query.
        return [BatchDescriptor(t, min(self.max_num_reqs + 1, t)) for t in self.mixed_sizes]

    def _smallest(
        self, query_len: int | None, num_tokens: int, num_reqs: int
    ) -> BatchDescriptor | None:
        """The first key that is large enough; no later one fits where that one does not."""
        at = bisect_left(self._tokens[query_len], num_tokens)
        if at == len(self._tables[query_len]):
            return None
        key = self._tables[query_len][at]
        return key if fits(key, num_tokens, num_reqs, query_len) else None

    def _for(
        self,
        key: BatchDescriptor,
        mode: CUDAGraphMode,
        **wanted: Any,
    ) -> BatchDescriptor:
        if any(getattr(key, name) != value for name, value in wanted.items()):
            key = dataclasses.replace(key, **wanted)
            self._keys[mode].add(key)
        return key


def fits(
    key: BatchDescriptor, num_tokens: int, num_reqs: int, uniform_query_len: int | None
) -> bool:
    """Whether a batch can run under a key.

    Under a uniform key, padding is whole requests of that query length. Under a mixed one, a
    request more owns all padding rows; a batch without padding rows needs none.
    """
    if key.uniform:
        return uniform_query_len == key.query_len and num_reqs <= key.num_reqs
    padding = num_tokens < key.num_tokens
    return num_tokens <= key.num_tokens and num_reqs + padding <= key.num_reqs


def _check_type(name: str, value: object, kind: type[CUDAGraphMode] | type[Sampling]) -> None:
    if not isinstance(value, kind):
        names = ", ".join(known.name for known in kind)
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}; supported: {names}")


def _check_modes(modes: Iterable[CUDAGraphMode]) -> None:
    bad = next((mode for mode in modes if mode not in RUNTIME_MODES), None)
    if bad is not None:
        names = ", ".join(mode.name for mode in RUNTIME_MODES)
        raise ValueError(f"runtime mode must be known, got {bad.name}; supported: {names}")


def _check_batch(num_tokens: int, num_reqs: int, uniform_query_len: int | None) -> None:
    if not 1 <= num_reqs <= num_tokens:
        raise ValueError(f"num_reqs must be from 1 to num_tokens={num_tokens}, got {num_reqs}")
    if uniform_query_len is not None and num_reqs * uniform_query_len != num_tokens:
        raise ValueError(
            f"uniform_query_len must be num_tokens / num_reqs = {num_tokens} / {num_reqs}, "
            f"got {uniform_query_len}"
        )
