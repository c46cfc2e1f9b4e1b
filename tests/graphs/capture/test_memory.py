"""The account of graphs' bytes, and the estimate before them."""

import pytest

from graphs.capture.memory import NODE_BYTES, GraphMemory, estimate, human

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_layers": 32}


def test_estimate_by_hand():
    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 32, "num_layers": 2}
    layer = 4 * (3 * 8 + 3 * 16) * 2
    logits = 4 * 32 * 10
    rest = layer * 3 // 2 + 3 * 2 * 5 * NODE_BYTES
    assert estimate([1, 2, 4], **sizes, kernels_per_layer=5) == rest + logits
    one_row = estimate([1, 2, 4], **sizes, kernels_per_layer=5, logits_rows=1)
    assert rest < one_row < rest + logits
    assert estimate([], **sizes) == 0


@pytest.mark.parametrize("name", [*LLAMA_8B, "dtype_bytes"])
def test_estimate_refuses_numbers_out_of_range(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        estimate([1], **{**LLAMA_8B, name: 0})
    with pytest.raises(ValueError, match="rows must be at least 1 each, got 0"):
        estimate([1, 0], **LLAMA_8B)


def test_account():
    memory = GraphMemory(estimated=3 * 2**20)
    memory.add("small", 512)
    memory.add("large", 2 * 2**20)
    memory.add("small", 1024)
    assert memory.total == 2 * 2**20 + 1024
    assert str(memory) == "2 graphs, 2.0 MiB (estimated 3.0 MiB)"
    first, second, last = memory.table().splitlines()
    assert first.split() == ["2.0", "MiB", "large"]
    assert second.split() == ["1.0", "KiB", "small"]
    assert last.split()[:2] == ["2.0", "MiB"]
    with pytest.raises(ValueError, match="num_bytes must not be negative, got -1"):
        memory.add("small", -1)
    memory.clear()
    assert str(memory) == "0 graphs, 0 B (estimated 3.0 MiB)"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**40, "1024.0 GiB"),
    ],
)
def test_human(num_bytes, text):
    assert human(num_bytes) == text
