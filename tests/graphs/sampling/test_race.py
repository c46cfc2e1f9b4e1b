"""The race: its distribution, its edges, and the Triton kernel against plain PyTorch.

The kernel runs on a GPU, and interpreted on a machine without one.
"""

import pytest
import torch

from graphs.sampling import argmax
from graphs.sampling.philox import words
from graphs.sampling.race import reference_race
from tests.graphs.sampling.exact import check_draws

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = torch.inf


def kernel_race(*arguments):
    pytest.importorskip("triton")
    from graphs.sampling.triton.race import launch_race

    return launch_race(*(x.to(DEVICE) for x in arguments)).cpu()


RACES = [reference_race, kernel_race]


def rows(num_rows, temperature, seed=5):
    """Temperatures, seeds and positions of as many draws of one request."""
    return (
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), seed),
        torch.arange(num_rows) + 100,
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_follow_the_softmax(temperature, dtype):
    logits_V = torch.randn(40).mul(2).to(dtype)
    logits_V[7] = -INF
    tokens = reference_race(logits_V.expand(20000, -1), *rows(20000, temperature))
    check_draws(tokens, (logits_V.double() / temperature).softmax(0).tolist())


@pytest.mark.parametrize(
    "vocab_size",
    [1, 255, 1025, 2049, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 1024, 2048, 5003))],
)
def test_kernel_draws_what_the_reference_draws(vocab_size):
    num_rows = 24
    logits = torch.randn(num_rows, vocab_size) * 3
    temperatures = torch.rand(num_rows) * 2
    temperatures[::5] = 0
    seeds = torch.randint(-(2**62), 2**62, (num_rows,))
    positions = torch.randint(0, 2**40, (num_rows,))
    wanted = reference_race(logits, temperatures, seeds, positions)
    assert torch.equal(kernel_race(logits, temperatures, seeds, positions), wanted)
    if vocab_size > 1000:
        assert len(set(wanted.tolist())) > num_rows // 2
    greedy = temperatures == 0
    assert torch.equal(wanted[greedy], logits[greedy].argmax(-1))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_kernel_reads_rows_of_any_type_and_stride(dtype):
    whole = (torch.randn(6, 2, 1200) * 3).to(dtype)
    arguments = rows(6, 0.8)
    for logits in (whole[:, 0], whole[:, 1, ::2], whole[:, 1].t().contiguous().t()):
        wanted = reference_race(logits, *arguments)
        assert torch.equal(kernel_race(logits, *arguments), wanted)


def test_kernel_has_the_words_of_the_reference():
    """With equal logits the token is the index of the smallest word: all of them matter."""
    arguments = rows(40, 1.0, seed=-3)
    wanted = words(*arguments[1:], 4000).argmin(-1)
    assert torch.equal(kernel_race(torch.zeros(40, 4000), *arguments), wanted)


@pytest.mark.parametrize(
    ("race", "num_rows"),
    [
        (reference_race, 300),
        (kernel_race, 40),  # interpreted, a row takes 20 ms
        pytest.param(kernel_race, 300, marks=pytest.mark.slow),
    ],
)
def test_masked_tokens_are_never_drawn(race, num_rows):
    logits = torch.full((num_rows, 1500), -INF)
    open_at = torch.randint(1500, (num_rows, 3))
    logits.scatter_(1, open_at, torch.randn(num_rows, 3) * 50)
    temperatures, seeds, positions = rows(num_rows, 100.0)
    temperatures[::2] = 0.01
    tokens = race(logits, temperatures, seeds, positions)
    assert (tokens.unsqueeze(1) == open_at).any(1).all()


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")
@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1e30])
def test_every_row_gives_a_token_of_the_vocabulary(race, temperature):
    logits = torch.randn(6, 1100)
    logits[0] = -INF
    logits[1] = torch.nan
    logits[2, 5], logits[2, 6] = torch.nan, 1e4
    logits[3, 700] = INF
    logits[4, [3, 1050]] = INF
    logits[5] = 3e38
    tokens = race(logits, *rows(6, temperature))
    assert tokens[:2].tolist() == [0, 0]
    assert tokens[3:5].tolist() == [700, 3]
    assert ((tokens >= 0) & (tokens < 1100)).all()
    if temperature < 1:
        assert tokens[2] == 6


@pytest.mark.parametrize("race", RACES)
def test_greedy_rows_take_the_first_of_equal_logits(race):
    logits = torch.zeros(4, 3000)
    logits[0, [900, 2900]] = 1
    logits[1, [256, 1]] = 1
    logits[2, [1024, 512]] = 1
    assert race(logits, *rows(4, 0.0)).tolist() == [900, 1, 512, 0]


@pytest.mark.parametrize("race", RACES)
def test_no_rows(race):
    assert race(torch.empty(0, 50), *rows(0, 1.0)).shape == (0,)


@pytest.mark.parametrize("size", [100, 4096, 8192, 8200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_in_two_stages(size, dtype):
    logits = torch.randn(5, size).to(dtype)
    logits[0, [70, 90]] = 50
    assert torch.equal(argmax(logits), logits.argmax(-1))
    assert argmax(logits)[0] == 70


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("size", [1, 1000, 5001])
def test_argmax_kernel(rows, size):
    """The first of equal ones, in every chunk's corner; NaN is never the largest."""
    launch_argmax = pytest.importorskip("graphs.sampling.triton.race").launch_argmax
    logits = torch.randn(rows, size, device=DEVICE)
    for place in {0, size // 3, min(1023, size - 1), min(1024, size - 1), size - 1}:
        logits[0, place:] = logits[0].max() + 1
        assert torch.equal(launch_argmax(logits), logits.argmax(-1))
        half = logits.half()
        assert torch.equal(launch_argmax(half), half.argmax(-1))
        assert torch.equal(launch_argmax(logits.t().contiguous().t()), logits.argmax(-1))
    logits[0] = -torch.inf
    assert launch_argmax(logits)[0] == 0
    logits[0, size // 2 :] = torch.nan
    logits[0, 0] = 0.0
    assert launch_argmax(logits)[0] == 0
    assert launch_argmax(logits[:0]).shape == (0,)
