"""FLEX on a CPU: plans, windows, sinks, tiles, and calls inside the dispatcher.

What FLEX declares is tested by tests/conformance; its kernels by tests/gpu/attn_ops/test_flex.py.

T rows, N query heads, Q rows of one request, C cached tokens of one request.
"""

import pytest
import torch

from attn_ops import AttentionSpec, attention, attention_with_lse, varlen_metadata
from attn_ops.backends.flex import BACKEND, flex_backend, plan
from attn_ops.backends.torch_backend import reference_attention
from tests.attn_ops.backends.flex.masks import RAGGED, check, every_third, oracle, ragged


def test_geometries_share_the_plan_of_their_mask(make_batch, monkeypatch):
    """The builder's: a layer makes none."""
    made, real = [], plan.make_plan
    batch = make_batch(*RAGGED, backend=BACKEND)
    monkeypatch.setattr(plan, "make_plan", lambda *mask: made.append(mask[1:]) or real(*mask))
    specs = [
        AttentionSpec(4, 2, 8, torch.float32, soft_cap=cap, sliding_window=window)
        for cap in (None, 2.0)
        for window in (None, 3)
    ]
    meta = BACKEND.builder(BACKEND, specs, 4, "cpu").build(0, batch.common)
    for cap in (None, 2.0, 5.0):
        for window in (None, 3):
            options = {"soft_cap": cap, "sliding_window": window}
            out = attention(batch.q, batch.kv_cache, meta, 0.3, **options)
            want = reference_attention(batch.q, batch.kv_cache, batch.common, 0.3, **options)
            assert (out - want).norm() <= 1e-5 * want.norm()
    assert made == [(True, None), (True, 3)]


def test_a_batch_without_the_mirror_is_refused(make_batch):
    """Instead of waiting for the device."""
    batch = make_batch(*RAGGED, backend=BACKEND)
    common = batch.common.replace(seq_lens_cpu=None)
    builder = BACKEND.builder(BACKEND, [AttentionSpec(4, 2, 8, torch.float32)], 4, "cpu")
    with pytest.raises(ValueError, match="seq_lens_cpu must be given, got None; FLEX"):
        builder.build(0, common)


@pytest.mark.parametrize("window", [15, 16, 20, 2**31 - 1, 2**40])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_wider_than_the_batch(make_batch, window, causal):
    """More rows than keys, as in cross-attention: positions start at -12, and see key 3 at 15."""
    batch = make_batch([16], [16], backend=BACKEND)
    keys = torch.tensor([4], dtype=torch.int32)
    common = batch.common.replace(
        seq_lens=keys, seq_lens_cpu=keys, num_computed_tokens_cpu=None, max_seq_len=4
    )
    made = plan.make_plan(common, causal, window)
    assert made is not None
    for row, position in enumerate(range(-12, 4)):
        first = max(0, position - window + 1)
        end = min(4, position + 1 if causal else position + window)
        seen = range(int(made.first_key_T[row]), int(made.end_key_T[row]))
        assert list(seen) == list(range(first, end))


@pytest.mark.parametrize("sink", [float("-inf"), float("inf")])
def test_infinite_sinks(make_batch, sink):
    """-inf is no sink, inf takes all; rows without keys are zero, a padding request's included."""
    sinks = torch.full((4,), sink)
    for backend, mask in ((BACKEND, None), (flex_backend("CUSTOM", every_third), every_third)):
        batch = ragged(make_batch, backend)
        out, lse = attention_with_lse(batch.q, batch.kv_cache, batch.meta, 0.3, sinks=sinks)
        if sink > 0:
            assert not out.any()
        else:
            check(out, lse, *oracle(batch, {}, True, mask or (lambda r, q, k: k >= 0)))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_grad_modes(make_batch, mode, requires_grad):
    with mode():
        batch = ragged(make_batch)
        if requires_grad and mode is not torch.inference_mode:
            batch.q.requires_grad_()
        out = attention(batch.q, batch.kv_cache, batch.meta, 0.3)
        want = reference_attention(batch.q, batch.kv_cache, batch.common, 0.3)
        assert (out - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("row_tile", [16, 128])
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_hold_every_visible_key(row_tile, window, causal):
    query, seq = [1, 300, 0, 5, 17, 2], [5, 333, 40, 70, 17, 0]
    spec = AttentionSpec(1, 1, 8, torch.float32)
    common = varlen_metadata(query, spec).common.replace(
        seq_lens=torch.tensor(seq, dtype=torch.int32), num_computed_tokens_cpu=None
    )
    made = plan._plan(common, causal, window, True, 384, 512, row_tile)
    key = torch.arange(512)
    seen = (key >= made.first_key_T[:, None]) & (key < made.end_key_T[:, None])
    row = start = 0
    for num_rows, length in zip(query, seq, strict=True):
        for i in range(num_rows):
            position = length - num_rows + i
            first = 0 if window is None else max(0, position - window + 1)
            end = length if window is None or causal else min(length, position + window)
            end = min(end, position + 1) if causal else end
            want = (key >= start + first) & (key < start + end) if length else key < 0
            assert torch.equal(seen[row], want), (row, position)
            row += 1
        start += length
    assert not seen[row:].any()
    tiles = seen.view(-1, row_tile, 512 // plan.KEY_TILE, plan.KEY_TILE).any(3).any(1)
    counts, indices = made.num_tiles_11I[0, 0].tolist(), made.tiles_11IJ[0, 0].tolist()
    for needed, count, visited in zip(tiles, counts, indices, strict=True):
        needed = needed.nonzero().flatten().tolist()
        span = list(range(needed[0], needed[-1] + 1)) if needed else []
        assert visited[:count] == span
