"""Which states behind prefixes are kept, found, waited for and given up."""

from types import SimpleNamespace

import torch

from attn_ops.states import StatePool, StateSpec
from graphs.requests.checkpoints import Checkpoints

KEYS = [bytes([number]) for number in range(9)]


def made(number=2):
    """Of a pool of two requests, with a slot each."""
    specs = [StateSpec(("recurrent", 0, 0), (3,), torch.float32)]
    pool = StatePool(specs, 2, num_checkpoints=number)
    return Checkpoints(pool), pool


def request(id):
    return SimpleNamespace(id=id, checkpoints={})


def test_a_state_is_found_when_its_rows_are_computed():
    checkpoints, pool = made()
    one = request(1)
    checkpoints.plan(one, KEYS, 3, 4)
    ((_, slot),) = one.checkpoints.values()
    assert slot in pool.checkpoint_slots
    checkpoints.keep(one, 11)
    assert (checkpoints.find(KEYS), checkpoints.num_kept, checkpoints.num_planned) == (0, 0, 1)
    checkpoints.keep(one, 12)
    assert (checkpoints.find(KEYS), checkpoints.num_kept, checkpoints.num_planned) == (3, 1, 0)
    assert checkpoints.find(KEYS[:2]) == 0
    pool.tensors["recurrent", 0, 0][slot] = 7.0
    own = pool.take("a")
    checkpoints.use("a", KEYS[2])
    assert pool.tensors["recurrent", 0, 0][own].tolist() == [7.0] * 3


def test_the_one_that_was_not_used_for_longest_makes_room():
    checkpoints, pool = made()
    one = request(1)
    for number in (1, 2):
        checkpoints.plan(one, KEYS, number, 4)
    checkpoints.keep(one, 8)
    pool.take("a")
    checkpoints.use("a", KEYS[0])
    checkpoints.plan(one, KEYS, 3, 4)
    assert (checkpoints.find(KEYS), checkpoints.num_evicted) == (1, 1)
    checkpoints.plan(one, KEYS, 3, 4)  # it is planned: nothing more
    checkpoints.plan(one, KEYS, 4, 4)
    checkpoints.plan(one, KEYS, 5, 4)  # no slot is left that is not planned
    assert sorted(one.checkpoints) == [12, 16]
    checkpoints.drop(one)
    assert (checkpoints.num_planned, one.checkpoints) == (0, {})


def test_younger_requests_wait_until_a_plan_is_kept_or_dropped():
    checkpoints, _ = made()
    older, younger = request(1), request(2)
    checkpoints.plan(older, KEYS, 3, 4)
    assert checkpoints.awaits(younger, KEYS, 0)
    assert not checkpoints.awaits(younger, KEYS, 3)
    assert not checkpoints.awaits(younger, KEYS[:2], 0)
    assert not checkpoints.awaits(younger, [b"x", b"x", b"x"], 0)
    assert not checkpoints.awaits(request(0), KEYS, 0)
    checkpoints.drop(older)
    assert not checkpoints.awaits(younger, KEYS, 0)


def test_what_was_planned_before_everything_was_forgotten_is_dropped():
    checkpoints, _ = made()
    old, new = request(1), request(2)
    checkpoints.plan(old, KEYS, 1, 4)
    checkpoints.keep(old, 4)
    checkpoints.plan(old, KEYS, 3, 4)
    checkpoints.forget()
    assert checkpoints.find(KEYS) == 0
    checkpoints.plan(new, KEYS, 3, 4)
    checkpoints.drop(old)
    checkpoints.keep(new, 12)
    assert (checkpoints.find(KEYS), checkpoints.num_planned) == (3, 0)
