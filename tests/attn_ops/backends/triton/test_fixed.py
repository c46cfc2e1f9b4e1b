"""Units, splits and their order: interpreted, and bit by bit on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_ops.backends.triton import fixed
from tests.kit.marks import long, slow
from tests.kit.rows_alone import Rows

ASKED = [
    {},
    {"sliding_window": 300},
    {"soft_cap": 5.0, "sliding_window": 70},
    {"sinks": True},
    {"kv_cache_dtype": "fp8_e5m2"},
]


@pytest.mark.parametrize(
    "asked", [ASKED[2], *slow(ASKED[3]), *long(*ASKED[:2], *ASKED[4:])], ids=str
)
def test_a_row_is_the_same_in_every_step(asked: dict) -> None:
    rows = Rows([530, 1, 30], (4, 2), 16, torch.float32, "cpu", **asked)
    for what, got, want in rows.steps(splits=(1, 3), batches=(3,), chunks=(16,)):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, msg=lambda m, w=what: w + m)


def test_few_rows_have_a_launch_of_their_own_beside_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([60, 1, 30], (4, 2), 16, torch.float32, "cpu")
    chunks = [(1, 0, 1), (0, 20, 60), (2, 29, 30), (0, 10, 11)]
    rows_T, got = rows.attend(chunks, num_splits=1)
    torch.testing.assert_close(rows.whole_TNH[rows_T], got, rtol=2e-6, atol=2e-6)
    launched: list[tuple[int, bool]] = []

    def noted(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            launched.append((constants["FEW"], constants["IS_FEW"]))
            kernel[grid](*args, **constants)

        return launch

    monkeypatch.setattr(fixed, "quick", noted)
    assert torch.equal(rows.attend(chunks)[1], got)
    assert launched == [(8, False), (8, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize(("heads", "head_size"), [((32, 8), 128), ((16, 8), 256)])
def test_bits_are_the_same_in_every_step(heads: tuple[int, int], head_size: int, asked: dict):
    rows = Rows([5000, 1, 0, 700, 33], heads, head_size, torch.bfloat16, "cuda", **asked)
    for what, got, want in rows.steps():
        assert torch.equal(got, want), what
