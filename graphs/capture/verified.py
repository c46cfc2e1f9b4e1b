"""Replays that are compared with calls of the same steps.

S requests, R rows of logits, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping

import torch

from attn_ops import AttentionMetadata
from graphs.capture.recorder import Builder, Graph, Recorder, Step, metadata_now
from graphs.capture.verifier import States, Verifier
from graphs.modes import CUDAGraphMode
from graphs.sampling.params import Sampling
from graphs.step.tensors import TABLES


def verified(
    recorders: Mapping[CUDAGraphMode, Recorder], verifier: Verifier, builder: Builder
) -> dict[CUDAGraphMode, Recorder]:
    """Recorders of the same graphs, which compare their replays with calls."""
    return {m: VerifiedRecorder(r, verifier, builder) for m, r in recorders.items()}


class VerifiedRecorder:
    """Records as another recorder does; the verifier decides which replays are compared.

    Args:
        recorder: records.
        verifier: compares.
        builder: of the backend; plans the calls.
    """

    def __init__(self, recorder: Recorder, verifier: Verifier, builder: Builder) -> None:
        self.recorder, self.verifier, self.builder = recorder, verifier, builder

    def metadata(self, step: Step) -> AttentionMetadata | None:
        return self.recorder.metadata(step)

    def warm_up(self, step: Step, metadata: AttentionMetadata | None) -> None:
        self.recorder.warm_up(step, metadata)

    def record(self, step: Step, metadata: AttentionMetadata | None) -> "VerifiedReplay":
        """Record a step that keeps its logits."""
        kept = _KeptLogits(step)
        graph = self.recorder.record(dataclasses.replace(step, run=kept), metadata)
        self.verifier.forget(step.key)  # the next replay is this graph's first
        return VerifiedReplay(graph, step, kept, self.verifier, self.builder)

    def release(self) -> None:
        self.recorder.release()


class _KeptLogits:
    """Runs a step and keeps the logits: those that a graph writes, if the graph is recorded."""

    def __init__(self, step: Step) -> None:
        self._run = step.run
        self.logits_RV: torch.Tensor | None = None

    def __call__(self, metadata: AttentionMetadata | None) -> torch.Tensor:
        self.logits_RV = self._run(metadata)
        return self.logits_RV


class VerifiedReplay:
    """A graph whose replays are compared with calls, as the verifier decides.

    Attributes:
        graph: which is replayed.
    """

    def __init__(
        self,
        graph: Graph,
        step: Step,
        kept: _KeptLogits,
        verifier: Verifier,
        builder: Builder,
    ) -> None:
        self.graph, self.step = graph, step
        self.num_bytes, self.metadata, self.plan = graph.num_bytes, graph.metadata, graph.plan
        self._kept, self._verifier, self._builder = kept, verifier, builder
        self._logits_RV: torch.Tensor | None = None  # of the last replay or call

    def replay(self, metadata: AttentionMetadata | None = None) -> None:
        """Replay; compare with a call if the verifier wants to.

        Raises:
            VerificationError: replay and call differ.
        """
        if not self._verifier.should(self.step.key):
            self.graph.replay(metadata)
            return
        try:
            self._compare(metadata)
        finally:
            self._logits_RV = None

    def _compare(self, metadata: AttentionMetadata | None) -> None:
        """With a call that is planned for this step, not for the bounds of the recording.

        The call reads all keys at once, so that it also tells whether prefixes are shared.
        """
        step, key, tensors = self.step, self.step.key, self.step.tensors
        planned = metadata
        if planned is None:
            planned = metadata_now(self._builder, tensors, apart=False)
        rows_S = tensors.device["seq_lens"] > 0
        rows_R = rows_S.repeat_interleave(key.query_len or 1)[: tensors.num_rows]
        if (key.query_len or 1) > 1:  # drafts behind a request's end: their keys are nowhere
            rows_R = rows_R & (tensors.device["slot_mapping"][: tensors.num_rows] >= 0)

        def replay() -> None:
            self.graph.replay(metadata)
            self._logits_RV = self._kept.logits_RV

        def call() -> None:
            self._logits_RV = step.run(planned)

        def draw(logits_RV: torch.Tensor) -> torch.Tensor:
            return self._drawn(logits_RV, rows_R)

        penalties = step.penalties
        self._verifier.check(
            key,
            tensors.device_bytes,
            step.cache.tensors,
            self._slots(),
            replay,
            call,
            lambda: self._outputs(rows_S, rows_R),
            more={} if penalties is None else {"output_counts": penalties.output_counts},
            draw=None if key.sampling is Sampling.GREEDY else draw,
            states=self._states(),
            dtypes={spec.dtype for spec in step.cache.specs},
        )

    def _slots(self) -> list[torch.Tensor]:
        """Of every cache, those that the step writes."""
        slots = {n: self.step.tensors.device[TABLES[n]].clone() for n in self.step.tensors.versions}
        tables = ("block_table", "window_block_table")
        return [slots[tables[own]] for own in self.step.cache.own_blocks]

    def _states(self) -> States | None:
        """Pools of the model, and the slots that the step writes.

        Behind drafts without a place for their keys, states are nobody's, as those rows are.
        """
        states, device = self.step.cache.states, self.step.tensors.device
        if states is None:
            return None
        names, query_len = ("state_slots", "kept_slots"), self.step.key.query_len or 1
        slots_N = torch.cat([device[name] for name in names if name in device])
        wanted_N = torch.ones_like(slots_N, dtype=torch.bool)
        if query_len > 1:
            has_place_T = device["slot_mapping"] >= 0
            wanted_N = torch.cat([has_place_T[query_len - 1 :: query_len], has_place_T])
        return States(states.by_name(), slots_N, wanted_N)

    def _outputs(self, rows_S: torch.Tensor, rows_R: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the step leaves of rows that are no padding; the first since its filling."""
        assert self._logits_RV is not None, "a replay or a call comes before its outputs"
        device = self.step.tensors.device
        found = {"logits": self._logits_RV[rows_R], "tokens": device["tokens"][0][rows_R]}
        if self.step.key.query_len == 1:
            tables = self.step.tensors.versions
            names = ("seq_lens", "active", *map(TABLES.__getitem__, tables))
            found |= {name: device[name][rows_S] for name in names}
        return found

    def _drawn(self, logits_RV: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Tokens for the logits of the rows that are no padding."""
        shape = (rows_R.shape[0], *logits_RV.shape[1:])
        padded_RV = logits_RV.new_zeros(shape)
        padded_RV[rows_R] = logits_RV
        return self.step.draw(padded_RV)[rows_R]
