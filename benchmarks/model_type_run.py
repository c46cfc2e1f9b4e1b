"""One model type, built small: Transformers' tokens, a session's tokens, and what came of it."""

import contextlib
import dataclasses
import io
import linecache
import logging
import random
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from attn_ops.integrations.transformers import has_latent
from benchmarks.model_type_configs import RESERVED, VOCAB, classes, small_config

PROMPT_LENGTHS = (5, 20, 33)
NEW_TOKENS = 12

SCALE = 1.2
"""Standard deviation of a weight's elements, times the root of its inputs."""

TIE = 1e-4
"""Logits this close may be ordered either way: such a token ends the comparison of its prompt."""

TOLERANCE = 1e-3
"""Logits may differ by this, relative to the largest of their row."""

FEW = 6
"""Distinct tokens, of all prompts, that prove little."""

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / package}/" for package in ("attn_ops", "fx_passes", "graphs"))

Prompts = Sequence[Sequence[int]]


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


@dataclasses.dataclass
class Generated:
    """Greedy tokens, a list a prompt, and the logits [tokens, V] they were chosen from."""

    model: Any
    tokens: list[list[int]]
    logits: list[torch.Tensor]
    cached: bool = True  # not by a loop without a cache


def run_type(model_type: str, sender: Connection) -> None:
    """Body of a child process: send the stages, then the outcome; what models print is dropped."""
    begin = time.perf_counter()
    stage = "reference"
    logging.disable(logging.WARNING)
    dropped = io.StringIO()
    with contextlib.redirect_stdout(dropped), contextlib.redirect_stderr(dropped):
        try:
            sender.send(stage)
            draw, known = random.Random(0), [t for t in range(VOCAB) if t not in RESERVED]
            prompts = [draw.choices(known, k=length) for length in PROMPT_LENGTHS]
            reference = _reference(model_type, prompts)
            sender.send(stage := "build")
            model = built(model_type, "attn_ops")
            model.load_state_dict(reference.model.state_dict())
            sender.send(stage := "session")
            session = _session(model)
            sender.send(stage := "generate")
            outcome = _judged(model_type, prompts, reference, _ours(session, model, prompts))
        except Exception as error:
            outcome = _raised(model_type, stage, error)
    outcome.seconds = time.perf_counter() - begin
    sender.send(outcome)


# -- Transformers' side ----------------------------------------------------------------------------


def built(model_type: str, attn_implementation: str) -> Any:
    """A model from a fresh config, which building one changes."""
    import transformers

    config = small_config(model_type)
    model_class = getattr(transformers, classes()[model_type])
    if model_class.config_class is type(config.get_text_config()):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attn_implementation)
    model.generation_config = transformers.GenerationConfig(  # its own may stop or penalize
        bos_token_id=1, decoder_start_token_id=1
    )
    return model.float().eval().requires_grad_(False)


def _reference(model_type: str, prompts: Prompts) -> Generated:
    """Eager attention, one prompt at a time; by hand where `generate` fails."""
    model = built(model_type, "eager")
    _randomize(model)
    try:
        return _generated(model, prompts)
    except Exception:
        return _by_hand(model, prompts)


def _randomize(model: torch.nn.Module) -> None:
    """Weights so large that greedy outputs vary and attention matters, biases that are not 0.

    What is no random weight (decays, scales of norms) stays. No reserved token is ever the best.
    """
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and weight.abs().mean() > 2 * weight.mean().abs():
            weight.data.normal_(0, SCALE * weight.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias") and not weight.any():
            weight.data.normal_(0, 0.1, generator=generator)
    head = model.get_output_embeddings()
    for part in head if isinstance(head, torch.nn.ModuleList) else [head]:
        for weight in part.parameters() if part is not None else ():
            if weight.shape[0] == VOCAB:
                weight.data[list(RESERVED)] = 0


def _generated(model: Any, prompts: Prompts) -> Generated:
    """By `generate`, with the cache that the type has."""
    found = Generated(model, [], [])
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found.tokens.append(out.sequences[0, len(prompt) :].tolist())
        found.logits.append(torch.cat(out.logits).float())
    return found


@torch.no_grad()
def _by_hand(model: Any, prompts: Prompts) -> Generated:
    """Without `generate` and without a cache."""
    found = Generated(model, [], [], cached=False)
    for prompt in prompts:
        ids, rows = torch.tensor([list(prompt)]), []
        for _ in range(NEW_TOKENS):
            out = model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
            rows.append(out.logits[:, -1].float())
            ids = torch.cat([ids, rows[-1].argmax(-1, keepdim=True)], dim=1)
        found.tokens.append(ids[0, len(prompt) :].tolist())
        found.logits.append(torch.cat(rows))
    return found


# -- our side --------------------------------------------------------------------------------------


def _session(model: Any) -> Any:
    """Room for all prompts at once; the longest is computed in two chunks."""
    from graphs import DecodeSession

    backend = "TORCH_MLA" if any(map(has_latent, model.modules())) else "TORCH"
    return DecodeSession(
        model, max_batch_size=3, max_tokens=64, max_tokens_per_step=24, backend=backend
    )


def _ours(session: Any, model: Any, prompts: Prompts) -> Generated:
    from graphs.app.parity import keeping_logits

    with keeping_logits(session) as logits:
        results = session.generate(prompts, max_new_tokens=NEW_TOKENS, eos=())
    rows = [torch.stack(logits[i]) for i in range(len(prompts))]
    return Generated(model, [r.token_ids for r in results], rows)


# -- outcomes --------------------------------------------------------------------------------------


def _judged(model_type: str, prompts: Prompts, reference: Generated, ours: Generated) -> Outcome:
    """Wrong, unless `generate`, or the model without a cache, has the same tokens and logits."""
    notes = [] if reference.cached else ["generate fails, reference without a cache"]
    reason = _difference(reference, ours)
    if reference.cached:
        with contextlib.suppress(Exception):  # some cannot do without
            uncached = _by_hand(reference.model, prompts)
            if _difference(uncached, reference):
                notes.append("generate and a loop without a cache differ")
                notes += ["equal to generate"] if not reason else []
            if reason and not _difference(uncached, ours):
                notes.append("equal to the loop")
                reference, reason = uncached, ""
    note = ", ".join(notes + _weaknesses(reference, prompts))
    return Outcome(model_type, "wrong" if reason else "equal", "generate", reason, note=note)


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


def _num_clear(logits_TV: torch.Tensor) -> int:
    """Tokens before the first near tie of the best two logits."""
    best = logits_TV.topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    return next((k for k, margin in enumerate(margins) if margin < TIE), len(margins))


def _weaknesses(reference: Generated, prompts: Prompts) -> list[str]:
    """What makes equal tokens say less than they seem to."""
    notes, num_compared = [], sum(map(_num_clear, reference.logits))
    if num_compared < len(prompts) * NEW_TOKENS:
        notes.append(f"near ties: {num_compared} tokens compared")
    if len({t for tokens in reference.tokens for t in tokens}) < FEW:
        notes.append("few distinct tokens")
    others = [[*random.Random(1).choices(p, k=len(p) - 1), p[-1]] for p in prompts]
    again = (_generated if reference.cached else _by_hand)(reference.model, others)
    if not _difference(reference, again):
        notes.append("only the last token of a prompt matters")
    return notes


def _raised(model_type: str, stage: str, error: Exception) -> Outcome:
    """Refused, if one of our lines says so with a raise; else a crash."""
    shown: BaseException | None = error
    while shown is not None and not _on_purpose(shown):
        shown = shown.__cause__
    refused, shown = shown is not None, shown or error
    kind = "unbuildable" if stage == "reference" else "refused" if refused else "crash"
    lines = str(shown).strip().splitlines() or [""]
    reason = f"{type(shown).__name__}: {lines[0] if refused else lines[-1]}"
    filename, number = _origin(shown)
    return Outcome(model_type, kind, stage, reason, f"{filename.removeprefix(f'{ROOT}/')}:{number}")


def _on_purpose(error: BaseException) -> bool:
    """A ValueError or TypeError that a raise statement of our packages made."""
    filename, number = _origin(error)
    raised = linecache.getline(filename, number).strip().startswith("raise")
    return isinstance(error, (ValueError, TypeError)) and raised and filename.startswith(OURS)


def _origin(error: BaseException) -> tuple[str, int]:
    """File and line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)
