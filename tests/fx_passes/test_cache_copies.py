"""No copy of a KV cache in a compiled model: not in its ATen graphs, not in Inductor's code.

P blocks, B block size, K kv heads, H head size.
"""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from fx_passes import attn_ops, recording
from tests.kit.compile import check_no_copies, graphs_are_compiled_anew
from tests.kit.marks import long, slow


def copies_in_graph(text: str, shape: tuple[int, ...]) -> list[str]:
    """Lines that make a tensor of the cache's size, but for the scatter and the returned input."""
    dims = ", ".join(map(str, shape))
    made = re.compile(rf'^\s*(\w+): "\w+\[{re.escape(dims)}\].* = (torch\.ops\.[\w.]+)')
    found = [(m.group(2), line) for line in text.splitlines() if (m := made.match(line))]
    assert found, "the cache is not in the graph at all"
    return [
        line
        for op, line in found
        if any(w in op for w in ("clone", "empty", "full", "copy.default", "_to_copy"))
    ]


@pytest.mark.parametrize(
    ("with_slots", "nested"),
    [
        (True, True),
        *slow((False, False)),
        *long((True, False), (False, True)),
    ],
)
def test_no_copy_of_a_cache(make_model, make_prompts, nested, with_slots):
    model = make_model("llama", num_layers=2)
    prompts = make_prompts(model, [3, 9, 1])
    if not with_slots:
        del prompts.keywords["slot_mapping"]
    wanted = model(**prompts.keywords).logits
    shape, addresses = tuple(prompts.caches[0].shape), [t.data_ptr() for t in prompts.caches]
    written = [t.clone() for t in prompts.caches]
    for tensor in prompts.caches:
        tensor.fill_(float("nan"))
    with recording() as recorder, graphs_are_compiled_anew():
        run = torch.compile(
            model, backend=attn_ops, options={"outline_layers": nested}, fullgraph=True
        )
        output, code = run_and_get_code(lambda: run(**prompts.keywords))
    torch.testing.assert_close(output.logits, wanted, atol=1e-5, rtol=1e-5)
    assert recorder.matches().get("outline_layers", 0) == (2 if nested else 0)
    assert [t.data_ptr() for t in prompts.caches] == addresses
    for tensor, want in zip(prompts.caches, written, strict=True):
        written_slots = ~want[1:].isnan()
        torch.testing.assert_close(
            tensor[1:][written_slots], want[1:][written_slots], atol=1e-5, rtol=1e-5
        )

    texts = [text for _, text in recorder.final_graphs if "index_put" in text]
    assert not any(copies_in_graph(text, shape) for text in texts)
    writes = [text.count("torch.ops.aten.index_put") for text in texts]
    assert writes == ([1] if nested else [2]), (
        "a layer's keys and values, and a layer is compiled once"
    )
    check_no_copies(code, shape)
