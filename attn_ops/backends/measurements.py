"""Measurements of backends in a JSON file that the user names, and the choice made by them.

The file holds one entry for each combination of device, versions of torch and the attention
libraries, geometries, block size, shapes and candidates; what was measured for one is never used
for another.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import stat
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

KEY_FIELDS = ("device", "versions", "candidates", "specs", "block_size", "shapes")
"""Of `measurement_key`."""

KEY_FORM = f"named by a JSON object of {', '.join(KEY_FIELDS)}"

ENTRY = "an object of times, a list for each backend that was timed, and failed, a reason each"

LONGEST_US = 1e12
"""Of a layer: eleven days."""


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
        ValueError: it cannot be read, or holds what this module would not write.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"measurements must be a path, got {path!r:.80}; supported: str, PathLike")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to read a pipe would wait for ever
            raise ValueError("it is no regular file")
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        _require(isinstance(content, dict), "it", "a JSON object", content)
        _require(content.get("format") == FORMAT, "format", repr(FORMAT), content.get("format"))
        entries = content.get("entries")
        _require(isinstance(entries, dict), "entries", "a JSON object", entries)
        return {key: _measurement(key, entry) for key, entry in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"measurements must be a file that select_backend wrote, got {path!r}: "
            f"{type(error).__name__}: {error}; supported: an absent file, which is then made"
        ) from error


def _measurement(key: str, entry: Any) -> Measurement:
    """An entry, checked against its key: who was timed, on how many shapes."""
    known: Any = json.loads(key) if key.startswith("{") else None
    where = f"entry {key[:60]!r}"
    _require(isinstance(known, dict) and known.keys() == set(KEY_FIELDS), where, KEY_FORM, key)
    _require(isinstance(entry, dict) and entry.keys() == {"times", "failed"}, where, ENTRY, entry)
    times, failed = entry["times"], entry["failed"]
    _require(isinstance(times, dict) and bool(times), f"times of {where}", ENTRY, times)
    _require(isinstance(failed, dict), f"failed of {where}", ENTRY, failed)
    names, candidates = sorted([*times, *failed]), known["candidates"]
    _require(names == sorted(map(str, candidates)), f"backends of {where}", str(candidates), names)
    for name, taken in times.items():
        what = f"times of {name} in {where}"
        wanted = f"{len(known['shapes'])} positive finite numbers, one a shape"
        right = isinstance(taken, list) and len(taken) == len(known["shapes"])
        _require(right and all(map(_is_time, taken)), what, wanted, taken)
    for name, why in failed.items():
        _require(isinstance(why, str), f"failed of {name} in {where}", "a reason", why)
    return Measurement({n: [float(t) for t in taken] for n, taken in times.items()}, dict(failed))


def _is_time(value: Any) -> bool:
    """Whether it is microseconds; JSON knows NaN, infinity and integers of any length."""
    return isinstance(value, int | float) and value is not True and 0 < value <= LONGEST_US


def _require(right: bool, what: str, wanted: str, got: Any) -> None:
    if not right:
        raise ValueError(f"{what} must be {wanted}, got {str(got)[:80]}")


def remember(path: str | os.PathLike[str], key: str, found: Measurement) -> None:
    """Add an entry: written beside the file and moved over it, so that no reader meets half of it.

    A link stays one, and its target is replaced. The file keeps its mode.

    Raises:
        ValueError: it cannot be written.
    """
    entries = {k: dataclasses.asdict(m) for k, m in load(path).items()}
    entries[key] = dataclasses.asdict(found)
    target = os.path.realpath(path)
    temporary = f"{target}.{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            if os.path.exists(target):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            json.dump({"format": FORMAT, "entries": entries}, file, indent=1)
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise ValueError(
            f"measurements must be a file that can be written, got {os.fspath(path)!r}: {error}"
        ) from error
