"""`attention_quant` in random forms, by its kernels and by plain PyTorch, against the unfused form.

Values of any magnitude, infinite and NaN ones, scales of any value, batches without rows.
"""

import dataclasses
import random

import pytest
import torch

from attn_ops import AttentionSpec, attention, attention_quant, get_backend
from attn_ops.output_quant.quantize import reference_quantize
from attn_ops.output_quant.schemes import SCHEMES, OutputQuant
from attn_ops.testing.calls import Case, make_case
from attn_ops.testing.features import FEATURES
from attn_ops.testing.quantized import nibble_steps, scale_steps
from tests.kit.marks import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ODD = (0.02, 1.0, 17.0, 0.0, -0.5, float("nan"), float("inf"), 1e-40)


def random_how(numbers: random.Random) -> OutputQuant:
    """A scheme with any options that it takes."""
    how = OutputQuant(numbers.choice(list(SCHEMES)))
    likely = {
        "round_values": how.scheme != "nvfp4", "multiply": how.scheme != "nvfp4",
        "round_scale": how.dynamic, "ue8m0": how.dynamic and how.group is not None,
    }  # fmt: skip
    options: dict = {name: taken and numbers.random() < 0.35 for name, taken in likely.items()}
    if how.dynamic:
        options["min_scale"] = numbers.choice([0.0, 0.0, 1e-9, 2.0**-12, 0.3])
    return dataclasses.replace(how, **options)


def random_case(numbers: random.Random, how: OutputQuant, backend: str) -> Case | None:
    """None: the width is no multiple of the group."""
    heads = numbers.choice([(4, 2), (2, 1), (6, 2), (1, 1), (3, 3), (8, 1)])
    size = numbers.choice([16, 32, 64, 64, 80, 96, 128, 128, 256])
    if heads[0] * size % (how.group or 1):
        return None
    wide = numbers.random() < 0.5
    dtype = torch.float32 if wide else torch.float16  # the interpreter cuts bfloat16
    num_reqs = numbers.choice([0, 1, 2, 4])
    lengths = [numbers.choice([1, 1, 1, 0, 3, 17]) for _ in range(num_reqs)]
    lengths = [1] * num_reqs if numbers.random() < 0.5 else lengths
    seen = [length + numbers.choice([0, 0, 5, 40, 130]) for length in lengths]
    asked = FEATURES[numbers.choice(["plain", "plain", "window", "soft_cap"])]
    spec = AttentionSpec(*heads, size, dtype, **asked.spec)
    more = {"num_padding_rows": numbers.choice([0, 2]), "device": DEVICE}
    case = make_case(get_backend(backend), spec, (lengths, seen), asked, **more)
    if numbers.random() < 0.5:
        for block in case.kv_cache[:, 1]:
            block *= 10.0 ** numbers.randint(*((-40, 30) if wide else (-7, 3)))
    if numbers.random() < 0.3 and case.q.shape[0]:
        case.q[numbers.randrange(case.q.shape[0])] = numbers.choice([float("nan"), float("inf"), 0])
    return case


def check(seed: int, backend: str) -> None:
    numbers = random.Random(seed)
    how = random_how(numbers)
    case = random_case(numbers, how, backend)
    if case is None:
        return
    given = how.scheme == "fp8_static" or (how.scheme == "nvfp4" and numbers.random() < 0.7)
    out_scale = torch.tensor(numbers.choice(ODD), device=DEVICE) if given else None
    arguments = (case.q, case.kv_cache, case.meta, case.scale)
    want, want_scales = reference_quantize(attention(*arguments, **case.options), how, out_scale)
    got, scales = attention_quant(
        *arguments, out_scale=out_scale, **dataclasses.asdict(how), **case.options
    )
    for a, b in ((got, want), (scales, want_scales)):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    steps = nibble_steps if how.scheme == "nvfp4" else scale_steps
    most = 0 if backend == "TORCH" else 1
    assert not got.numel() or steps(got, want) <= most, f"seed {seed}: {how}"
    assert scale_steps(scales, want_scales) <= most, f"seed {seed}: {how}"


@pytest.mark.parametrize("backend", ["TORCH", "TRITON"])
@pytest.mark.parametrize("seeds", [range(6), *slow(range(6, 106))], ids=["few", "many"])
def test_random_forms(backend, seeds):
    for seed in seeds:
        check(seed, backend)
