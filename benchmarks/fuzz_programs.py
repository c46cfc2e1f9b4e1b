"""Random programs against "no silent wrong token": each one equal or refused.

    python -m benchmarks.fuzz_programs --num 500 --seed 0 --out programs.json
    python -m benchmarks.fuzz_programs --only 37

A program changes a small model, makes a session of it, steps, and changes more in between
(`benchmarks.programs`). The truth is what the changed model computes by itself, eagerly, one prompt
at a time, without a cache. Exit status 1 if any token was wrong without an error.
"""

import argparse
import collections
import dataclasses
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

from benchmarks.programs.draw import Program, drawn
from benchmarks.programs.drive import Outcome, run
from benchmarks.programs.judge import AS_GENERATE

MAX_ATTEMPTS = 20
"""Programs drawn for one number until one has a truth."""


def main() -> None:
    """Run the programs, print what came of them."""
    args = _arguments()
    _prepare()
    numbers = range(args.num) if args.only is None else [args.only]
    results, begin = [], time.perf_counter()
    for number in numbers:
        started = time.perf_counter()
        program, outcome, attempt = _valid(args, number)
        if outcome.kind == "WRONG" and not args.as_drawn:
            program, outcome = minimized(program, outcome, args.timeout)
        outcome.seconds = time.perf_counter() - started
        results.append((number, attempt, program, outcome))
        if outcome.kind == "WRONG" or args.verbose or args.only is not None:
            print(_described(number, program, outcome), flush=True)
    _summarize(results, time.perf_counter() - begin)
    if args.out:
        with open(args.out, "w") as file:
            json.dump([_record(*r) for r in results], file, indent=1)
    sys.exit(any(outcome.kind == "WRONG" for *_, outcome in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=500, help="programs to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one program, to run it alone")
    parser.add_argument("--out", help="a JSON file for all outcomes")
    parser.add_argument("--compiled", type=float, default=0.08, help="share that is compiled")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one program")
    parser.add_argument("--as-drawn", action="store_true", help="do not look for smaller ones")
    parser.add_argument(
        "--accept-generate",
        action="store_true",
        help="no cache and a cache of Transformers differ already: either may be the truth",
    )
    parser.add_argument("--verbose", action="store_true", help="print every program")
    return parser.parse_args()


def _prepare() -> None:
    """Import once what every child needs."""
    import logging

    import transformers

    import graphs  # noqa: F401
    from attn_ops.integrations import transformers as integration

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    integration.register()


def _valid(args: argparse.Namespace, number: int) -> tuple[Program, Outcome, int]:
    """The first program of the number that has a truth."""
    for attempt in range(MAX_ATTEMPTS):
        program = drawn(args.seed, number, attempt, args.compiled)
        outcome = in_child(run, program, args.timeout)
        if outcome.kind == "WRONG" and args.accept_generate and AS_GENERATE in outcome.message:
            outcome.kind = "generate"
        if outcome.kind != "invalid":
            break
    return program, outcome, attempt


def in_child(body: Callable[[Program], Outcome], program: Program, timeout: float) -> Outcome:
    """Run the program in a process of its own, which may crash, hang or patch what it likes."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send() -> None:
        sender.send(body(program))
        sender.close()
        os._exit(0)  # threads of a stuck session would keep it

    child = context.Process(target=send)
    child.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return Outcome("crash", f"hangs: no end after {timeout:.0f} s")
        return receiver.recv()
    except EOFError:
        child.join()
        return Outcome("crash", f"the process died with exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()


def minimized(program: Program, outcome: Outcome, timeout: float) -> tuple[Program, Outcome]:
    """A smaller program that is wrong too: what is not needed for it goes, piece by piece."""
    tried = set()
    while True:
        for smaller in _smaller(program):
            if smaller in tried:
                continue
            tried.add(smaller)
            found = in_child(run, smaller, timeout)
            milder = AS_GENERATE in found.message and AS_GENERATE not in outcome.message
            if found.kind == "WRONG" and not milder:
                program, outcome = smaller, found
                break
        else:
            return program, outcome


SIMPLE: dict[str, Any] = {
    "compiled": False,
    "merged": False,
    "debug": None,
    "decode_steps": 1,
    "late": 0,
    "max_tokens_per_step": 256,
    "max_batch_size": 4,
}


def _smaller(program: Program) -> list[Program]:
    """Programs with less in them: one surgery or change alone, and then one thing less each."""
    options: list[dict[str, Any]] = []
    nothing: dict[str, Any] = {"surgeries": (), "changes": ()}
    pieces = [("surgeries", (x,)) for x in program.surgeries]
    pieces += [("changes", (x,)) for x in program.changes]
    if len(pieces) > 1:
        options += [{**nothing, name: one, **SIMPLE} for name, one in pieces]
    options.append(dict(SIMPLE))
    for name in ("surgeries", "changes"):
        items = getattr(program, name)
        options += [{name: items[:i] + items[i + 1 :]} for i in range(len(items))]
    options += [{n: v} for n, v in SIMPLE.items() if getattr(program, n) != v]
    if len(program.prompts) > 1:
        options += [{"prompts": (p,), "late": 0} for p in program.prompts]
    smaller = [dataclasses.replace(program, **o) for o in options]
    return [p for p in smaller if p != program]


def _mode(program: Program) -> str:
    mode = "compiled" if program.compiled else program.debug or "called"
    if program.debug:
        mode += f" {program.cudagraph_mode}"
    mode += ", merged" * program.merged
    mode += f", decode_steps={program.decode_steps}" * (program.decode_steps > 1)
    mode += f", chunks of {program.max_tokens_per_step}" * (program.max_tokens_per_step < 256)
    return f"{mode}, prompts of {[len(p) for p in program.prompts]}"


def _described(number: int, program: Program, outcome: Outcome) -> str:
    did = "; ".join(outcome.did) or "nothing"
    end = f"{outcome.message} ({outcome.seconds:.1f} s)"
    return f"{number} {outcome.kind} {program.family}: {did} | {_mode(program)} | {end}"


def _group(program: Program, outcome: Outcome) -> str:
    """What programs that are wrong in one way have in common."""
    if outcome.kind == "crash":
        return outcome.message
    did = re.sub(r" ?(\d+|\[.*?\])", "", "; ".join(outcome.did))
    did = re.sub(r"in layer|behind \w+|before [A-Z]\w+|model\.\S+", "", did)
    several = ", several prompts" * (len(program.prompts) > 1)
    mode = _mode(program).partition(", prompts")[0]
    mild = f" [{AS_GENERATE}]" * (AS_GENERATE in outcome.message)
    return f"{did} ({mode}{several}){mild}"


def _record(number: int, attempt: int, program: Program, outcome: Outcome) -> dict[str, Any]:
    return {
        "number": number,
        "attempt": attempt,
        **dataclasses.asdict(outcome),
        "program": dataclasses.asdict(program),
    }


def _summarize(results: list[tuple[int, int, Program, Outcome]], seconds: float) -> None:
    kinds = collections.Counter(outcome.kind for *_, outcome in results)
    print(f"{len(results)} programs in {seconds:.0f} s: {dict(kinds.most_common())}")
    for kind in ("crash", "WRONG"):
        found = collections.defaultdict(list)
        for number, _, program, outcome in results:
            if outcome.kind == kind:
                found[_group(program, outcome)].append(number)
        for key, numbers in sorted(found.items(), key=lambda item: -len(item[1])):
            print(f"{kind} {len(numbers)}x {key}: programs {numbers[:8]}")


if __name__ == "__main__":
    main()
