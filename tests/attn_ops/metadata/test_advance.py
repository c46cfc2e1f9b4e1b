"""Positions, slots and the next decode step, computed on the device, against the loop over tokens.

The kernels run on a GPU, and interpreted on a machine without one.
"""

import dataclasses

import pytest
import torch

from attn_ops.metadata import CommonAttentionMetadata, advance_step, positions_and_slots
from attn_ops.metadata.triton.step import launch_advance_step, launch_positions_and_slots
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import Ragged, Tape, batches, check, int32, int64

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def narrowed(batch: Ragged) -> Ragged:
    """Now and then a table too narrow for the sequences."""
    width = max(1, batch.width - batch.tape.pick([0, 0, 1, 4]))
    return dataclasses.replace(batch, table=[blocks[:width] for blocks in batch.table])


def in_wider_table(table: torch.Tensor) -> torch.Tensor:
    """The same table as the left part of a wider one, as a view of an engine's buffers is."""
    wide = torch.full((table.shape[0], table.shape[1] + 2), 99_999, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    return wide[:, : table.shape[1]]


@check(batches())
def test_positions_and_slots(batch):
    """Into new tensors, and into given ones: nothing around them is written."""
    batch = narrowed(batch)
    given = int32(batch.starts), int32(batch.seq_lens), in_wider_table(batch.table_tensor())
    before = [tensor.tolist() for tensor in given]
    positions, slots = positions_and_slots(*given, batch.block_size, batch.num_rows)
    assert (positions.tolist(), slots.tolist()) == batch.positions_and_slots
    assert positions.dtype == slots.dtype == torch.int64
    around = torch.full((2, batch.num_rows + 2), 77)
    rows = around[:, 1 : batch.num_rows + 1]
    got = positions_and_slots(
        *given, batch.block_size, batch.num_rows, positions=rows[0], slot_mapping=rows[1]
    )
    assert around.tolist() == [[77, *wanted, 77] for wanted in batch.positions_and_slots]
    assert [tensor.data_ptr() for tensor in got] == [row.data_ptr() for row in rows]
    assert [tensor.tolist() for tensor in given] == before


def run_positions_kernel(batch: Ragged) -> None:
    positions, slots = torch.full((2, batch.num_rows), 77, device=DEVICE)
    launch_positions_and_slots(
        int32(batch.starts).to(DEVICE),
        int32(batch.seq_lens).to(DEVICE),
        in_wider_table(batch.table_tensor()).to(DEVICE),
        batch.block_size,
        positions,
        slots,
    )
    assert (positions.tolist(), slots.tolist()) == batch.positions_and_slots


@check(batches(), quick=20, full=50)
def test_positions_and_slots_kernel(batch):
    run_positions_kernel(narrowed(batch))


def many_requests(num_reqs: int) -> Ragged:
    """More requests and rows than one program of a kernel takes."""
    query_lens = [(5 * i) % 4 for i in range(num_reqs)]
    seq_lens = [query + (7 * i) % 11 for i, query in enumerate(query_lens)]
    table = [[1 + 5 * i + m for m in range(5)] for i in range(num_reqs)]
    num_rows = sum(query_lens) + 300
    return Ragged(query_lens, seq_lens, table, 3, num_rows, [], 0, Tape(b""))


@pytest.mark.parametrize("num_reqs", [255, 256, 257, 600])
def test_positions_and_slots_kernel_of_many_requests(num_reqs):
    run_positions_kernel(many_requests(num_reqs))


@pytest.mark.parametrize("launch", [positions_and_slots, launch_positions_and_slots])
def test_padding_requests_of_a_captured_step_get_no_slot(launch):
    """They have one row and nothing in the cache: no slot of a block may be theirs."""
    starts, seq_lens = int32([0, 1, 2, 3]).to(DEVICE), int32([0, 4, 0]).to(DEVICE)
    table = int32([[5, 6], [7, 8], [9, 10]]).to(DEVICE)
    positions, slots = torch.full((2, 4), 77, device=DEVICE)
    if launch is positions_and_slots:
        launch(starts, seq_lens, table, 3, 4, positions=positions, slot_mapping=slots)
    else:
        launch(starts, seq_lens, table, 3, positions, slots)
    assert slots.tolist() == [-1, 24, -1, -1]
    assert positions[1].item() == 3


@dataclasses.dataclass
class Decode:
    """A batch before a decode step: lists of the tensors, and what the step must leave in them."""

    state: dict[str, list[int]]
    sampled: list[int]
    table: list[list[int]]
    block_size: int
    active: list[bool] | None
    indices_room: int

    @classmethod
    def read(cls, batch: Ragged) -> "Decode":
        batch = narrowed(batch)
        tape, capacity = batch.tape, batch.width * batch.block_size
        lengths = [min(n, capacity) for n in batch.seq_lens]
        lengths = [tape.pick([n, n, n, 0, capacity]) for n in lengths]
        count = range(batch.num_reqs)
        state = {
            "input_tokens": [1000 + i for i in count],
            "positions": [max(n - 1, 0) for n in lengths],
            "seq_lens": lengths,
            "slot_mapping": [500 + i for i in count],
        }
        active = [tape.below(3) > 0 for _ in count] if tape.below(2) else None
        sampled = [2000 + i for i in count]
        room = batch.num_reqs * batch.width + tape.below(3)
        return cls(state, sampled, batch.table, batch.block_size, active, room)

    def tensors(self) -> dict[str, torch.Tensor]:
        given = {
            name: (int32 if name == "seq_lens" else int64)(values).to(DEVICE)
            for name, values in self.state.items()
        }
        width = len(self.table[0]) if self.table else 1
        given["sampled_token_ids"] = int64(self.sampled).to(DEVICE)
        table = in_wider_table(int32(self.table).view(-1, width))
        given["block_table"] = table.to(DEVICE)
        return given

    def active_tensor(self) -> torch.Tensor | None:
        return None if self.active is None else torch.tensor(self.active).bool().to(DEVICE)

    def page_arrays(self) -> dict[str, torch.Tensor]:
        sizes = {
            "paged_kv_indptr": len(self.table) + 1,
            "paged_kv_indices": self.indices_room,
            "paged_kv_last_page_len": len(self.table),
        }
        return {
            name: torch.full((size,), 77, dtype=torch.int32, device=DEVICE)
            for name, size in sizes.items()
        }

    def expected(self) -> dict[str, list[int]]:
        return brute_force.advance(
            self.state, self.sampled, self.table, self.block_size, self.active
        )

    def expected_pages(self) -> dict[str, list[int]]:
        indptr, indices, last = brute_force.pages(
            self.expected()["seq_lens"], self.table, self.block_size
        )
        untouched = [77] * (self.indices_room - len(indices))
        return {
            "paged_kv_indptr": indptr,
            "paged_kv_indices": indices + untouched,
            "paged_kv_last_page_len": last,
        }


def lists(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@check(batches())
def test_advance_step(batch):
    case = Decode.read(batch)
    given, pages = case.tensors(), case.page_arrays()
    own = {name: tensor.cpu() for name, tensor in given.items()}
    paged = {name: tensor.cpu() for name, tensor in pages.items()}
    active = None if case.active is None else case.active_tensor().cpu()
    with_pages = paged if batch.tape.below(4) else {}
    result = advance_step(**own, block_size=case.block_size, active=active, **with_pages)
    assert result is None
    expected = {"sampled_token_ids": case.sampled, "block_table": case.table, **case.expected()}
    assert lists(own) == {name: expected[name] for name in own}
    untouched = lists(case.page_arrays())
    assert lists(paged) == (case.expected_pages() if with_pages else untouched)
    if active is not None:
        assert active.tolist() == case.active


def run_advance_kernel(case: Decode, pages_asked: slice = slice(3)) -> None:
    """`pages_asked`: which of FlashInfer's three arrays are given; the offsets always are."""
    given, pages = case.tensors(), case.page_arrays()
    names = list(pages)[pages_asked]
    launch_advance_step(
        given["sampled_token_ids"],
        given["input_tokens"],
        given["positions"],
        given["seq_lens"],
        given["slot_mapping"],
        given["block_table"],
        case.block_size,
        case.active_tensor(),
        *(tensor if name in names else None for name, tensor in pages.items()),
    )
    expected = {"sampled_token_ids": case.sampled, "block_table": case.table, **case.expected()}
    assert lists(given) == {name: expected[name] for name in given}
    untouched, written = lists(case.page_arrays()), case.expected_pages()
    for name, tensor in pages.items():
        assert tensor.tolist() == (written if name in names else untouched)[name], name


@check(batches(), quick=20, full=50)
def test_advance_step_kernel(batch):
    run_advance_kernel(
        Decode.read(batch), batch.tape.pick([slice(3), slice(0), slice(1), slice(2)])
    )


@pytest.mark.parametrize("num_reqs", [256, 257, pytest.param(600, marks=pytest.mark.slow)])
def test_advance_step_kernel_of_many_requests(num_reqs):
    batch = many_requests(num_reqs)
    batch.tape = Tape(bytes(range(256)) * 12)
    run_advance_kernel(Decode.read(batch))


def test_a_table_without_columns_has_no_slots():
    """No request owns a block: nothing advances and no row is written to the cache."""
    table, seq_lens = torch.empty(2, 0, dtype=torch.int32), int32([3, 0])
    positions, slots = positions_and_slots(int32([0, 2, 2]), seq_lens, table, 4, 3)
    assert positions.tolist() == [1, 2, 0]
    assert slots.tolist() == [-1, -1, -1]
    state = {
        "input_tokens": int64([1, 2]),
        "positions": int64([5, 6]),
        "slot_mapping": int64([7, 8]),
    }
    advance_step(int64([9, 9]), **state, seq_lens=seq_lens, block_table=table, block_size=4)
    assert lists(state) == {"input_tokens": [1, 2], "positions": [5, 6], "slot_mapping": [-1, -1]}
    assert seq_lens.tolist() == [3, 0]


@pytest.mark.parametrize("name", ["paged_kv_indices", "paged_kv_last_page_len"])
def test_advance_step_needs_the_page_offsets(name):
    given = step_arguments()
    before = lists(given)
    others = [n for n in given if n.startswith("paged_kv") and n != name]
    with pytest.raises(ValueError, match="paged_kv_indptr"):
        advance_step(**{**given, **dict.fromkeys(others)}, block_size=4)
    assert lists(given) == before


def step_arguments() -> dict:
    case = Decode(
        {"input_tokens": [1, 2], "positions": [3, 0], "seq_lens": [4, 1], "slot_mapping": [5, 6]},
        [7, 8], [[1, 2], [3, 4]], 4, [True, True], 4,
    )  # fmt: skip
    own = {name: tensor.cpu() for name, tensor in case.tensors().items()}
    pages = {name: tensor.cpu() for name, tensor in case.page_arrays().items()}
    return {**own, "active": torch.tensor(case.active), **pages}


@pytest.mark.parametrize("name", step_arguments())
def test_advance_step_refuses_and_writes_nothing(name):
    """Another dtype, one dimension more and more requests, each argument in turn."""
    # The others are measured against seq_lens, so that one of them may be named for its shape.
    offender = f"^{name} must" if name != "seq_lens" else "^(seq_lens|sampled_token_ids) must"
    changes = [(torch.Tensor.double, offender), (lambda tensor: tensor[None, None], offender)]
    if name not in ("block_table", "paged_kv_indices"):
        changes.append((lambda tensor: torch.cat([tensor, tensor]), "must have shape"))
    for change, message in changes:
        given = step_arguments()
        before = lists(given)
        with pytest.raises(ValueError, match=message):
            advance_step(**{**given, name: change(given[name])}, block_size=4)
        assert lists(given) == before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query_start_loc", int32([0])),
        ("query_start_loc", int64([0, 1, 2])),
        ("seq_lens", int64([1, 1])),
        ("block_table", int64([[1], [2]])),
        ("block_table", int32([[1]])),
        ("block_size", 0),
        ("positions", int64([0])),
        ("positions", int32([0, 0])),
        ("slot_mapping", int64([0, 0, 0])),
    ],
)
def test_positions_and_slots_refuses(name, change):
    given = {
        "query_start_loc": int32([0, 1, 2]), "seq_lens": int32([1, 1]),
        "block_table": int32([[1], [2]]), "block_size": 4, "num_tokens": 2,
        "positions": int64([77, 77]), "slot_mapping": int64([77, 77]),
    }  # fmt: skip
    with pytest.raises(ValueError, match=name):
        positions_and_slots(**{**given, name: change})
    assert given["positions"].tolist() == given["slot_mapping"].tolist() == [77, 77]


from_lengths = CommonAttentionMetadata.from_lengths


def test_what_is_written_stands_apart():
    common = from_lengths([1, 1], [5, 2], [[1, 2], [3, 4]], 4)
    both = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="must not share memory"):
        positions_and_slots(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, 4, 2,
            positions=both, slot_mapping=both,
        )  # fmt: skip
    with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
        positions_and_slots(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, 4, -1
        )
    indptr = int32([0, 0, 0])
    step = [int64([1, 2]), int64([0, 0]), int64([0, 0]), common.seq_lens, int64([0, 0])]
    with pytest.raises(ValueError, match=r"paged_kv_last_page_len.* must not share memory"):
        advance_step(
            *step, common.block_table_tensor, 4,
            paged_kv_indptr=indptr, paged_kv_last_page_len=indptr[1:],
        )  # fmt: skip
    assert common.seq_lens.tolist() == [5, 2]
