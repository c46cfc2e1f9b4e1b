"""One causal model type, built small: its reference, our tokens, and what came of it."""

import contextlib
import dataclasses
import io
import linecache
import logging
import random
import re
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from attn_ops.integrations.transformers import has_latent
from benchmarks.model_type_reference import (
    NEW_TOKENS,
    Generated,
    built,
    by_hand,
    generated,
    make_prompts,
    make_reference,
)

TIE = 1e-4
"""Logits this close may be ordered either way: such a token ends the comparison of its prompt."""

TOLERANCE = 1e-3
"""Logits may differ by this, relative to the largest of their row."""

FEW = 6
"""Distinct tokens, of all prompts, that prove little."""

_OURS = ("attn_ops", "fx_passes", "graphs")


@dataclasses.dataclass(frozen=True)
class Options:
    """How our side runs."""

    backend: str = "TORCH"  # with latent attention, the one of its name and _MLA
    compile: bool = False
    merge: bool = False
    window: int = 8  # tokens of sliding windows; many: the windows change nothing


@dataclasses.dataclass
class Outcome:
    """What came of one type; `kind` as in `benchmarks.model_types`."""

    model_type: str
    kind: str
    stage: str  # reference, build, session or generate: where it ended
    reason: str = ""  # what was raised, or which tokens differ
    where: str = ""  # file:line that raised it
    note: str = ""  # what weakens the comparison
    seconds: float = 0.0
    num_compared: int = 0  # tokens before the first near tie of their prompt
    smallest_margin: float = 0.0  # between the best two logits of a token
    reference: list[list[int]] = dataclasses.field(default_factory=list)
    tokens: list[list[int]] = dataclasses.field(default_factory=list)


def run_type(model_type: str, options: Options, sender: Connection) -> None:
    """Body of a child process: send the stages, then the outcome; what models print is dropped."""
    begin = time.perf_counter()
    stage = "reference"
    logging.disable(logging.WARNING)
    dropped = io.StringIO()
    with contextlib.redirect_stdout(dropped), contextlib.redirect_stderr(dropped):
        try:
            sender.send(stage)
            prompts = make_prompts()
            reference = make_reference(model_type, prompts, options.window)
            sender.send(stage := "build")
            model = _ours(model_type, reference.model, options)
            sender.send(stage := "session")
            session = _session(model, options)
            sender.send(stage := "generate")
            ours = _generated(session, model, prompts)
            outcome = _judged(model_type, prompts, reference, ours)
        except Exception as error:
            outcome = _raised(model_type, stage, error)
    outcome.seconds = time.perf_counter() - begin
    sender.send(outcome)


# -- our side --------------------------------------------------------------------------------------


def _ours(model_type: str, reference: Any, options: Options) -> Any:
    """The same weights with `attn_implementation="attn_ops"`."""
    from attn_ops.integrations.merged import merge_projections

    model = built(model_type, "attn_ops", options.window)
    model.load_state_dict(reference.state_dict())
    if options.merge:
        merge_projections(model)
    if options.compile:
        import fx_passes  # noqa: F401

        return torch.compile(model, backend="attn_ops", fullgraph=True)
    return model


def _session(model: Any, options: Options) -> Any:
    """Room for all prompts at once; the longest is computed in two chunks."""
    from graphs import DecodeSession

    latent = any(map(has_latent, getattr(model, "_orig_mod", model).modules()))
    backend = f"{options.backend}_MLA" if latent else options.backend
    return DecodeSession(
        model, max_batch_size=3, max_tokens=64, max_tokens_per_step=24, backend=backend
    )


def _generated(session: Any, model: Any, prompts: Sequence[Sequence[int]]) -> Generated:
    from graphs.app.parity import keeping_logits

    with keeping_logits(session) as logits:
        results = session.generate(prompts, max_new_tokens=NEW_TOKENS, eos=())
    return Generated(
        model,
        [r.token_ids for r in results],
        [torch.stack(logits[i]) for i in range(len(prompts))],
        cached=True,
    )


# -- outcomes --------------------------------------------------------------------------------------


def _judged(
    model_type: str, prompts: Sequence[Sequence[int]], reference: Generated, ours: Generated
) -> Outcome:
    """Wrong, unless `generate`, or the model without a cache, has the same tokens and logits."""
    notes = [] if reference.cached else ["generate fails, reference without a cache"]
    reason = _difference(reference, ours)
    if reference.cached:
        with contextlib.suppress(Exception):  # some cannot do without
            uncached = by_hand(reference.model, prompts)
            if _difference(uncached, reference):
                notes.append("generate and a loop without a cache differ")
                notes += ["equal to generate"] if not reason else []
            if reason and not _difference(uncached, ours):
                notes.append("equal to the loop")
                reference, reason = uncached, ""
    outcome = Outcome(model_type, "wrong" if reason else "equal", "generate", reason)
    outcome.reference, outcome.tokens = reference.tokens, ours.tokens
    outcome.smallest_margin = min(float(_margins(rows).min()) for rows in reference.logits)
    outcome.num_compared = sum(map(_num_clear, reference.logits))
    outcome.note = ", ".join(notes + _weaknesses(reference, prompts, outcome.num_compared))
    return outcome


def _difference(wanted: Generated, got: Generated) -> str:
    """The first token or row of logits that differs, before a near tie; empty: none."""
    for i, (rows, its_rows) in enumerate(zip(wanted.logits, got.logits, strict=True)):
        for k in range(_num_clear(rows)):
            gap = float((rows[k] - its_rows[k]).abs().max() / rows[k].abs().max())
            place = f"prompt {i}, token {k} of {len(rows)}"
            if wanted.tokens[i][k] != got.tokens[i][k]:
                return f"tokens differ: {place}, logits by {gap:.2g} of the largest"
            if not gap <= TOLERANCE:
                return f"logits differ: {place}, by {gap:.2g} of the largest"
    return ""


def _margins(logits_TV: torch.Tensor) -> torch.Tensor:
    """Between the best two of each row."""
    best = logits_TV.topk(2).values
    return best[:, 0] - best[:, 1]


def _num_clear(logits_TV: torch.Tensor) -> int:
    """Tokens before the first near tie."""
    margins = _margins(logits_TV).tolist()
    return next((k for k, margin in enumerate(margins) if margin < TIE), len(margins))


def _weaknesses(
    reference: Generated, prompts: Sequence[Sequence[int]], num_compared: int
) -> list[str]:
    """What makes equal tokens say less than they seem to."""
    notes = []
    if num_compared < len(prompts) * NEW_TOKENS:
        notes.append(f"near ties: {num_compared} tokens compared")
    if len({t for tokens in reference.tokens for t in tokens}) < FEW:
        notes.append("few distinct tokens")
    others = [[*random.Random(1).choices(p, k=len(p) - 1), p[-1]] for p in prompts]
    again = (generated if reference.cached else by_hand)(reference.model, others)
    if not _difference(reference, again):
        notes.append("only the last token of a prompt matters")
    return notes


def _raised(model_type: str, stage: str, error: Exception) -> Outcome:
    """Refused, if one of our lines says so with a raise; else a crash."""
    shown: BaseException | None = error
    while shown is not None and not _on_purpose(shown, error):
        shown = shown.__cause__
    refused, shown = shown is not None, shown or error
    kind = "unbuildable" if stage == "reference" else "refused" if refused else "crash"
    lines = str(shown).strip().splitlines() or [""]
    reason = f"{type(shown).__name__}: {lines[0] if refused else lines[-1]}"
    filename, number = _origin(shown, error)
    return Outcome(model_type, kind, stage, reason, f"{_short(filename)}:{number}")


def _on_purpose(error: BaseException, caught: Exception) -> bool:
    """A ValueError or TypeError that a raise statement of our packages made."""
    observed = type(error).__name__.startswith(("ObservedValueError", "ObservedTypeError"))
    if not observed and not isinstance(error, (ValueError, TypeError)):  # Dynamo has its own
        return False
    filename, number = _origin(error, caught)
    ours = _short(filename).startswith(tuple(f"{p}/" for p in _OURS))
    return ours and linecache.getline(filename, number).strip().startswith("raise")


def _origin(error: BaseException, caught: Exception) -> tuple[str, int]:
    """File and line that raised; what Dynamo saw while tracing, it tells in what was caught."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        return frames[-1].filename, frames[-1].lineno or 0
    traced = re.findall(r'File "(.+)", line (\d+)', str(caught))
    return (traced[-1][0], int(traced[-1][1])) if traced else ("", 0)


def _short(filename: str) -> str:
    """The path inside the package that the file belongs to."""
    path = Path(filename)
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    for package in (*_OURS, "benchmarks"):
        if package in path.parts:
            return "/".join(path.parts[len(path.parts) - path.parts[::-1].index(package) - 1 :])
    return filename
