"""Kernels that sum over ranks, whose ranks are streams of one GPU here: all fit on it at once.

On an H100 they take 30 s (predicted).
"""

import random

import pytest
import torch

from attn_ops.early_launch import launched_in_turn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
collectives = pytest.importorskip("attn_ops.ops.triton.collectives")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(collectives, "PROGRAMS", 32)
    with launched_in_turn():
        yield


class Ranks:
    """Blocks of one GPU's memory, as if each was another's."""

    def __init__(self, number):
        blocks = [
            torch.zeros(collectives.num_bytes(number), dtype=torch.uint8, device="cuda")
            for _ in range(number)
        ]
        bases = torch.tensor([block.data_ptr() for block in blocks], device="cuda")
        self.shared = []
        for rank in range(number):
            epochs = torch.zeros(2, collectives.PROGRAMS, dtype=torch.int64, device="cuda")
            self.shared.append(collectives.Shared(bases, (epochs[0], epochs[1]), rank, blocks))
        self.streams = [torch.cuda.Stream() for _ in blocks]
        torch.cuda._sleep(1)  # loads it: a kernel that waits would keep it out

    def sums(self, rows, late=0):
        """What each rank gets; a stream is late by so many cycles."""
        found = []
        torch.cuda.synchronize()
        order = list(range(len(rows)))
        random.shuffle(order)
        for rank in order:
            with torch.cuda.stream(self.streams[rank]):
                if late and rank == order[-1]:
                    torch.cuda._sleep(late)
                found.append((rank, collectives.launch_all_reduce(rows[rank], self.shared[rank])))
        torch.cuda.synchronize()
        return [total for _, total in sorted(found, key=lambda one: one[0])]


@pytest.mark.parametrize("number", [2, 3])
def test_sums_of_random_sizes(number):
    random.seed(0)
    ranks = Ranks(number)
    for case in range(400):
        dtype = random.choice([torch.bfloat16, torch.float16, torch.float32])
        most = random.choice([16, 5_000, 300_000, 2_000_000, 9_000_000])
        length = random.randint(1, most) if case % 2 else 16 * random.randint(1, most // 16)
        rows = [torch.randn(length, device="cuda").to(dtype) for _ in range(number)]
        wanted = torch.zeros(length, device="cuda")
        for one in rows:
            wanted += one.float()
        late = random.choice([0, 0, 100_000])
        for total in ranks.sums(rows, late):
            assert torch.equal(total, wanted.to(dtype)), (case, length, dtype)


def test_many_sums_without_waiting():
    """A rank may be ahead by one sum: the next one overwrites nothing that is still read."""
    random.seed(1)
    ranks = Ranks(2)
    lengths = [8 * random.randint(1, random.choice([64, 4096, 1 << 17])) for _ in range(300)]
    rows = [[torch.randn(n, device="cuda") for _ in range(2)] for n in lengths]
    wanted = [(torch.zeros_like(a) + a) + b for a, b in rows]
    for pair in rows[:20]:  # loads what is launched below: a kernel that waits would keep it out
        ranks.sums(pair, late=1)
    for _ in range(5):
        found = [[], []]
        for pair in rows:
            for rank, stream in enumerate(ranks.streams):
                with torch.cuda.stream(stream):
                    if random.random() < 0.05:
                        torch.cuda._sleep(100_000)
                    found[rank].append(
                        collectives.launch_all_reduce(pair[rank], ranks.shared[rank])
                    )
        torch.cuda.synchronize()
        for totals in found:
            assert all(map(torch.equal, totals, wanted))
