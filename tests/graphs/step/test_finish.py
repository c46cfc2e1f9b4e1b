"""What follows a decode step on the device: tokens kept, stops, the next step's inputs."""

import pytest
import torch

from attn_ops.integrations.transformers.rotary import SHIFT
from graphs.step.finish import reference_finish_step
from graphs.step.triton.finish import launch_finish_step

BLOCK = 4


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(num_reqs)
    for num_steps in (1, 3):
        tensors = make(num_reqs, num_steps, generator, windows=windows)
        on_device = {name: x.clone().to(device) for name, x in tensors.items()}
        for _ in range(4):
            tokens = torch.randint(0, 12, (num_reqs,), generator=generator)
            tensors = by_hand(tokens.tolist(), tensors)
            finish(tokens.to(device), on_device, BLOCK)
            for name, want in tensors.items():
                assert torch.equal(on_device[name].cpu(), want), name
