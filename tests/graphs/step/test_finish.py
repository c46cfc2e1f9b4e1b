"""What follows a decode step on the device: tokens kept, stops, the next step's inputs."""

import pytest
import torch

from attn_ops.integrations.transformers.rotary import SHIFT
from graphs.step.finish import reference_finish_step, reference_take_tokens
from graphs.step.triton.finish import launch_finish_step, launch_take_tokens

BLOCK = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(num_reqs, num_steps, generator, max_blocks=3, windows=False):
    """Random tensors of a decode batch; some rows are padding or have stopped."""

    def pick(high, *shape, dtype=torch.int64):
        return torch.randint(0, high, shape, generator=generator).to(dtype)

    seq_lens = pick(max_blocks * BLOCK + 1, num_reqs, dtype=torch.int32)
    own = {
        "window_slot_mapping": pick(9, num_reqs),
        "window_block_table": pick(50, num_reqs, max_blocks, dtype=torch.int32),
    }
    return {
        **(own if windows else {}),
        "input_ids": pick(9, 1, num_reqs),
        "position_ids": pick(9, 1, num_reqs) + pick(2, 1, num_reqs) * SHIFT,
        "slot_mapping": pick(9, num_reqs),
        "seq_lens": seq_lens,
        "block_table": pick(50, num_reqs, max_blocks, dtype=torch.int32),
        "stop_tokens": pick(12, num_reqs, 8) - 1,
        "remaining": pick(4, num_reqs, dtype=torch.int32),
        "active": pick(3, num_reqs) > 0,
        "step": pick(30, 1),
        "tokens": pick(9, num_steps, num_reqs),
    }


def by_hand(tokens, t):
    """Request by request."""
    t = {name: x.clone() for name, x in t.items()}
    t["tokens"][int(t["step"]) % len(t["tokens"])] = torch.tensor(tokens)
    t["step"] += 1
    for i, token in enumerate(tokens):
        if t["active"][i]:
            t["remaining"][i] -= 1
        if token in t["stop_tokens"][i].tolist() or t["remaining"][i] <= 0:
            t["active"][i] = False
        length = int(t["seq_lens"][i])
        kinds = [kind for kind in ("", "window_") if f"{kind}block_table" in t]
        for kind in kinds:
            t[f"{kind}slot_mapping"][i] = -1
        if t["active"][i] and 0 < length < t["block_table"].shape[1] * BLOCK:
            for kind in kinds:
                block = t[f"{kind}block_table"][i, length // BLOCK]
                t[f"{kind}slot_mapping"][i] = block * BLOCK + length % BLOCK
            shift = SHIFT if t["position_ids"][0, i] >= SHIFT else 0
            t["input_ids"][0, i], t["position_ids"][0, i] = token, shift + length
            t["seq_lens"][i] += 1
    return t


@pytest.mark.parametrize("finish", [reference_finish_step, launch_finish_step])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 7, 300])
def test_against_python(finish, num_reqs, windows):
    generator = torch.Generator().manual_seed(num_reqs)
    for num_steps in (1, 3):
        tensors = make(num_reqs, num_steps, generator, windows=windows)
        on_device = {name: x.clone().to(DEVICE) for name, x in tensors.items()}
        for _ in range(4):
            tokens = torch.randint(0, 12, (num_reqs,), generator=generator)
            tensors = by_hand(tokens.tolist(), tensors)
            finish(tokens.to(DEVICE), on_device, BLOCK)
            for name, want in tensors.items():
                assert torch.equal(on_device[name].cpu(), want), name


@pytest.mark.parametrize("take", [reference_take_tokens, launch_take_tokens])
@pytest.mark.parametrize("num_reqs", [1, 5, 300])
def test_inputs_that_the_step_before_has_drawn(take, num_reqs):
    """Rows with a source stand anywhere, of queries of any length; padding has none."""
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
    tensors = {name: field.to(DEVICE) for name, field in fields.items()}
    take(tensors, drawn.to(DEVICE))
    assert torch.equal(tensors["input_ids"].cpu(), want)
