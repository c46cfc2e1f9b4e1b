"""A row's bits in sessions on a GPU: none differs with batch_invariant, some do without.

Layers have the sizes of Llama-3-8B; `python -m benchmarks.batch_invariance` does more of it.
"""

import gc
import importlib
import runpy
from pathlib import Path

import pytest
import torch

from attn_ops.integrations import transformers as integration
from attn_ops.ops.products import ordered_mm
from attn_ops.ops.products.skinny_constants import most_rows
from benchmarks.batch_invariance import WAYS, built, measured, requests
from graphs import DecodeSession

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]
bench = importlib.import_module("benchmarks.batch_invariance")


@pytest.fixture(scope="module")
def model():
    integration.register()
    return built("llama-3-8b", 1, "cuda")


def num_differing(model, monkeypatch, *ways, **options):
    torch._dynamo.reset()
    monkeypatch.setattr(bench, "WAYS", {name: WAYS[name] for name in ways})
    found = measured(model, requests(12, 128_256), 12, **options)
    return {name: counts[0] for name, counts in found.items()}


def test_none_differs(model, monkeypatch):
    ways = ("batches of 24", "chunks of 100", "called", "prefixes", "preempted", "drafts")
    found = num_differing(model, monkeypatch, *ways, number=3, batch_invariant=True)
    assert not any(found.values()), found
    assert len(found) == 8


def test_some_differ_without(model, monkeypatch):
    found = num_differing(model, monkeypatch, "batches of 24", batch_invariant=False)
    assert found["batches of 24"] > 0


def test_a_planted_split_shows(model, monkeypatch):
    """Products of few rows by the library, which splits some of them by the number of rows."""
    monkeypatch.setattr(ordered_mm, "most_rows", lambda w: 0)
    monkeypatch.setattr(ordered_mm, "_library_is_ordered", lambda *_: True)
    monkeypatch.setattr("attn_ops.ops.products.fused_products.MOST_ROWS_WITHOUT_NORM", 0)
    found = num_differing(model, monkeypatch, "batches of 24", batch_invariant=True)
    assert found["batches of 24"] > 0


def test_a_model_compiled_before(model):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True)
    asked = {"max_batch_size": 2, "max_tokens": 64}
    DecodeSession(compiled, **asked).generate([[1, 2]], 2)
    with pytest.raises(ValueError, match="which was compiled before without it"):
        DecodeSession(compiled, **asked, batch_invariant=True).generate([[1, 2]], 2)
    torch._dynamo.reset()
    session = DecodeSession(compiled, **asked, batch_invariant=True)
    session.generate([[1, 2]], 2)
    assert "the library in" in session.report().batch_invariant


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("k", "m"), [(4096, 1024), (4096, 4096), (14336, 4096), (4096, 14336)])
def test_products(k, m, bias):
    """As they are computed for any number of rows, beside 2,048."""
    generator = torch.Generator("cuda").manual_seed(k + m)
    like = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    x, w = torch.randn(2048, k, **like), torch.randn(m, k, **like).t()
    b = torch.randn(m, **like) if bias else None
    whole = ordered_mm.ordered_product(x, w, b)
    wanted = x.double() @ w.double() + (0 if b is None else b.double())
    torch.testing.assert_close(whole.double(), wanted, atol=2.0, rtol=1e-2)
    for rows in (2047, 513, 300, 129, 128, 127, 65, 64, 33, 17, 16, 5, 1):
        some = ordered_mm.ordered_product(x[:rows], w, b)
        assert torch.equal(some, whole[:rows]), (rows, most_rows(w), ordered_mm.tried_products())


def test_updates_between_steps(model):
    """200 updates: tokens are those of a fresh session, and memory stays."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True)
    asked = {"max_batch_size": 4, "max_tokens": 256, "cache_tokens": 2048, "batch_invariant": True}
    session, prompts = DecodeSession(compiled, **asked), [[5, 6, 7], [9] * 30, [1], [*range(40)]]
    first = {name: value.clone() for name, value in model.state_dict().items()}
    used = []
    for number in range(1, 201):
        factor = 1 + 0.002 * number
        session.update_weights((n, w * factor if "proj" in n else w) for n, w in first.items())
        got = [result.token_ids for result in session.generate(prompts, 3, eos=())]
        if number % 40 == 0:
            fresh = DecodeSession(compiled, **asked)
            assert got == [result.token_ids for result in fresh.generate(prompts, 3, eos=())]
            del fresh
            gc.collect()
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    session.update_weights(first)
    assert session.weight_version == 201
    assert len(set(used)) == 1, used


def test_the_example(capsys):
    """Score minus drawn is 0 in every round of training."""
    path = Path(__file__).parents[3] / "examples" / "rollouts.py"
    torch._dynamo.reset()
    runpy.run_path(str(path), run_name="__main__")
    rounds = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert len(rounds) == 8
    assert all(line.endswith("score minus drawn at most 0.0e+00") for line in rounds), rounds


def test_rows_behind_are_read_in_place():
    """Without a copy where there is room, and with one at the end of a tensor."""
    w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16).t()
    x = ordered_mm.new_rows(777, 4096, w).normal_()
    x._base[777:] = float("nan")
    assert ordered_mm._with_room(x).data_ptr() == x.data_ptr()
    whole = ordered_mm.ordered_product(x.clone(), w, None)
    assert torch.equal(ordered_mm.ordered_product(x, w, None), whole)
    assert not whole.isnan().any()
