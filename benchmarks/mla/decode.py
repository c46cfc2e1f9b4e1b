"""Decodes: attention over the latents by each kernel, and whole operators beside the same by hand.

attention   q through W_UK is given; the latents weighted by attention come out
by hand     both products, by `torch.bmm`, around the library's kernel
fused       the product by W_UK by `torch.bmm`, that by W_UV in TRITON_MLA's merging kernel
operator    torch.ops.attn_ops.mla_attention with a backend
"""

from collections.abc import Callable
from typing import Any

import torch

from attn_ops import backend_names, get_backend
from attn_ops.backends.measure import capture_metadata
from benchmarks.figures import free
from benchmarks.mla.direct import DIRECT, Attend, triton_mla_project
from benchmarks.mla.inputs import Layers, Shape, make_layers
from benchmarks.mla.runs import kernel_us, layer_us, prepared, record


def by_hand(name: str) -> Callable[[Layers], Attend]:
    """A library's kernel between both products."""

    def make(layers: Layers) -> Attend:
        attend = DIRECT[name](layers)

        def whole(layer: int) -> torch.Tensor:
            layers.ql_nope[layer] = layers.absorbed(layer)
            return layers.projected(layer, attend(layer))

        return whole

    return make


def fused(layers: Layers) -> Attend:
    """TRITON_MLA's merging kernel multiplies by W_UV."""
    attend = triton_mla_project(layers)

    def whole(layer: int) -> torch.Tensor:
        layers.ql_nope[layer] = layers.absorbed(layer)
        return attend(layer)

    return whole


def fused_early(layers: Layers) -> Attend:
    """All three products by kernels that are launched before the one before them has ended."""
    from attn_ops.backends.mla.triton.absorb import absorb

    attend = triton_mla_project(layers)

    def whole(layer: int) -> torch.Tensor:
        layers.ql_nope[layer] = absorb(layers.q_nope(layer), layers.w_uk(layer))
        return attend(layer)

    return whole


def operator(name: str) -> Callable[[Layers], Attend]:
    """The operator with a backend that can be captured."""

    def make(layers: Layers) -> Attend:
        backend, shape, common = get_backend(name), layers.shape, layers.common
        reasons = backend.reasons_against(shape.spec, shape.block_size, layers.device)
        if reasons:
            raise ValueError("; ".join(reasons))
        if not backend.support.cudagraph.takes(common):
            raise ValueError(f"{name} must be captured, got {backend.support.cudagraph.name}")
        builder = backend.builder(backend, [shape.spec], shape.block_size, layers.device)
        meta = capture_metadata(builder, common)

        def whole(layer: int) -> torch.Tensor:
            return torch.ops.attn_ops.mla_attention(
                layers.q[layer], layers.caches[layer], meta, layers.kv_b[layer], shape.scale,
                v_head_dim=shape.latent.v_head_dim, kv_cache_dtype=shape.kv_cache_dtype,
                kv_scale=layers.kv_scale,
            )  # fmt: skip

        return whole

    return make


def operators() -> list[str]:
    """Latent backends, the oracle excepted."""
    names = [n for n in backend_names() if n not in ("AUTO", "TORCH_MLA")]
    return [n for n in names if get_backend(n).support.latent]


def measure_decode(
    shape: Shape,
    device: torch.device,
    rounds: int,
    rates: dict[str, float],
    whole: bool = True,
    profile: bool = False,
) -> list[dict[str, Any]]:
    """All kernels, and with `whole` all operators, at one shape; `profile`: by kernel."""
    layers = make_layers(shape, device)
    wanted = layers.first_request()
    runs, errors, failed = prepared(layers, DIRECT, wanted)
    rows = _rows("attention", layers, runs, errors, failed, rounds, rates, profile)
    if whole:
        runs.clear()
        free()
        candidates = {f"{name} by hand": by_hand(name) for name in DIRECT if name not in failed}
        candidates["TRITON_MLA fused"] = fused
        candidates["TRITON_MLA fused, absorb"] = fused_early
        candidates |= {f"{name} operator": operator(name) for name in operators()}
        value = layers.projected(0, wanted.to(layers.q[0].dtype)).float()
        runs, errors, failed = prepared(layers, candidates, value)
        rows += _rows("whole", layers, runs, errors, failed, rounds, rates, profile)
    return rows


def _rows(
    kind: str,
    layers: Layers,
    runs: dict[str, Any],
    errors: dict[str, float],
    failed: dict[str, str],
    rounds: int,
    rates: dict[str, float],
    profile: bool,
) -> list[dict[str, Any]]:
    shape = layers.shape
    num_bytes = shape.kv_bytes + (shape.weight_bytes if kind == "whole" else 0)
    rows = [
        record(
            name, layers, us, kind=kind, error=errors[name],
            kernels=kernel_us(layers, runs[name]) if profile else {},
            percent_of_bandwidth=100 * num_bytes / us * 1e6 / rates["bytes_per_second"],
            percent_of_matmul=100 * shape.decode_flops / us * 1e6 / rates["flops_per_second"],
        )
        for name, us in layer_us(layers, runs, rounds).items()
    ]  # fmt: skip
    return rows + [
        record(name, layers, float("nan"), kind=kind, reason=why) for name, why in failed.items()
    ]
