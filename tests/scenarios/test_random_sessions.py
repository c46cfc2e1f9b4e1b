"""Random sessions: added, discarded, stopped, drafted and shared at random places."""

import pytest

from tests.kit.random_sessions import results_alone, run_session

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def alone(model):
    return results_alone(model)


@pytest.mark.parametrize("number", [12, pytest.param(30, marks=pytest.mark.slow)])
def test_tokens_are_those_of_requests_alone(model, alone, number):
    """`python -m tests.kit.random_sessions` runs thousands."""
    first = 0 if number < 30 else 1000
    for seed in range(first, first + number):
        run_session(model, alone, seed)
