"""A batch's metadata is no part of what is compiled."""

import copy
import io
import pickle

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from attn_ops import AttentionSpec, get_backend
from attn_ops.ops import attention


def test_a_batch_is_no_part_of_a_cache_key(make_batch):
    """Inductor pickles what a graph gets, without looking for circles."""
    backend, spec = get_backend("TORCH"), AttentionSpec(4, 2, 8, torch.float32)
    written = []
    for lengths in ([3], [5, 1]):
        common = make_batch([1] * len(lengths), lengths).common
        meta = backend.builder(backend, [spec], 4, "cpu").build(0, common)
        assert meta.once("a circle", lambda meta=meta: {"of": meta})["of"] is meta
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream)
        pickler.fast = True
        pickler.dump(meta)
        written.append(stream.getvalue())
    assert written[0] == written[1]
    with pytest.raises(TypeError, match="AttentionMetadata cannot be loaded: it belongs"):
        pickle.loads(written[0])
    assert copy.copy(meta).common is meta.common
    found = copy.deepcopy(meta)
    assert (found.backend, list(found.plans)) == (meta.backend, [spec])
    assert found.common.seq_lens.data_ptr() != meta.common.seq_lens.data_ptr()


@pytest.mark.slow
def test_a_batch_of_other_lengths_is_found_in_inductor_s_cache(make_batch):
    backend, spec = get_backend("TORCH"), AttentionSpec(4, 2, 8, torch.float32)

    def layer(q, cache, meta):
        return attention(q * 2, cache, meta, 0.3).sin()

    seen = []
    with fresh_cache():
        for lengths in ([3], [4]):
            batch = make_batch([1], lengths)
            meta = backend.builder(backend, [spec], 4, "cpu").build(0, batch.common)
            torch._dynamo.reset()
            counters.clear()
            torch.compile(layer)(torch.ones(1, 4, 8), torch.zeros(9, 2, 4, 2, 8), meta)
            seen.append((counters["inductor"]["fxgraph_cache_miss"],
                         counters["inductor"]["fxgraph_cache_hit"]))  # fmt: skip
    assert seen == [(1, 0), (0, 1)]
