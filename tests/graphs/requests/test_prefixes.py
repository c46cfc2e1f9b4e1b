"""What requests share: who waits for whom, what is computed, and what is forgotten."""

# pyright: reportOptionalMemberAccess=false
import torch

from attn_ops import AttentionSpec, PagedKVCache
from graphs.requests.requests import Request
from graphs.requests.scheduler import Scheduler
from graphs.sampling import SamplingParams

SPEC = AttentionSpec(1, 1, 1, torch.float32)


class Weights:
    """Weights that change when a test says so."""

    is_new = False

    def changed(self, *, values_too=False) -> bool:
        return self.is_new

    def remember(self) -> None:
        self.is_new = False


def make_scheduler(
    num_tokens: int = 256,
    *,
    most: int = 8,
    budget: int = 64,
    lookahead: int | None = None,
    shares: bool = True,
) -> Scheduler:
    cache = PagedKVCache([SPEC], num_tokens=num_tokens, block_size=4)
    return Scheduler(cache, most, budget, Weights() if shares else None, lookahead)


def queue(scheduler: Scheduler, number: int, prompt: list[int], new: int = 4, **more) -> Request:
    none = frozenset()
    request = Request(number, prompt, new, SamplingParams(seed=0), none, none, 80, **more)
    scheduler.waiting.append(request)
    return request


def step(scheduler: Scheduler) -> dict[int, int]:
    """Tokens that a step computes, by request; it writes only to blocks of its request.

    Every drawn token is 9.
    """
    scheduled = scheduler.next_step()
    assert not scheduled or scheduled.reach >= 1
    for s in scheduled:
        room = 4 * len(scheduler.cache.blocks(s.request.id))
        assert s.request.num_computed + s.num_tokens <= s.request.room == room
        if s.wants_token:
            s.request.append(9)
            if s.request.finish_reason:
                scheduler.leave(s.request)
        else:
            s.request.num_computed += s.num_tokens
    return {s.request.id: s.num_tokens for s in scheduled}


def finish(scheduler: Scheduler, most: int = 400) -> int:
    """Steps to the end; returns the tokens that they compute."""
    num_tokens = 0
    for _ in range(most):
        if not scheduler.waiting and not scheduler.running:
            assert scheduler.cache.num_free_blocks == scheduler.cache.num_blocks - 1
            return num_tokens
        num_tokens += sum(step(scheduler).values())
    raise AssertionError("somebody starves")


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


def test_equal_prompts_wait_for_the_first():
    scheduler = make_scheduler()
    for number in range(4):
        queue(scheduler, number, list(PROMPT))
    assert step(scheduler) == {0: 10}
    assert step(scheduler) == {0: 1, 1: 1, 2: 1, 3: 1}
    counts = scheduler.prefixes.counts()
    assert (counts.num_requests, counts.num_hits) == (4, 3)
    assert (counts.num_prompt_tokens, counts.num_shared_tokens) == (40, 27)
    finish(scheduler)


def test_younger_ones_pass_those_that_wait():
    scheduler = make_scheduler()
    for number, first in enumerate([1, 1, 2, 2]):
        queue(scheduler, number, [first, *PROMPT])
    assert step(scheduler) == {0: 11, 2: 11}
    assert step(scheduler) == {0: 1, 2: 1, 1: 1, 3: 1}
    finish(scheduler)


def test_chunks_are_waited_for():
    scheduler = make_scheduler(budget=5)
    for number in range(2):
        queue(scheduler, number, list(PROMPT))
    assert [step(scheduler) for _ in range(2)] == [{0: 5}, {0: 5}]
    assert step(scheduler) == {0: 1, 1: 1}
    finish(scheduler)


def test_nobody_waits_for_a_younger_one():
    scheduler = make_scheduler(budget=8)
    first = queue(scheduler, 0, [*PROMPT, 3, 3])
    second = queue(scheduler, 1, [*PROMPT, 3, 4])
    third = queue(scheduler, 2, [*PROMPT, 3, 4])
    assert step(scheduler) == {0: 8}
    scheduler.leave(first)
    scheduler.waiting.clear()
    scheduler.waiting.extend([third, second])  # as if it had been passed
    assert step(scheduler) == {1: 4, 2: 4}


def test_a_promise_ends_with_its_request():
    scheduler = make_scheduler(budget=4)
    first = queue(scheduler, 0, list(PROMPT))
    queue(scheduler, 1, list(PROMPT))
    assert step(scheduler) == {0: 4}
    scheduler.leave(first)
    assert step(scheduler) == {1: 4}  # the first block was kept
    assert step(scheduler) == {1: 2}
    finish(scheduler)


def test_who_opts_out_neither_finds_nor_leaves_anything():
    scheduler = make_scheduler()
    queue(scheduler, 0, list(PROMPT), share_prefix=False)
    queue(scheduler, 1, list(PROMPT))
    queue(scheduler, 2, list(PROMPT), share_prefix=False)
    assert step(scheduler) == {0: 10, 1: 10, 2: 10}
    finish(scheduler)
    assert scheduler.prefixes.counts().num_requests == 1
    assert scheduler.cache.num_kept_blocks == 4  # of 13 tokens: the last one is not written


def test_generated_tokens_are_found():
    scheduler = make_scheduler()
    queue(scheduler, 0, list(PROMPT))
    finish(scheduler)
    queue(scheduler, 1, [*PROMPT, 9, 9, 9, 9, 5])
    assert step(scheduler) == {1: 2}


def test_new_weights_forget_everything():
    scheduler = make_scheduler(budget=8)
    queue(scheduler, 0, list(PROMPT))
    step(scheduler)
    scheduler.prefixes._weights.is_new = True
    queue(scheduler, 1, list(PROMPT))
    assert step(scheduler) == {0: 2, 1: 6}, "nobody waits for old weights"
    finish(scheduler)
    assert scheduler.cache.num_kept_blocks == 4, "of the second request alone"
    assert scheduler.prefixes.counts().num_forgotten == 1


def test_a_prefix_makes_room():
    """Two requests share two blocks; without them only one would fit."""
    scheduler = make_scheduler(num_tokens=24)
    for number in range(2):
        queue(scheduler, number, list(PROMPT))
    assert step(scheduler) == {0: 10}
    assert step(scheduler) == {0: 1, 1: 1}
    finish(scheduler)


def test_32_groups_of_8():
    """Every shared token is computed once: 32 x 64, not 256 x 64."""
    scheduler = make_scheduler(budget=512, most=256, num_tokens=32 * 8 * 80)
    for number in range(256):
        queue(scheduler, number, [number // 8] * 64 + [number % 8] * 4)
    assert finish(scheduler) == 32 * 64 + 256 * (4 + 3)  # and three of four drawn


def test_those_with_one_prefix_are_neighbours():
    """Also those that join later; of a shorter prefix behind all that have it."""
    scheduler = make_scheduler(budget=64, num_tokens=512)
    for number in range(6):
        queue(scheduler, number, [1, 1, 1, 1, *[2 + number % 2] * 8, number])
    assert step(scheduler) == {0: 13}
    assert step(scheduler) == {0: 1, 1: 9, 2: 1, 4: 1}
    assert step(scheduler) == dict.fromkeys((0, 2, 4, 1, 3, 5), 1)
    queue(scheduler, 6, [1, 1, 1, 1, 2, 2, 2, 2, 6, 6])
    queue(scheduler, 7, [1, 1, 1, 1, 7])
    scheduler.next_step()
    assert [r.id for r in scheduler.running] == [0, 2, 4, 6, 1, 3, 5, 7]
    finish(scheduler)


def test_an_older_prompt_comes_before_neighbours_of_others():
    scheduler = make_scheduler(budget=8, num_tokens=512)
    queue(scheduler, 0, [*PROMPT[:8], 1])
    step(scheduler)
    step(scheduler)
    queue(scheduler, 1, [3] * 16)
    assert step(scheduler) == {0: 1, 1: 7}
    for number in range(2, 6):
        queue(scheduler, number, [*PROMPT[:8], *[number] * 4])
    assert step(scheduler)[1] == 7
    assert [r.id for r in scheduler.running] == [0, 2, 3, 4, 5, 1]
    finish(scheduler)


def test_without_sharing_everything_is_as_it_was():
    scheduler = make_scheduler(shares=False)
    for number in range(2):
        queue(scheduler, number, list(PROMPT))
    assert step(scheduler) == {0: 10, 1: 10}
    assert scheduler.cache.num_kept_blocks == 0
    assert scheduler.prefixes.counts() is None
