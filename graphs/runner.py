"""Runs steps on the device: model, sampling and what follows, called or from graphs.

S requests, R rows of logits, V vocabulary.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from attn_ops import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    PagedKVCache,
)
from attn_ops.integrations.transformers import (
    AttentionProbe,
    PackedPositions,
    StateCache,
    StateProbe,
    cache_name,
    check_logits,
    counts_positions,
    state_layers,
)
from attn_ops.integrations.transformers.rotary import SHIFT
from attn_ops.ops.write_kv import SlotMapping
from attn_ops.states import StatePool
from fx_passes.calls import calls
from graphs.capture.failures import untraced
from graphs.capture.recorder import Recorder, Step, metadata_now
from graphs.capture.store import CapturedStep, StepGraphs
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.requests.batch import Rows, Scheduled
from graphs.requests.embeds import fill_embeds
from graphs.requests.processors import by_processors
from graphs.requests.state_slots import advance_states
from graphs.sampling import PenaltyState, argmax, at_temperature, processed, sample
from graphs.sampling.edits import Editing, edited
from graphs.sampling.logprobs import log_probs, packed, scored, to_device
from graphs.sampling.params import Sampling
from graphs.step.blocks import BlockRows
from graphs.step.finish import finish_step, take_tokens
from graphs.step.shared import SharedPrefixes, shared_prefixes
from graphs.step.tensors import StepTensors

logger = logging.getLogger(__name__)

LogitsObserver = Callable[[Sequence[Scheduled], torch.Tensor], object]
"""Gets the requests of a step and its logits [R, V]; see `DecodeSession.observe_logits`."""


OF_STATES = ("state_slots", "query_start_loc", "seq_lens", "prompt_lens")
"""Tensors of a step that a `StateCache` takes."""


def slots_of(tensors: Mapping[str, torch.Tensor]) -> SlotMapping:
    """The slots of a step, as the model is given them."""
    slots = tensors["slot_mapping"]
    return (slots, tensors["window_slot_mapping"]) if "window_slot_mapping" in tensors else slots


class ModelInputs:
    """Forward keywords of a step, the same ones in every step: another one would recompile.

    Args:
        model: as Transformers made it, uncompiled.
        kv_cache_dtype: what the caches hold.
    """

    def __init__(self, model: Any, kv_cache_dtype: str) -> None:
        self.model = model
        self.counts_positions = counts_positions(model)
        self.has_states = bool(state_layers(model))
        self.cache_name = cache_name(model)
        self.constants: dict[str, Any] = {"use_cache": False}
        if kv_cache_dtype != "auto":
            self.constants["kv_cache_dtype"] = kv_cache_dtype

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        metadata: AttentionMetadata | None,
        kv_caches: list[torch.Tensor],
        states: StatePool | None = None,
    ) -> dict[str, Any]:
        """Keywords for the device side of a step's tensors."""
        more = self.constants.copy()
        if self.has_states and states is not None:
            of_states = (tensors[name] for name in OF_STATES)
            more[self.cache_name] = StateCache(states, *of_states, kept=tensors.get("kept_slots"))
        if self.counts_positions:
            more[self.cache_name] = PackedPositions(tensors["position_ids"])
        name = "inputs_embeds" if "inputs_embeds" in tensors else "input_ids"
        return more | {
            name: tensors[name],
            "position_ids": tensors["position_ids"],
            "attn_metadata": metadata,
            "kv_caches": kv_caches,
            "slot_mapping": slots_of(tensors),
            "logits_to_keep": tensors["logits_indices"],
        }

    def probe(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        logits_rows: torch.Tensor,
        probe: AttentionProbe,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call the model as a step does, uncompiled, with a probe in place of attention.

        Arguments: those of `attn_ops.integrations.transformers.contract.Forward`.
        """
        tensors: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "slot_mapping": input_ids[0],  # a probe reads none
            "logits_indices": logits_rows,
        }
        more: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
        if position_ids is None:  # the model counts from 0
            more[self.cache_name] = None
        if self.has_states:
            more[self.cache_name] = StateProbe(probe, input_ids.shape[1], input_ids.device)
        with torch.compiler.set_stance("force_eager"):
            return self.model(**(self(tensors, None, []) | more | {"attn_metadata": probe})).logits


class StepRunner:
    """The device side of a session: one model over one paged cache.

    Args:
        model: as it is called, compiled or not.
        inputs: makes its keywords.
        cache: the KV cache.
        builder: of the attention metadata.
        max_batch_size: requests of a step at most.
        max_tokens: of a request at most, drafts included; captured steps are planned for it, though
            positions end with the last that a request without a draft may have.
        vocab_size: V.
        num_steps: steps that a captured decode may run without the host.
        logprobs_mode, logits_function, batch_invariant: see `SessionOptions`.
        max_query_len: tokens of a request in a uniform batch at most.

    Attributes:
        on_logits: called in every step that is called and wants logits, not in replays.
        drops_rows: whether some layers see only the rows whose logits are wanted (fast prefill), so
            that a step without any is worth its own graph. Known when the model was compiled.
        cascades: whether attention to prefixes that requests share can be had apart.
        keeps_rows_why: why not, where the model could not be called without any; else None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: ModelInputs,
        cache: PagedKVCache,
        builder: AttentionMetadataBuilder[AttentionMetadata],
        *,
        max_batch_size: int,
        max_tokens: int,
        vocab_size: int,
        num_steps: int,
        logprobs_mode: str = "raw_logprobs",
        logits_function: Callable[..., Any] | None = None,
        max_query_len: int = 1,
        batch_invariant: bool = False,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.logprobs_mode, self.max_query_len = logprobs_mode, max_query_len
        self._logits_function = logits_function
        self.model, self.inputs, self.cache, self.builder = model, inputs, cache, builder
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        self.max_blocks = -(-max_tokens // cache.block_size)
        pools = [pool for pool in (cache.pool, cache.window_pool) if pool is not None]
        self.blocks = [BlockRows(pool, self.max_blocks, 2 * max_batch_size) for pool in pools]
        self.vocab_size, self.num_steps = vocab_size, num_steps
        self.device = cache.tensors[0].device
        self.graphs: StepGraphs | None = None
        self.on_logits: LogitsObserver | None = None
        self.drops_rows = False
        self.keeps_rows_why: str | None = None
        whole = [spec for spec in builder.specs if spec.cascades]
        self.cascades = bool(whole) and builder.cascades_on_device and not cache.window_pool
        sizes = [math.prod(s.cache_shape(1, 1)) * s.cache_dtype.itemsize for s in whole]
        self._cascaded_bytes = max(sizes, default=0)  # of a token in a layer that sees all keys
        self._penalties: PenaltyState | None = None

    @property
    def _fields(self) -> dict[str, bool]:
        """Fields of `StepTensors` that the layers need."""
        windows, states = self.cache.window_pool is not None, self.cache.states
        kept = states is not None and states.keeps_rows
        return {"windows": windows, "states": states is not None, "kept": kept}

    def release(self) -> None:
        """Drop all graphs; `captured` captures anew."""
        if self.graphs is not None:
            self.graphs.release()

    def start_capturing(
        self,
        recorders: Mapping[CUDAGraphMode, Recorder],
        model: torch.nn.Module,
        keep_failures: bool,
    ) -> None:
        """From here on `graphs` captures what it is asked for; arguments: see `StepGraphs`."""
        self.graphs = StepGraphs(self.step, recorders, model, keep_failures)

    # -- called ------------------------------------------------------------------------------------

    def call(
        self,
        step: Rows,
        sampling: Sampling,
        *,
        logits: bool = True,
        logprobs: int = -1,
        edits: int = -1,
        last_R: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Launch a step as it is, without padding; returns its tensors on the device.

        `tokens` [1, R] int64 are those that were drawn, `logprobs` is that of `StepTensors`, and
        `scores` [R, 1 + k + M] int64 what `scored` gives of prompts, where one is scored.

        One a request; of requests with a draft one a row, where all have drafts of one length. None
        where no `logits` are wanted. `last_R`: tokens of the step before; see `take_tokens`.
        """
        query_len = step.query_len if step.num_draft else None
        counts = step.num_logits if logits else None
        tensors = StepTensors.allocate(
            step.num_tokens,
            len(step),
            self.max_blocks,
            self.device,
            query_len=query_len,
            logits=logits,
            logprobs=logprobs,
            edits=edits,
            vocab_size=self.vocab_size,
            num_rows=None if counts is None else int(counts.sum()),
            **self._fields,
        )
        self.fill(tensors, step, sampling)
        if last_R is not None:
            self.take_tokens(tensors, step, last_R)
        if step.embeds:
            rows_TD = self.inputs.model.get_input_embeddings()(tensors.device["input_ids"])[0]
            tensors.device["inputs_embeds"] = fill_embeds(rows_TD, step.embeds)[None]
        logits_RV = self._logits(tensors, metadata_now(self.builder, tensors))
        if counts is not None:
            tensors.device["scores"] = scored(logits_RV, *step.given())
            ends_S = to_device(counts.cumsum() - 1, self.device)
            logits_RV = logits_RV[ends_S]
        if logits:
            if self.on_logits is not None:
                self.on_logits(step, logits_RV)
            processed_RV = logits_RV
            if step.editing is Editing.CALLED:
                processed_RV = by_processors(logits_RV, step, tensors.device.get("allowed"))
            tokens_R = self._drawn(logits_RV, tensors, sampling, processed_RV)
            tensors.device["tokens"][0].copy_(tokens_R)
        return tensors.device

    def fill(self, tensors: StepTensors, step: Rows, kind: Sampling, *, edits: bool = True) -> None:
        """Bring a step into tensors, on the host and the device; `edits` False: they come later."""
        ids = [request.id for request in step.requests]
        tables = [(blocks, blocks.find(ids)) for blocks in self.blocks]
        tensors.fill(step, tables, self.cache.block_size)
        if edits:
            tensors.fill_edits(step)
        tensors.upload(edits=edits)
        self.advance_states(step, 1)
        if kind is Sampling.PENALIZED:
            rows = [(s.request, s.draft[:n]) for s in step for n in range(len(s.draft) + 1)]
            state = self._penalties_of(tensors)
            state.rebuild([r.prompt for r, _ in rows], [[*r.token_ids, *d] for r, d in rows])

    def advance_states(self, step: Rows, num_steps: int) -> None:
        """Note, before a launch, which tokens states have seen after `num_steps` of the step."""
        if self.cache.states is not None:
            advance_states(step, num_steps)

    def shared_prefixes(self, step: Rows) -> SharedPrefixes | None:
        """Those of decodes that are worth to be attended to apart."""
        if not self.cascades or step.query_len != 1:
            return None
        size = self.cache.block_size
        return shared_prefixes(step, self.blocks[0], size, self._cascaded_bytes)

    def take_tokens(self, tensors: StepTensors, step: Rows, last_R: torch.Tensor) -> None:
        """Behind `fill`: rows whose tokens the host does not know take them from `last_R`."""
        if step.takes_tokens:
            take_tokens(tensors.device, last_R)

    # -- captured ----------------------------------------------------------------------------------

    def launch(self, captured: CapturedStep, num_steps: int = 1) -> None:
        """`StepGraphs.replay`, so many times; where edits come late, `finish` follows."""
        assert self.graphs is not None, "a step is replayed only while there are graphs"
        for i in range(num_steps):
            self.graphs.replay(captured, weights=i == 0)

    def finish(self, captured: CapturedStep, step: Rows | None = None) -> None:
        """What follows the logits of a step whose edits come late; `step`: they come now."""
        assert self.graphs is not None, "a step is replayed only while there are graphs"
        if step is not None:
            captured.tensors.fill_edits(step)
            captured.tensors.upload_edits()
        self.graphs.finish(captured)

    def step(self, key: BatchDescriptor) -> Step:
        """A step of padding, on new tensors."""
        tensors = StepTensors.allocate(
            key.num_tokens,
            key.num_reqs,
            self.max_blocks,
            self.device,
            query_len=key.query_len,
            num_steps=self.num_steps if key.query_len == 1 else 1,
            logits=key.logits,
            logprobs=key.logprobs,
            edits=key.edits,
            vocab_size=self.vocab_size,
            **self._fields,
        )
        longest = key.query_len or key.num_tokens
        common = tensors.common(longest, self.max_tokens, on_host=False)
        kind, run = key.sampling, functools.partial(self._run, tensors, key, common)
        kept: list[torch.Tensor] = []  # logits between two graphs

        def keep(metadata: AttentionMetadata | None) -> torch.Tensor:
            kept[:] = [run(metadata)]
            return kept[0]

        def rest(_: AttentionMetadata | None) -> torch.Tensor:
            self._finish(kept[0], tensors, key)
            return kept[0]

        return Step(
            key,
            tensors,
            common,
            self.cache,
            self._penalties_of(tensors) if kind is Sampling.PENALIZED else None,
            run=keep if key.late_edits else run,
            draw=lambda logits: self._sampled(self._edited(logits, tensors), tensors, kind),
            rest=rest if key.late_edits else None,
        )

    # -- a step ------------------------------------------------------------------------------------

    def _run(
        self,
        tensors: StepTensors,
        key: BatchDescriptor,
        common: CommonAttentionMetadata,
        metadata: AttentionMetadata | None,
    ) -> torch.Tensor:
        """Metadata to tokens, and of a decode step the next one's inputs; the logits [R, V].

        Where edits come late, no further than the logits: `_finish` is the other graph.
        """
        if metadata is None and key.groups:
            metadata = self.builder.build_cascade(common, *tensors.groups(key.groups))
        elif metadata is None:
            metadata = self.builder.build_for_cudagraph_capture(common)
        logits_RV = self._logits(tensors, metadata)
        if key.logits and not key.late_edits:
            self._finish(logits_RV, tensors, key)
        return logits_RV

    def _finish(self, logits_RV: torch.Tensor, tensors: StepTensors, key: BatchDescriptor) -> None:
        """Logits to tokens, and of a decode step the next one's inputs."""
        tokens_R = self._drawn(logits_RV, tensors, key.sampling)
        if key.query_len != 1:
            tensors.device["tokens"][0].copy_(tokens_R)
            return
        if key.sampling is Sampling.PENALIZED:
            self._penalties_of(tensors).update(tokens_R, tensors.device["active"])
        finish_step(tokens_R, tensors.device, self.cache.block_size)

    def _logits(self, tensors: StepTensors, metadata: AttentionMetadata) -> torch.Tensor:
        inputs = self.inputs(tensors.device, metadata, self.cache.tensors, self.cache.states)
        compiled = "input_ids" in inputs  # with embeddings Dynamo would compile once more
        model = self.model if compiled else self.inputs.model
        try:
            with calls(captures=self.graphs is not None, invariant=self.batch_invariant):
                logits_1RV = model(**inputs).logits
        except (Unsupported, FailOnRecompileLimitHit) as error:
            raise untraced(self.model, error) from error
        check_logits(logits_1RV, tensors.num_rows)
        return logits_1RV[0]

    def _drawn(
        self,
        logits_RV: torch.Tensor,
        tensors: StepTensors,
        kind: Sampling,
        processed_RV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A token a row; log-probabilities are kept where the step's tensors have room for them.

        `processed_RV`: what a caller's processors made of the model's logits.
        """
        edited_RV = self._edited(logits_RV if processed_RV is None else processed_RV, tensors)
        tokens_R = self._sampled(edited_RV, tensors, kind)
        ring_NRK = tensors.device.get("logprobs")
        if ring_NRK is not None:
            if self.logprobs_mode == "processed_logprobs":
                fields = tensors.sampling()
                state = self._penalties_of(tensors) if kind is Sampling.PENALIZED else None
                logits_RV = processed(edited_RV, fields, kind, state)
                logits_RV = at_temperature(logits_RV, fields["temperature"])
            found_RK = packed(log_probs(logits_RV, tokens_R, ring_NRK.shape[2] - 1))
            row = tensors.device["step"] % ring_NRK.shape[0]
            ring_NRK.index_copy_(0, row, found_RK.unsqueeze(0))
        return tokens_R

    def _edited(self, logits_RV: torch.Tensor, tensors: StepTensors) -> torch.Tensor:
        if self._logits_function is not None:
            logits_RV = self._by_function(logits_RV, tensors)
        edits = tensors.edits()
        if edits is None:
            return logits_RV
        return edited(logits_RV, edits, self._positions(tensors))

    def _by_function(self, logits_RV: torch.Tensor, tensors: StepTensors) -> torch.Tensor:
        assert self._logits_function is not None, "there is one"
        tokens_R = tensors.device["input_ids"][0]
        if tensors.query_len is None:
            tokens_R = tokens_R[(tensors.device["query_start_loc"][1:] - 1).clamp(min=0)]
        state = {"positions": self._positions(tensors), "tokens": tokens_R}
        keeps = "logprobs" in tensors.device  # log-probabilities are those of the model
        found_RV = self._logits_function(logits_RV.clone() if keeps else logits_RV, state)
        if getattr(found_RV, "shape", None) != logits_RV.shape:
            raise ValueError(
                f"logits_function must return logits {list(logits_RV.shape)}, "
                f"got {getattr(found_RV, 'shape', found_RV)!r:.80}"
            )
        return found_RV

    def _sampled(
        self, logits_RV: torch.Tensor, tensors: StepTensors, kind: Sampling
    ) -> torch.Tensor:
        """A token a row: the one that follows the row's tokens in the cache."""
        if kind is Sampling.GREEDY:
            return argmax(logits_RV)
        state = self._penalties_of(tensors) if kind is Sampling.PENALIZED else None
        return sample(logits_RV, tensors.sampling(), self._positions(tensors), kind, state)

    def _positions(self, tensors: StepTensors) -> torch.Tensor:
        """[R] int64: index of the drawn token in its sequence."""
        if tensors.query_len is not None and tensors.query_len > 1:
            return tensors.device["position_ids"][0] % SHIFT + 1
        return tensors.device["seq_lens"].long()

    def _penalties_of(self, tensors: StepTensors) -> PenaltyState:
        """Counts of the rows that a step draws, in memory that all steps share."""
        number = tensors.device["tokens"].shape[1]
        if self._penalties is None:
            size = self.max_batch_size + 1  # a mixed step's padding request is one more
            size = max(size, self.max_batch_size * self.max_query_len)
            self._penalties = PenaltyState.allocate(size, self.vocab_size, self.device)
        return self._penalties.view(number)

    # -- compiling ---------------------------------------------------------------------------------

    def compile(self, first_call: Callable[..., Any]) -> float:
        """Call the model once on padding rows, every size that changes between steps dynamic.

        `first_call(input_ids=, position_ids=, slot_mapping=, logits_to_keep=, kv_caches=)` is a
        context manager that tells Dynamo so. Returns seconds.
        """
        begin = time.perf_counter()
        tensors = StepTensors.allocate(17, 5, self.max_blocks, self.device, **self._fields)
        tensors.upload()
        # Clones, because Dynamo guards on the base of a view.
        tensors.device.update({name: t.clone() for name, t in tensors.device.items()})
        device = tensors.device
        batch: dict[str, Any] = {name: device[name] for name in ("input_ids", "position_ids")}
        batch["slot_mapping"] = slots_of(device)
        metadata = self.builder.build(0, tensors.common(17, 1))
        batch["kv_caches"] = self.cache.tensors
        if self.cache.states is not None:
            batch["states"] = list(self.cache.states.tensors.values())
            names = (*OF_STATES, "kept_slots")
            batch["of_requests"] = [device[name] for name in names if name in device]
        with first_call(**batch, logits_to_keep=device["logits_indices"]):
            self._logits(tensors, metadata)
        self.drops_rows = metadata.has_logits_rows and self._runs_without_logits()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _runs_without_logits(self) -> bool:
        """Whether the model takes a step that wants no row's logits; not all take empty tensors."""
        more = {"logits": False, **self._fields}
        tensors = StepTensors.allocate(17, 5, self.max_blocks, self.device, **more)
        tensors.upload()
        try:
            self._logits(tensors, self.builder.build(0, tensors.common(17, 1)))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.keeps_rows_why = f"chunks of prompts compute a row of logits a request: {error}"
            logger.warning(self.keeps_rows_why)
            return False
        return True
