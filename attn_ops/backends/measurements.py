"""Chooses a backend by time, and remembers the times in a JSON file that the user names.

The file holds one entry for each combination of device, versions of torch and the attention
libraries, geometries, block size, shapes and candidates; what was measured for one is never used
for another.
"""

import contextlib
import dataclasses
import json
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from attn_ops.backends.base import Backend
from attn_ops.backends.measure import (
    Lengths,
    Measurement,
    Shape,
    check_shapes,
    describe,
    measure,
)
from attn_ops.metadata import AttentionSpec

LIBRARIES = (
    "attn-ops", "torch", "triton", "vllm", "vllm-flash-attn", "flash-attn", "flash-attn-3",
    "flashinfer-python", "xformers",
)  # fmt: skip
"""Distributions whose version decides how fast a backend is."""

FORMAT = "attn_ops measurements 1"


def choose(
    backends: Sequence[Backend],
    specs: Sequence[AttentionSpec],
    block_size: int,
    device: torch.device,
    shapes: Sequence[Shape] | None,
    path: str | os.PathLike[str] | None,
) -> tuple[str, str, dict[str, str]]:
    """The fastest of `backends`, all of which apply, why, and the reasons against the others.

    What the file knows is not timed again.

    Raises:
        ValueError: no backend could be timed, a shape is no batch, or the file cannot be used.
    """
    lengths = check_shapes(shapes, device)
    fp8 = any(spec.kv_cache_dtype != "auto" for spec in specs)
    against = {
        b.name: "applies, but quantizes q to FP8; only a request by name chooses it"
        for b in backends
        if fp8 and b.support.quantizes_query
    }
    candidates = [b for b in backends if b.name not in against]
    key = measurement_key([b.name for b in candidates], specs, block_size, device, lengths)
    found = None if path is None else load(path).get(key)
    if found is None:
        found = measure(candidates, specs, block_size, device, lengths)
        if path is not None and found.times:
            remember(path, key, found)
    against |= {name: f"failed when it was timed: {why}" for name, why in found.failed.items()}
    if not found.times:
        listed = "; ".join(f"{name}: {why}" for name, why in against.items())
        raise ValueError(f"measure must find a backend that runs, got none: {listed}")
    name = found.fastest()
    against |= {other: f"applies, but {name} was faster" for other in found.times if other != name}
    return name, explain(found, lengths), against


def explain(found: Measurement, lengths: Sequence[Lengths]) -> str:
    """All times, shape by shape, the fastest backend first."""
    parts = []
    for place, shape in enumerate(lengths):
        ordered = sorted(found.times, key=lambda name: found.times[name][place])
        times = ", ".join(f"{name} {found.times[name][place]:.1f} us" for name in ordered)
        parts.append(f"{times} at {describe(shape)}")
    return f"fastest of {len(found.times)} measured: {'; '.join(parts)}"


def library_versions() -> dict[str, str]:
    """Installed versions of `LIBRARIES`."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions | {"torch": str(torch.__version__)}


def measurement_key(
    names: Sequence[str],
    specs: Sequence[AttentionSpec],
    block_size: int,
    device: torch.device,
    lengths: Sequence[Lengths],
) -> str:
    """All that a measurement depends on, as canonical JSON."""
    counted = Counter(repr(spec) for spec in specs)
    on_gpu = device.type == "cuda"
    fields = {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "versions": library_versions(),
        "candidates": list(names),
        "specs": sorted(counted.items()),
        "block_size": block_size,
        "shapes": lengths,
    }
    return json.dumps(fields, sort_keys=True)


def load(path: str | os.PathLike[str]) -> dict[str, Measurement]:
    """What the file knows, by key; nothing if there is no file.

    Raises:
        ValueError: it cannot be read, or holds what this module would not write.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        return {
            key: Measurement(
                {name: [float(t) for t in taken] for name, taken in entry["times"].items()},
                dict(entry["failed"]),
            )
            for key, entry in content["entries"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"measurements must be a file that select_backend wrote, got {path!r}: "
            f"{type(error).__name__}: {error}; supported: an absent file, which is then made"
        ) from error


def remember(path: str | os.PathLike[str], key: str, found: Measurement) -> None:
    """Add an entry: written beside the file and moved over it, so that no reader meets half of it.

    Raises:
        ValueError: it cannot be written.
    """
    entries = {k: dataclasses.asdict(m) for k, m in (load(path) | {key: found}).items()}
    target = Path(path).resolve()
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1))
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"measurements must be a file that can be written, got {os.fspath(path)!r}: {error}"
        ) from error
