"""Kernels that must not be launched early, each for one reason; and one that may."""

import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import wait_for_inputs


@triton.jit
def right(out_ptr, x_ptr, w_ptr, PDL: tl.constexpr):
    w = tl.load(w_ptr)
    wait_for_inputs(PDL)
    tl.store(out_ptr, tl.load(x_ptr) * w)


@triton.jit
def reads_first(out_ptr, x_ptr, w_ptr, PDL: tl.constexpr):
    x = tl.load(x_ptr)
    wait_for_inputs(PDL)
    tl.store(out_ptr, x + tl.load(w_ptr))


@triton.jit
def reads_in_a_branch(out_ptr, x_ptr, w_ptr, PDL: tl.constexpr):
    if tl.program_id(0) > 3:
        tl.store(out_ptr, tl.load(x_ptr + tl.program_id(0)))
    else:
        wait_for_inputs(PDL)
        tl.store(out_ptr, tl.load(x_ptr) + tl.load(w_ptr))


@triton.jit
def writes_first(out_ptr, x_ptr, w_ptr, PDL: tl.constexpr):
    tl.store(out_ptr, tl.load(w_ptr))
    wait_for_inputs(PDL)
    tl.store(out_ptr + 1, tl.load(x_ptr))


@triton.jit
def triggers_first(out_ptr, x_ptr, w_ptr, PDL: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    wait_for_inputs(PDL)
    tl.store(out_ptr, tl.load(x_ptr) + tl.load(w_ptr))


@triton.jit
def follows_a_pointer(out_ptr, x_ptr, w_ptr, PDL: tl.constexpr):
    place = tl.load(w_ptr).to(tl.int64)
    x = tl.load(x_ptr + place)
    wait_for_inputs(PDL)
    tl.store(out_ptr, x)


@triton.jit
def never_waits(out_ptr, x_ptr, w_ptr, PDL: tl.constexpr):
    tl.store(out_ptr, tl.load(w_ptr))


EXPECTED = {
    "right": [],
    "reads_first": ["it reads x_ptr before it has waited"],
    "reads_in_a_branch": [
        "it may end without waiting",
        "it reads x_ptr before it has waited",
        "it writes out_ptr before it has waited",
    ],
    "writes_first": ["it writes out_ptr before it has waited"],
    "triggers_first": ["it lets the next kernel start before it has waited"],
    "follows_a_pointer": ["it reads x_ptr before it has waited"],
    "never_waits": ["it may end without waiting", "it writes out_ptr before it has waited"],
}
"""What is found when w_ptr alone is never written."""
