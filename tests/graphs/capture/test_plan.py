"""What a session captures, while it changes: `CapturePlan.stop`."""

import torch

from attn_ops import AttentionSpec, get_backend
from graphs.capture.plan import CapturePlan
from graphs.modes import CUDAGraphMode
from graphs.options import SessionOptions


def make_plan() -> CapturePlan:
    options = SessionOptions(
        max_batch_size=4, max_tokens=32, cudagraph_mode="PIECEWISE", debug="eager_replay"
    )
    specs = [AttentionSpec(4, 2, 8, torch.float32)]
    return CapturePlan.of(options, get_backend("TORCH"), specs, torch.device("cpu"), None)


def key_of_decode(plan: CapturePlan):
    return plan.dispatcher.dispatch(2, 2, 1)[1]


def test_a_stopped_plan_has_no_keys():
    plan = make_plan()
    plan.stop("enough")
    assert (plan.used, plan.why) == (CUDAGraphMode.NONE, "enough")
    assert key_of_decode(plan) is None
    assert not plan.first_keys()
