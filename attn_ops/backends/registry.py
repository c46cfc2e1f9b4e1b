"""Which backends exist, and which one a model gets, with the reasons against every other."""

import dataclasses
import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points

import torch

from attn_ops.backends.base import Backend
from attn_ops.metadata import AttentionSpec

_BUILT_IN = {
    "FLASH_ATTN": "attn_ops.backends.flash_attn",
    "TRITON": "attn_ops.backends.triton",
    "FLASHINFER": "attn_ops.backends.flashinfer",
    "TORCH": "attn_ops.backends.torch_backend",
}
"""Name to the module that holds `BACKEND`, in order of preference; imported on first use."""

_registered: dict[str, Backend] = {}

ENTRY_POINT_GROUP = "attn_ops.backends"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The backend chosen, why, and the reasons against each of the others."""

    backend: Backend
    why: str
    reasons_against: dict[str, list[str]]


def register_backend(backend: Backend) -> None:
    """Add a third party's backend; it stands behind the built-in ones in the order of preference.

    Raises:
        ValueError: the name is taken.
    """
    if backend.name in backend_names():
        raise ValueError(
            f"backend.name must be new, got {backend.name}; taken: {', '.join(backend_names())}"
        )
    _registered[backend.name] = backend


def backend_names() -> list[str]:
    """All names, in order of preference: built in, registered, installed entry points."""
    installed = [point.name for point in entry_points(group=ENTRY_POINT_GROUP)]
    return list(dict.fromkeys([*_BUILT_IN, *_registered, *installed]))


def get_backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        ValueError: there is none.
    """
    _check_known(name)
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        return importlib.import_module(_BUILT_IN[name]).BACKEND
    return next(p for p in entry_points(group=ENTRY_POINT_GROUP) if p.name == name).load()


def select_backend(
    specs: AttentionSpec | Sequence[AttentionSpec],
    *,
    block_size: int,
    device: torch.device | str,
    backend: str | None = None,
) -> Selection:
    """Choose the backend for a model's layers.

    Args:
        specs: geometry of the layers; one backend must take them all.
        block_size: tokens a block of the KV cache holds.
        device: where the model runs.
        backend: an explicit request; it is honoured or refused, never replaced.

    Raises:
        ValueError: no backend, or not the requested one, supports the layers; the
            reasons are in the message.
    """
    device = torch.device(device)
    layers = [specs] if isinstance(specs, AttentionSpec) else list(specs)
    if backend is not None:
        _check_known(backend)
    against = {name: _reasons(name, layers, block_size, device) for name in backend_names()}
    if backend is not None:
        if against[backend]:
            raise ValueError(f"backend {backend} cannot be used: {'; '.join(against[backend])}")
        why = "requested"
    else:
        usable = [name for name, reasons in against.items() if not reasons]
        if not usable:
            listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in against.items())
            raise ValueError(f"no backend supports these layers: {listed}")
        backend, why = (
            _preferred(usable, device),
            f"first of the order of preference on {device.type} that applies",
        )
    for name, reasons in against.items():
        if name != backend and not reasons:
            reasons.append(
                f"applies, but {backend} was {'requested' if why == 'requested' else 'preferred'}"
            )
    del against[backend]
    return Selection(get_backend(backend), why, against)


def _check_known(name: str) -> None:
    if name not in backend_names():
        raise ValueError(
            f"backend must be a known name, got {name!r}; supported: {', '.join(backend_names())}"
        )


def _preferred(usable: list[str], device: torch.device) -> str:
    """TORCH first on a CPU, where TRITON only runs interpreted; else the order of preference."""
    if device.type == "cpu" and "TORCH" in usable:
        return "TORCH"
    return usable[0]


def _reasons(
    name: str, layers: list[AttentionSpec], block_size: int, device: torch.device
) -> list[str]:
    try:
        backend = get_backend(name)
    except Exception as error:  # a third party's entry point; it must not take the others with it
        return [f"its module cannot be loaded: {type(error).__name__}: {error}"]
    reasons = [
        reason for spec in layers for reason in backend.reasons_against(spec, block_size, device)
    ]
    return list(dict.fromkeys(reasons))
