"""A program's model, after its surgeries and after its changes."""

import random
from typing import Any

import torch

from benchmarks.programs import changes
from benchmarks.programs.draw import CHANGES, STEPS, Program
from benchmarks.programs.models import build
from benchmarks.programs.surgeries import Box


def made(program: Program, implementation: str, changed: bool, box: Box) -> tuple[Any, list[str]]:
    """The program's model after its surgeries, and after its changes too."""
    model, did = build(program.family, program.model_seed, implementation), []
    for name, seed in program.surgeries:
        torch.manual_seed(seed)
        did.append(f"{name}: {STEPS[name](model, random.Random(seed), box)}")
    if implementation == "eager":
        model.eval()
        if changed:
            apply_changes(program, model, for_truth=True)
    return model, did


def apply_changes(program: Program, model: Any, for_truth: bool) -> tuple[list[str], list[Any]]:
    """What the changes did, in words, and the surroundings of later steps."""
    did, around = [], []
    same = {f.__name__ for f in changes.SAME}
    for name, seed in program.changes:
        if name in changes.DRIVERS or (for_truth and name in same):
            continue
        torch.manual_seed(seed)
        done = CHANGES[name](model, random.Random(seed))
        if isinstance(done, tuple):
            around.append(done[1])
        did.append(f"{name}: {done if isinstance(done, str) else done[0]}")
    return did, around
