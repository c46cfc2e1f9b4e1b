"""A step's tensors."""

import pytest
import torch

from graphs.step.tensors import StepTensors


def test_captured_padding_is_valid_and_has_no_tokens():
    step = StepTensors.allocate(4, 4, 2, torch.device("cpu"), query_len=1)
    step.upload()
    common = step.common(1, 8)
    common.validate(block_size=4)
    assert common.num_computed_tokens.tolist() == [0] * 4
    assert common.num_computed_tokens_cpu.tolist() == [0] * 4
    common.slot_mapping[2] = 5
    with pytest.raises(ValueError, match=r"slot_mapping must be -1 for requests .*\[2\]=5"):
        common.validate(block_size=4)
