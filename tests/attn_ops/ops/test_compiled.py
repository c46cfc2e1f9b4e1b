"""The operators in compiled functions: no recompilation, and reads and writes in their order.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
from functools import partial

import pytest
import torch

from attn_ops import attention, write_kv
from attn_ops.backends.torch_backend import reference_attention
from tests.kit.operators import bits

ops = torch.ops.attn_ops


BATCHES = [
    ([3, 0, 1], [7, 5, 4]),
    ([1], [9]),
    ([1, 1], [4, 2]),
    ([5], [5]),
    ([1, 1, 1, 1], [3, 2, 9, 1]),
    ([2], [2]),
]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_other_batches_do_not_recompile(make_batch, as_dynamic, num_graphs, backend):
    """Sizes T and S, lengths and metadata change; the cache's size does not."""

    @torch.compile(backend=backend, fullgraph=True)
    def step(q, k, v, kv_cache, meta, slot_mapping):
        write_kv(k * 2, v, kv_cache, meta, slot_mapping=slot_mapping)
        return attention(q, kv_cache, meta, 0.3, sliding_window=6) + 1

    before = num_graphs()
    for index, lengths in enumerate(BATCHES):
        b = make_batch(
            *lengths, written=False, seed=index, num_blocks=14, num_padding_rows=index % 2
        )
        wanted = b.kv_cache.clone()
        write_kv(b.k * 2, b.v, wanted, b.meta)
        slots = b.common.slot_mapping.clone()
        for tensor in (b.q, b.k, b.v, slots) if index == 0 else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        with as_dynamic():
            out = step(b.q, b.k, b.v, b.kv_cache, b.meta, slots)
        assert torch.equal(bits(b.kv_cache[1:]), bits(wanted[1:]))
        reference = reference_attention(b.q, wanted, b.common, 0.3, sliding_window=6) + 1
        torch.testing.assert_close(out.double(), reference, atol=1e-5, rtol=1e-5)
        assert num_graphs() - before == 1, f"batch {index} was compiled anew"


def test_slots_from_the_metadata_do_not_recompile(make_batch, as_dynamic, num_graphs):
    write = torch.compile(write_kv, backend="aot_eager", fullgraph=True)
    before = num_graphs()
    for index, lengths in enumerate(BATCHES):
        b = make_batch(*lengths, written=False, seed=index, num_blocks=14)
        wanted = b.kv_cache.clone()
        write_kv(b.k, b.v, wanted, b.meta)
        for tensor in (b.k, b.v) if index == 0 else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        with as_dynamic():
            write(b.k, b.v, b.kv_cache, b.meta)
        assert torch.equal(bits(b.kv_cache), bits(wanted))
    assert num_graphs() - before == 1


REVERSED = torch.tensor([20, 16, 12, 8, 4])
"""Slot 0 of blocks 5 to 1, of 4 tokens each."""


def read_a_clone_after_the_write(b, kv_cache):
    old = kv_cache.clone()
    write_kv(b.k, b.v, kv_cache, b.meta)
    return attention(b.q, old, b.meta, 1.0), attention(b.q, kv_cache, b.meta, 1.0)


def slices_of_a_clone(b, kv_cache, write):
    """op(clone(x), x) of pytorch#198031: block i is written to block 6 - i, read before."""
    old = kv_cache.clone()
    write(old[1:6, 0, 0], old[1:6, 1, 0], kv_cache, b.meta, slot_mapping=REVERSED)
    return (b.q * 2,)


def clones_of_slices(b, kv_cache, write):
    k, v = kv_cache[1:6, 0, 0].clone(), kv_cache[1:6, 1, 0].clone()
    write(k, v, kv_cache, b.meta, slot_mapping=REVERSED)
    return (b.q * 2,)


def write_twice(b, kv_cache):
    write_kv(b.k, b.v, kv_cache, b.meta)
    first = attention(b.q, kv_cache, b.meta, 1.0)
    write_kv(b.k + first[:, :2], b.v * 2, kv_cache, b.meta)
    return first, attention(b.q, kv_cache, b.meta, 1.0)


HAZARDS = {
    "read_a_clone_after_the_write": read_a_clone_after_the_write,
    "write_slices_of_a_clone": partial(slices_of_a_clone, write=write_kv),
    "write_clones_of_slices": partial(clones_of_slices, write=write_kv),
    "operator_on_slices_of_a_clone": partial(slices_of_a_clone, write=ops.write_kv),
    "operator_on_clones_of_slices": partial(clones_of_slices, write=ops.write_kv),
    "write_twice": write_twice,
}


@pytest.mark.parametrize("function", HAZARDS.values(), ids=HAZARDS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_order_of_reads_and_writes(make_batch, function, backend):
    b = make_batch([3, 0, 1, 1], [7, 5, 1, 9], num_blocks=20)
    b.kv_cache = torch.randn(b.kv_cache.shape, generator=torch.Generator().manual_seed(3))
    eager, compiled = b.kv_cache.clone(), b.kv_cache.clone()
    wanted = function(b, eager)

    @torch.compile(backend=backend, fullgraph=True)
    def run(q, k, v, kv_cache, meta):
        return function(dataclasses.replace(b, q=q, k=k, v=v, meta=meta), kv_cache)

    got = run(b.q, b.k, b.v, compiled, b.meta)
    assert torch.equal(compiled, eager), "the cache differs"
    for one, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, want, atol=1e-6, rtol=1e-6)
    if len(wanted) == 2:
        assert not torch.equal(wanted[0], wanted[1]), "the case does not tell old from new"
