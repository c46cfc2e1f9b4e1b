"""The requests of the workload: the same ones for everything that is measured."""

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests of uniformly drawn lengths, greedy, without an eos token."""

    num_requests: int = 512
    prompt: tuple[int, int] = (32, 1024)  # tokens, both ends included
    output: tuple[int, int] = (16, 512)
    max_batch_size: int = 256
    max_tokens_per_step: int = 8192
    seed: int = 7

    @property
    def max_tokens(self) -> int:
        """Of a request at its longest."""
        return self.prompt[1] + self.output[1]

    def draw(self, vocab_size: int) -> "list[Wish]":
        """All requests, in the order in which they come."""
        rng = random.Random(self.seed)
        lengths = [
            (rng.randint(*self.prompt), rng.randint(*self.output)) for _ in range(self.num_requests)
        ]
        return [Wish([rng.randrange(vocab_size) for _ in range(p)], n) for p, n in lengths]


SMALL = Workload(12, (2, 24), (1, 9), max_batch_size=5, max_tokens_per_step=24)
"""For a run on a CPU, whose figures mean nothing."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """A prompt, and how many tokens are wanted."""

    prompt: list[int]
    num_new: int


def num_output_tokens(wishes: list[Wish]) -> int:
    return sum(wish.num_new for wish in wishes)
