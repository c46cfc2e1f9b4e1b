"""What tests of operators share."""

from functools import partial

import torch

opcheck = partial(
    torch.library.opcheck,
    test_utils=(
        "test_schema",
        "test_faketensor",
        "test_aot_dispatch_static",
        "test_aot_dispatch_dynamic",
    ),
)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor as integers: NaNs compare equal to themselves."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
