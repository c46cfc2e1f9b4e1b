"""Times backends against each other: what `select_backend(measure=True)` chooses by.

Every candidate runs the same layers: distinct caches and queries, as many as outgrow the device's
L2 cache twice, because a model's next layer never finds its keys there. Where the backend allows
it the layers run in one CUDA graph, so that what is compared is the device's time. Candidates take
turns, round by round, and a drifting clock meets them all.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size, S requests.
"""

import contextlib
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attn_ops.backends.base import Backend
from attn_ops.block_layout import BlockLayout, BlocksparseParams, BlockTables, local_strided
from attn_ops.metadata import (
    KV_CACHE_DTYPES,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
)
from attn_ops.metadata.features import FEATURES, PER_HEAD

ROUNDS = {"cuda": 20, "cpu": 3}

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""Query lengths and sequence lengths of a batch's requests."""


@dataclasses.dataclass(frozen=True)
class MeasuredShape:
    """A batch of equal requests, to time backends on."""

    num_reqs: int
    query_len: int  # new tokens of each request
    seq_len: int  # tokens in the cache of each request, the new ones included

    def lengths(self) -> Lengths:
        return (self.query_len,) * self.num_reqs, (self.seq_len,) * self.num_reqs


DEFAULT_SHAPES = {
    "cuda": (MeasuredShape(32, 1, 2048), MeasuredShape(1, 2048, 2048)),
    "cpu": (MeasuredShape(2, 1, 64), MeasuredShape(1, 32, 32)),
}
"""A decode and a prefill; small on a CPU, where kernels run interpreted."""

Shape = MeasuredShape | tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Microseconds a layer, by backend, one for each shape; and who could not be timed, and why."""

    times: dict[str, list[float]]
    failed: dict[str, str]

    def fastest(self) -> str:
        """The least sum over the shapes of time by the shape's best time."""
        best = [min(column) for column in zip(*self.times.values(), strict=True)]
        return min(
            self.times,
            key=lambda name: sum(t / b for t, b in zip(self.times[name], best, strict=True)),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """One batch over several layers of one geometry, each with a cache and queries of its own."""

    spec: AttentionSpec
    block_size: int
    common: CommonAttentionMetadata
    queries: list[torch.Tensor]  # each [T, N, H]; of latent attention [T, N, P + R]
    caches: list[torch.Tensor]  # each [P, 2, B, K, H]; of latent attention [P, B, Lkv + R]
    options: dict[str, Any]  # keywords of the operator
    weights: list[torch.Tensor] = dataclasses.field(default_factory=list)  # kv_b, of latent ones

    @property
    def scale(self) -> float:
        return self.queries[0].shape[2] ** -0.5

    def attend(self, meta: AttentionMetadata, layer: int) -> torch.Tensor:
        """The operator on one layer."""
        arguments = (self.queries[layer], self.caches[layer], meta)
        if self.spec.latent is not None:
            return torch.ops.attn_ops.mla_attention(
                *arguments, self.weights[layer], self.scale, **self.options
            )
        return torch.ops.attn_ops.attention(*arguments, self.scale, **self.options)


def l2_bytes(device: torch.device) -> int:
    """Bytes of the device's L2 cache; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).L2_cache_size


def make_layers(
    spec: AttentionSpec, lengths: Lengths, block_size: int, device: torch.device, min_bytes: int
) -> Layers:
    """Random layers, at least two, whose caches together hold more than `min_bytes`."""
    query_lens, seq_lens = lengths
    generator = torch.Generator(device).manual_seed(0)  # the caller's own stays as it is
    width = max(1, -(-max(seq_lens) // block_size))
    num_blocks = len(seq_lens) * width + 1
    owned = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    common = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, owned.int().view(len(seq_lens), width), block_size, device
    )
    if not spec.causal:
        common = common.replace(causal=False)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=spec.dtype, device=device)

    def cache() -> torch.Tensor:
        values = randn(*spec.cache_shape(num_blocks, block_size))
        fp8 = KV_CACHE_DTYPES[spec.kv_cache_dtype]
        return values if fp8 is None else values.to(fp8).view(torch.uint8)  # no random NaNs

    caches = [cache()]
    caches += [cache() for _ in range(max(1, min_bytes // caches[0].nbytes))]
    latent = spec.latent
    columns = spec.head_size if latent is None else latent.qk_head_dim
    queries = [randn(sum(query_lens), spec.num_heads, columns) for _ in caches]
    weights = []
    if latent is not None:
        rows = spec.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        weights = [randn(rows, latent.kv_lora_rank) for _ in caches]
    options = layer_options(spec, device, max(seq_lens))
    return Layers(spec, block_size, common, queries, caches, options, weights)


def layer_options(spec: AttentionSpec, device: torch.device, max_seq_len: int) -> dict[str, Any]:
    """Keywords of the operator that make a layer of geometry `spec`."""
    if spec.latent is not None:
        return {"v_head_dim": spec.latent.v_head_dim, "kv_cache_dtype": spec.kv_cache_dtype}
    options: dict[str, Any] = {f.name: getattr(spec, f.declared) for f in FEATURES}
    options["kv_cache_dtype"] = spec.kv_cache_dtype
    if spec.attention_chunk_size is not None:
        options["attention_chunk_size"] = spec.attention_chunk_size
    head_N = torch.arange(1, spec.num_heads + 1, dtype=torch.float32, device=device)
    small_N = torch.exp2(-8 * head_N / spec.num_heads)  # values do not change how long it takes
    if spec.blocksparse is not None:
        layout = default_layout(spec, max_seq_len)
        options["block_layout"] = BlockTables(layout).to(device).tensors()
    return options | {f.name: small_N if options[f.name] else None for f in PER_HEAD}


def default_layout(spec: AttentionSpec, max_seq_len: int) -> BlockLayout:
    """What a block-sparse layer is timed with, as its spec has no layout: that of Phi-3-small."""
    assert spec.blocksparse is not None, "asked for block-sparse layers only"
    return local_strided(
        BlocksparseParams(
            max(max_seq_len, 1), spec.num_heads, spec.num_kv_heads, spec.blocksparse, 16, 8
        )
    )


def capture_metadata(
    builder: AttentionMetadataBuilder, common: CommonAttentionMetadata
) -> AttentionMetadata:
    """Metadata for a captured step, made outside the graph."""
    prepared = builder.prepare_capture(common)
    return builder.build_for_cudagraph_capture(common) if prepared is None else prepared


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A backend's metadata for one batch, and whether its layers run as a CUDA graph."""

    builder: AttentionMetadataBuilder
    meta: AttentionMetadata
    captured: bool


def make_step(backend: Backend, layers: Layers) -> Step:
    """Build a backend's metadata; captured on a GPU where the backend takes the batch."""
    common, device = layers.common, layers.common.device
    builder = backend.builder(backend, [layers.spec], layers.block_size, device)
    captured = device.type == "cuda" and backend.support.cudagraph.takes(common)
    meta = capture_metadata(builder, common) if captured else builder.build(0, common)
    return Step(builder, meta, captured)


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """Replays of `run` as a CUDA graph, after one call outside of it that compiles the kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()

    def replay() -> None:
        """Holds `run` too: what it refers to is memory that the graph reads."""
        assert run is not None
        graph.replay()

    return replay


def runner(backend: Backend, layers: Layers) -> Callable[[], object]:
    """All layers by the operator: a replay where the backend can be captured, else calls."""
    step = make_step(backend, layers)
    return repeat_layers(layers, lambda layer: layers.attend(step.meta, layer), step.captured)


def repeat_layers(
    layers: Layers, attend: Callable[[int], object], captured: bool
) -> Callable[[], object]:
    """`attend` on every layer in turn, as a CUDA graph of the layers' device or as it is."""

    def run() -> None:
        for layer in range(len(layers.caches)):
            attend(layer)

    if not captured:
        return run
    with on(layers.common.device):
        return capture(run)


def on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current one: streams, captures and kernels of Triton go there."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def interval_us(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one call: of the device's work on a GPU, else until it returns."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begin)
    with on(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def interleaved_us(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    interval: Callable[[Callable[[], object]], float],
) -> dict[str, float]:
    """Median microseconds of each; in every round each runs once, so that drift meets them all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(interval(run))
    return {name: statistics.median(taken) for name, taken in times.items()}


def check_shapes(shapes: Sequence[Shape] | None, device: torch.device) -> list[Lengths]:
    """The shapes as lengths; the device's default ones for None.

    Raises:
        ValueError: one is no batch.
    """
    if shapes is None:
        shapes = DEFAULT_SHAPES.get(device.type, DEFAULT_SHAPES["cpu"])
    checked = []
    for shape in shapes:
        try:
            pair = shape.lengths() if isinstance(shape, MeasuredShape) else shape
            query_lens, seq_lens = (tuple(int(n) for n in lens) for lens in pair)
        except (TypeError, ValueError):
            query_lens, seq_lens = (), ()
        fits = len(query_lens) == len(seq_lens) > 0
        if not fits or any(not 0 < q <= s for q, s in zip(query_lens, seq_lens, strict=True)):
            raise ValueError(
                "shapes must be batches of queries of at least 1 token and at most their "
                f"sequence's, got {shape!r}; supported: MeasuredShape, (query_lens, seq_lens)"
            )
        checked.append((query_lens, seq_lens))
    if not checked:
        raise ValueError("shapes must hold at least one batch, got none")
    return checked


def describe(lengths: Lengths) -> str:
    """A batch in few words, as `Selection.why` names it."""
    query_lens, seq_lens = lengths
    query, seq = max(query_lens), max(seq_lens)
    equal = min(query_lens) == query and min(seq_lens) == seq
    return f"{len(query_lens)} x {query} of {seq}" + ("" if equal else " at most")


def measure(
    backends: Sequence[Backend],
    specs: Sequence[AttentionSpec],
    block_size: int,
    device: torch.device,
    shapes: Sequence[Lengths],
) -> Measurement:
    """Time all backends on all shapes; a model's time is the mean over its layers.

    A backend that raises on one shape is out, with the reason; it does not stop the others.
    """
    counts = Counter(specs)
    failed: dict[str, str] = {}
    times: dict[str, list[float]] = {backend.name: [0.0] * len(shapes) for backend in backends}
    for place, lengths in enumerate(shapes):
        for spec, count in counts.items():
            alive = [b for b in backends if b.name not in failed]
            with on(device):
                taken = _time_layers(alive, spec, lengths, block_size, device, failed)
            for name, microseconds in taken.items():
                times[name][place] += microseconds * count / len(specs)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the graphs' pools serve nobody else
    return Measurement({n: t for n, t in times.items() if n not in failed}, failed)


def _time_layers(
    backends: Sequence[Backend],
    spec: AttentionSpec,
    lengths: Lengths,
    block_size: int,
    device: torch.device,
    failed: dict[str, str],
) -> dict[str, float]:
    """Microseconds a layer of geometry `spec`, by backend; who raises goes to `failed`."""
    layers = make_layers(spec, lengths, block_size, device, 2 * l2_bytes(device))
    runs: dict[str, Callable[[], object]] = {}
    for backend in backends:
        try:
            run = runner(backend, layers)
            run()
            interval_us(run, device)
        except Exception as error:  # a library's own; the others can still be timed
            failed[backend.name] = f"{type(error).__name__}: {error}"
        else:
            runs[backend.name] = run
    rounds = ROUNDS.get(device.type, ROUNDS["cpu"])
    taken = interleaved_us(runs, rounds, lambda run: interval_us(run, device))
    return {name: total / len(layers.caches) for name, total in taken.items()}
