"""Decodes and prefills brought into order."""

import dataclasses
import types

from attn_ops.metadata import reorder_batch_to_split_decodes_and_prefills
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import batches, check


@dataclasses.dataclass
class InputBatch:
    """What an engine's batch offers: requests in order, and a swap of two of them."""

    req_ids: list[str]
    swaps: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def swap_states(self, i: int, j: int) -> None:
        self.swaps.append((i, j))
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]


@check(batches())
def test_reorder_batch(batch):
    threshold = batch.tape.pick([1, 1, 2, 4])
    names = [f"request {i}" for i in range(batch.num_reqs)]
    tokens = dict(zip(names, batch.query_lens, strict=True))
    input_batch = InputBatch(list(names))
    scheduler_output = types.SimpleNamespace(num_scheduled_tokens=dict(tokens))
    modified = reorder_batch_to_split_decodes_and_prefills(
        input_batch, scheduler_output, decode_threshold=threshold
    )
    is_decode = [tokens[name] <= threshold for name in input_batch.req_ids]
    assert is_decode == sorted(is_decode, reverse=True), "decodes first"
    assert sorted(input_batch.req_ids) == sorted(names)
    num_decodes = sum(is_decode)
    behind = sum(query <= threshold for query in batch.query_lens[num_decodes:])
    assert len(input_batch.swaps) == behind, "as few swaps as there are decodes behind their place"
    assert input_batch.swaps == brute_force.decode_first_swaps(batch.query_lens, threshold)
    assert modified is (behind > 0)
    assert scheduler_output.num_scheduled_tokens == tokens


def test_reorder_batch_by_hand():
    input_batch = InputBatch(["p0", "d0", "p1", "d1", "d2"])
    scheduler_output = types.SimpleNamespace(
        num_scheduled_tokens={"p0": 7, "d0": 1, "p1": 4, "d1": 1, "d2": 1}
    )
    assert reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output) is True
    assert input_batch.req_ids == ["d2", "d0", "d1", "p1", "p0"]
    assert reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output) is False
