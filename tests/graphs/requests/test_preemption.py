"""Requests that grow out of the cache: who gives way, who gets blocks, and what is counted."""

# pyright: reportOptionalMemberAccess=false
import functools

import pytest

from graphs.requests.batch import After, Rows, Scheduled
from tests.graphs.requests import test_prefixes
from tests.graphs.requests.test_prefixes import finish, step

make_scheduler = functools.partial(test_prefixes.make_scheduler, lookahead=1, shares=False)


def queue(scheduler, number, length, new=8):
    return test_prefixes.queue(scheduler, number, [number + 1] * length, new)


def test_more_run_than_their_whole_lengths_allow():
    by_need, by_length = make_scheduler(32), make_scheduler(32, lookahead=None)
    for scheduler in (by_need, by_length):
        for number in range(3):
            queue(scheduler, number, 4, new=13)
    assert step(by_need) == {0: 4, 1: 4, 2: 4}
    assert step(by_length) == {0: 4, 1: 4}
    assert by_length.reservations.counts() is None
    finish(by_need)
    finish(by_length)


def test_the_youngest_gives_way_and_comes_back():
    scheduler = make_scheduler(28, most=2)
    first, second = queue(scheduler, 0, 8, new=12), queue(scheduler, 1, 8, new=9)
    for _ in range(4):
        assert set(step(scheduler)) == {0, 1}
    assert step(scheduler) == {0: 1}, "13 tokens take the last block"
    assert list(scheduler.waiting) == [second]
    assert (second.num_computed, second.room, second.token_ids) == (0, 0, [9] * 4)
    for _ in range(20):
        if second not in scheduler.running:
            step(scheduler)
    assert first.finish_reason
    counts = scheduler.reservations.counts()
    assert (counts.num_preemptions, counts.num_recomputed_tokens) == (1, 11)
    assert "1; 11 tokens were computed again" in str(counts)
    assert second.num_tokens >= 13
    finish(scheduler)


def test_it_comes_back_before_younger_ones():
    scheduler = make_scheduler(24)
    requests = [queue(scheduler, number, 7) for number in range(4)]
    order = []
    for _ in range(200):
        step(scheduler)
        assert [r.id for r in scheduler.waiting] == sorted(r.id for r in scheduler.waiting)
        order += [r.id for r in requests if r.finish_reason and r.id not in order]
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize("lookahead", [1, 7, None])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("num_tokens", [40, 64, 120])
def test_nobody_starves(num_tokens, lookahead, shares):
    scheduler = make_scheduler(num_tokens, lookahead=lookahead, shares=shares, budget=12)
    requests = [queue(scheduler, n, 1 + 5 * n % 17, new=1 + 7 * n % 23) for n in range(40)]
    give_back, running = scheduler.cache.free, scheduler.running

    def free(request):
        alive = [r.id for r in running if not r.finish_reason]
        assert request != min(alive, default=None), "the oldest one keeps its blocks"
        give_back(request)

    scheduler.cache.free = free
    finish(scheduler, 4000)
    assert [len(r.token_ids) for r in requests] == [1 + 7 * n % 23 for n in range(40)]


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_oldest_gets_a_token_in_every_step(length, budget):
    """However many younger ones come, whose prompts are one token: decodes from the beginning."""
    scheduler = make_scheduler(400, most=4, budget=budget)
    for number in range(3):
        queue(scheduler, number, 1, new=2)
    old = queue(scheduler, 3, length, new=6)
    for number in range(4, 100):
        if old.finish_reason:
            break
        queue(scheduler, number, 1, new=2)
        alive = [r.id for r in [*scheduler.running, *scheduler.waiting]]
        assert min(alive) in step(scheduler)
    assert old.finish_reason


def test_a_preempted_request_finds_its_own_blocks():
    scheduler = make_scheduler(32, most=2, shares=True)
    first, second = queue(scheduler, 0, 8, new=9), queue(scheduler, 1, 12, new=9)
    for _ in range(9):
        step(scheduler)
        if second in scheduler.waiting and second.token_ids:
            break
    scheduler.leave(first)
    computed = step(scheduler)
    assert computed[1] < second.num_tokens // 2, "its blocks were kept"
    assert scheduler.prefixes.counts().num_requests == 2
    finish(scheduler)


def test_tables_change_rarely_while_there_is_room():
    scheduler = make_scheduler(80 * 8)
    requests = [queue(scheduler, n, 8 + n, new=64) for n in range(4)]
    rooms, changes = None, 0
    for _ in range(60):
        step(scheduler)
        new = [r.room for r in requests]
        changes += new != rooms
        rooms = new
    assert changes <= 3


def test_steps_reach_no_further_than_blocks():
    scheduler = make_scheduler(24, lookahead=3)
    first, second = queue(scheduler, 0, 8, new=20), queue(scheduler, 1, 4, new=4)
    step(scheduler)
    assert [r.room for r in (first, second)] == [12, 8]
    reaches = {s.request.id: Rows([s]).reach for s in scheduler.next_step()}
    assert reaches[0] == 4, "tokens 9 to 12"
    assert reaches[1] > 100, "its longest sequence"


def test_who_has_ended_in_launched_steps_is_waited_for():
    scheduler = make_scheduler(16, most=2)
    first, second = queue(scheduler, 0, 6, new=4), queue(scheduler, 1, 3, new=2)
    step(scheduler)
    rows = scheduler.next_step()
    assert [s.request for s in rows] == [first, second]
    scheduler.cache.reserve("somebody", 4)
    assert scheduler.cache.num_free_blocks == 0
    first.append(9)
    after = After([rows[1]])
    assert after.has_ended(second)
    assert not scheduler.next_step(after)
    assert scheduler.running == [first, second]
    assert scheduler.reservations.counts().num_preemptions == 0


def test_a_preempted_request_waits_until_its_launched_steps_are_read():
    scheduler = make_scheduler(28, most=2)
    first, second = queue(scheduler, 0, 8, new=12), queue(scheduler, 1, 8, new=9)
    for _ in range(4):
        step(scheduler)
    rows = scheduler.next_step()
    assert [s.request for s in rows] == [first]
    scheduler.cache.free(first.id)
    scheduler.running.clear()
    launched = Scheduled(second, 1, 11, 12, True, 0)
    assert not scheduler.next_step(After([launched]))
    assert [s.num_tokens for s in scheduler.next_step()] == [12]


def test_a_prompt_that_is_preempted_counts_once():
    scheduler = make_scheduler(64, budget=5, shares=True)
    request = queue(scheduler, 0, 12)
    step(scheduler)
    assert request.num_computed == 5
    scheduler._preempt(request)
    scheduler.next_step()
    counts = scheduler.prefixes.counts()
    assert (counts.num_requests, counts.num_hits, counts.num_prompt_tokens) == (1, 0, 12)
    assert scheduler.reservations.counts().num_recomputed_tokens == 1, "of 5, 4 were found"
    finish(scheduler)
