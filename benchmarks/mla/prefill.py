"""Queries of many rows: which way is faster, what chunks cost, and the attention kernels alone.

ways      the operator with every request forced to the decode way, and to the prefill way, in
          CUDA graphs: the device's time
chunks    the prefill way over a long context through workspaces of several sizes, eager: the
          time of a call, and the peak of memory
prompts   attention over up-projected keys: FA3, FlashInfer, and forms of TRITON_MLA's kernel
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attn_ops import get_backend
from attn_ops.backends.mla import plan as planning
from attn_ops.backends.mla.workspace import MLAWorkspace
from benchmarks.direct import vllm_flash_attn
from benchmarks.figures import free
from benchmarks.mla.decode import operators
from benchmarks.mla.direct import Attend
from benchmarks.mla.inputs import Layers, Shape, make_layers
from benchmarks.mla.runs import brief, layer_us, over_layers, prepared, record

MAX_LAYERS = 2


@contextlib.contextmanager
def forced(way: str) -> Iterator[None]:
    """Every request that is planned meanwhile takes one way."""
    before = planning.SHORT_QUERY_LEN, planning.LONG_CONTEXT_QUERY_LEN
    planning.SHORT_QUERY_LEN = 1 << 30 if way == "decode" else 0
    planning.LONG_CONTEXT_QUERY_LEN = 0
    try:
        yield
    finally:
        planning.SHORT_QUERY_LEN, planning.LONG_CONTEXT_QUERY_LEN = before


def operator(name: str, way: str, num_tokens: int) -> Callable[[Layers], Attend]:
    """A backend's operator, planned for one way and a workspace of `num_tokens`."""

    def make(layers: Layers) -> Attend:
        backend, shape = get_backend(name), layers.shape
        reasons = backend.reasons_against(shape.spec, shape.block_size, layers.device)
        if reasons:
            raise ValueError("; ".join(reasons))
        workspace = MLAWorkspace([shape.spec], num_tokens, layers.device)
        builder: Any = backend.builder
        made = builder(backend, [shape.spec], shape.block_size, layers.device, workspace=workspace)
        with forced(way):
            meta = made.build(0, layers.common)

        def whole(layer: int) -> torch.Tensor:
            return torch.ops.attn_ops.mla_attention(
                layers.q[layer], layers.caches[layer], meta, layers.kv_b[layer], shape.scale,
                v_head_dim=shape.latent.v_head_dim, kv_cache_dtype=shape.kv_cache_dtype,
                kv_scale=layers.kv_scale,
            )  # fmt: skip

        return whole

    return make


def measure_ways(
    shape: Shape, device: torch.device, rounds: int, rates: dict[str, float]
) -> list[dict[str, Any]]:
    """Both ways of every backend at one shape."""
    layers = make_layers(shape, device, MAX_LAYERS)
    tokens = max(shape.num_reqs * shape.context, 1 << 16)
    candidates = {
        f"{name} {way}": operator(name, way, tokens)
        for name in operators()
        for way in ("prefill", "decode")
    }
    runs, errors, failed = prepared(layers, candidates, None)
    per_matmul = 1e8 / rates["flops_per_second"]
    rows = [
        record(
            name, layers, us, kind="ways", error=errors[name],
            percent_of_matmul=per_matmul / us
            * (shape.decode_flops if name.endswith("decode") else shape.prefill_flops),
        )
        for name, us in layer_us(layers, runs, rounds).items()
    ]  # fmt: skip
    return rows + _failed(layers, "ways", failed)


def measure_chunks(shape: Shape, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """The prefill way through workspaces from an eighth of the context to all of it."""
    layers, rows = make_layers(shape, device, 1), []
    sizes = [-(-shape.context // part // 64) * 64 for part in (1, 2, 4, 8)]
    wanted: torch.Tensor | None = None
    for name in operators():
        for num_tokens in sizes:
            label = f"{name} {num_tokens} tokens"
            try:
                attend = operator(name, "prefill", num_tokens)(layers)
                run = over_layers(layers, attend, captured=False)
                error, wanted = _difference(attend(0), wanted)
                taken = layer_us(layers, {label: run}, rounds)[label]
                rows.append(
                    record(label, layers, taken, kind="chunks", error=error,
                           peak_bytes=_peak_bytes(run), workspace_tokens=num_tokens)
                )  # fmt: skip
            except Exception as error:  # out of memory, most likely
                rows += _failed(layers, "chunks", {label: brief(error)})
            free()
    return rows


def _difference(out: torch.Tensor, wanted: torch.Tensor | None) -> tuple[float, torch.Tensor]:
    out = out.float()
    wanted = out if wanted is None else wanted
    return ((out - wanted).norm() / wanted.norm()).item(), wanted


def _peak_bytes(run: Callable[[], object]) -> int:
    """Memory that a call takes beyond what was there before it."""
    if not torch.cuda.is_available():
        return 0
    free()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _failed(layers: Layers, kind: str, failed: dict[str, str]) -> list[dict[str, Any]]:
    return [record(n, layers, float("nan"), kind=kind, reason=why) for n, why in failed.items()]


class Prompt:
    """q, up-projected keys and values of equal requests, and where each request begins."""

    def __init__(self, layers: Layers) -> None:
        shape, common = layers.shape, layers.common
        one, num_keys = shape.latent, shape.num_reqs * shape.context
        like = {"dtype": torch.bfloat16, "device": layers.device}
        self.q = layers.q[0]
        self.k = torch.randn(num_keys, shape.heads, one.qk_head_dim, **like)
        self.v = torch.randn(num_keys, shape.heads, one.v_head_dim, **like)
        self.cu_q = common.query_start_loc
        starts = torch.arange(shape.num_reqs + 1, dtype=torch.int32, device=layers.device)
        self.cu_k = starts * shape.context
        self.shape = shape


def fa3(prompt: Prompt) -> Attend:
    library = vllm_flash_attn()
    shape = prompt.shape
    return lambda layer: library.flash_attn_varlen_func(
        q=prompt.q, k=prompt.k, v=prompt.v, max_seqlen_q=shape.query_len, cu_seqlens_q=prompt.cu_q,
        max_seqlen_k=shape.context, cu_seqlens_k=prompt.cu_k, softmax_scale=shape.scale,
        causal=True, fa_version=3,
    )  # fmt: skip


def flashinfer(prompt: Prompt, backend: str) -> Attend:
    library, shape = importlib.import_module("flashinfer"), prompt.shape
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device=prompt.q.device), backend=backend
    )
    wrapper.plan(
        prompt.cu_q, prompt.cu_k, shape.heads, shape.heads, shape.latent.qk_head_dim,
        shape.latent.v_head_dim, causal=True, sm_scale=shape.scale, q_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda layer: wrapper.run(prompt.q, prompt.k, prompt.v)


def triton_prompt(prompt: Prompt, **choice: Any) -> Attend:
    from attn_ops.backends.mla.triton.prefill import mla_prefill

    shape = prompt.shape
    return lambda layer: mla_prefill(
        prompt.q, prompt.k, prompt.v, prompt.cu_q, prompt.cu_k, shape.query_len, shape.context,
        scale=shape.scale, causal=True, with_lse=False, **choice,
    )[0]  # fmt: skip


def measure_prompts(
    shape: Shape, device: torch.device, rounds: int, rates: dict[str, float], flashinfer_too: bool
) -> list[dict[str, Any]]:
    """The kernels alone; FlashInfer compiles CUDA for minutes where it is not prebuilt."""
    from attn_ops.backends.mla.triton.prefill import PrefillLaunch

    layers = make_layers(shape, device, 1)
    prompt = Prompt(layers)
    candidates: dict[str, Callable[[Layers], Attend]] = {
        "TRITON_MLA": lambda layers: triton_prompt(prompt),
        "FA3": lambda layers: fa3(prompt),
    }
    if flashinfer_too:
        for backend in ("fa2", "fa3"):
            make = functools.partial(flashinfer, prompt, backend)
            candidates[f"FlashInfer {backend}"] = lambda layers, make=make: make()
    forms = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 4), (128, 128, 8, 2), (64, 64, 4, 2),
             (64, 64, 4, 3), (64, 32, 4, 4), (64, 128, 8, 2)]  # fmt: skip
    for form in forms if device.type == "cuda" else forms[:1]:
        launch = PrefillLaunch(*form)
        name = f"M{form[0]} C{form[1]} w{form[2]} s{form[3]}"
        candidates[name] = lambda layers, launch=launch: triton_prompt(prompt, launch=launch)
    runs, errors, failed = prepared(layers, candidates, None)
    flops = shape.prefill_flops - shape.num_reqs * shape.context * shape.weight_bytes
    rows = [
        record(name, layers, us, kind="prompts", error=errors[name],
               percent_of_matmul=100 * flops / us * 1e6 / rates["flops_per_second"])
        for name, us in layer_us(layers, runs, rounds).items()
    ]  # fmt: skip
    return rows + _failed(layers, "prompts", failed)
