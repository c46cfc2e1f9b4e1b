"""fast_prefill and in-place writes: inside, across and outside of what is reduced.

`edit(m, h, e, put)`: h are the hidden states of two layers, e the embeddings, `put` fills a cache.
"""

import pytest
import torch
from torch import nn

import fx_passes
from fx_passes import recording
from tests.fx_passes.passes.fast_prefill_models import (
    KINDS,
    Batches,
    D,
    H,
    K,
    Plain,
    compare,
    compiled,
    record_of,
    seeded,
    write,
)


class Edits(Plain):
    """Two layers, and then `edit(model, h, e, write)`: e are embeddings, `write` fills a cache."""

    num_caches = 3

    def __init__(self, edit):
        super().__init__()
        self.edit, self.put = edit, nn.Linear(D, 2 * K * H)

    def run(self, h, kv_caches, batch):
        e = h.clone()
        h = super().run(h, kv_caches[:2], batch)
        return self.edit(self, h, e, lambda x: write(self.put(x), kv_caches[2], batch))


def adds(m, h, e, put):
    h += e
    h.mul_(2)
    return m.layers[1].mlp(h)


def adds_to_streams(m, h, e, put):
    """As Gemma 3n's predictions."""
    streams = torch.stack((h, h * 2, e))
    streams[1:] += m.layers[1].mlp(h)
    streams[0].add_(e)
    return m.layers[1].mlp(streams.mean(0))


def sets_columns(m, h, e, put):
    h = h * 2
    h[..., :4] = e[..., 4:8]
    h[:, :, 5] = 0.5
    return m.layers[1].mlp(h)


def sets_a_row(m, h, e, put):
    h = h * 2
    h[:, 0] = 0.25
    return m.layers[1].mlp(h)


def views_a_row(m, h, e, put):
    h = h * 2
    row = h.select(1, 0)
    row.mul_(3.0)
    return m.layers[1].mlp(h)


def sets_rows(m, h, e, put):
    h = h * 2
    h[:, 1:] = e[:, :-1]
    return m.layers[1].mlp(h)


def sums_a_row(m, h, e, put):
    h = h * 2
    h[:, 0] += h.sum(1)
    return m.layers[1].mlp(h)


def read_before_a_write(m, h, e, put):
    state = e * 2
    put(state)
    h = h + m.layers[1].mlp(state)
    state.add_(1.0)
    put(state)
    return h


def read_after_a_write(m, h, e, put):
    state = e * 2
    put(state)
    state.add_(1.0)
    put(state)
    return h + m.layers[1].mlp(state)


def read_before_and_after(m, h, e, put):
    state = e * 2
    view = state.view(-1, D)
    put(state)
    h = h + m.layers[1].mlp(state)
    view.mul_(0.5)
    put(state)
    return h + m.layers[0].mlp(state) + view


def written_by_the_region(m, h, e, put):
    """What all rows were read of before."""
    state = e * 2
    put(state)
    state += m.layers[1].mlp(h)
    return m.layers[0].mlp(state)


def written_and_read_whole(m, h, e, put):
    """The region's own value is put into a cache at the end: all its rows are needed."""
    h = m.layers[1].mlp(h)
    h += e
    put(h)
    return m.layers[0].mlp(h)


def kept_copy(m, h, e, put):
    """A copy holds what was there before the write."""
    old = e.clone()
    e.zero_()
    put(e)
    return h + m.layers[1].mlp(old) + e


def fills_a_buffer(m, h, e, put):
    out = torch.empty_like(h)
    out.copy_(m.layers[1].mlp(h))
    out[..., 0].fill_(1.0)
    return m.layers[0].mlp(out)


def table_of_positions(m, h, e, put):
    """Row i of a table is that of row i of the batch."""
    return m.layers[1].mlp(h + m.place.weight[: h.shape[1]])


def one_row_of_all(m, h, e, put):
    """A squeeze would drop the rows of a batch with one logits row."""
    return m.layers[1].mlp(h.squeeze()).view_as(h)


@pytest.mark.parametrize(
    "edit",
    [adds, adds_to_streams, sets_columns, sets_a_row, views_a_row, sets_rows, sums_a_row,
     read_before_a_write, read_after_a_write, read_before_and_after, written_by_the_region,
     written_and_read_whole, kept_copy, fills_a_buffer, table_of_positions, one_row_of_all],
)  # fmt: skip
def test_in_place(edit):
    model = seeded(Edits(edit))
    with recording() as recorder:
        fast = compiled(model)
    assert record_of(recorder).matches > 0
    batches = Batches(model)
    for kind in KINDS:
        compare(model, fast, batches.step(kind))


@pytest.mark.slow
@pytest.mark.parametrize("edit", [adds_to_streams])
def test_in_place_by_inductor(edit):
    model = seeded(Edits(edit))
    fast = compiled(model, backend=fx_passes.attn_ops, options={"fast_prefill": "on"})
    batches = Batches(model)
    for kind in KINDS[:3]:
        compare(model, fast, batches.step(kind), exact=False)


@pytest.mark.parametrize(
    ("edit", "products"),
    [(adds, 6), (adds_to_streams, 8), (sets_columns, 6), (fills_a_buffer, 8), (sets_a_row, 2)],
)
def test_in_place_costs_no_more_than_needed(edit, products):
    """What is written row by row stays in the region; a write to one row ends it."""
    with recording() as recorder:
        compiled(seeded(Edits(edit)))
    assert record_of(recorder).facts["num_products"] == products
