"""FLASHINFER_MLA's own part on a CPU: what FlashInfer is planned and called with.

Its wrapper is replaced by attention in float64 from those arguments. tests/gpu runs kernels.
"""

import contextlib
import dataclasses
import gc
import math

import pytest
import torch

from attn_ops import AttentionSpec, mla_attention_with_lse
from attn_ops.backends.flashinfer.wrappers import Wrappers
from attn_ops.backends.mla import flashinfer_mla
from attn_ops.backends.mla.torch_mla import reference_mla_attention
from tests.kit.latent import build_latent_batch

BACKEND = dataclasses.replace(
    flashinfer_mla.BACKEND,
    support=dataclasses.replace(
        flashinfer_mla.BACKEND.support,
        devices=("cpu",), dtypes=(torch.float32,), latent_sizes=(), block_sizes=(),
    ),
    unavailable=lambda: None,
)  # fmt: skip


class Paged:
    """A wrapper, by FlashInfer's documented meaning of `plan` and `run`."""

    def plan(self, **given) -> None:
        self.given = given
        assert given["kv_indptr"][-1] == len(given["kv_indices"])
        assert given["causal"]

    def copied(self) -> bool:
        return True

    def run(self, q_nope, q_pe, ckv, kpe, *, out, lse, return_lse, return_lse_base_on_e) -> None:
        given = self.given
        assert (return_lse, return_lse_base_on_e) == (lse is not None, True)
        assert out.shape == q_nope.shape
        assert out.is_contiguous()
        for i, num_keys in enumerate(given["kv_len_arr"].tolist()):
            rows = slice(*given["qo_indptr"][i : i + 2].tolist())
            page = given["kv_indices"][slice(*given["kv_indptr"][i : i + 2].tolist())].long()
            c, k = (x.double()[page].flatten(0, 1)[:num_keys] for x in (ckv, kpe))
            scores = q_nope[rows].double() @ c.T + q_pe[rows].double() @ k.T
            key = torch.arange(num_keys)
            hidden = key > key[num_keys - scores.shape[0] :, None]
            scores = (given["sm_scale"] * scores).masked_fill(hidden[:, None], -math.inf)
            out[rows] = (scores.softmax(-1) @ c).to(out.dtype)
            if lse is not None:
                lse[rows] = scores.logsumexp(-1).float()


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The wrappers that are made instead of FlashInfer's."""
    found = []

    def take(self, kind, device):
        if idle := self._idle[kind]:
            return idle.pop()
        found.append(Paged())
        return found[-1]

    monkeypatch.setattr(Wrappers, "take", take)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return found


def batch_of(query_lens, seq_lens, **sizes):
    return build_latent_batch(query_lens, seq_lens, backend=BACKEND, **sizes)


def check(batch, scale) -> None:
    got, lse = mla_attention_with_lse(*batch.arguments[:4], scale, **batch.keywords)
    want_lse = torch.zeros_like(lse)
    options = batch.options(lse=want_lse)
    options = dataclasses.replace(options, scale=scale)
    want = reference_mla_attention(batch.q, batch.kv_cache, batch.common, options)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [([1, 1, 1], [5, 1, 33]), ([4, 1, 0, 3], [4, 20, 7, 9])])
def test_layers_of_several_scales(made, lengths):
    """Planned once a scale, by what `plan` takes."""
    batch = batch_of(*lengths, num_padding_rows=2)
    for scale in (0.3, 0.7, 0.3):
        check(batch, scale)
    assert [wrapper.given["sm_scale"] for wrapper in made] == [0.3, 0.7]


def test_a_wrapper_is_lent_for_as_long_as_its_batch_lives(made):
    first, second = batch_of([1, 1], [3, 9]), batch_of([1], [4])
    spec = AttentionSpec.of_latent(first.q.shape[1], first.shape, torch.float32)
    builder = BACKEND.builder(BACKEND, [spec], 4, "cpu")
    both = [dataclasses.replace(b, meta=builder.build(0, b.common)) for b in (first, second)]
    for batch in both:
        check(batch, 0.3)
    assert len(made) == 2
    both.pop(0)
    del batch
    gc.collect()
    third = dataclasses.replace(second, meta=builder.build(0, second.common))
    check(third, 0.5)
    assert [wrapper.given["sm_scale"] for wrapper in made] == [0.5, 0.3]


def test_batches_without_rows_are_not_planned(made):
    check(batch_of([0, 0], [3, 9], num_padding_rows=2), 0.3)
    assert not made
