"""What `benchmarks.attention` measures at one shape: every backend, and its library by hand.

All runs of a shape are prepared first and then take turns, so that a drifting clock meets the
operator, the library and the other backends alike. A decode's graph holds so many layers that its
launch weighs nothing.
"""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import attn_ops
from attn_ops import AttentionSpec, Backend, get_backend
from attn_ops.backends.measure import (
    Layers,
    MeasuredShape,
    Step,
    interleaved_us,
    l2_bytes,
    make_layers,
    make_step,
    repeat_layers,
)
from benchmarks.direct import DIRECT, Attend
from benchmarks.harness import brief, free
from graphs.app.bench import shape_of

L2_BYTES = 50 << 20  # of an H200
UNLIMITED = ("AUTO", "FLASH_ATTN", "TRITON", "FLASHINFER")
"""Never skipped for compiling long: the bars need the first three, and FlashInfer without its
jit-cache compiles CUDA for minutes, but once."""

Interval = Callable[[Callable[[], object]], float]


@dataclasses.dataclass(frozen=True)
class Case:
    """Equal requests: decodes, as `64x8192`, or one prompt, as `2048`."""

    name: str
    shape: MeasuredShape

    @classmethod
    def parse(cls, text: str) -> "Case":
        return cls(text, shape_of(text))

    @property
    def kind(self) -> str:
        return "decode" if "x" in self.name else "prefill"

    def kv_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of the keys and values that a layer reads."""
        item = torch.empty(0, dtype=spec.cache_dtype).itemsize
        return (
            2 * self.shape.num_reqs * self.shape.seq_len * spec.num_kv_heads * spec.head_size * item
        )

    def flops(self, spec: AttentionSpec) -> int:
        """Operations of both products over the visible pairs of query and key."""
        queries, keys = self.shape.query_len, self.shape.seq_len
        pairs = self.shape.num_reqs * (queries * keys - queries * (queries - 1) // 2)
        return 4 * spec.head_size * spec.num_heads * pairs


@dataclasses.dataclass
class Row:
    """One backend at one shape; times are microseconds a layer."""

    dtype: str
    shape: str
    kind: str
    backend: str
    default: bool = False  # `select_backend` chooses it
    quantizes_query: bool = False
    layers: int = 0
    captured: bool = False
    runs: str | None = None  # the backend that was chosen for this batch, where it is another
    ours_us: float | None = None
    direct_us: float | None = None
    planned_us: float | None = None  # ours, the plan's kernels in the graph, once for all layers
    ratio: float | None = None  # direct / ours
    percent: float | None = None  # of copy bandwidth (decode) or matmul rate (prefill)
    difference: float | None = None  # of ours and direct on layer 0: norm by norm
    reason: str | None = None  # why there is no `ours_us`
    direct_reason: str | None = None  # why there is no `direct_us`, or what is doubtful about it


@dataclasses.dataclass
class Setting:
    """What does not change between shapes."""

    names: Sequence[str]
    block_size: int
    device: torch.device
    rounds: int
    interval: Interval
    bytes_per_second: float
    flops_per_second: float
    prepare_seconds: (
        float  # a backend may spend this much on compiling; then its shapes are skipped
    )
    spent: dict[str, float] = dataclasses.field(default_factory=dict)


def bytes_of_layers(case: Case, spec: AttentionSpec, device: torch.device) -> int:
    """Bytes of caches that outgrow the L2 cache three times, at most half of the free memory.

    Decodes read 4 GiB, which takes more than a millisecond, or 64 layers: in a shorter graph what a
    replay costs once would weigh in. Prefills take that long anyway.
    """
    if device.type != "cuda":
        return 0
    wanted = 3 * max(L2_BYTES, l2_bytes(device))
    if case.kind == "decode":
        wanted = max(wanted, min(4 << 30, 64 * case.kv_bytes(spec)))
    return min(wanted, torch.cuda.mem_get_info(device)[0] // 2)


def measure_case(
    case: Case, dtype: str, spec: AttentionSpec, default: str | None, setting: Setting
) -> list[Row]:
    """All backends at one shape."""
    device = setting.device
    num_bytes = bytes_of_layers(case, spec, device)
    rows = [Row(dtype, case.name, case.kind, n, default=n == default) for n in setting.names]
    try:
        layers = make_layers(spec, case.shape.lengths(), setting.block_size, device, num_bytes)
    except Exception as error:  # out of memory, most likely
        for row in rows:
            row.reason = brief(error)
        return rows
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for row in rows:
        began = time.perf_counter()
        runs |= {(row.backend, k): run for k, run in prepare(row, layers, setting).items()}
        took = time.perf_counter() - began
        setting.spent[row.backend] = setting.spent.get(row.backend, 0.0) + took
    keyed = {f"{name} {kind}": run for (name, kind), run in runs.items()}
    try:
        times = interleaved_us(keyed, setting.rounds, setting.interval)
    except Exception as error:  # one run spoils the round of all: none of the times is whole
        for row in rows:
            row.reason = row.reason or brief(error)
        return rows
    for row in rows:
        fill(row, times, case, spec, setting)
    return rows


def prepare(row: Row, layers: Layers, setting: Setting) -> dict[str, Callable[[], object]]:
    """The runs of one backend, by kind, warmed up; what cannot run leaves its reason in `row`."""
    spent = setting.spent.get(row.backend, 0.0)
    if spent > setting.prepare_seconds and row.backend not in UNLIMITED:
        row.reason = f"skipped: it has compiled for {spent:.0f} s (--prepare-seconds)"
        return {}
    runs: dict[str, Callable[[], object]] = {}
    try:
        backend = get_backend(row.backend)
        reasons = backend.reasons_against(layers.spec, setting.block_size, setting.device)
        if reasons:
            row.reason = "; ".join(reasons)
            return {}
        step = make_step(backend, layers)
        chosen = step.meta.backend
        row.runs = chosen.name if chosen.name != row.backend else None
        fp8 = layers.spec.kv_cache_dtype != "auto"
        row.quantizes_query = fp8 and chosen.support.quantizes_query
        out = layers.attend(step.meta, 0).clone()
        row.layers, row.captured = len(layers.caches), step.captured
        ours = lambda layer: layers.attend(step.meta, layer)  # noqa: E731
        runs["ours"] = warmed(layers, ours, step.captured, setting)
    except Exception as error:
        row.reason = brief(error)
        free()
        return {}
    if step.captured and plans_on_device(step):
        with contextlib.suppress(Exception):  # a plan that cannot be captured has no such figure
            runs["planned"] = warmed_plan(layers, step, setting)
    try:
        runs |= prepare_direct(row, layers, out, setting)
    except Exception as error:
        row.direct_reason = brief(error)
        free()
    return runs


def prepare_direct(
    row: Row, layers: Layers, out: torch.Tensor, setting: Setting
) -> dict[str, Callable[[], object]]:
    """The library by hand, in the same kind of run; compared with the operator's output."""
    if row.backend not in DIRECT:
        return {}
    attend: Attend = DIRECT[row.backend](layers, row.captured)
    by_hand = attend(0).reshape(out.shape).float()
    row.difference = ((by_hand - out.float()).norm() / by_hand.norm()).item()
    if not row.difference < 0.05:
        row.direct_reason = f"its output differs from the operator's by {row.difference:.1%}"
    return {"direct": warmed(layers, attend, row.captured, setting)}


def warmed(
    layers: Layers, attend: Callable[[int], object], captured: bool, setting: Setting
) -> Callable[[], object]:
    """All layers, after two runs that must not raise."""
    run = repeat_layers(layers, attend, captured)
    for _ in range(2):
        setting.interval(run)
    return run


def plans_on_device(step: Step) -> bool:
    """Whether the metadata holds a plan that a captured step would compute anew.

    Of a geometry, that is: backends keep other things there besides.
    """
    plans = step.meta.plans.items()
    planned = any(isinstance(k, AttentionSpec) and plan is not None for k, plan in plans)
    return planned and not step.builder.plans_on_host


def warmed_plan(layers: Layers, step: Step, setting: Setting) -> Callable[[], object]:
    """All layers behind one build of the metadata, as a model's step has it."""
    held: dict[str, Any] = {}

    def attend(layer: int) -> torch.Tensor:
        if layer == 0:
            held["meta"] = step.builder.build_for_cudagraph_capture(layers.common)
        return layers.attend(held["meta"], layer)

    return warmed(layers, attend, True, setting)


def fill(
    row: Row, times: dict[str, float], case: Case, spec: AttentionSpec, setting: Setting
) -> None:
    """Times of all layers into a row's figures of one layer."""
    for kind in ("ours", "direct", "planned"):
        total = times.get(f"{row.backend} {kind}")
        if total is not None:
            setattr(row, f"{kind}_us", total / row.layers)
    if row.ours_us is None:
        return
    if row.direct_us is not None:
        row.ratio = row.direct_us / row.ours_us
    per_second = 1e6 / row.ours_us
    if case.kind == "decode":
        row.percent = 100 * case.kv_bytes(spec) * per_second / setting.bytes_per_second
    else:
        row.percent = 100 * case.flops(spec) * per_second / setting.flops_per_second


def host_us(
    calls: dict[str, Callable[[], object]], device: torch.device, num_calls: int, group: int = 50
) -> dict[str, float]:
    """Median microseconds until a call returns, in groups; between groups the queue drains."""

    def interval(run: Callable[[], object]) -> float:
        begin = time.perf_counter_ns()
        for _ in range(group):
            run()
        took = time.perf_counter_ns() - begin
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return took / 1000 / group

    for call in calls.values():
        interval(call)
    enabled = gc.isenabled()
    gc.disable()
    try:
        return interleaved_us(calls, max(1, num_calls // group), interval)
    finally:
        if enabled:
            gc.enable()


def measure_overhead(
    name: str, dtype: str, spec: AttentionSpec, num_calls: int, setting: Setting
) -> dict[str, Any]:
    """Host microseconds of one eager call, one decode of 128 tokens: the operator, the library."""
    row: dict[str, Any] = {"dtype": dtype, "backend": name}
    try:
        backend: Backend = get_backend(name)
        reasons = backend.reasons_against(spec, setting.block_size, setting.device)
        if reasons:
            return row | {"reason": "; ".join(reasons)}
        layers = make_layers(spec, ((1,), (128,)), setting.block_size, setting.device, 0)
        builder = backend.builder(backend, [spec], setting.block_size, setting.device)
        meta = builder.build(0, layers.common)
        q, cache, scale = layers.queries[0], layers.caches[0], layers.scale
        options = {name: value for name, value in layers.options.items() if value is not None}
        calls: dict[str, Callable[[], object]] = {
            "ours_us": lambda: attn_ops.attention(q, cache, meta, scale, **options)
        }
        calls["ours_us"]()
    except Exception as error:
        return row | {"reason": brief(error)}
    try:
        if name in DIRECT:
            attend = DIRECT[name](layers, False)
            attend(0)
            calls["direct_us"] = lambda: attend(0)
    except Exception as error:
        row["direct_reason"] = brief(error)
    row |= host_us(calls, setting.device, num_calls)
    if "direct_us" in row:
        row["difference_us"] = row["ours_us"] - row["direct_us"]
    return row
