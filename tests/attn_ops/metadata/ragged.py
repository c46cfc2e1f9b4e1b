"""Ragged batches for hypothesis, drawn as one byte string, which is what makes 2000 of them cheap.

Byte 0 always picks the simplest choice, so that hypothesis shrinks towards few and short requests.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops.metadata import CommonAttentionMetadata
from tests.attn_ops.metadata import brute_force

PRIME = 331  # more than the blocks of any batch here: (a * i) % PRIME shuffles without repeating
NUM_BLOCKS = PRIME + 1
INT64 = {"slot_mapping", "positions", "logits_indices", "logits_indices_padded"}
INT64 |= {"logits_indices_cpu"}


class Tape:
    """Choices read off a byte string; past its end every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def below(self, n: int) -> int:
        """A number in [0, max(n, 1))."""
        byte = self.data[self.at] if self.at < len(self.data) else 0
        self.at += 1
        return byte % max(n, 1)

    def pick(self, options: Sequence) -> Any:
        return options[self.below(len(options))]


@dataclasses.dataclass
class Ragged:
    """A batch as plain numbers, and the tape for a test's own choices."""

    query_lens: list[int]
    seq_lens: list[int]
    table: list[list[int]]
    block_size: int
    num_rows: int  # padding rows included
    logits_rows: list[int]  # rows whose logits are wanted, ascending
    num_garbage: int  # entries behind them in logits_indices_padded
    tape: Tape = dataclasses.field(repr=False)

    @property
    def starts(self) -> list[int]:
        return brute_force.starts(self.query_lens)

    @property
    def num_reqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def computed(self) -> list[int]:
        return [s - q for q, s in zip(self.query_lens, self.seq_lens, strict=True)]

    @property
    def width(self) -> int:
        return len(self.table[0]) if self.table else 1

    @property
    def garbage(self) -> list[int]:
        """Padding of a captured step's logits indices: rows that must not count."""
        return [0, 10_000, -1][: self.num_garbage]

    @property
    def positions_and_slots(self) -> tuple[list[int], list[int]]:
        return brute_force.positions_and_slots(
            self.query_lens, self.seq_lens, self.table, self.block_size, self.num_rows
        )

    def table_tensor(self) -> torch.Tensor:
        return int32(self.table).view(self.num_reqs, self.width)

    def common(self, **changes: Any) -> CommonAttentionMetadata:
        """Put together field by field, so that no test leans on `from_lengths`."""
        positions, slots = self.positions_and_slots
        starts = int32(self.starts)
        seq_lens = int32(self.seq_lens)
        fields = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": seq_lens,
            "seq_lens_cpu": seq_lens.clone(),
            "num_computed_tokens_cpu": int32(self.computed),
            "num_reqs": self.num_reqs,
            "num_actual_tokens": self.num_tokens,
            "max_query_len": max([0, *self.query_lens]),
            "max_seq_len": max([0, *self.seq_lens]),
            "block_table_tensor": self.table_tensor(),
            "slot_mapping": int64(slots),
            "positions": int64(positions),
            "block_size": self.block_size,
        }
        return CommonAttentionMetadata(**{**fields, **changes})

    def logits_fields(self, on_host: bool = True) -> dict[str, Any]:
        fields = {
            "logits_indices_padded": int64(self.logits_rows + self.garbage),
            "num_logits_indices": len(self.logits_rows),
        }
        if on_host:
            fields["logits_indices_cpu"] = int64(self.logits_rows)
        return fields


def int32(values: Sequence) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(values: Sequence) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _query_lens(tape: Tape, num_reqs: int) -> list[int]:
    longest = tape.pick([12, 12, 8, 4, 2, 1])
    lens = [tape.below(longest + 1) for _ in range(num_reqs)]
    order = tape.pick(
        ["any", "decodes first", "any", "any", "decodes first", "uniform", "uniform, then empty"]
    )
    if order == "decodes first":
        lens.sort(key=lambda query: query > 1)
    elif order == "uniform":
        lens = [max(lens, default=0)] * num_reqs
    elif order == "uniform, then empty":
        full = 1 + tape.below(num_reqs)
        lens = [max(lens, default=0) if i < full else 0 for i in range(num_reqs)]
    return lens


def _logits_rows(tape: Tape, query_lens: Sequence[int]) -> list[int]:
    """The last 0 to 3 rows of every request."""
    most = tape.pick([1, 3, 3])
    rows, end = [], 0
    for query in query_lens:
        end += query
        rows += range(end - min(query, tape.below(most + 1)), end)
    return rows


def read_batch(data: bytes, max_reqs: int = 6) -> Ragged:
    tape = Tape(data)
    num_reqs = tape.pick([2, 3, 1, 4, 5, 6, 3, 2, 0])
    num_reqs = min(num_reqs, max_reqs)
    block_size = 1 + tape.below(8)
    query_lens = _query_lens(tape, num_reqs)
    most_computed = tape.pick([30, 30, 8, 0])
    seq_lens = [query + tape.below(most_computed + 1) for query in query_lens]
    if tape.below(3) == 2:  # a padding request: nothing in the cache either
        query_lens[-1:] = seq_lens[-1:] = [0][:num_reqs]
    width = max([1, *(-(-n // block_size) for n in seq_lens)]) + tape.below(3)
    step, offset = 1 + tape.below(PRIME - 1), tape.below(PRIME)
    table = [
        [1 + (offset + step * (r * width + m)) % PRIME for m in range(width)]
        for r in range(num_reqs)
    ]
    num_rows = sum(query_lens) + tape.pick([0, 1, 4])
    rows = _logits_rows(tape, query_lens)
    return Ragged(query_lens, seq_lens, table, block_size, num_rows, rows, tape.below(4), tape=tape)


def batches(max_reqs: int = 6) -> st.SearchStrategy[Ragged]:
    return st.binary(min_size=56, max_size=56).map(lambda data: read_batch(data, max_reqs))


def check(strategy: st.SearchStrategy, quick: int = 300, full: int = 2000) -> Callable:
    """`given` with `quick` examples, and with `full` ones in a test marked slow."""

    def decorate(test: Callable) -> Callable:
        def run(num_examples: int) -> None:
            settings(max_examples=num_examples, deadline=None)(given(strategy)(test))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        numbers = [quick, pytest.param(full, marks=pytest.mark.slow)]
        return pytest.mark.parametrize("num_examples", numbers)(run)

    return decorate


def assert_fields(common: CommonAttentionMetadata, **expected: Any) -> None:
    """Lists stand for tensors, int64 where the fields are int64 and int32 elsewhere."""
    for name, value in expected.items():
        got = getattr(common, name)
        if isinstance(got, torch.Tensor) and isinstance(value, list):
            assert got.tolist() == value, f"{name}: got {got.tolist()}, expected {value}"
            wanted = torch.int64 if name in INT64 else torch.int32
            assert got.dtype in (wanted, torch.bool), name
        else:
            assert got == value, f"{name}: got {got}, expected {value}"


def snapshot(common: CommonAttentionMetadata) -> dict[str, Any]:
    """Every field as plain values, to see later that a function left its argument alone."""
    values = {field.name: getattr(common, field.name) for field in dataclasses.fields(common)}
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def assert_is_view(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    """`tensor` starts where `buffer` starts, so that a captured graph reads what is written."""
    same = tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert same, "not a view on the caller's buffer"
    assert tensor.storage_offset() == buffer.storage_offset()
