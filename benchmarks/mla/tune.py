"""Constants of TRITON_MLA's kernels against each other, to set the tables in its launchers.

`tune_decode` times forms of the decode kernel, each with the ranges that its launcher would choose
for it; then ranges of the best form. `tune_project` times forms of the merging kernel. Kernels are
compiled by several processes first, as compiling takes longer than the runs.
"""

import dataclasses
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.figures import free
from benchmarks.mla.direct import Attend, triton_mla
from benchmarks.mla.inputs import Layers, Shape, make_layers
from benchmarks.mla.runs import layer_us, prepared, record

SHARED_MEMORY = 232448
"""Bytes a program may take on Hopper."""


def decode_forms(rows: int, width: int, fp8: bool) -> list[Any]:
    """Launches that fit the chip, as far as that can be said before they are compiled."""
    from attn_ops.backends.mla.triton.launch import DecodeLaunch

    return [
        DecodeLaunch(rows, *form, programs_per_sm=programs, chains=1 if rows >= 64 else 2)
        for form in _forms(rows, fp8)
        for programs in [_resident(rows, *form, width, fp8)]
        if programs
    ]


def _forms(rows: int, fp8: bool) -> Iterator[tuple[int, int, int, bool]]:
    """Keys of a tile, warps, stages, transposed products."""
    if rows >= 64:
        yield from itertools.product((32, 64), (8, 16), (2, 3, 4), (False,))
        return
    for keys, warps, stages in itertools.product((16, 32, 64), (2, 4, 8), (2, 3, 4, 5)):
        if not (warps == 2 and (keys == 64 or fp8 or rows > 16)):  # those spill
            yield keys, warps, stages, False
    if not fp8:
        yield from itertools.product((64,), (4, 8), (2,), (True,))


def _resident(
    rows: int, keys: int, warps: int, stages: int, swap: bool, width: int, fp8: bool
) -> int:
    """Programs that an SM holds: by shared memory, estimated, and by registers."""
    buffers = stages if rows >= 64 or swap else stages - 1
    tile = keys * width * (1 if fp8 else 2)
    shared = buffers * tile + rows * width * 2 + (keys * width * 2 if fp8 else 0) + 1024
    registers = 128 if warps == 8 else 168  # of a thread, as ptxas 13.0 gives them
    if fp8 or rows > 16 or warps == 2 or swap:
        registers = 255
    return min(SHARED_MEMORY // shared, 65536 // (registers * warps * 32), 4)


def small(shape: Shape) -> Shape:
    """Two short requests whose kernels are those of `shape`."""
    return dataclasses.replace(shape, num_reqs=2, context=256)


def _compile(work: tuple[Shape, Sequence[Any]]) -> None:
    """Launch every form, unsplit and split, so that its binary is in Triton's cache."""
    shape, forms = work
    layers = make_layers(small(shape), torch.device("cuda"))
    for form, num_splits in itertools.product(forms, (1, 2)):
        try:
            triton_mla(layers, launch=form, num_splits=num_splits)(0)
        except Exception:
            continue  # it is tried again, and reported, where it is timed
    torch.cuda.synchronize()


def compile_all(shape: Shape, forms: Sequence[Any], processes: int) -> None:
    """Compile by several processes; each has a CUDA context of its own."""
    if processes <= 1:
        return
    parts = [(shape, forms[i::processes]) for i in range(processes) if forms[i::processes]]
    with multiprocessing.get_context("spawn").Pool(len(parts)) as pool:
        pool.map(_compile, parts)


def describe(form: Any) -> str:
    """A launch in few words."""
    swap = " swap" if form.swap else ""
    return f"M{form.rows} C{form.keys} w{form.num_warps} s{form.num_stages}{swap}"


def tune_decode(
    shapes: Sequence[Shape], device: torch.device, rounds: int, processes: int
) -> list[dict[str, Any]]:
    """All forms at all shapes, which share heads, query length and cache dtype."""
    one = shapes[0]
    rows = min(max(1 << (one.heads * one.query_len - 1).bit_length(), 16), 64)
    sizes = [rows] if rows <= 16 else [rows, 16, 32]
    width, fp8 = one.latent.cache_width, one.fp8 is not None
    forms = [form for size in sizes for form in decode_forms(size, width, fp8)]
    if device.type == "cuda":
        compile_all(one, forms, processes)
    else:
        forms = forms[:2]
    found = []
    for shape in shapes:
        layers = make_layers(shape, device)
        found += _time_forms(layers, forms, rounds)
        best = min(
            (r for r in found if _of(r, shape) and r["us"] == r["us"]), key=lambda r: r["us"]
        )
        form = next(f for f in forms if describe(f) == best["name"])
        found += _time_splits(layers, form, best["splits"], rounds)
        del layers
        free()
    return found


def _of(row: dict[str, Any], shape: Shape) -> bool:
    return (row["num_reqs"], row["context"]) == (shape.num_reqs, shape.context)


def _time_forms(layers: Layers, forms: Sequence[Any], rounds: int) -> list[dict[str, Any]]:
    wanted = layers.first_request()
    candidates = {
        describe(form): lambda layers, form=form: triton_mla(layers, launch=form) for form in forms
    }
    runs, errors, failed = prepared(layers, candidates, wanted)
    splits = {describe(form): _chosen_splits(layers, form) for form in forms}
    rows = [
        record(name, layers, us, kind="form", splits=splits[name], error=errors[name])
        for name, us in layer_us(layers, runs, rounds).items()
    ]
    return rows + [
        record(n, layers, float("nan"), kind="form", reason=why) for n, why in failed.items()
    ]


def _chosen_splits(layers: Layers, form: Any) -> int:
    from attn_ops.backends.mla.triton.launch import choose_num_splits
    from attn_ops.backends.triton.tiles import num_sms

    shape = layers.shape
    row_tiles = -(-shape.heads * shape.query_len // form.rows)
    slots = form.programs_per_sm * num_sms(layers.device)
    return choose_num_splits(shape.num_reqs * row_tiles, shape.context, slots)


def _time_splits(layers: Layers, form: Any, chosen: int, rounds: int) -> list[dict[str, Any]]:
    """Ranges around the choice, and up to four times as many."""
    counts = {max(1, round(chosen * f)) for f in (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4)}
    counts |= {1, 2, 4, 8}
    most = max(1, min(128, layers.shape.context // 32))
    candidates = {
        str(n): lambda layers, n=n: triton_mla(layers, launch=form, num_splits=n)
        for n in sorted(counts)
        if n <= most
    }
    runs, _, _ = prepared(layers, candidates, layers.first_request())
    times = layer_us(layers, runs, rounds)
    return [
        record(describe(form), layers, us, kind="splits", splits=int(n), chosen=chosen)
        for n, us in times.items()
    ]


def tune_project(
    shapes: Sequence[Shape], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Forms of the merging kernel at the ranges that decoding would choose."""
    found = []
    for shape in shapes:
        layers = make_layers(shape, device)
        found += _time_absorb(layers, rounds)
        for num_splits in sorted({1, 4, 16, _default_splits(layers)}):
            found += _time_project(layers, num_splits, rounds)
        del layers
        free()
    return found


def _time_absorb(layers: Layers, rounds: int) -> list[dict[str, Any]]:
    """q through W_UK by a batched product, and by forms of our kernel."""
    from attn_ops.backends.mla.triton.absorb import AbsorbLaunch, absorb

    num_rows = layers.shape.num_reqs * layers.shape.query_len
    rows = min(max(1 << (num_rows - 1).bit_length(), 16), 64)
    candidates: dict[str, Callable[[Layers], Attend]] = {
        "bmm": lambda layers: layers.absorbed,
        "default": lambda layers: lambda i: absorb(layers.q_nope(i), layers.w_uk(i)),
    }
    forms = [(rows, 64, 4), (rows, 128, 4), (rows, 128, 8), (rows, 256, 8)]
    for form in forms if layers.device.type == "cuda" else ():
        candidates[f"M{form[0]} L{form[1]} w{form[2]}"] = lambda layers, form=form: (
            lambda i: absorb(layers.q_nope(i), layers.w_uk(i), AbsorbLaunch(*form))
        )
    runs, errors, failed = prepared(layers, candidates, None)
    rows_found = [
        record(name, layers, us, kind="absorb", error=errors[name])
        for name, us in layer_us(layers, runs, rounds).items()
    ]
    return rows_found + [
        record(n, layers, float("nan"), kind="absorb", reason=why) for n, why in failed.items()
    ]


def _default_splits(layers: Layers) -> int:
    from attn_ops.backends.mla.triton.launch import decode_launch
    from attn_ops.backends.triton.tiles import num_sms

    shape = layers.shape
    form = decode_launch(
        shape.heads * shape.query_len, torch.bfloat16, shape.fp8 is not None,
        shape.latent.kv_lora_rank, shape.num_reqs > num_sms(layers.device),
    )  # fmt: skip
    return _chosen_splits(layers, form)


def project_forms(num_rows: int, latent: int) -> list[Any]:
    from attn_ops.backends.mla.triton.project import ProjectLaunch

    rows = min(1 << (num_rows - 1).bit_length(), 16)
    few = [
        ProjectLaunch(rows, values, latent, warps, 1)
        for values, warps in ((16, 4), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8))
    ]
    sizes = sorted({min(1 << (num_rows - 1).bit_length(), size) for size in (16, 32, 64, 128)})
    return few + [
        ProjectLaunch(rows, values, latents, warps, 3)
        for rows in sizes
        for values, latents, warps in (
            (16, 128, 4),
            (32, 128, 4),
            (64, 64, 4),
            (128, 64, 4),
            (128, 64, 8),
            (128, 128, 8),
        )
    ]


def _time_project(layers: Layers, num_splits: int, rounds: int) -> list[dict[str, Any]]:
    """The merging kernel alone, parts given; beside `combine` and a batched product."""
    from attn_ops.backends.mla.triton.combine import combine
    from attn_ops.backends.mla.triton.decode import Parts
    from attn_ops.backends.mla.triton.project import combine_project

    shape, count = layers.shape, range(len(layers.caches))
    num_rows, rank = shape.num_reqs * shape.query_len, shape.latent.kv_lora_rank
    size = (num_rows, shape.heads, num_splits)
    dtype = torch.float32 if num_splits > 1 else torch.bfloat16
    parts = [
        Parts(
            torch.randn(*size, rank, dtype=dtype, device=layers.device),
            torch.randn(size, device=layers.device) if num_splits > 1 else None,
        )
        for _ in count
    ]

    def merged(layer: int) -> torch.Tensor:
        part, lse = parts[layer]
        return part[:, :, 0] if lse is None else combine(part, lse, torch.bfloat16)

    candidates = {
        "combine, bmm": lambda layers: lambda i: layers.projected(i, merged(i)),
        "default": lambda layers: lambda i: combine_project(parts[i], layers.w_uv(i)),
        "combine, project": lambda layers: (
            lambda i: combine_project(parts[i], layers.w_uv(i), max_fused_splits=1)
        ),
    }
    forms = project_forms(num_rows, rank)
    for form in forms if layers.device.type == "cuda" else forms[:1]:
        name = f"D{form.rows} V{form.values} L{form.latents} w{form.num_warps}"
        candidates[name] = lambda layers, form=form: (
            lambda i: combine_project(parts[i], layers.w_uv(i), launch=form, max_fused_splits=128)
        )
    wanted = layers.projected(0, merged(0)).float()
    runs, errors, failed = prepared(layers, candidates, wanted)
    rows = [
        record(name, layers, us, kind="project", splits=num_splits, error=errors[name])
        for name, us in layer_us(layers, runs, rounds).items()
    ]
    return rows + [
        record(n, layers, float("nan"), kind="project", splits=num_splits, reason=why)
        for n, why in failed.items()
    ]
