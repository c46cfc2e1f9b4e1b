"""Random sessions of models whose layers keep states: one of each rule in turn.

    python -m tests.fuzz states --number 2000

Chunks of every size, preemption, drafts, interrupts, discards. Slots that nobody owns hold NaN, as
the null slot does; at the end nobody owns one.
"""

from collections.abc import Callable
from typing import Any

from tests.fuzz.sessions import results_alone, run_session
from tests.kit.state_models import build_state_model

FAMILIES = ("qwen3_next", "kimi_linear", "bamba", "lfm2")
"""Gated delta rule, KDA, Mamba-2, short convolution."""


def search(args: Any) -> Callable[[int], str]:
    models = [build_state_model(name) for name in FAMILIES]
    alone = [results_alone(model) for model in models]

    def run(seed: int) -> str:
        which = seed % len(FAMILIES)
        run_session(models[which], alone[which], seed)
        return FAMILIES[which]

    return run
