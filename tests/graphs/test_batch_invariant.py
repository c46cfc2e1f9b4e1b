"""batch_invariant=True where it cannot be had: refused by name when the session is made."""

from unittest import mock

import pytest
import torch

from attn_ops import get_backend
from graphs import DecodeSession
from graphs.compilation import invariant_options
from graphs.options import SessionOptions

CUDA = torch.device("cuda")


def of(backend=None, *, compiled=True, capability=(9, 0)):
    options = SessionOptions(max_batch_size=2, max_tokens=64, batch_invariant=True, backend=backend)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        return invariant_options(options, CUDA, compiled=compiled)


def test_the_backend():
    assert of().backend == of("TRITON_FIXED").backend == "TRITON_FIXED"
    assert of(get_backend("TRITON_FIXED")).backend == "TRITON_FIXED"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"capability": (8, 0)}, "without a model on a Hopper GPU, got one on cuda"),
        ({"compiled": False}, "without a compiled model, got one that is not"),
        ({"backend": "FLASH_ATTN"}, "without backend None or 'TRITON_FIXED', got 'FLASH_ATTN'"),
    ],
)
def test_refused(asked, message):
    with pytest.raises(ValueError, match=f"batch_invariant must be False {message}"):
        of(**asked)


def test_a_session_on_a_cpu(make_model):
    model = make_model("llama")
    with pytest.raises(ValueError, match="without a model on a Hopper GPU, got one on cpu"):
        DecodeSession(model, max_batch_size=2, max_tokens=64, batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant must be True or False, got 1"):
        DecodeSession(model, max_batch_size=2, max_tokens=64, batch_invariant=1)
