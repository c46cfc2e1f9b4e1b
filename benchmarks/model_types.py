"""Every model type of Transformers, small and random: does a session generate its tokens?

`python -m benchmarks.model_types [--types llama gpt2 ...] [--page docs/models.md]`

Causal types, and those that read images and text (`image-text/llava`), which are given text alone.
Each type is built from a small config (`model_type_configs`), once with Transformers' eager
attention, whose `generate` is the reference, and once with attn_ops in a `DecodeSession`, which
computes all prompts together. Outcomes:

    equal        the same tokens and logits, up to the first token that the reference all but tied
    wrong        others, and nothing raised: the only outcome that must never happen
    refused      attn_ops raised a ValueError or TypeError on purpose
    crash        anything else was raised, or the process died or took too long
    unbuildable  there is no reference: Transformers could not build or run the type
"""

import argparse
import dataclasses
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.model_type_configs import classes
from benchmarks.model_type_run import Outcome, run_type
from benchmarks.model_types_page import page

KINDS = ("equal", "wrong", "refused", "crash", "unbuildable")


@dataclasses.dataclass
class Child:
    """A process that runs one type; it sends the stages it enters, then its outcome."""

    model_type: str
    process: Any
    receiver: Connection
    deadline: float
    begin: float
    stage: str = "start"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", help="model types; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds a type may take")
    parser.add_argument("--page", type=Path, help="write the outcomes there, as docs/models.md")
    args = parser.parse_args()
    known = prepared_types()
    types = args.types or known
    if unknown := set(types) - set(known):
        parser.error(f"--types must be known model types, got {', '.join(sorted(unknown))}")
    outcomes, begin = [], time.perf_counter()
    for outcome in run_all(types, args.jobs, args.timeout):
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
    outcomes.sort(key=lambda o: types.index(o.model_type))
    _summarize(outcomes, time.perf_counter() - begin)
    if args.page:
        args.page.write_text(page(outcomes))
    raise SystemExit(any(o.kind == "wrong" for o in outcomes))


def prepared_types() -> list[str]:
    """Import once what every child needs; the types that Transformers knows."""
    import torch
    import transformers

    import graphs  # noqa: F401
    from attn_ops.integrations.transformers import register

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    register()
    return list(classes())


def run_all(types: Sequence[str], jobs: int, timeout: float) -> Iterator[Outcome]:
    """Outcomes as they come, each type in a forked process of its own."""
    waiting, running = list(types), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(0), timeout))
        patience = max(0.0, min(c.deadline for c in running) - time.perf_counter())
        ready = wait([c.receiver for c in running], timeout=patience)
        for child in list(running):
            late = time.perf_counter() > child.deadline
            if child.receiver not in ready and not late:
                continue
            outcome = _received(child) if child.receiver in ready else _late(child, timeout)
            if outcome is not None:
                child.process.join()
                running.remove(child)
                yield outcome


def _start(model_type: str, timeout: float) -> Child:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_type, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    begin = time.perf_counter()
    return Child(model_type, process, receiver, begin + timeout, begin)


def _received(child: Child) -> Outcome | None:
    """The child's outcome; None if it has told that it goes on."""
    try:
        message = child.receiver.recv()
    except EOFError:
        child.process.join()
        return _failed(child, f"the process ended with status {child.process.exitcode}")
    if not isinstance(message, str):
        return message
    child.stage = message
    return None


def _late(child: Child, timeout: float) -> Outcome:
    child.process.kill()
    return _failed(child, f"took more than {timeout:g} s")


def _failed(child: Child, reason: str) -> Outcome:
    """Until there is a reference, the failure is Transformers' own."""
    kind = "unbuildable" if child.stage in ("start", "reference") else "crash"
    seconds = time.perf_counter() - child.begin
    return Outcome(child.model_type, kind, child.stage, reason, seconds=seconds)


def _line(outcome: Outcome) -> str:
    stage = outcome.stage if outcome.kind in ("refused", "crash") else ""
    reason = " ".join(outcome.reason.split())[:300]
    rest = "; ".join(x for x in (stage, outcome.where, reason, outcome.note) if x)
    return f"{outcome.model_type:26} {outcome.kind:12} {outcome.seconds:5.1f} s  {rest}"


def _summarize(outcomes: Sequence[Outcome], seconds: float) -> None:
    print(f"\n{len(outcomes)} types in {seconds:.0f} s")
    for kind in KINDS:
        if names := [o.model_type for o in outcomes if o.kind == kind]:
            print(f"\n{kind} ({len(names)}): {' '.join(names)}")


if __name__ == "__main__":
    main()
