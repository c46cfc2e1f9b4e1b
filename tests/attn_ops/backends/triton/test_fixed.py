"""Units, splits and their order, through the interpreter; the bits are compared on a GPU."""

import pytest
import torch

from tests.kit.marks import slow
from tests.kit.rows_alone import Rows

ASKED = [
    {},
    {"sliding_window": 300},
    {"soft_cap": 5.0, "sliding_window": 70},
    {"sinks": True},
    {"kv_cache_dtype": "fp8_e5m2"},
]


@pytest.mark.parametrize("asked", [ASKED[2], *slow(*ASKED[:2], *ASKED[3:])], ids=str)
def test_a_row_is_the_same_in_every_step(asked: dict) -> None:
    rows = Rows([530, 1, 30], (4, 2), 16, torch.float32, "cpu", **asked)
    for what, got, want in rows.steps(splits=(1, 3), batches=(3,), chunks=(16,)):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, msg=lambda m, w=what: w + m)
