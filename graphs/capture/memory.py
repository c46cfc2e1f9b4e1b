"""What captured graphs cost in device memory: an estimate before, an account after."""

import dataclasses
from collections.abc import Sequence
from typing import Any

NODE_BYTES = 8 * 1024
"""Device memory that the driver keeps for a kernel of a graph: a guess on the large side."""

COMPILED_KERNELS, UNCOMPILED_KERNELS = 12, 30
"""Kernels that a Llama layer launches."""


def estimate(
    rows: Sequence[int],
    *,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_layers: int,
    dtype_bytes: int = 2,
    kernels_per_layer: int = COMPILED_KERNELS,
    logits_rows: int | None = None,
) -> int:
    """Bytes that capturing one graph per entry of `rows` may take: an estimate, made of shapes.

    Graphs of one pool share their activations, so the largest graph decides. A layer has the
    residual, its normed copy, an output and the three parts of the feed-forward at a time. Half as
    much again is lost to fragmentation. The logits come on top: once in the model's dtype and
    twice in float32 for sampling. The driver's share grows with the number of kernels in all
    graphs. Workspaces of libraries are not counted.

    Args:
        rows: tokens T of each graph.
        hidden_size, intermediate_size, vocab_size, num_layers: of the model.
        dtype_bytes: of an activation.
        kernels_per_layer: launches.
        logits_rows: rows whose logits are computed; default: all.

    Raises:
        ValueError: a number is out of range.
    """
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    sizes |= {"vocab_size": vocab_size, "num_layers": num_layers, "dtype_bytes": dtype_bytes}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if any(row < 1 for row in rows):
        raise ValueError(f"rows must be at least 1 each, got {min(rows)}")
    if not rows:
        return 0
    largest = max(rows)
    layer = largest * (3 * hidden_size + 3 * intermediate_size) * dtype_bytes
    logits = (logits_rows or largest) * vocab_size * (dtype_bytes + 8)
    return layer * 3 // 2 + logits + len(rows) * num_layers * kernels_per_layer * NODE_BYTES


def sizes_of(model: Any, *, compiled: bool) -> dict[str, int] | None:
    """What `estimate` asks of a Transformers model; None where a size is not one int."""
    config = model.config.get_text_config()
    names = {n: n for n in ("hidden_size", "intermediate_size", "vocab_size")}
    names["num_layers"] = "num_hidden_layers"
    sizes: dict[str, Any] = {name: getattr(config, of, None) for name, of in names.items()}
    if not all(type(size) is int for size in sizes.values()):
        return None
    kernels = COMPILED_KERNELS if compiled else UNCOMPILED_KERNELS
    return sizes | {"dtype_bytes": model.dtype.itemsize, "kernels_per_layer": kernels}


@dataclasses.dataclass
class GraphMemory:
    """Bytes of graphs, filled as they are captured.

    A graph's bytes are those by which the pool grew: the first, largest one pays for what later
    ones use again.
    """

    estimated: int | None = None  # before the first capture
    by_key: dict[object, int] = dataclasses.field(default_factory=dict)  # growth of the pool

    @property
    def total(self) -> int:
        """Of all graphs."""
        return sum(self.by_key.values())

    def add(self, key: object, num_bytes: int) -> None:
        """Book a graph; one that is captured again replaces its entry.

        Raises:
            ValueError: the bytes are negative.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes must not be negative, got {num_bytes}")
        self.by_key[key] = num_bytes

    def clear(self) -> None:
        """The graphs were released."""
        self.by_key.clear()

    def __str__(self) -> str:
        graphs = f"{len(self.by_key)} graph" + ("" if len(self.by_key) == 1 else "s")
        guess = "" if self.estimated is None else f" (estimated {human(self.estimated)})"
        return f"{graphs}, {human(self.total)}{guess}"

    def table(self) -> str:
        """A line for each graph, the largest first, and one for all."""
        lines = [
            f"{human(num_bytes):>10}  {key}"
            for key, num_bytes in sorted(self.by_key.items(), key=lambda item: -item[1])
        ]
        return "\n".join([*lines, f"{human(self.total):>10}  in all: {self}"])


def human(num_bytes: int) -> str:
    """Bytes as people read them: 512 B, 1.5 KiB, 0.6 GiB."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1000 or unit == "GiB":
            return f"{value:.1f} {unit}"
    raise AssertionError("the last unit takes every value")
