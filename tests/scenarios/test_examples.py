"""The programs in examples/ run, and the drafter looks up what it says."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from graphs import DecodeSession
from tests.kit.models import build_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("ngram_drafter")


def number_in(text: str, before: str) -> float:
    return float(text.split(before)[1].split()[0])


def test_ngram_drafter(example, capsys):
    """It asserts itself that drafts change no token; here, that they save steps."""
    example.main()
    out = capsys.readouterr().out
    assert "384 tokens, the same with drafts and without" in out
    assert 0.5 < number_in(out, "accepted tokens per step: ") < 4
    assert number_in(out, "with drafts: ") < number_in(out, "without drafts: ")


def test_decode_llama(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # tested elsewhere
    load("decode_llama").main()
    assert capsys.readouterr().out.count("length") == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_own_loop(model, compiled):
    """Its tokens are those of `generate`; on a GPU tests/gpu/test_own_loop.py replays it."""
    own_loop, prompts = load("own_loop"), [[1, 2, 3, 4, 5], [6], [7, 8] * 9]
    alone = build_model(attn_implementation="sdpa")
    wanted = [
        alone.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    run = torch.compile(model, backend="attn_ops", fullgraph=True) if compiled else model
    assert own_loop.generate(run, prompts, 20) == wanted


def test_rollouts(monkeypatch, capsys):
    """Samples get better as the trainer's weights reach the session."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # tested elsewhere
    load("rollouts").main()
    out = capsys.readouterr().out
    rewards = [float(line.split("mean reward ")[1][:5]) for line in out.splitlines()[:8]]
    assert rewards[-1] > rewards[0] + 0.1
    differences = [float(line.rsplit(" ", 1)[1]) for line in out.splitlines()[:8]]
    assert max(differences) < 1e-5
    assert "forgotten 8 times" in out


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_drafts_through_the_capture_path(example, mode):
    model, prompts = example.random_model(), [[1, 2, 3, 1, 2], [7], [5] * 9]
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_tokens": 64}
    plain = DecodeSession(model, cudagraph_mode="NONE", **sizes)
    session = DecodeSession(
        model, cudagraph_mode=mode, debug="eager_replay", num_draft_tokens=3, **sizes
    )
    tokens, yields = example.generate(session, prompts, 40, 3)
    assert tokens == [r.token_ids for r in plain.generate(prompts, 40)]
    assert sum(yields) == 120
    assert max(yields) == 4  # a draft that was right to the end
    assert session.num_steps["captured"] > 10


def looked_up(tokens: list[int], longest: int, num_tokens: int) -> list[int]:
    """As `NgramDrafter.draft`, by a search through the whole text."""
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == tokens[-n:]:
                text = tokens[begin + n :]
                return [text[i % len(text)] for i in range(num_tokens)]
    return []


def test_drafts_are_what_followed_the_latest_longest_match(example):
    generator = random.Random(0)
    for longest in (1, 2, 4):
        drafter = example.NgramDrafter([], longest)
        assert drafter.draft(3) == []
        for _ in range(200):
            drafter.append(generator.randrange(4))
            assert drafter.draft(5) == looked_up(drafter.tokens, longest, 5)


def test_a_loop_is_drafted_round_and_round(example):
    assert example.NgramDrafter([8, 1, 2, 1, 2]).draft(5) == [1, 2, 1, 2, 1]
    assert example.NgramDrafter([9]).draft(4) == []
