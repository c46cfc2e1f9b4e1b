"""Rewrites of the graph that torch.compile traced, and the `attn_ops` backend that runs them."""

from fx_passes.backend import attn_ops, options
from fx_passes.base import Pass
from fx_passes.config import PassConfig
from fx_passes.failures import PassError, RefusedError
from fx_passes.observe import Recorder, recording
from fx_passes.pipeline import broken_passes, pass_names, register_pass, unregister_pass

__all__ = [
    "Pass",
    "PassConfig",
    "PassError",
    "Recorder",
    "RefusedError",
    "attn_ops",
    "broken_passes",
    "options",
    "pass_names",
    "recording",
    "register_pass",
    "unregister_pass",
]
