"""FlashInfer replaced by `Paged`: attention in float64 from nothing but what it was planned with.

It goes by FlashInfer's documented meaning of the arguments. In CUDA-graph mode it reads the buffers
that it was constructed with, when it runs, and takes requests without pages as the FA2 kernels do:
their rows are zero, their log-sum-exp is finite.
"""

import dataclasses
import math
import sys
import types

import pytest
import torch

from attn_ops import attention, attention_with_lse, get_backend
from attn_ops.backends.torch_backend import reference_attention
from tests.attn_ops.backends.paged import make_paged

REAL = get_backend("FLASHINFER")
BACKEND = dataclasses.replace(
    REAL,
    support=dataclasses.replace(REAL.support, devices=("cpu",), dtypes=(torch.float32,)),
    unavailable=lambda: None,
)
BLOCK = 16
EMPTY_LSE = math.log2(5) - 5e4
"""FlashInfer's without keys: its infinity is 5e4, and each of 4 warps adds one to the first sum."""


class Event:
    """Done unless recorded while `Event.done` is False; `waits` counts who waited for it."""

    done = True
    waits = 0

    def __init__(self) -> None:
        self.is_pending = False

    def record(self) -> None:
        self.is_pending = True

    def query(self) -> bool:
        return Event.done or not self.is_pending

    def synchronize(self) -> None:
        Event.waits += not self.query()
        self.is_pending = False


class Paged:
    """Both wrappers. `made` holds them, `planned` the kind and the batch size of every plan."""

    made: list["Paged"]
    planned: list[tuple[str, int]]

    def __init__(
        self,
        workspace: torch.Tensor,
        layout: str,
        *,
        backend: str,
        use_tensor_cores: bool | None = None,
        use_cuda_graph: bool = False,
        **buffers: torch.Tensor,
    ):
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        assert use_tensor_cores in (None, True)
        assert bool(buffers) == use_cuda_graph
        self.is_decode, self.graph, self.buffers = use_tensor_cores, use_cuda_graph, buffers
        self.kind = "decode" if use_tensor_cores else {"auto": "prefill", "fa2": "fa2"}[backend]
        self.workspaces = (workspace, None)
        self._plan_info = None
        Paged.made.append(self)

    def reset_workspace_buffer(self, workspace: torch.Tensor, ints: torch.Tensor) -> None:
        self.workspaces = (workspace, ints)

    def plan(self, **given) -> None:
        prefix = "" if self.is_decode else "paged_kv_"
        pages = tuple(given[prefix + n] for n in ("indptr", "indices", "last_page_len"))
        indptr, indices, last = pages
        self.given, size = given, len(last)
        self.rows = given.get("qo_indptr", torch.arange(size + 1))
        for host in (indptr, last, given["seq_lens"]):
            assert host.dtype == torch.int32
            assert host.device.type == "cpu"
        lens = (indptr.diff() - 1) * given["page_size"] + last
        assert lens.tolist() == given["seq_lens"].tolist(), "a request without pages has 0 tokens"
        assert self.graph or lens.all(), "only FA2 kernels are given requests without tokens"
        assert indptr[-1] == len(indices)
        assert last.min() >= 1
        assert last.max() <= given["page_size"]
        assert int(self.rows[-1]) > 0
        if not self.is_decode:
            assert given["max_token_per_sequence"] == self.rows.diff().max()
        if self.graph:
            for buffer, values in zip(self.buffers.values(), pages, strict=True):
                buffer[: len(values)].copy_(values)
            self.pages = tuple(self.buffers.values())
        else:
            self.pages = tuple(x.clone() for x in pages)
        self._plan_info = [size, self.graph]
        Paged.planned.append((self.kind, size))

    def run(self, q, kv_cache, *, q_scale, out=None, lse=None, return_lse=False) -> torch.Tensor:
        indptr, indices, last = self.pages
        given = self.given
        out = torch.full(q.shape, math.nan, dtype=q.dtype) if out is None else out
        assert q.shape == out.shape
        assert len(q) == self.rows[-1]
        assert out.stride()[1:] == (out.shape[2], 1)
        assert return_lse == (lse is not None)
        assert q.dtype == given["q_data_type"]
        assert kv_cache.dtype == given["kv_data_type"]
        for i in range(len(last)):
            begin, end = self.rows[i], self.rows[i + 1]
            page = indices[indptr[i] : indptr[i + 1]].long()
            num_keys = (len(page) - 1) * given["page_size"] + int(last[i])
            kv = kv_cache.double()[page].transpose(0, 1).flatten(1, 2)[:, :num_keys]
            group = q.shape[1] // kv.shape[2]
            k, v = kv.repeat_interleave(group, dim=2)
            scores = torch.einsum("qnh,cnh->nqc", q[begin:end].double(), k)
            scores *= given["sm_scale"] * q_scale
            if cap := given["logits_soft_cap"]:
                scores = cap * torch.tanh(scores / cap)
            key, query = torch.arange(len(k)), torch.arange(len(k) - (end - begin), len(k))[:, None]
            hidden = (key > query) & given.get("causal", False)
            if (left := given["window_left"]) >= 0:
                hidden |= key < query - left
            scores = scores.masked_fill(hidden, -math.inf)
            out[begin:end] = torch.einsum("nqc,cnh->qnh", scores.softmax(-1), v).to(out.dtype)
            if lse is not None:
                lse[begin:end] = (scores.logsumexp(-1).T / math.log(2)).float().clamp(min=EMPTY_LSE)
        return out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fakes where the backend looks for FlashInfer and CUDA."""
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Paged
    module.BatchPrefillWithPagedKVCacheWrapper = Paged
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    properties = types.SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(Paged, "made", [], raising=False)
    monkeypatch.setattr(Paged, "planned", [], raising=False)
    monkeypatch.setattr(Event, "done", True)
    monkeypatch.setattr(Event, "waits", 0)


def builder_of(*specs):
    return BACKEND.builder(BACKEND, specs, BLOCK, "cpu", workspace_bytes=16)


def make(query, seq, spec, pad=0, builder=None):
    """q, a poisoned cache of shuffled blocks, metadata."""
    q, cache, common = make_paged(query, seq, spec, BLOCK, num_padding_rows=pad)
    common = common.replace(num_actual_tokens=sum(query) + pad)
    return q, cache, (builder or builder_of(spec)).build(0, common)


def check(q, cache, meta, scale=0.3, common=None, **options):
    """Output and log-sum-exp are the oracle's for `common`, by default the metadata's own."""
    out, lse = attention_with_lse(q, cache, meta, scale, **options)
    want_lse = torch.empty(q.shape[:2], dtype=torch.float64)
    want = reference_attention(q, cache, common or meta.common, scale, **options, lse=want_lse)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(attention(q, cache, meta, scale, **options), out)
