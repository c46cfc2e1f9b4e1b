"""Every backend x what it declares, against the float64 oracle; the rest must be refused.

On a CPU the backends that run there (TRITON interpreted); marked `gpu`, all of them on CUDA. The
rules are those of attn_ops/testing, which backends in other packages run too. Only our own
backends are run here, whatever else is installed.
"""

import pytest

from attn_ops import get_backend
from attn_ops.backends.registry import built_in_names
from attn_ops.testing import ConformanceCase, conformance_cases, latent, rules

QUANTIZED = (rules.output_quantization, latent.latent_output_quantization)


def is_long(case: ConformanceCase) -> bool:
    """Whether the interpreter takes seconds: others show the same on a smaller batch."""
    fp8 = any(str(parameter).startswith("fp8") for parameter in case.parameters)
    if case.rule is latent.latent_batches:
        return fp8 or "mixed" not in case.parameters
    return case.rule is latent.latent_chunks and "two chunks" not in case.parameters


def is_shown_again(case: ConformanceCase) -> bool:
    """Whether a mixed batch, called or compiled, shows the same of TRITON's kernels or FLEX."""
    if case.backend.name not in ("TRITON", "FLEX"):
        return False
    if case.rule is rules.features:
        return "mixed" not in case.parameters
    return case.rule is rules.compiled_features and "sinks, window" not in case.parameters


def all_cases() -> list:
    """Of every backend on every device type that it declares."""
    found = []
    for backend in map(get_backend, built_in_names()):
        for case in conformance_cases(backend, backend.support.devices):
            marks = [pytest.mark.gpu] if case.device == "cuda" else []
            interpreted = case.device == "cpu" and backend.name == "TRITON_MLA"
            if interpreted and case.rule is latent.latent_beyond_64k:
                continue  # 90 s of the interpreter; on a GPU it runs
            mixed = case.rule in QUANTIZED and "mixed" in case.parameters
            again = case.device == "cpu" and is_shown_again(case)
            if backend.name == "BLOCKSPARSE" and case.parameters[-2:] != ("mixed", "blocksparse"):
                again = case.device == "cpu"  # TRITON's kernels, which run by its name
            if again or (interpreted and is_long(case)):
                marks.append(pytest.mark.long)
            elif mixed:
                marks.append(pytest.mark.slow)
            found.append(pytest.param(case, marks=marks, id=case.id))
    return found


def check_usable(case: ConformanceCase) -> None:
    name, missing = case.backend.name, case.backend.unavailable()
    assert missing is None, f"{name} must run here for its conformance to be tested: {missing}"


@pytest.mark.parametrize("case", all_cases())
def test_conformance(case):
    check_usable(case)
    case.run()
