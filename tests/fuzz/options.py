"""Random mixes of what requests ask for: tokens and log-probabilities of Transformers, one by one.

Sessions are made once: batches, chunks, preemption, prefixes, drafts, decode steps, captured.
Each case draws requests and their options for one of them.
"""

import argparse
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from graphs import DecodeSession
from tests.kit.models import build_model
from tests.kit.sessions import is_empty, make_session, poisoned

VOCAB = 64
CLOSE = {"cpu": 1e-5, "cuda": 3e-5}
"""Of log-probabilities in float32, and of logits that are all but equal: on a GPU the products of a
batch add in another order than those of one row."""

CALLED = {"cudagraph_mode": "NONE"}
SESSIONS: list[dict[str, Any]] = [
    CALLED,
    {"debug": "eager_replay"},
    {"debug": "eager_replay", "decode_steps": 8},
    {"debug": "eager_replay", "decode_steps": 8, "share_prefixes": True},
    {"debug": "eager_replay", "num_draft_tokens": 3},
    {"debug": "eager_replay", "num_draft_tokens": 2, "share_prefixes": True, "cache_tokens": 96},
    {"debug": "eager_replay", "cache_tokens": 80, "max_tokens_per_step": 8, "decode_steps": 2},
    {"share_prefixes": True, "cache_tokens": 80, "max_tokens_per_step": 7} | CALLED,
]


def asked_of(rng: random.Random) -> dict[str, Any]:
    """Options of a request, most of them left out."""
    tokens = list(range(VOCAB))
    draws: dict[str, Callable[[], Any]] = {
        "logprobs": lambda: rng.choice([0, 1, 5]),
        "prompt_logprobs": lambda: rng.choice([0, 3]),
        "logit_bias": lambda: {t: rng.uniform(-3, 3) for t in rng.sample(tokens, 5)},
        "bad_words": lambda: [rng.sample(tokens, rng.choice([1, 1, 2])) for _ in range(6)],
        "allowed_token_ids": lambda: rng.sample(tokens, 24),
        "min_tokens": lambda: rng.randrange(1, 8),
        "eos": lambda: rng.sample(tokens, 8),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "presence_penalty": lambda: rng.choice([-0.5, 1.0]),
        "frequency_penalty": lambda: rng.choice([-0.2, 0.7]),
    }
    asked = {name: draw() for name, draw in draws.items() if rng.random() < 0.25}
    return {"eos": ()} | asked


def prompt_of(rng: random.Random) -> list[int]:
    shared = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20] * 2
    own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 3, 9, 25]))]
    return shared[: rng.choice([0, 0, 8, 20])] + own


def processors(asked: dict[str, Any], num_prompt: int, device: torch.device) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if asked.get("min_tokens") and asked["eos"]:
        eos = torch.tensor(asked["eos"], device=device)
        found.append(
            MinNewTokensLengthLogitsProcessor(num_prompt, asked["min_tokens"], eos, device=device)
        )
    if "repetition_penalty" in asked:
        found.append(RepetitionPenaltyLogitsProcessor(asked["repetition_penalty"]))
    return found


@torch.no_grad()
def check(model: Any, prompt: list[int], asked: dict[str, Any], result: Any, most: int) -> None:
    """Raise an AssertionError unless Transformers would have drawn `result` greedily, token by
    token, of the same log-probabilities.
    """
    tokens = result.token_ids
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(ids).logits[0].float()
    raw = logits.log_softmax(-1)
    process = processors(asked, len(prompt), ids.device)
    for number, token in enumerate(tokens):
        end = len(prompt) + number
        row = logits[end - 1].clone()
        if asked.get("allowed_token_ids"):
            kept = torch.full_like(row, -torch.inf)
            kept[asked["allowed_token_ids"]] = 0
            row += kept
        for other, bias in asked.get("logit_bias", {}).items():
            row[other] += bias
        row = process(ids[:, :end], row[None])[0]
        counts = torch.bincount(ids[0, len(prompt) : end], minlength=row.numel())
        row -= asked.get("presence_penalty", 0) * (counts > 0)
        row -= asked.get("frequency_penalty", 0) * counts
        # Not Transformers' processor: before 5.20 it left out a word one longer than all tokens.
        for *begin, last in asked.get("bad_words", []):
            if ids[0, max(end - len(begin), 0) : end].tolist() == begin:
                row[last] = -torch.inf
        assert row[token] >= row.max() - CLOSE[row.device.type], (
            f"token {number} is {token}, not {row.argmax()}"
        )
        if "logprobs" in asked:
            _check_row(raw[end - 1], result.logprobs[number], token, asked["logprobs"])
    ended = tokens[-1] in asked["eos"]
    assert len(tokens) == most or ended, "it ended early"
    assert not any(token in asked["eos"] for token in tokens[:-1]), "it went on behind eos"
    if "prompt_logprobs" in asked:
        assert result.prompt_logprobs[0] is None
        assert len(result.prompt_logprobs) == len(prompt)
        for at, found in enumerate(result.prompt_logprobs[1:], 1):
            _check_row(raw[at - 1], found, prompt[at], asked["prompt_logprobs"])


def _check_row(wanted: torch.Tensor, found: dict[int, Any], token: int, k: int) -> None:
    close = CLOSE[wanted.device.type]
    assert token in found
    assert k <= len(found) <= k + 1
    for other, one in found.items():
        assert abs(one.logprob - wanted[other].item()) < close, f"{one} of {wanted[other]}"
        greater = int((wanted > wanted[other] + close).sum())
        assert greater < one.rank <= 1 + int((wanted > wanted[other] - close).sum())


def run(sessions: list[DecodeSession], model: Any, seed: int) -> str:
    rng = random.Random(seed)
    session = rng.choice(sessions)
    number, most = rng.randrange(1, 7), rng.randrange(1, 13)
    cases = [(prompt_of(rng), asked_of(rng)) for _ in range(number)]
    requests = [session.add(prompt, most, **asked) for prompt, asked in cases]
    drafted = session.plan.num_draft_tokens
    while session.num_unfinished:
        if drafted and rng.random() < 0.7:
            draft = [rng.randrange(VOCAB) for _ in range(rng.randrange(drafted + 1))]
            session.verify_draft({i: draft for i in requests if rng.random() < 0.8})
        else:
            session.step()
    for request, (prompt, asked) in zip(requests, cases, strict=True):
        check(model, prompt, asked, session.result(request), most)
        session.discard(request)
    _check_scores(session, model, rng)
    assert is_empty(session)
    return "right"


@torch.no_grad()
def _check_scores(session: DecodeSession, model: Any, rng: random.Random) -> None:
    pairs = [(prompt_of(rng), prompt_of(rng)[:8]) for _ in range(rng.randrange(3))]
    scores = session.score([p for p, _ in pairs], [r for _, r in pairs])
    for (prompt, rest), score in zip(pairs, scores, strict=True):
        raw = model(torch.tensor([prompt + rest], device=model.device)).logits[0].float()
        raw = raw.log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = raw.gather(1, torch.tensor(rest, device=raw.device)[:, None])[:, 0].tolist()
        assert len(score.logprobs) == len(wanted)
        error = max(abs(a - b) for a, b in zip(wanted, score.logprobs, strict=True))
        assert error < CLOSE[raw.device.type]


def search(args: argparse.Namespace) -> Callable[[int], str]:
    model = build_model("llama", "sdpa").to(args.device)
    own = build_model("llama").to(args.device)
    debugged = args.device == "cpu"
    options = [
        {name: value for name, value in one.items() if debugged or name != "debug"}
        for one in SESSIONS
    ]
    sessions = [poisoned(make_session(own, max_tokens=64, **one)) for one in options]
    return functools.partial(run, sessions, model)
