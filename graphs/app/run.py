"""What `attn-ops run` does: generate, compare with Transformers, time the steps, report."""

import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fx_passes
from graphs.app.parity import Reference, compare, keeping_logits
from graphs.app.presets import PRESETS, load
from graphs.app.tables import RunReport, StepTimes
from graphs.dump.dump import dump
from graphs.modes import CUDAGraphMode
from graphs.session import DecodeSession

PROMPT_LENGTHS = (1, 2, 17, 200, 33, 5, 64, 100)
"""Of the prompts that are used when none are given."""


def run(
    model: str = "llama-tiny",
    *,
    backend: str | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = 16,
    dump_directory: str | Path | None = None,
    fast_prefill: str = "off",
) -> RunReport:
    """Run a model through everything: one batch, the longest prompt prefilled in chunks.

    Args:
        model: a preset, or a directory that holds a model.
        backend: an attention backend by name; None lets `select_backend` choose.
        prompts: token ids; default: random ones of `PROMPT_LENGTHS`.
        dump_directory: where to write a dump, if at all.
        fast_prefill: the option of `fx_passes.PassConfig`.

    Raises:
        ValueError: anything of it is not supported.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subject = load(model, device)
    if prompts is None:
        prompts = _random_prompts(subject)
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    options = _session_options(prompts, max_new_tokens, backend)
    eager = DecodeSession(subject, cudagraph_mode=CUDAGraphMode.NONE, **options)
    compiled = _compiled(subject, fast_prefill)
    session = called = DecodeSession(compiled, **options)
    with (
        dump(dump_directory) if dump_directory is not None else contextlib.nullcontext(),
        keeping_logits(session) as logits,
    ):
        session.warm_up()
        begin = time.perf_counter()
        results = session.generate(prompts, max_new_tokens)
        seconds = time.perf_counter() - begin
    if session.graphs is not None:  # replayed steps hand out no logits
        called = DecodeSession(compiled, cudagraph_mode=CUDAGraphMode.NONE, **options)
        with keeping_logits(called) as logits:
            again = called.generate(prompts, max_new_tokens)
        if again != results:
            raise AssertionError("captured steps generated other tokens than called ones")
    parity = compare(Reference(subject), prompts, results, [logits[i] for i in range(len(prompts))])
    steps = StepTimes(
        batch=options["max_batch_size"],
        eager_ms=_step_ms(eager, max_new_tokens),
        compiled_ms=_step_ms(called, max_new_tokens),
        captured_ms=_step_ms(session, max_new_tokens) if session.graphs is not None else None,
    )
    return RunReport.of(
        session,
        model=model,
        parity=parity,
        ok=parity.ok and (parity.varied or model not in PRESETS),
        steps=steps,
        tokens_per_second=parity.num_tokens / seconds,
        dump=str(dump_directory) if dump_directory is not None else None,
    )


def _compiled(model: Any, fast_prefill: str) -> Any:
    switch: Any = {"fast_prefill": fast_prefill}
    fx_passes.PassConfig.split(switch)  # refuses what is wrong before the model is traced
    return torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True, options=switch)


def read_prompts(path: str | Path) -> list[list[int]]:
    """Prompts from a file: one a line, as token ids between spaces or as a JSON list.

    Empty lines are passed over.

    Raises:
        ValueError: the file cannot be read, a line is neither, or there is no prompt.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts must be a text file, got {path}: {error}") from error
    prompts = [_prompt(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"prompts must hold at least one line of token ids, got none in {path}")
    return prompts


def _prompt(line: str, place: str) -> list[int]:
    try:
        tokens: Any = (
            json.loads(line) if line.lstrip().startswith("[") else [int(t) for t in line.split()]
        )
    except ValueError:
        tokens = None
    if not isinstance(tokens, list) or any(type(t) is not int for t in tokens):
        raise ValueError(
            "prompts must be token ids between spaces or a JSON list of them, "
            f"got {line.strip()!r} at {place}"
        )
    return tokens


def _random_prompts(model: Any) -> list[list[int]]:
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
    ]


def _session_options(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, backend: str | None
) -> dict[str, Any]:
    batch = min(8, len(prompts))
    longest = max(len(p) for p in prompts)
    return {
        "max_batch_size": batch,
        "max_tokens": longest + max(1, max_new_tokens),
        "max_tokens_per_step": max(batch, longest // 3),
        "backend": backend,
    }


def _step_ms(session: DecodeSession, max_new_tokens: int, num_steps: int = 20) -> float | None:
    """Median time of a decode step of a full batch; None where the session holds too few tokens."""
    num_steps = min(num_steps, session.max_tokens - 4)
    if num_steps < 1:
        return None
    for _ in range(session.max_batch_size):
        session.add([1], num_steps + 3)
    session.step()  # the prompts
    session.step()
    seconds = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        session.step()  # ends with the tokens on the host
        seconds.append(time.perf_counter() - begin)
    while session.num_unfinished:
        session.step()
    return 1000 * statistics.median(seconds)
