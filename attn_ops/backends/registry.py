"""Which backends exist, and which one a model gets, with the reasons against every other."""

import dataclasses
import importlib
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import torch

from attn_ops.backends.base import OWN_MASK, Backend
from attn_ops.backends.measure import Shape
from attn_ops.backends.measurements import choose
from attn_ops.metadata import AttentionSpec, Support

_BUILT_IN = {
    "AUTO": "attn_ops.backends.auto",
    "FLASH_ATTN": "attn_ops.backends.flash_attn",
    "TRITON": "attn_ops.backends.triton",
    "TRITON_FIXED": "attn_ops.backends.triton_fixed",
    "BLOCKSPARSE": "attn_ops.backends.blocksparse",
    "FLASHINFER": "attn_ops.backends.flashinfer",
    "XFORMERS": "attn_ops.backends.xformers_backend",
    "FLEX": "attn_ops.backends.flex",
    "TORCH": "attn_ops.backends.torch_backend",
    "AUTO_MLA": "attn_ops.backends.mla.auto_mla",
    "FLASH_ATTN_MLA": "attn_ops.backends.mla.flash_attn_mla",
    "TRITON_MLA": "attn_ops.backends.mla.triton_mla",
    "FLASHINFER_MLA": "attn_ops.backends.mla.flashinfer_mla",
    "TORCH_MLA": "attn_ops.backends.mla.torch_mla",
}
"""Name to the module that holds `BACKEND`, in order of preference; imported on first use.

Those of latent attention (MLA) come last: no layer can take both them and the others.
"""

_registered: dict[str, Backend] = {}
"""Third parties' backends by name. Global: it is the registry of backends."""

ENTRY_POINT_GROUP = "attn_ops.backends"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The backend chosen, why, and the reasons against each of the others."""

    backend: Backend
    why: str
    reasons_against: dict[str, list[str]]


def register_backend(backend: Backend) -> None:
    """Add a third party's backend; it follows the built-in ones in the order of preference.

    Raises:
        TypeError: it is no `Backend`, or a field of it has another type.
        ValueError: the name is taken or not in upper case.
    """
    _check_backend(backend)
    if backend.name in backend_names():
        raise ValueError(
            f"backend.name must be new, got {backend.name}; taken: {', '.join(backend_names())}"
        )
    _registered[backend.name] = backend


def built_in_names() -> list[str]:
    """Names of our own backends, in order of preference, whatever else is installed."""
    return list(_BUILT_IN)


def backend_names() -> list[str]:
    """All names, in order of preference: built in, registered, installed entry points."""
    installed = [point.name for point in entry_points(group=ENTRY_POINT_GROUP)]
    return list(dict.fromkeys([*_BUILT_IN, *_registered, *installed]))


def get_backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        TypeError: an installed package's entry point is no `Backend`, or a field has another type.
        ValueError: there is none, or an entry point's has another name.
    """
    _check_known(name)
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        return importlib.import_module(_BUILT_IN[name]).BACKEND
    point = next(p for p in entry_points(group=ENTRY_POINT_GROUP) if p.name == name)
    backend = point.load()
    _check_backend(backend)
    if backend.name != name:
        raise ValueError(f"backend.name must be that of its entry point {name}, got {backend.name}")
    return backend


def _check_backend(backend: Any) -> None:
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a Backend, got {type(backend).__name__}")
    if not isinstance(backend.name, str) or not backend.name.isupper():
        raise ValueError(f"backend.name must be a name in upper case, got {backend.name!r}")
    for field, wanted, fits in (
        ("support", "a Support", isinstance(backend.support, Support)),
        ("builder", "a class or function that makes builders", callable(backend.builder)),
        ("forward", "a function", callable(backend.forward)),
        ("unavailable", "a function", callable(backend.unavailable)),
    ):
        if not fits:
            got = getattr(backend, field)
            raise TypeError(
                f"backend.{field} must be {wanted}, got {got!r} of backend {backend.name}"
            )


def load_backend(name: str) -> tuple[Backend | None, str]:
    """The backend called `name`; or None and why it cannot be loaded.

    The module of another package may raise anything. It must not take other backends with it.

    Raises:
        ValueError: there is none of that name.
    """
    _check_known(name)
    try:
        return get_backend(name), ""
    except Exception as error:
        return None, f"it cannot be loaded: {type(error).__name__}: {error}"


def select_backend(
    specs: AttentionSpec | Sequence[AttentionSpec],
    *,
    block_size: int,
    device: torch.device | str,
    backend: str | None = None,
    measure: bool = False,
    shapes: Sequence[Shape] | None = None,
    measurements: str | os.PathLike[str] | None = None,
) -> Selection:
    """Choose the backend for a model's layers.

    With `measure` every backend that applies is timed on `shapes`; the least sum of its times, each
    by the shape's best, wins. `Selection.why` gives the times, microseconds a layer: of the GPU,
    captured where the backend allows it, or of a CPU's clock. A backend that quantizes q
    (`Support.quantizes_query`, with an FP8 cache) computes something else and is no candidate. One
    with a mask of its own (`Support.own_mask`) is taken by name alone, with or without `measure`.

    Args:
        specs: geometry of the layers; one backend must take them all.
        block_size: tokens a block of the KV cache holds.
        device: where the model runs.
        backend: an explicit request; it is honoured or refused, never replaced.
        measure: choose by time instead of by the order of preference.
        shapes: batches to time, each a `MeasuredShape` or a pair (query_lens, seq_lens); None: a
            decode and a prefill (`attn_ops.backends.measure.DEFAULT_SHAPES`). Each needs GPU memory
            for at least two caches of its size.
        measurements: JSON file that remembers times, made if there is none; a later call with the
            same device, versions, layers, block size, shapes and candidates runs nothing. None
            remembers nothing.

    Raises:
        ValueError: no backend, or not the requested one, supports the layers; the
            reasons are in the message. `measure` together with `backend`; `shapes` or
            `measurements` without `measure`, or unusable.
    """
    device = torch.device(device)
    layers = [specs] if isinstance(specs, AttentionSpec) else list(specs)
    _check_request(backend, measure, shapes, measurements)
    against = {name: _reasons(name, layers, block_size, device) for name in backend_names()}
    if backend is None:
        against = {name: reasons or _only_by_name(name) for name, reasons in against.items()}
    usable = [name for name, reasons in against.items() if not reasons]
    if backend is not None and against[backend]:
        instead = [name for name in usable if not _only_by_name(name)]
        raise ValueError(
            f"backend {backend} cannot be used: {'; '.join(against[backend])}; "
            f"backends that can: {', '.join(instead) or 'none'}"
        )
    if not usable:
        listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in against.items())
        raise ValueError(f"no backend supports these layers: {listed}")
    if measure:
        candidates = [get_backend(name) for name in usable]
        chosen, why, lost = choose(candidates, layers, block_size, device, shapes, measurements)
    elif backend is not None:
        chosen, why = backend, "requested"
        lost = dict.fromkeys(usable, f"applies, but {backend} was requested")
    else:
        chosen = _preferred(usable, layers, device)
        why = f"first of the order of preference on {device.type} that applies"
        lost = dict.fromkeys(usable, f"applies, but {chosen} was preferred")
    against |= {name: [lost[name]] for name in usable if name != chosen}
    del against[chosen]
    return Selection(get_backend(chosen), why, against)


def _check_request(
    backend: str | None, measure: bool, shapes: object | None, measurements: object | None
) -> None:
    if backend is not None:
        _check_known(backend)
        if measure:
            raise ValueError(f"backend must be None with measure=True, got {backend!r}")
    for name, value in (("shapes", shapes), ("measurements", measurements)):
        if value is not None and not measure:
            raise ValueError(f"{name} must be None without measure=True, got {value!r}")


def _check_known(name: str) -> None:
    if name in _BUILT_IN or name in _registered:
        return
    if name not in backend_names():  # looks through installed packages, which takes milliseconds
        raise ValueError(
            f"backend must be a known name, got {name!r}; supported: {', '.join(backend_names())}"
        )


def _preferred(usable: list[str], layers: list[AttentionSpec], device: torch.device) -> str:
    """The first of the order of preference, with two exceptions.

    TORCH and TORCH_MLA are first on a CPU, where Triton's kernels only run interpreted. A backend
    that rounds q to FP8 computes something else than the layer asks for, so it is taken only if no
    other applies.
    """
    for name in ("TORCH", "TORCH_MLA"):
        if device.type == "cpu" and name in usable:
            return name
    if any(spec.kv_cache_dtype != "auto" for spec in layers):
        exact = [name for name in usable if not get_backend(name).support.quantizes_query]
        return (exact or usable)[0]
    return usable[0]


def _only_by_name(name: str) -> list[str]:
    """Why a backend that applies is not chosen unasked."""
    return [OWN_MASK] if get_backend(name).support.own_mask else []


def _reasons(
    name: str, layers: list[AttentionSpec], block_size: int, device: torch.device
) -> list[str]:
    backend, failed = load_backend(name)
    if backend is None:
        return [failed]
    reasons = [
        reason for spec in layers for reason in backend.reasons_against(spec, block_size, device)
    ]
    return list(dict.fromkeys(reasons))
