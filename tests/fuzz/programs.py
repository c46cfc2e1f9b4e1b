"""Random models against "no silent wrong token": a session gives their own tokens or refuses.

    python -m tests.fuzz programs

A small model of a random family is changed (`tests.fuzz.surgeries`), perhaps compiled or merged,
and decoded by a session. The truth is what the changed model computes by itself, eagerly, one
prompt at a time, without a cache.
"""

import dataclasses
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_ops.integrations.merged import merge_projections
from graphs import DecodeSession
from tests.fuzz.surgeries import SURGERIES, Inapplicable
from tests.kit.models import MORE_CONFIGS, build_model

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt_oss", *MORE_CONFIGS)
NEAR = 1e-4
"""Logits closer to the largest than this, relative to the largest magnitude, may be drawn too."""
COMPILED = 0.08
"""Share of programs that are compiled."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, what is done to it, how its session runs, and for whom."""

    family: str
    surgeries: tuple[tuple[str, int], ...]  # name and seed
    prompts: tuple[tuple[int, ...], ...]
    num_new: int
    compiled: bool
    merged: bool
    options: dict[str, Any]


def drawn(seed: int, compiled: float = COMPILED) -> Program:
    rng = random.Random(f"program {seed}")
    is_compiled = rng.random() < compiled
    replays = not is_compiled and rng.random() < 0.5
    return Program(
        family=rng.choice(FAMILIES),
        surgeries=tuple(
            (rng.choice(sorted(SURGERIES)), rng.randrange(10**6))
            for _ in range(rng.choice((1, 1, 2, 2, 3)))
        ),
        prompts=tuple(
            tuple(rng.randrange(3, 64) for _ in range(rng.choice((1, 2, 3, 5, 9, 14, 22, 30))))
            for _ in range(rng.choice((1, 2, 3, 5)))
        ),
        num_new=rng.choice((4, 8, 8, 12)),
        compiled=is_compiled,
        merged=rng.random() < (0.5 if is_compiled else 0.1),
        options={
            "backend": "TORCH",
            "max_tokens": 48,
            "max_batch_size": rng.choice((2, 4)),
            "max_tokens_per_step": rng.choice((8, 16, 64, 256)),
            "decode_steps": rng.choice((1, 1, 4)),
            "cudagraph_mode": rng.choice(("FULL", "FULL_DECODE_ONLY")),
            "debug": "eager_replay" if replays else None,
            "lazy_capture": True,
        },
    )


def made(program: Program, implementation: str) -> tuple[Any, list[str]]:
    """The model after its surgeries, and what they did."""
    model, did = build_model(program.family, implementation, num_layers=3), []
    for name, seed in program.surgeries:
        torch.manual_seed(seed)
        did.append(SURGERIES[name](model, random.Random(seed)))
    return model, did


def truth(program: Program) -> Any:
    return made(program, "eager")[0].eval()


def next_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[V], all of the sequence computed at once.

    With a mask, as `generate` gives one: without, Transformers takes positions that do not rise by
    one for several sequences.
    """
    ids_1T = torch.tensor([ids])
    with torch.no_grad():
        mask = torch.ones_like(ids_1T)
        logits = model(input_ids=ids_1T, attention_mask=mask, use_cache=False).logits
    if logits.shape[1] != len(ids) or not logits.isfinite().all():
        raise Inapplicable(f"{logits.shape[1]} rows of logits for {len(ids)} tokens, or not finite")
    return logits[0, -1].float()


def first_wrong(program: Program, prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Index of the first token that the model would not draw; None: all are its own."""
    model, ids = truth(program), list(prompt)
    for i, token in enumerate(tokens):
        logits_V = next_logits(model, ids)
        top = int(logits_V.argmax())
        near = NEAR * float(logits_V.abs().max())
        if not 0 <= token < len(logits_V) or logits_V[top] - logits_V[token] > near:
            return None if unstable(program, ids, top) else i
        ids.append(token)
    return None


def unstable(program: Program, ids: Sequence[int], expected: int) -> bool:
    """Whether weights off by 2e-6 draw another token: an expert's near tie, say."""
    for seed in range(3):
        model = truth(program)
        torch.manual_seed(seed)
        for p in model.parameters():
            p.data = p.data * (1 + 2e-6 * torch.randn(p.shape))
        if int(next_logits(model, ids).argmax()) != expected:
            return True
    return False


def refused(error: BaseException) -> bool:
    """Whether one of our own lines raised it, or Dynamo would not compile."""
    path = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = {"attn_ops", "fx_passes", "graphs"} & set(path.parts) and "tests" not in path.parts
    named = isinstance(error, ValueError | TypeError | RuntimeError)
    return type(error).__module__.startswith("torch._dynamo") or bool(ours and named)


def run(seed: int, compiled: float = COMPILED) -> str:
    """`equal`, `refused`, or `no truth` where the changed model does not run by itself."""
    program = drawn(seed, compiled)
    try:
        next_logits(truth(program), program.prompts[0])
    except Exception:  # no truth, no program
        return "no truth"
    model, did = made(program, "attn_ops")
    try:
        if program.merged:
            merge_projections(model)
        called: Any = model
        if program.compiled:
            torch._dynamo.reset()
            called = torch.compile(model, backend="attn_ops", fullgraph=True)
        session = DecodeSession(called, **program.options)
        results = session.generate(list(map(list, program.prompts)), program.num_new, eos=())
    except Exception as error:
        if not refused(error):
            raise
        return "refused"
    for prompt, result in zip(program.prompts, results, strict=True):
        wrong = first_wrong(program, prompt, result.token_ids)
        right = wrong is None and len(result.token_ids) == program.num_new
        assert right, f"{did}, token {wrong} of {result.token_ids} for {prompt}: {program}"
    return "equal"


def search(args: Any) -> Callable[[int], str]:
    warnings.simplefilter("ignore")
    return run
