"""Times attention that quantizes its output against a quantize kernel behind it.

What the pass `quantize_output` chooses by on a GPU of which nothing is known. Both ways are the
operator `attention_quant`, over layers as in `attn_ops.backends.measure`; times are remembered in
files of `attn_ops.backends.measurements`, one entry a batch.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from attn_ops.backends.measure import (
    ROUNDS,
    Layers,
    Lengths,
    MeasuredShape,
    Measurement,
    Step,
    interleaved_us,
    interval_us,
    l2_bytes,
    make_layers,
    make_step,
    on,
    repeat_layers,
)
from attn_ops.backends.measurements import load, measurement_key, remember
from attn_ops.backends.registry import get_backend, select_backend
from attn_ops.metadata import AttentionSpec
from attn_ops.output_quant.schemes import OutputQuant

SHAPES = {
    "cuda": (
        *(MeasuredShape(requests, 1, 1024) for requests in (1, 8, 64, 256)),
        *(MeasuredShape(1, tokens, tokens) for tokens in (512, 2048)),
    ),
    "cpu": (MeasuredShape(2, 1, 32), MeasuredShape(1, 16, 16)),
}
"""Decodes and prompts; small on a CPU, which is only timed where a file is named."""


class Pair(NamedTuple):
    """Microseconds a layer."""

    fused: float  # as the backend has it: quantized by its kernel where it declares the scheme
    apart: float  # by a kernel behind attention


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is timed, and where.

    Attributes:
        backend: which the layers would get; a batch may go to a part of it.
    """

    backend: str
    spec: AttentionSpec
    how: OutputQuant
    block_size: int
    device: torch.device

    @property
    def names(self) -> list[str]:
        """Of both ways, as a file has them."""
        return [f"{self.backend}, {way}, {self.how}" for way in Pair._fields]


def pairs(
    spec: AttentionSpec,
    how: OutputQuant,
    block_size: int,
    device: torch.device,
    path: str | os.PathLike[str] | None,
) -> dict[MeasuredShape, Pair | str]:
    """Both times of each of the device's `SHAPES`, or why there are none.

    Without a file a process times a geometry once; with one, what the file knows is not timed.

    Raises:
        ValueError: the file cannot be used.
    """
    shapes = SHAPES.get(device.type, SHAPES["cpu"])
    try:
        selected = select_backend(spec, block_size=block_size, device=device)
    except ValueError as error:  # the model may have one that is taken by name alone
        return dict.fromkeys(shapes, _in_short(error))
    setting = Setting(selected.backend.name, spec, how, block_size, device)
    found: dict[MeasuredShape, Pair | str] = {}
    for shape in shapes:
        measured = _known(setting, shape.lengths(), path)
        fused, apart = (measured.times.get(name) for name in setting.names)
        if fused and apart:
            found[shape] = Pair(fused[0], apart[0])
        else:
            found[shape] = next(iter(measured.failed.values()))
    return found


def _known(setting: Setting, lengths: Lengths, path: str | os.PathLike[str] | None) -> Measurement:
    """What the file or this process knows of a batch; else it is timed."""
    if path is None:
        return _in_this_process(setting, lengths)
    key = measurement_key(
        setting.names, [setting.spec], setting.block_size, setting.device, [lengths]
    )
    if (found := load(path).get(key)) is not None:
        return found
    found = _timed(setting, lengths)
    if found.times:
        remember(path, key, found)
    return found


# Cached: a model of several kinds of layers asks for the same geometry more than once.
@functools.lru_cache(maxsize=256)
def _in_this_process(setting: Setting, lengths: Lengths) -> Measurement:
    return _timed(setting, lengths)


def _timed(setting: Setting, lengths: Lengths) -> Measurement:
    """In a thread of its own: that which compiles has modes on, in which tensors are fake."""
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            pair = pool.submit(time_pair, setting, lengths).result()
        found = Measurement({n: [t] for n, t in zip(setting.names, pair, strict=True)}, {})
    except Exception as error:  # out of memory, or a library's own: a model compiles without it
        found = Measurement({}, dict.fromkeys(setting.names, _in_short(error)))
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()  # caches and the graphs' pools serve nobody else
    return found


def _in_short(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first[:120]}"


def time_pair(setting: Setting, lengths: Lengths) -> Pair:
    """Medians of both ways; of one, where the backend leaves the scheme to a kernel behind."""
    device, how = setting.device, setting.how
    with on(device), torch.no_grad():
        layers = make_layers(
            setting.spec, lengths, setting.block_size, device, 2 * l2_bytes(device)
        )
        step = make_step(get_backend(setting.backend), layers)
        given = torch.tensor([0.01], device=device) if how.scheme == "fp8_static" else None
        fuses = how.scheme in step.meta.backend.support.output_quant
        runs = {
            way: repeat_layers(
                layers, quantized(layers, step, how, given, fuse=way == "fused"), step.captured
            )
            for way in Pair._fields
            if fuses or way == "apart"
        }
        for run in runs.values():
            run()
        rounds = ROUNDS.get(device.type, ROUNDS["cpu"])
        times = interleaved_us(runs, rounds, lambda run: interval_us(run, device))
    fused, apart = times.get("fused", times["apart"]), times["apart"]
    return Pair(fused / len(layers.caches), apart / len(layers.caches))


def quantized(
    layers: Layers, step: Step, how: OutputQuant, out_scale: torch.Tensor | None, *, fuse: bool
) -> Callable[[int], Any]:
    """`attention_quant` on one layer."""
    keywords = {**dataclasses.asdict(how), "out_scale": out_scale, "fuse": fuse, **layers.options}
    return lambda layer: torch.ops.attn_ops.attention_quant(
        layers.queries[layer], layers.caches[layer], step.meta, layers.scale, **keywords
    )
