"""Random sessions: added, discarded, stopped, drafted and shared at random places."""

import pytest

from tests.fuzz.sessions import results_alone, run_session
from tests.kit.marks import long, slow
from tests.kit.models import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL_CACHES = [{"cache_tokens": n} for n in (36, 40, 48, 64)]
KINDS = {
    "any": ("llama", [{}]),
    "preempted": ("llama", SMALL_CACHES),
    "sharing": ("llama", [{"share_prefixes": True}]),
    "windows": ("mistral", SMALL_CACHES),
}
"""Family, and options in turn."""


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("any", 6),
        ("sharing", 5),
        *slow(*((kind, 10) for kind in KINDS)),
        *long(*((kind, 50) for kind in KINDS)),
    ],
)
def test_tokens_are_those_of_requests_alone(kind, number):
    """`python -m tests.fuzz sessions` runs thousands."""
    family, options = KINDS[kind]
    model = build_model(family)
    alone, first = results_alone(model), 10_000 * list(KINDS).index(kind)
    for seed in range(first, first + number):
        run_session(model, alone, seed, **options[seed % len(options)])
