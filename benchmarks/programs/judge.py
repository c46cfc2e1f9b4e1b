"""Whether the tokens of a session are those of the program's models."""

import contextlib
from typing import Any

import torch

from benchmarks.programs import changes, truth
from benchmarks.programs.draw import Program
from benchmarks.programs.made import made
from benchmarks.programs.serve import Served
from benchmarks.programs.surgeries import Box

AS_GENERATE = "as generate would"
"""Said of wrong tokens that the model draws by itself too, over a cache of Transformers."""

SLACK = 2
"""How many times `decode_steps` steps may already be launched at a change."""


def judged(program: Program, served: Served, expected: list[list[int]]) -> str:
    """What is wrong with the tokens, the worst first; empty if nothing is."""
    if served.stream_differs:
        return served.stream_differs
    same = {f.__name__ for f in changes.SAME} | set(changes.DRIVERS)
    changes_truth = served.changed and any(name not in same for name, _ in program.changes)
    found = []
    for i, tokens in enumerate(served.tokens):
        if served.finished and len(tokens) != program.max_new_tokens:
            return f"prompt {i}: {len(tokens)} tokens, not {program.max_new_tokens}"
        as_old = tokens == expected[i][: len(tokens)]
        if as_old and (not changes_truth or len(tokens) <= served.before[i]):
            continue
        if changes_truth:
            wrong = _wrong_after_change(program, served, i)
        else:
            wrong = _wrong_for_old(program, i, tokens)
        if wrong:
            found.append(f"prompt {i}: {wrong}: {tokens}; the old model: {expected[i]}")
    return min(found, key=lambda wrong: AS_GENERATE in wrong, default="")


def _wrong_for_old(program: Program, i: int, tokens: list[int]) -> str:
    old = made(program, "eager", False, Box())[0]
    prompt = program.prompts[i]
    ids = [*prompt, *tokens]
    found = truth.first_wrong(truth.recomputed(old, ids), prompt, tokens)
    if found is None:
        return ""
    at, top = found

    def again() -> Any:
        return made(program, "eager", False, Box())[0]

    if truth.unstable(again, ids[: len(prompt) + at], top):
        return ""
    return f"token {at} should be {top}" + _as_cached(program, i, tokens)


def _as_cached(program: Program, i: int, tokens: list[int]) -> str:
    """Whether the model with a cache of Transformers would have drawn the same wrong tokens."""
    prompt = program.prompts[i]
    ids = [*prompt, *tokens]
    try:
        old = made(program, "eager", False, Box())[0]
        from transformers import DynamicCache

        cache, rows = DynamicCache(), []
        with torch.no_grad():
            for part in (list(prompt), *([t] for t in tokens)):
                out = old(input_ids=torch.tensor([part]), past_key_values=cache, use_cache=True)
                rows.append(out.logits[0, -1])
        found = truth.first_wrong(lambda n: rows[n - len(prompt)], prompt, tokens)
        return f" ({AS_GENERATE})" if found is None and ids else ""
    except Exception:  # nothing to compare with
        return ""


def _wrong_after_change(program: Program, served: Served, i: int) -> str:
    """Tokens before the change by the old model, and after by what `changes` says."""
    prompt, tokens, before = program.prompts[i], served.tokens[i], served.before[i]
    early = _wrong_for_old(program, i, tokens[:before])
    if early:
        return f"before the change, {early}"
    slack = SLACK * program.decode_steps if program.debug else 0
    begin = served.computed[i]
    near = 3e-2 if any(name == "autocast" for name, _ in program.changes) else truth.NEAR
    best = -1
    for at in dict.fromkeys((*range(begin, begin + slack + 1), served.launched[i])):
        for rows in _truths(program, (*prompt, *tokens), at):
            try:
                found = truth.first_wrong(rows, prompt, tokens, before, near)
            except Exception:  # that truth cannot be had
                continue
            if found is None:
                return ""
            best = max(best, found[0])
    return f"after the change, token {best} is no model's"


def _truths(program: Program, ids: tuple[int, ...], at: int) -> Any:
    """Of a change when `at` positions were in the cache: over that cache, or all computed anew."""
    old = made(program, "eager", False, Box())[0]
    new = made(program, "eager", True, Box())[0]
    around = contextlib.nullcontext
    if any(name == "autocast" for name, _ in program.changes):
        around = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    try:
        yield truth.switched(old, new, ids, min(at, len(ids)), around)
    except truth.BadTruth:  # no truth to judge by
        raise
    except Exception:
        pass
    by_old, by_new = truth.recomputed(old, ids), truth.recomputed(new, ids)

    def rows(num_tokens: int) -> torch.Tensor:
        if num_tokens <= at:
            return by_old(num_tokens)
        with around():
            return by_new(num_tokens)

    yield rows
