"""A kernel that stores what `tl.philox` gives; imported by test_race."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seed", "low", "high"])  # 1 would become a constant
def store_words(out_ptr, seed, low, high, LANES: tl.constexpr):
    """out [4, LANES] int64: the words of counters (n, 0, low, high), n below LANES."""
    n = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seed, n.to(tl.uint32), zero, zero + low.to(tl.uint32), zero + high.to(tl.uint32)
    )
    tl.store(out_ptr + n, w0.to(tl.int64))
    tl.store(out_ptr + LANES + n, w1.to(tl.int64))
    tl.store(out_ptr + 2 * LANES + n, w2.to(tl.int64))
    tl.store(out_ptr + 3 * LANES + n, w3.to(tl.int64))
