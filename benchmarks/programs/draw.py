"""A random program: a model, what is done to it, how its session runs, and for whom."""

import dataclasses
import random
from typing import Any

from benchmarks.programs import changes
from benchmarks.programs.models import FAMILIES, VOCAB
from benchmarks.programs.outside import OUTSIDE
from benchmarks.programs.surgeries import SURGERIES

STEPS = {f.__name__: f for f in (*SURGERIES, *OUTSIDE)}
CHANGES = {f.__name__: f for f in (*changes.SAME, *changes.OTHER)}


@dataclasses.dataclass(frozen=True)
class Program:
    """Plain values: printed, it is enough to do it again.

    Attributes:
        surgeries, changes: (name, seed), in order.
        change_after: calls of `step` before the changes.
        late: how many of the prompts are added after the second step.
        compiled: by the backend attn_ops.
        merged: `merge_projections` before that.
    """

    family: str
    model_seed: int
    surgeries: tuple[tuple[str, int], ...]
    changes: tuple[tuple[str, int], ...]
    change_after: int
    prompts: tuple[tuple[int, ...], ...]
    late: int
    max_new_tokens: int
    compiled: bool
    merged: bool
    debug: str | None
    cudagraph_mode: str
    decode_steps: int
    max_tokens_per_step: int
    max_batch_size: int

    def session_options(self) -> dict[str, Any]:
        captured: dict[str, Any] = {"cudagraph_mode": self.cudagraph_mode}
        if self.debug:
            sizes = [n for n in (1, 2, 4) if n <= self.max_batch_size]
            captured |= {"debug": self.debug, "capture_sizes": sizes}
        if self.debug and self.cudagraph_mode == "FULL":
            sizes = [n for n in (8, 16) if n <= self.max_tokens_per_step]
            captured["mixed_capture_sizes"] = sizes
        return captured | {
            "max_batch_size": self.max_batch_size,
            "max_tokens": 48,
            "decode_steps": self.decode_steps,
            "max_tokens_per_step": self.max_tokens_per_step,
            "backend": "TORCH",
        }


def drawn(seed: int, number: int, attempt: int, compiled: float) -> Program:
    """The program of these numbers; `compiled` is how often one is compiled."""
    rng = random.Random(f"{seed}-{number}-{attempt}")
    surgeries = rng.choices(sorted(STEPS), k=rng.choice((0, 1, 1, 1, 2, 2, 3)))
    names = [*sorted(CHANGES), *changes.DRIVERS]
    later = rng.choices(names, k=rng.choice((0, 0, 1, 1, 2)))
    if "hook_removed" in later:
        surgeries = [*surgeries, "hooked"]
    if not surgeries and not later:
        surgeries = ["mixed"]
    is_compiled = rng.random() < compiled
    debug = None if is_compiled or rng.random() < 0.5 else "eager_replay"
    prompts = tuple(
        tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 3, 5, 9, 14, 22, 30))))
        for _ in range(rng.choice((1, 2, 3, 5)))
    )
    decode_steps = rng.choice((1, 1, 4))
    return Program(
        family=rng.choice(sorted(FAMILIES)),
        model_seed=rng.randrange(10**6),
        surgeries=tuple((name, rng.randrange(10**6)) for name in surgeries),
        changes=tuple((name, rng.randrange(10**6)) for name in later),
        change_after=rng.choice((1, 2, 3, 5) if decode_steps == 1 else (1, 2)),
        prompts=prompts,
        late=rng.randrange(len(prompts)) if rng.random() < 0.5 else 0,
        max_new_tokens=rng.choice((4, 8, 8, 12)),
        compiled=is_compiled,
        merged=rng.random() < (0.5 if is_compiled else 0.1),
        debug=debug,
        cudagraph_mode=rng.choice(("FULL", "FULL_DECODE_ONLY")),
        decode_steps=decode_steps,
        max_tokens_per_step=rng.choice((8, 16, 64, 256)),
        max_batch_size=rng.choice((2, 4)),
    )
