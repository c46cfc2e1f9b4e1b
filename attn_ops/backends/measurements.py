"""Measurements of backends in a JSON file that the user names, and the choice made by them.

The file holds one entry for each combination of device, versions of torch and the attention
libraries, geometries, block size, shapes and candidates; what was measured for one is never used
for another.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attn_ops.backends.base import OWN_MASK, Backend
from attn_ops.backends.measure import (
    Lengths,
    Measurement,
    Shape,
    check_shapes,
    describe,
    measure,
    quantizes_query,
)
from attn_ops.metadata import AttentionSpec

LIBRARIES = (
    "attn-ops", "torch", "triton", "vllm", "vllm-flash-attn", "flash-attn", "flash-attn-3",
    "flashinfer-python", "xformers",
)  # fmt: skip
"""Distributions whose version decides how fast a backend is."""

FORMAT = "attn_ops measurements 1"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest backend, why, and the reasons against other candidates."""

    name: str
    why: str
    reasons_against: dict[str, str]


def choose(
    backends: Sequence[Backend],
    specs: Sequence[AttentionSpec],
    block_size: int,
    device: torch.device,
    shapes: Sequence[Shape] | None,
    path: str | os.PathLike[str] | None,
) -> Choice:
    """The fastest of `backends`, all of which apply; what the file knows is not timed again.

    Raises:
        ValueError: no backend could be timed, a shape is no batch, or the file cannot be used.
    """
    lengths = check_shapes(shapes, device)
    against = {
        b.name: "applies, but quantizes q to FP8; only a request by name chooses it"
        for b in backends
        if any(quantizes_query(b.support, spec) for spec in specs)
    }
    against |= {b.name: OWN_MASK for b in backends if b.support.own_mask}
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
    return Choice(name, explain(found, lengths), against)


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
        ValueError: it cannot be read, or this module did not write it.
    """
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format is {content['format']!r}, not {FORMAT!r}")
        return {key: _measurement(entry) for key, entry in content["entries"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"measurements must be a file that select_backend wrote, got {os.fspath(path)!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _measurement(entry: Any) -> Measurement:
    times = {name: [float(t) for t in taken] for name, taken in entry["times"].items()}
    if not times or min(map(min, times.values())) <= 0 or len({*map(len, times.values())}) > 1:
        raise ValueError("an entry's times are not positive numbers, one a shape")
    return Measurement(times, {str(name): str(why) for name, why in entry["failed"].items()})


def remember(path: str | os.PathLike[str], key: str, found: Measurement) -> None:
    """Add an entry: written beside the file and moved over it, so that no reader meets half of it.

    Raises:
        ValueError: it cannot be written.
    """
    entries = {k: dataclasses.asdict(m) for k, m in load(path).items()}
    entries[key] = dataclasses.asdict(found)
    target = Path(path)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=target.parent, prefix=f".{target.name}.", suffix=".tmp", delete=False
        ) as file:
            temporary = file.name
            json.dump({"format": FORMAT, "entries": entries}, file, indent=1)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise ValueError(
            f"measurements must be a file that can be written, got {os.fspath(path)!r}: {error}"
        ) from error
