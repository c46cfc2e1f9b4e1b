"""All cases of a backend, by its declaration, and a function that runs them."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.output_quant.schemes import SCHEMES
from attn_ops.testing import apart, latent, rules
from attn_ops.testing.features import CROSS, FEATURES, HEADS, LENGTHS, UNIFORM

_RULES: dict[rules.Rule, tuple[Iterable[Any], ...]] = {
    rules.features: (LENGTHS, FEATURES),
    rules.log_sum_exp: (("decode", "mixed"), FEATURES),
    rules.output_quantization: (("decode", "mixed"), SCHEMES),
    rules.groups: (HEADS,),
    rules.head_sizes: ((8, 40, 64, 72, 80, 96, 112, 128, 160, 192, 248, 256, 512),),
    rules.block_sizes: ((16, 32, 48, 64, 128, 240, 256),),
    rules.no_tokens: (),
    rules.uniform_queries: (UNIFORM,),
    rules.cross_attention: (CROSS,),
    rules.heads_before_tokens: (("decode", "mixed"), ("auto", "fp8_e4m3")),
    rules.chunked_local_attention: (("decode", "mixed"),),
    rules.cascade: (("plain", "sinks"),),
    rules.narrow_values: (),
    rules.without_a_cache: (FEATURES, (None, 32)),
    rules.operator_contract: (),
    apart.requests_apart: (("decode", "mixed"), ("plain", "blocksparse")),
    apart.requests_of_a_cascade_apart: (),
    apart.rows_apart_without_a_cache: (),
    latent.refuses_latent_layers: (),
    rules.compiled_features: (FEATURES,),
}
"""Each rule with the values of its parameters. Those that compile are last."""

_LATENT_RULES: dict[rules.Rule, tuple[Iterable[Any], ...]] = {
    latent.latent_batches: (latent.LENGTHS, latent.LATENT_CACHES),
    latent.latent_log_sum_exp: (),
    latent.latent_chunks: (latent.CHUNKS,),
    latent.latent_ways: (),
    latent.latent_heads: ((1, 3, 16),),
    latent.latent_block_sizes: ((16, 32, 64, 128),),
    latent.latent_no_tokens: (),
    latent.latent_uniform_queries: (latent.UNIFORM,),
    latent.latent_strides: (),
    latent.latent_writes: (latent.LATENT_CACHES,),
    latent.latent_gather: (latent.LATENT_CACHES,),
    latent.latent_output_quantization: (("decode", "mixed"), SCHEMES),
    latent.latent_geometry: (),
    latent.latent_beyond_64k: (),
    latent.latent_operators: (),
    apart.latent_requests_apart: (("decode", "mixed", "prefill"),),
    latent.latent_compiled: (latent.LATENT_CACHES,),
}
"""The same of backends of latent attention."""

_COMPILED = (rules.compiled_features, latent.latent_compiled)


@dataclasses.dataclass(frozen=True, eq=False)
class ConformanceCase:
    """One rule with its parameters, for one backend on one device."""

    backend: Backend
    device: str
    rule: rules.Rule
    parameters: tuple[Any, ...]

    @property
    def id(self) -> str:
        """Such as MINE-cpu-features-decode-window."""
        parts = (self.backend.name, self.device, self.rule.__name__, *self.parameters)
        return "-".join(map(str, parts))

    def run(self) -> None:
        """Run it.

        Raises:
            AssertionError: the backend breaks the rule; the message names request, row and head of
                the largest difference, with both values.
        """
        self.rule(self.backend, self.device, *self.parameters)


def conformance_cases(
    backend: Backend, devices: Sequence[str] | None = None
) -> list[ConformanceCase]:
    """What a backend must do, by its declaration; what it does not declare, it must refuse.

    For pytest: `@pytest.mark.parametrize("case", conformance_cases(BACKEND), ids=lambda c: c.id)`
    and `case.run()`. Attention without a cache is asked by name, so such a backend must be known to
    attn-ops: an entry point, or `register_backend`.

    Args:
        backend: it need not run on this machine to have cases.
        devices: types to run on; None: those declared of which this machine has one.

    Raises:
        TypeError: `backend` is none.
        ValueError: a device is not declared.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a Backend, got {type(backend).__name__}")
    declared = backend.support.devices
    for device in devices or ():
        if device not in declared:
            raise ValueError(
                f"devices must be declared, got {device!r}; supported: {', '.join(declared)}"
            )
    if devices is None:
        devices = [d for d in declared if d != "cuda" or torch.cuda.is_available()]
    return [
        ConformanceCase(backend, device, rule, parameters)
        for device in devices
        for rule, values in (_LATENT_RULES if backend.support.latent else _RULES).items()
        for parameters in itertools.product(*values)
        if _applies(rule, parameters, backend.support)
    ]


def _applies(rule: rules.Rule, parameters: tuple[Any, ...], support: Support) -> bool:
    """Whether a rule says something of a backend that declares `support`."""
    if rule is rules.compiled_features:
        return FEATURES[parameters[0]].declared(support)
    return rule is not rules.heads_before_tokens or parameters[1] in support.kv_cache_dtypes


def check_backend(backend: Backend, cases: Iterable[ConformanceCase] | None = None) -> int:
    """Run `cases`, by default all of `conformance_cases(backend)`; how many there were.

    Graphs that Dynamo has made are dropped before every case that compiles.

    Raises:
        AssertionError: some cases fail; the message lists them all.
        ValueError: the backend cannot run on this machine, or there is no case.
    """
    chosen = list(conformance_cases(backend) if cases is None else cases)
    missing = backend.missing()
    if missing is not None:
        raise ValueError(f"backend {backend.name} must run here to be checked, got: {missing}")
    if not chosen:
        raise ValueError(f"cases must hold at least one of backend {backend.name}, got none")
    failures = []
    for case in chosen:
        if case.rule in _COMPILED:
            torch._dynamo.reset()
        try:
            case.run()
        except Exception as error:  # a kernel's own; the other cases still run
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            failures.append(f"{case.id}: {kind}{error}")
    if failures:
        count = f"{len(failures)} of {len(chosen)} cases of backend {backend.name} failed"
        raise AssertionError("\n".join([f"{count}:", *failures]))
    return len(chosen)
