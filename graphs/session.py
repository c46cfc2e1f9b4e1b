"""`DecodeSession`: a Transformers model on a paged KV cache, decode steps captured whole.

add -> Scheduler.next_step -> StepTensors.fill, upload -> model, sampling -> Request.append
"""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from tqdm import tqdm

from attn_ops import (
    AttentionMetadata,
    CommonAttentionMetadata,
    PagedKVCache,
    select_backend,
)
from attn_ops.integrations.merged import check_merged
from attn_ops.integrations.transformers import attention_specs, check_lengths, dynamic_batch
from attn_ops.metadata import KVCacheLayoutType
from fx_passes.backend import start_compile_workers
from fx_passes.observe import Recorder, recorders, recording
from graphs.admission import check_positive, checked_request, stop_list
from graphs.batch import StepTensors
from graphs.capture import CUDARecorder, DecodeGraphs, GraphRecorder
from graphs.collector import paused_collector
from graphs.counters import CompileCounters
from graphs.modes import BatchDescriptor, CUDAGraphMode, checked_capture_sizes
from graphs.sampling import sample
from graphs.scheduler import Generation, Request, Scheduled, Scheduler, StepOutput
from graphs.step import ModelInputs, resolve_mode


class DecodeSession:
    """Continuous batching over one model, its paged KV cache and its captured decode steps.

    Args:
        model: a causal model of Transformers with
            `attn_implementation="attn_ops"`, compiled or not.
        max_batch_size: requests that run at a time; more wait.
        max_tokens: tokens of one request that the cache may hold; a longer prompt is refused.
        cudagraph_mode: see `CUDAGraphMode`. If it cannot be had, `graph_mode_why` says why.
        backend: an attention backend by name; None lets `select_backend` choose.
        block_size: tokens a block of the cache holds.
        cache_tokens: tokens the cache holds; default: every request of the batch at its longest.
        max_tokens_per_step: token budget of a step; longer prompts are computed in chunks.
        capture_sizes: captured batch sizes; default `default_capture_sizes(max_batch_size)`.
        seed: of the random numbers that sampling draws.
        kv_cache_dtype: auto, the model's; or fp8_e4m3, fp8_e5m2, scaled by the [1] float32 tensors
            `k_scale` and `v_scale` that attention modules may have.
        cache_layout: of `PagedKVCache`.

    Attributes:
        backend_selection: the backend, why, and the reasons against the others.
        graph_mode: the mode in use; `graph_mode_why` says why where it is not the one asked for.
        compile_record: what the passes did when the model was compiled.

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
        backend: str | None = None,
        block_size: int = 16,
        cache_tokens: int | None = None,
        max_tokens_per_step: int = 2048,
        capture_sizes: Sequence[int] | None = None,
        seed: int = 0,
        kv_cache_dtype: str = "auto",
        cache_layout: KVCacheLayoutType | None = None,
    ) -> None:
        check_positive(max_batch_size=max_batch_size, max_tokens=max_tokens)
        check_positive(max_tokens_per_step=max_tokens_per_step, block_size=block_size)
        self.graph_mode_asked = mode = CUDAGraphMode.parse(cudagraph_mode)
        self.model = model
        self.original: Any = getattr(model, "_orig_mod", model)
        self.vocab_size = self.original.config.get_text_config().vocab_size
        self.device = next(self.original.parameters()).device
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        check_lengths(self.original, max_tokens)
        check_merged(self.original)
        self.specs = attention_specs(self.original, kv_cache_dtype)
        self.model_inputs = ModelInputs(self.original, kv_cache_dtype)
        self.backend_selection = select_backend(
            self.specs, block_size=block_size, device=self.device, backend=backend
        )
        chosen = self.backend_selection.backend
        self.builder = chosen.builder(chosen, self.specs, block_size, self.device)
        tokens_per_request = math.ceil(max_tokens / block_size) * block_size
        if cache_tokens is None:
            cache_tokens = max_batch_size * tokens_per_request
        self.cache = PagedKVCache(
            self.specs,
            num_tokens=cache_tokens,
            block_size=block_size,
            device=self.device,
            cache_layout=cache_layout,
        )
        self.max_blocks = tokens_per_request // block_size
        self.scheduler = Scheduler(self.cache, max_batch_size, max_tokens_per_step)
        self.capture_sizes = checked_capture_sizes(capture_sizes, max_batch_size)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.graph_mode, self.graph_mode_why = resolve_mode(mode, chosen, self.device)
        self.graphs = self._decode_graphs() if self.graph_mode is not CUDAGraphMode.NONE else None
        self.compile_record = Recorder()
        self.counters = CompileCounters()
        self.compile_seconds = 0.0
        self.num_steps = {"captured": 0, "called": 0}
        self._next_id = 0
        self._requests: dict[int, Request] = {}
        self._warm = False
        if self.device.type == "cuda":
            start_compile_workers()

    # -- requests ----------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        eos: int | Iterable[int] | None = None,
    ) -> int:
        """Queue a prompt; returns the request's id.

        Args:
            prompt: token ids, 1 to `max_tokens` of them.
            max_new_tokens: tokens to generate at most.
            temperature: 0 is greedy.
            eos: token or tokens that end the generation.

        Raises:
            ValueError: the prompt is empty, too long or holds an unknown token, the request can
                never fit into the cache, or a parameter is out of range. Nothing is queued.
        """
        request = self._request(prompt, max_new_tokens, temperature, eos)
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
        temperature: float = 0.0,
        eos: int | Iterable[int] | None = None,
    ) -> list[Generation]:
        """Generate for all prompts: one result a prompt, in order.

        Arguments and errors as in `add`. A prompt that is refused refuses the call before
        anything is queued.
        """
        eos = stop_list(eos)
        checked = [self._request(p, max_new_tokens, temperature, eos) for p in prompts]
        keywords = {"temperature": temperature, "eos": eos}
        ids = [self.add(request.prompt, max_new_tokens, **keywords) for request in checked]
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
        """Run one step of all running requests; returns their new tokens.

        Empty while prompts are computed only in part, and when nothing is
        left: `num_unfinished` tells.
        """
        self.warm_up()
        step = self.scheduler.next_step()
        if not step:
            return []
        decode = all(s.num_tokens == 1 and s.wants_token for s in step)
        bucket = next((size for size in self.capture_sizes if size >= len(step)), None)
        if self.graphs is not None and decode and bucket is not None:
            tokens = self._replay(step, bucket)
        else:
            tokens = self._call(step)
        return self._take(step, tokens.tolist())

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
        if self.graphs is not None:
            sizes = sorted(self.capture_sizes, reverse=True)
            for size in tqdm(sizes, desc="capture", disable=None, leave=False):
                with torch.no_grad():
                    self.graphs.get(BatchDescriptor(size, sampling=False))
        self._warm = True  # last: what was interrupted is done again

    def release(self) -> None:
        """Give captured graphs and their memory back; the session goes on uncaptured."""
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None
            self.graph_mode, self.graph_mode_why = CUDAGraphMode.NONE, "release() was called"

    # -- inside ------------------------------------------------------------------------------------

    def _request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        eos: int | Iterable[int] | None,
    ) -> Request:
        return checked_request(
            self._next_id,
            prompt,
            max_new_tokens,
            temperature,
            eos,
            vocab_size=self.vocab_size,
            max_tokens=self.max_tokens,
            cache_tokens=self.cache.num_usable_tokens,
        )

    def _decode_graphs(self, recorder: GraphRecorder | None = None) -> DecodeGraphs:
        return DecodeGraphs(
            run_step=self._run_captured,
            allocate=lambda num_reqs: StepTensors.allocate(
                num_reqs, num_reqs, self.max_blocks, self.device
            ),
            batch_of=lambda tensors: tensors.common(1, self.max_tokens, tensors.num_tokens),
            builder=self.builder,
            inputs=lambda: self.cache.tensors,
            recorder=recorder or CUDARecorder(self.generator),
        )

    def _run_captured(
        self,
        tensors: StepTensors,
        key: BatchDescriptor,
        common: CommonAttentionMetadata,
        metadata: AttentionMetadata | None,
    ) -> torch.Tensor:
        if metadata is None:
            metadata = self.builder.build_for_cudagraph_capture(common)
        return self._forward(tensors, metadata, not key.sampling)

    def _run(
        self, tensors: StepTensors, *, max_query_len: int, max_seq_len: int, greedy: bool
    ) -> torch.Tensor:
        """One step on the device, metadata to sampling: next tokens [S] int64."""
        common = tensors.common(max_query_len, max_seq_len, tensors.num_tokens)
        return self._forward(tensors, self.builder.build(0, common), greedy)

    def _forward(self, tensors: StepTensors, metadata: Any, greedy: bool) -> torch.Tensor:
        logits_SV = self._logits(tensors, metadata)
        return sample(logits_SV, tensors.device["temperature"], self.generator, greedy)

    def _logits(self, tensors: StepTensors, metadata: Any) -> torch.Tensor:
        inputs = self.model_inputs(tensors.device, metadata, self.cache.tensors)
        return self.model(**inputs).logits[0]

    def _replay(self, step: list[Scheduled], num_reqs: int) -> torch.Tensor:
        assert self.graphs is not None, "a step is replayed only while there are graphs"
        sampling = any(s.request.temperature > 0 for s in step)
        captured = self.graphs.get(BatchDescriptor(num_reqs, sampling))
        captured.tensors.fill(step, self._tables(step), self.cache.block_size)
        captured.tensors.upload()
        self.num_steps["captured"] += 1
        return self.graphs.replay(captured)[: len(step)]

    def _call(self, step: list[Scheduled]) -> torch.Tensor:
        num_tokens = sum(s.num_tokens for s in step)
        tensors = StepTensors.allocate(num_tokens, len(step), self.max_blocks, self.device)
        tensors.fill(step, self._tables(step), self.cache.block_size)
        tensors.upload()
        self.num_steps["called"] += 1
        with self.counters.watching():
            return self._run(
                tensors,
                max_query_len=max(s.num_tokens for s in step),
                max_seq_len=max(s.request.num_computed + s.num_tokens for s in step),
                greedy=all(s.request.temperature == 0 for s in step),
            )

    def _tables(self, step: list[Scheduled]) -> list[list[int]]:
        return [self.cache.blocks(s.request.id) for s in step]

    def _take(self, step: list[Scheduled], tokens: list[int]) -> list[StepOutput]:
        outputs = []
        for scheduled, token in zip(step, tokens, strict=True):
            request, wanted = scheduled.request, scheduled.wants_token
            request.num_computed += scheduled.num_tokens
            if not wanted:
                continue
            request.append(token)
            outputs.append(StepOutput(request.id, token, request.finish_reason))
            if request.finish_reason:
                self.scheduler.finish(request)
        return outputs

    def _compile_again(self) -> None:
        """Forget what was compiled and compile it anew; graphs are captured again when needed."""
        if self.graphs is not None:
            self.graphs.release()
        torch._dynamo.reset()
        self._compile()

    def _compile(self) -> None:
        """Call the model once on padding rows, every size that changes between steps dynamic."""
        begin = time.perf_counter()
        tensors = StepTensors.allocate(17, 5, self.max_blocks, self.device)
        tensors.upload()
        # Clones, because Dynamo guards on the base of a view.
        fresh = {name: t.clone() for name, t in tensors.device.items()}
        tensors = dataclasses.replace(tensors, device=fresh)
        batch = {name: fresh[name] for name in ("input_ids", "position_ids", "slot_mapping")}
        first_call = dynamic_batch(**batch, logits_to_keep=fresh["logits_indices"])
        with first_call, paused_collector(), torch.no_grad():
            self._run(tensors, max_query_len=1, max_seq_len=1, greedy=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.compile_seconds = time.perf_counter() - begin
