"""What every backend supports, as a table.

`python -m attn_ops.support_table docs/backends.md` rewrites the table of that page.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import torch

from attn_ops.backends import Backend, backend_names, get_backend
from attn_ops.backends.registry import built_in_names, load_backend
from attn_ops.metadata.features import FEATURES

BEGIN, END = "<!-- support-table:begin -->", "<!-- support-table:end -->"

COLUMNS = (
    "backend",
    "devices",
    "dtypes",
    "latent (MLA)",
    "head sizes",
    "block sizes",
    "KV cache",
    *(feature.title for feature in FEATURES),
    "non-causal",
    "log-sum-exp",
    "no cache",
    "quantized output",
    "CUDA graphs",
)

_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@dataclasses.dataclass(frozen=True)
class SupportRow:
    """One backend."""

    cells: tuple[str, ...]  # as in COLUMNS
    unavailable: str | None  # why it cannot run on this machine, or None


def support_rows() -> list[SupportRow]:
    """A row a backend, in the order of preference, from the declarations."""
    return [row_of(name) for name in backend_names()]


def row_of(name: str) -> SupportRow:
    """The row of one backend.

    Raises:
        ValueError: there is none of that name.
    """
    backend, failed = load_backend(name)
    if backend is None:
        return SupportRow((name, *("?" for _ in COLUMNS[1:])), failed)
    return SupportRow(_cells(backend), backend.missing())


def markdown() -> str:
    """The table of our own backends, markers included. It does not depend on the machine."""
    ours = [_cells(get_backend(name)) for name in built_in_names()]
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *ours]
    return "\n".join([BEGIN, *(f"| {' | '.join(row)} |" for row in rows), END])


def update(text: str) -> str:
    """`text` with what stands between the markers made new.

    Raises:
        ValueError: the markers are missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"text must hold the markers {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    return before + markdown() + rest.split(END, 1)[1]


def _cells(backend: Backend) -> tuple[str, ...]:
    support = backend.support
    able_to = (
        *(getattr(support, feature.declared) for feature in FEATURES),
        support.non_causal,
        support.lse,
        backend.varlen is not None,
    )
    return (
        backend.name,
        ", ".join(support.devices),
        ", ".join(_SHORT.get(dtype, str(dtype).removeprefix("torch.")) for dtype in support.dtypes),
        "yes" if support.latent else "no",
        ", ".join(f"{lkv} + {r}" for lkv, r in support.latent_sizes) or sizes(support.head_sizes),
        sizes(support.block_sizes),
        ", ".join(support.kv_cache_dtypes),
        *("yes" if able else "no" for able in able_to),
        ", ".join(support.output_quant) or "by a kernel behind",
        support.cudagraph.name.lower(),
    )


def sizes(values: tuple[int, ...]) -> str:
    """'any', or a list, whose first values are a range with its step if they are many."""
    steps = [b - a for a, b in itertools.pairwise(values)]
    run = sum(1 for _ in itertools.takewhile(lambda step: step == steps[0], steps))
    if run < 8:
        return ", ".join(map(str, values)) or "any"
    return ", ".join([f"{values[0]}-{values[run]} by {steps[0]}", *map(str, values[run + 1 :])])


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(update(page.read_text()))
