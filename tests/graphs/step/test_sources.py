"""Inputs that the step before has drawn."""

import pytest
import torch

from graphs.step.finish import reference_take_tokens
from graphs.step.triton.finish import launch_take_tokens


@pytest.mark.parametrize("take", [reference_take_tokens, launch_take_tokens])
@pytest.mark.parametrize("num_reqs", [1, 5, 300])
def test_against_python(take, num_reqs):
    """Rows with a source stand anywhere, of queries of any length; padding has none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(num_reqs)
    lengths = torch.randint(0, 4, (num_reqs,), generator=generator)
    sources = torch.randint(-1, 7, (num_reqs,), generator=generator).int()
    sources[lengths != 1] = -1
    starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    ids = torch.randint(100, 200, (1, int(starts[-1]) + 2), generator=generator)
    drawn = torch.randint(0, 100, (7,), generator=generator)
    want = ids.clone()
    for request, source in enumerate(sources.tolist()):
        if source >= 0:
            want[0, int(starts[request])] = drawn[source]
    fields = {"input_ids": ids, "sources": sources, "query_start_loc": starts}
    tensors = {name: field.to(device) for name, field in fields.items()}
    take(tensors, drawn.to(device))
    assert torch.equal(tensors["input_ids"].cpu(), want)
