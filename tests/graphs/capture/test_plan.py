"""What a session captures, while it changes: `CapturePlan.stop`."""

import torch

from attn_ops import AttentionSpec, get_backend
from graphs.capture.plan import CapturePlan
from graphs.modes import CUDAGraphMode
from graphs.options import SessionOptions
from tests.kit.interrupts import Interrupt

FILES = ("graphs/capture/plan.py", "graphs/capture/plan.py", "graphs/capture/dispatch.py")


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


def test_while_a_plan_has_keys_it_knows_where_their_graphs_break():
    """`release` may be interrupted while it stops the plan; the next step may capture again."""
    counting = Interrupt(0, FILES)
    first = make_plan()
    counting.during(lambda: first.stop("enough"))
    assert counting.seen == set(FILES)
    interrupted = 0
    for at in range(1, counting.num_lines + 1):
        plan, interrupt = make_plan(), Interrupt(at, FILES)
        interrupt.during(lambda plan=plan: plan.stop("enough"))
        key = key_of_decode(plan)
        if key is not None:
            interrupted += 1
            assert plan.breaks(key) is None, "attention runs between the graphs"
        plan.stop("enough")
        assert key_of_decode(plan) is None
    assert interrupted
