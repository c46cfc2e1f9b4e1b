"""FLASHINFER's own part on a CPU: who goes to which wrapper, page arrays, padding, who owns a plan.

FlashInfer is replaced by `Paged`, which computes attention in float64 from nothing but what it was
planned with, by FlashInfer's documented meaning of it. tests/gpu/test_flashinfer.py runs kernels.
"""

import dataclasses
import gc
import importlib.metadata
import math
import sys
import types

import numpy as np
import pytest
import torch

from attn_ops import (
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    attention_with_lse,
    get_backend,
)
from attn_ops.backends import flashinfer as backend_module
from attn_ops.backends.flashinfer.parts import divide
from attn_ops.backends.flashinfer.wrappers import split_bytes
from attn_ops.backends.torch_backend import reference_attention

REAL = get_backend("FLASHINFER")
BACKEND = dataclasses.replace(
    REAL,
    support=dataclasses.replace(REAL.support, devices=("cpu",), dtypes=(torch.float32,), lse=True),
    unavailable=lambda: None,
)
BLOCK = 16


class Event:
    """A copy that is under way until `Event.done`."""

    done = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.done

    def synchronize(self) -> None:
        pass


class Paged:
    """Both wrappers. `made` counts them, `planned` holds the batch size of every plan."""

    made: list["Paged"]
    planned: list[tuple[str, int]]

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool | None = None):
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        self.kind = {None: "prefill", False: "decode", True: "tensor cores"}[use_tensor_cores]
        Paged.made.append(self)

    def plan(self, **given) -> None:
        prefix = "paged_kv_" if self.kind == "prefill" else ""
        self.indptr, self.last = given[prefix + "indptr"], given[prefix + "last_page_len"]
        self.indices = given[prefix + "indices"].clone()
        self.given = given
        size = len(self.last)
        self.rows = given.get("qo_indptr", torch.arange(size + 1))
        for host in (self.indptr, self.last, given["seq_lens"]):
            assert host.dtype == torch.int32
            assert host.device.type == "cpu"
        lens = (self.indptr.diff() - 1) * given["page_size"] + self.last
        assert lens.tolist() == given["seq_lens"].tolist(), "no request is empty"
        assert self.indptr[-1] == len(self.indices)
        assert self.last.min() >= 1
        assert self.last.max() <= given["page_size"]
        assert int(self.rows[-1]) > 0
        if self.kind == "prefill":
            assert given["max_token_per_sequence"] == self.rows.diff().max()
        Paged.planned.append((self.kind, size))

    def run(self, q, kv_cache, *, q_scale, out, lse, return_lse) -> None:
        assert q.shape == out.shape
        assert len(q) == self.rows[-1]
        assert out.is_contiguous()
        assert return_lse == (lse is not None)
        for i in range(len(self.last)):
            begin, end = self.rows[i], self.rows[i + 1]
            pages = self.indices[self.indptr[i] : self.indptr[i + 1]].long()
            kv = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, : self.given["seq_lens"][i]]
            group = q.shape[1] // kv.shape[2]
            k, v = kv.double().repeat_interleave(group, dim=2)
            scores = torch.einsum("qnh,cnh->nqc", q[begin:end].double(), k)
            scores *= self.given["sm_scale"] * q_scale
            if cap := self.given["logits_soft_cap"]:
                scores = cap * torch.tanh(scores / cap)
            key, query = torch.arange(len(k)), torch.arange(len(k) - (end - begin), len(k))[:, None]
            hidden = key > query
            if (left := self.given["window_left"]) >= 0:
                hidden |= key < query - left
            scores = scores.masked_fill(hidden, -math.inf)
            out[begin:end] = torch.einsum("nqc,cnh->qnh", scores.softmax(-1), v).to(out.dtype)
            if lse is not None:
                lse[begin:end] = (scores.logsumexp(-1).T / math.log(2)).float()


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Paged
    module.BatchPrefillWithPagedKVCacheWrapper = Paged
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    properties = types.SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(Paged, "made", [], raising=False)
    monkeypatch.setattr(Paged, "planned", [], raising=False)
    monkeypatch.setattr(Event, "done", True)


def builder_of(spec):
    return BACKEND.builder(BACKEND, [spec], BLOCK, "cpu", workspace_bytes=16)


def make(query, seq, spec, pad=0, builder=None):
    """q, a poisoned cache of shuffled blocks, metadata."""
    width = max(1, -(-max(seq, default=1) // BLOCK))
    table = (torch.randperm(len(seq) * width) + 1).view(len(seq), width).int()
    heads, size = spec.num_kv_heads, spec.head_size
    cache = torch.full((table.numel() + 1, 2, BLOCK, heads, size), float("nan"))
    for blocks, n in zip(table, seq, strict=True):
        for b in range(-(-n // BLOCK)):
            m = min(BLOCK, n - b * BLOCK)
            cache[blocks[b], :, :m] = torch.randn(2, m, heads, size)
    common = CommonAttentionMetadata.from_lengths(
        query, [max(q, n) for q, n in zip(query, seq, strict=True)], table, BLOCK,
        num_padded_tokens=sum(query) + pad,
    )  # fmt: skip
    common.seq_lens.copy_(torch.tensor(seq, dtype=torch.int32))
    common = common.replace(
        seq_lens_cpu=torch.tensor(seq, dtype=torch.int32), num_actual_tokens=sum(query) + pad
    )
    q = torch.randn(sum(query) + pad, spec.num_heads, size)
    return q, cache, (builder or builder_of(spec)).build(0, common)


SPEC = AttentionSpec(8, 2, 64, torch.float32)
BATCHES = {
    "decodes": ([1, 1, 1], [1, 17, 40], [("tensor cores", 3)]),
    "mixed": ([1, 1, 5, 40], [5, 33, 5, 64], [("tensor cores", 2), ("prefill", 2)]),
    "prefills": ([2, 20], [2, 50], [("prefill", 2)]),
    "a decode behind": ([1, 5, 1], [9, 5, 30], [("tensor cores", 1), ("prefill", 2)]),
    "a prefill in front": ([5, 1, 1], [9, 5, 30], [("prefill", 3)]),
    "no query, no tokens": ([1, 0, 1, 7], [5, 0, 20, 7], [("tensor cores", 2), ("prefill", 1)]),
    "no query among decodes": ([1, 0, 1], [5, 18, 20], [("tensor cores", 1), ("prefill", 2)]),
    "padding requests behind": ([1, 1, 1, 1], [5, 33, 0, 0], [("tensor cores", 2)]),
    "padding request between": ([1, 1, 1, 3], [5, 0, 33, 4], [("tensor cores", 2), ("prefill", 1)]),
    "padding prefill in front": ([3, 1, 4], [0, 9, 20], [("prefill", 2)]),
    "padding alone": ([1, 1], [0, 0], []),
    "no query at all": ([0, 0], [5, 20], []),
    "nobody": ([], [], []),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 7, "soft_cap": 5.0}])
def test_against_the_oracle(batch, options):
    query, seq, planned = BATCHES[batch]
    spec = dataclasses.replace(SPEC, **options)
    q, cache, meta = make(query, seq, spec, pad=3)
    assert Paged.planned == planned
    out, lse = attention_with_lse(q, cache, meta, 0.3, **options)
    want_lse = torch.empty(q.shape[:2], dtype=torch.float64)
    want = reference_attention(q, cache, meta.common, 0.3, **options, lse=want_lse)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(attention(q, cache, meta, 0.3, **options), out)


def test_layers_of_one_geometry_may_differ_in_scale():
    q, cache, meta = make([1, 6], [20, 30], SPEC)
    for scale in (1.0, 0.01):
        want = reference_attention(q, cache, meta.common, scale)
        out = attention(q, cache, meta, scale)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kind"), [((8, 8), "decode"), ((6, 2), "decode"), ((8, 2), "tensor cores")]
)
def test_tensor_cores_from_four_heads_a_group(heads, kind):
    make([1], [20], AttentionSpec(*heads, 64, torch.float32))
    assert Paged.planned == [(kind, 1)]


@pytest.mark.parametrize("offset", [0, 1])
def test_rows_that_kernels_cannot_load_are_copied(offset):
    """A slice of a merged product is loaded where it stands, unless pieces of 16 bytes straddle."""
    q, cache, meta = make([1, 6], [20, 30], SPEC)
    merged = torch.randn(7, 8 * 64 + 64 + offset)
    q = merged[:, offset : offset + 512].view(7, 8, 64)
    seen = []
    run = Paged.run

    def spy(self, q, *arguments, **keywords):
        seen.append(q.data_ptr() - merged.data_ptr())
        assert all(stride % 4 == 0 for stride in q.stride()[:2])
        run(self, q, *arguments, **keywords)

    Paged.run = spy
    try:
        out = attention(q, cache, meta, 0.3)
    finally:
        Paged.run = run
    inside = [0 <= distance < merged.nbytes for distance in seen]
    assert inside == [offset == 0] * 2
    want = reference_attention(q, cache, meta.common, 0.3)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_batches_built_before_either_runs_do_not_share_a_plan():
    builder = builder_of(SPEC)
    made = [make([1, 1, 4], lens, SPEC, builder=builder) for lens in ([5, 33, 9], [40, 2, 20])]
    for q, cache, meta in made:
        want = reference_attention(q, cache, meta.common, 0.3)
        out = attention(q, cache, meta, 0.3)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert len(Paged.made) == 4


def test_wrappers_are_planned_again_when_their_metadata_is_gone():
    builder = builder_of(SPEC)
    for _ in range(5):
        make([1, 4], [5, 9], SPEC, builder=builder)
        gc.collect()
    assert len(Paged.made) == 2
    assert len(Paged.planned) == 10


def test_a_wrapper_is_not_planned_while_its_last_plan_is_copied(monkeypatch):
    """FlashInfer would overwrite the pinned arrays that the device has yet to read."""
    builder = builder_of(SPEC)
    monkeypatch.setattr(Event, "done", False)
    for _ in range(2):
        make([1], [5], SPEC, builder=builder)
        gc.collect()
    assert len(Paged.made) == 2
    monkeypatch.setattr(Event, "done", True)
    make([1], [5], SPEC, builder=builder)
    assert len(Paged.made) == 2


def test_host_arrays_are_no_views_of_the_mirrors():
    """A session rewrites its pinned mirrors for the next step while copies are under way."""
    _, _, meta = make([1, 6], [20, 30], SPEC)
    division = divide(meta.common, BLOCK)
    before = [
        getattr(part, field).clone()
        for part in (division.decodes, division.prefills)
        for field in ("query_start_loc", "page_start_loc", "last_page_len", "seq_lens")
    ]
    meta.common.seq_lens_cpu.fill_(99)
    meta.common.query_start_loc_cpu.fill_(99)
    after = [
        getattr(part, field)
        for part in (division.decodes, division.prefills)
        for field in ("query_start_loc", "page_start_loc", "last_page_len", "seq_lens")
    ]
    assert all(map(torch.equal, before, after))


def test_random_batches():
    """Rows and pages of every request land in exactly one part."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        size = int(rng.integers(0, 12))
        query = rng.choice([0, 1, 1, 1, 2, 30], size)
        seq = np.where(rng.random(size) < 0.2, 0, query + rng.integers(0, 50, size))
        _, _, meta = make(query.tolist(), seq.tolist(), SPEC)
        division = divide(meta.common, BLOCK)
        live = seq > 0
        assert division.num_rows == query[live].sum()
        rows = np.flatnonzero(np.repeat(live, query))
        if division.row_indices is None:
            assert rows.tolist() == list(range(len(rows)))
        else:
            assert division.row_indices.tolist() == rows.tolist()
        parts = [part for part in (division.decodes, division.prefills) if part is not None]
        assert sum(part.rows.stop - part.rows.start for part in parts) == division.num_rows
        assert division.num_pages == (-(-seq // BLOCK)).sum()
        if division.decodes is not None:
            assert (division.decodes.query_start_loc.diff() == 1).all()


@pytest.mark.parametrize("name", ["query_start_loc_cpu", "seq_lens_cpu"])
def test_missing_mirrors_are_refused(name):
    _, _, meta = make([1, 6], [20, 30], SPEC)
    common = meta.common.replace(**{name: None})
    with pytest.raises(ValueError, match=f"{name} must be given, got None"):
        builder_of(SPEC).build(0, common)


def test_a_layer_that_was_not_planned_is_refused():
    q, cache, meta = make([1], [20], SPEC)
    with pytest.raises(ValueError, match="layer must have been planned by the builder"):
        attention(q, cache, meta, 0.3, soft_cap=5.0)


def test_workspace_holds_what_splitting_can_need():
    """FlashInfer's own bound: tiles that fit 2 a multiprocessor, each with the heads of a group."""
    spec = AttentionSpec(64, 8, 128, torch.bfloat16)
    tiles = 2 * 132 // 8
    assert split_bytes(spec, 132) >= 64 * tiles * 128 * 128 * 4 + 64 * tiles * 128 * 4
    assert split_bytes(spec, 132) > 128 << 20, "the recommended size is too small for this one"


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, "flashinfer-python must be installed, got none"),
        ("0.6.7", "flashinfer-python must be 0.6.8 or later, got 0.6.7"),
        ("0.5.9", "flashinfer-python must be 0.6.8 or later, got 0.5.9"),
        ("0.6.8.post1", None),
        ("0.10.0rc1", None),
        ("1.0", None),
    ],
)
def test_unavailable_says_what_is_missing(monkeypatch, installed, reason):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(backend_module, "version", version)
    monkeypatch.setattr(backend_module.importlib.util, "find_spec", lambda name: installed)
    assert backend_module.unavailable.__wrapped__() == reason


def test_unavailable_without_a_gpu_or_on_an_old_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA device" in backend_module.unavailable.__wrapped__()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    assert backend_module.unavailable.__wrapped__() == "the GPU must be sm_80 or later, got T4"
