"""The searches for wrong tokens: a sample of each, and that they find what is planted."""

import dataclasses

import pytest
import torch

from attn_ops import get_backend
from attn_ops.backends import registry
from attn_ops.backends.mla.torch_mla import reference_mla_attention
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.integrations.transformers import Contract
from tests.fuzz import programs
from tests.fuzz.__main__ import main
from tests.kit.marks import slow

TORCH, TORCH_MLA = get_backend("TORCH"), get_backend("TORCH_MLA")


def attention_of(name: str, number: int = 40, longest: int = 60) -> int:
    numbers = ["--longest", str(longest), "--number", str(number)]
    return main(["attention", "--device", "cpu", *numbers, "--backends", name])


@pytest.fixture
def planted(monkeypatch):
    """Makes a backend with another forward known, for one test."""

    def register(backend, forward) -> None:
        changed = dataclasses.replace(backend, name="BROKEN", forward=forward)
        monkeypatch.setattr(registry, "_registered", {"BROKEN": changed})

    return register


@pytest.mark.parametrize(
    ("name", "number"), [("TORCH", 40), ("TORCH_MLA", 25), *slow(("TRITON", 3), ("TRITON_MLA", 3))]
)
def test_backends_are_right(name, number):
    if missing := get_backend(name).missing():
        pytest.skip(missing)
    assert attention_of(name, number, longest=10 if "TRITON" in name else 60) == 0


def one_key_too_many(q, kv_cache, meta, options):
    """NaN after the last token makes it plain."""
    seq_lens = meta.common.seq_lens
    room = meta.common.block_table_tensor.shape[1] * kv_cache.shape[2]
    longer = torch.where(seq_lens > 0, (seq_lens + 1).clamp(max=room), 0)
    more = meta.common.replace(seq_lens=longer, seq_lens_cpu=longer)
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return reference_attention(q, kv_cache, more, **fields).to(q.dtype)


def one_key_too_few(q, kv_cache, meta, options, plan=None):
    fewer = (meta.common.seq_lens - 1).clamp(min=0)
    part = meta.common.replace(seq_lens=fewer, seq_lens_cpu=fewer)
    return reference_mla_attention(q, kv_cache, part, options, torch.float32).to(q.dtype)


def stray_write(q, kv_cache, meta, options):
    """The result is right, but a byte of the null block is not what it was."""
    out = TORCH.forward(q, kv_cache, meta, options)
    kv_cache[0, 1, -1, -1, -1] = 1.0
    return out


@pytest.mark.parametrize(
    ("backend", "forward", "told"),
    [
        (TORCH, one_key_too_many, "out: relative error inf"),
        (TORCH_MLA, one_key_too_few, "out: relative error"),
        (TORCH, stray_write, "cache was written"),
    ],
)
def test_what_is_planted_is_found(planted, capsys, backend, forward, told):
    planted(backend, forward)
    assert attention_of("BROKEN") == 1
    printed = capsys.readouterr().out
    assert printed.count(told) > 10
    command = next(line for line in printed.splitlines() if "python -m tests.fuzz" in line)
    assert main(command.split("tests.fuzz ")[1].split()) == 1


def test_backends_that_do_not_run_here_are_refused():
    with pytest.raises(ValueError, match="backends must run on cpu, got"):
        attention_of("FLASH_ATTN")


def run_many(number: int) -> set[str]:
    return {programs.run(seed, compiled=0.0) for seed in range(number)}


@pytest.mark.parametrize("number", [10, *slow(40)])
def test_programs_are_equal_or_refused(number):
    assert run_many(number) >= {"equal", "refused"}


def test_without_the_checks_programs_go_wrong(monkeypatch):
    monkeypatch.setattr(Contract, "check", lambda self: None)
    with pytest.raises(AssertionError, match="token 0 of"):
        run_many(40)


def test_experts_are_right(monkeypatch):
    """And a wrong limit is found."""
    from attn_ops.ops.moe import composite

    sample = ["experts", "--device", "cpu", "--number", "30"]
    assert main(sample) == 0
    gated = composite._gated
    monkeypatch.setattr(composite, "_gated", lambda both, a, b, c, d: gated(both, a, b, None, d))
    assert main(sample) == 1
