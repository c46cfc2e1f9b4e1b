"""One fuzz case run and judged, and many of them in worker processes that may crash.

T tokens, N query heads, H head size.
"""

import dataclasses
import multiprocessing
import queue
import time
from collections.abc import Iterator
from typing import Any

import torch

from attn_ops import (
    AttentionOptions,
    attention,
    attention_quant,
    get_backend,
    mla_attention,
    mla_attention_quant,
)
from attn_ops.metadata import LatentOptions
from attn_ops.ops.attention import attend
from attn_ops.ops.checks import layer_of
from attn_ops.output_quant.quantize import reference_quantize
from attn_ops.testing.quantized import nibble_steps, scale_steps
from benchmarks.fuzz_cases import Case, Geometry, draw_case, geometries_of
from benchmarks.fuzz_inputs import Inputs, make_inputs
from benchmarks.fuzz_oracle import oracle

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}
"""Relative error norm by the dtype of q, as in attn_ops/testing/features.py."""

LATENT_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""The same of latent attention: q through W_UK is rounded once more."""

QUANTIZED_QUERY = 6e-2
"""The same where the backend rounds q to FP8."""

ROW_FACTOR, ROW_FLOOR = 4, 0.02
"""A row may err by ROW_FACTOR of the tolerance times its norm and ROW_FLOOR of it per element."""

TOLD = 3
"""Exit status of a worker whose last outcome tells that it has lost the device."""

PATIENCE = 120
"""Seconds behind the deadline after which a worker is taken to hang."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run draws its cases from."""

    backends: tuple[str, ...]
    device: str
    num_geometries: int
    geometry_seed: int
    longest: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one case: ok, mismatch, stray, refused or error."""

    seed: int
    backend: str
    kind: str
    error: float = 0.0  # relative to the float64 oracle
    reason: str = ""
    case: str = ""  # its description, unless ok
    scheme: str = ""  # in which the output was compared too
    in_kernel: bool = False  # by the backend's own kernels, not by one behind them


class Fuzzer:
    """Draws and runs the cases of one configuration."""

    def __init__(self, config: Config) -> None:
        self.device, self.longest = torch.device(config.device), config.longest
        self.backends = [get_backend(name) for name in config.backends]
        self.geometries: dict[str, list[Geometry]] = {
            b.name: geometries_of(b, self.device, config.num_geometries, config.geometry_seed)
            for b in self.backends
        }

    def run(self, seed: int) -> Outcome:
        """Draw the case of `seed` and run it; whatever is raised becomes an outcome."""
        case = draw_case(seed, self.backends, self.geometries, self.longest)
        backend = next(b for b in self.backends if b.name == case.backend)
        error = 0.0
        try:
            inputs = make_inputs(case, backend, self.device)
            out, lse = _call(case, inputs)
            wrong = _wrong_quantized(case, inputs, out)
            kind, error, reason = _judge(case, inputs, out, lse, backend.support.quantizes_query)
            if kind == "ok" and wrong:
                kind, reason = "mismatch", wrong
        except ValueError as refused:
            kind, reason = "refused", str(refused)
        except Exception as failure:  # a run goes on, whatever a backend raises
            kind, reason = "error", f"{type(failure).__name__}: {failure}"
        described, how = "" if kind == "ok" else str(case), case.geometry.quant
        scheme = "" if how is None else how.scheme
        in_kernel = scheme in backend.support.output_quant
        return Outcome(seed, backend.name, kind, error, reason, described, scheme, in_kernel)


def _call(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The operator; with the log-sum-exp its parts, so that lse can stand among guards."""
    q, cache, meta, scale = inputs.q, inputs.kv_cache, inputs.meta, inputs.asked.scale
    if not case.geometry.lse:
        return _plain(inputs), None
    options = dict(inputs.options)
    if inputs.kv_b is not None:
        asked = LatentOptions(scale, inputs.kv_b, **options, lse=inputs.lse.tensor)
        out = meta.latent_layer(q, cache, asked).attend(q, cache, meta, asked)
    else:
        chunk = options.pop("attention_chunk_size", None)
        asked = AttentionOptions(scale, **options, lse=inputs.lse.tensor)
        out = attend(layer_of(q, cache, meta, asked, chunk), q, cache, meta, asked)
    lse = inputs.lse.tensor.clone()
    inputs.lse.tensor.copy_(inputs.lse.remembered())  # what is left to differ is around it
    inputs.watched["around lse"] = (inputs.lse.bytes, inputs.lse.before)
    return out, lse


def _plain(inputs: Inputs) -> torch.Tensor:
    operator = attention if inputs.kv_b is None else mla_attention
    return operator(*inputs.arguments, **inputs.options)


def _wrong_quantized(case: Case, inputs: Inputs, out: torch.Tensor) -> str:
    """What is wrong with the quantized output, beside `out`, the plain one; nothing if it is fine.

    Interpreted kernels cut bfloat16 where they store it and round it before they quantize it.
    """
    how = case.geometry.quant
    interpreted = case.backend in ("TRITON", "TRITON_MLA") and not out.is_cuda
    cuts = case.spec.dtype == torch.bfloat16 and interpreted
    if how is None or cuts or out.numel() == 0:
        return ""
    if case.geometry.lse:  # a backend may compute that in another way
        out = _plain(inputs)
    given = how.scheme in ("fp8_static", "nvfp4")
    out_scale = torch.tensor([20.0 if how.multiply else 0.03], device=out.device)
    fields = dataclasses.asdict(how) | {"out_scale": out_scale if given else None}
    operator = attention_quant if inputs.kv_b is None else mla_attention_quant
    got = operator(*inputs.arguments, **fields, **inputs.options)
    want = reference_quantize(out, how, out_scale if given else None)
    steps = nibble_steps if how.scheme == "nvfp4" else scale_steps
    values, scales = steps(got[0], want[0]), scale_steps(got[1], want[1])
    return "" if max(values, scales) <= 1 else f"{how}: {values} steps, scales {scales}"


def _judge(
    case: Case,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    quantized: bool,
) -> tuple[str, float, str]:
    """(kind, error, reason); the device is read once."""
    latent = case.spec.latent
    width = inputs.q.shape[2] if latent is None else latent.v_head_dim
    shape = (sum(case.query_lens) + case.num_padding_rows, inputs.q.shape[1], width)
    if out.shape != shape or out.dtype != case.spec.dtype or not out.is_contiguous():
        return "mismatch", 0.0, f"result is {out.dtype} {list(out.shape)}, {out.stride()}"
    tolerance = TOLERANCE[case.spec.dtype]
    if quantized and case.spec.kv_cache_dtype != "auto":
        tolerance = max(tolerance, QUANTIZED_QUERY)
    if case.prefix_blocks:
        tolerance = max(tolerance, 1e-6)  # merged by float32 weights, float64 too
    if latent is not None:
        tolerance = max(tolerance, LATENT_TOLERANCE.get(case.spec.dtype, 0.0))
    want, want_lse = oracle(*inputs.for_oracle(case), inputs.asked)
    want = want[..., :width]
    found = {f"{name} changed": flag for name, flag in inputs.changed().items()}
    num_stray = len(found)
    error, wrong = _wrong(out, want, sum(case.query_lens), tolerance)
    found |= wrong
    if lse is not None:
        found |= _wrong_lse(lse, want_lse, max(tolerance, 1e-5) * 3)
    numbers = torch.stack([error, *(flag.double() for flag in found.values())]).tolist()
    flags = dict(zip(found, numbers[1:], strict=True))
    reasons = [name for name, flag in flags.items() if flag]
    if not reasons:
        return "ok", numbers[0], ""
    stray = any(numbers[1 : 1 + num_stray])
    return "stray" if stray else "mismatch", numbers[0], "; ".join(reasons)


def _wrong(
    out: torch.Tensor, want: torch.Tensor, num_rows: int, tolerance: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The relative error, and by description whether the result is wrong in that way."""
    difference = (out.double() - want)[:num_rows]
    norm = want.norm()
    error = difference.norm() / norm.clamp(min=1e-30)
    row_T, want_T = difference.flatten(1).norm(dim=1), want[:num_rows].flatten(1).norm(dim=1)
    floor = ROW_FLOOR * tolerance * (out.shape[1] * out.shape[2]) ** 0.5
    nonzero_T = (out[:num_rows] != 0).flatten(1).any(dim=1)
    return error, {
        "not finite": ~out.isfinite().all(),
        f"error above {tolerance:.1e}": error > tolerance,
        "a row's error too large": (row_T > ROW_FACTOR * tolerance * want_T + floor).any(),
        "rows that see nothing are not zero": (nonzero_T & (want_T == 0)).any(),
        "padding rows are not zero": (out[num_rows:] != 0).any(),
    }


def _wrong_lse(lse: torch.Tensor, want: torch.Tensor, limit: float) -> dict[str, torch.Tensor]:
    seen = want.isfinite()
    off = (lse - want).abs() > limit + 1e-6 * want.abs()
    return {
        "lse is not -inf where nothing is seen": (~seen & (lse != float("-inf"))).any(),
        f"lse is off by more than {limit:.1e}": (seen & (off | ~lse.isfinite())).any(),
    }


def run_here(config: Config, seeds: list[int], deadline: float) -> Iterator[Outcome]:
    """One case after another in this process, until the deadline (`time.monotonic`)."""
    fuzzer = Fuzzer(config)
    for seed in seeds:
        if time.monotonic() > deadline:
            return
        yield fuzzer.run(seed)


def run_in_workers(
    config: Config, seeds: list[int], deadline: float, num_workers: int
) -> Iterator[Outcome]:
    """The seeds dealt out to processes; one that dies costs its case, and another goes on."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    left = deal(config, seeds, num_workers)
    alive = {w: _start(context, config, results, w, left[w], deadline) for w in left}
    died: dict[int, float] = {}
    while alive:
        try:
            worker, outcome = results.get(timeout=1)
        except queue.Empty:
            worker, outcome = -1, None
        if outcome is not None:
            left[worker].remove(outcome.seed)
            yield outcome
        elif worker >= 0:
            alive.pop(worker, None)  # it has run or skipped all that it had
        for worker in _lost(alive, died, deadline):
            process = alive.pop(worker)
            if process.exitcode and process.exitcode != TOLD and left[worker]:
                yield _crash(config, left[worker].pop(0), process.exitcode)
            if process.exitcode and left[worker]:
                alive[worker] = _start(context, config, results, worker, left[worker], deadline)


def _lost(alive: dict[int, Any], died: dict[int, float], deadline: float) -> list[int]:
    """Workers that died a while ago, so that all they said has been read; kills those that hang."""
    now, lost = time.monotonic(), []
    for worker, process in alive.items():
        if process.is_alive():
            if now > deadline + PATIENCE:
                process.kill()
        elif now > died.setdefault(worker, now) + 2:
            del died[worker]
            lost.append(worker)
    return lost


def deal(config: Config, seeds: list[int], num_workers: int) -> dict[int, list[int]]:
    """Seeds by worker; cases of one geometry go to one, so that kernels are compiled once."""
    fuzzer = Fuzzer(config)
    left: dict[int, list[int]] = {worker: [] for worker in range(num_workers)}
    places: dict[tuple[str, Geometry], int] = {}
    for seed in seeds:
        case = draw_case(seed, fuzzer.backends, fuzzer.geometries, fuzzer.longest)
        place = places.setdefault((case.backend, case.geometry), len(places))
        left[place % num_workers].append(seed)
    return left


def _crash(config: Config, seed: int, exit_code: int) -> Outcome:
    fuzzer = Fuzzer(config)  # draws only: nothing is put on the device
    case = draw_case(seed, fuzzer.backends, fuzzer.geometries, fuzzer.longest)
    reason = f"the process died with exit status {exit_code}"
    return Outcome(seed, case.backend, "error", 0.0, reason, str(case))


def _start(
    context: Any, config: Config, results: Any, worker: int, seeds: list[int], deadline: float
) -> Any:
    process = context.Process(
        target=_work, args=(config, results, worker, list(seeds), deadline), daemon=True
    )
    process.start()
    return process


def _work(config: Config, results: Any, worker: int, seeds: list[int], deadline: float) -> None:
    torch.set_num_threads(1)
    for outcome in run_here(config, seeds, deadline):
        results.put((worker, outcome))
        lost = "CUDA error" in outcome.reason or "Triton Error [CUDA]" in outcome.reason
        if outcome.kind == "error" and lost:
            results.close()
            results.join_thread()  # the context is lost: another process takes the rest
            raise SystemExit(TOLD)
    results.put((worker, None))
