"""One program: its session driven to the end, and every token that it hands out judged."""

import dataclasses

from benchmarks.programs import truth
from benchmarks.programs.draw import Program
from benchmarks.programs.errors import kind_of, told
from benchmarks.programs.judge import judged
from benchmarks.programs.made import made
from benchmarks.programs.serve import serve
from benchmarks.programs.surgeries import Box, Inapplicable


@dataclasses.dataclass
class Outcome:
    """equal, refused, uncompilable, crash, WRONG or invalid."""

    kind: str
    message: str = ""
    did: list[str] = dataclasses.field(default_factory=list)  # surgeries and changes, in words
    seconds: float = 0.0


def run(program: Program) -> Outcome:
    """Run the program and judge it; what the session raises becomes an outcome."""
    try:
        expected = _expected(program)
        if program.changes:  # they must be possible
            new, _ = made(program, "eager", True, Box())
            truth.recomputed(new, program.prompts[0])(len(program.prompts[0]))
    except Exception as error:  # no truth, no program
        return Outcome("invalid", f"{type(error).__name__}: {error}"[:200])
    did: list[str] = []
    try:
        served = serve(program, did)
    except Inapplicable as error:
        return Outcome("invalid", str(error))
    try:
        wrong = judged(program, served, expected)
    except truth.BadTruth as error:
        return Outcome("invalid", str(error), did)
    except Exception as error:
        return Outcome("crash", f"of the judge: {told(error)}", did)
    if wrong:
        return Outcome("WRONG", wrong, did)
    if served.stuck:
        return Outcome("crash", "stuck: the session does not end", did)
    if served.error is not None:
        return Outcome(kind_of(served.error), told(served.error), did)
    return Outcome("equal", "", did)


def _expected(program: Program) -> list[list[int]]:
    """The old model's own tokens."""
    model, _ = made(program, "eager", False, Box())
    expected = []
    for prompt in program.prompts:
        ids = list(prompt)
        for _ in range(program.max_new_tokens):
            ids.append(int(truth.recomputed(model, ids)(len(ids)).argmax()))
        expected.append(ids[len(prompt) :])
    return expected
