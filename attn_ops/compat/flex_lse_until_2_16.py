"""Where compiled FlexAttention cannot return the log-sum-exp, so that it runs unfused.

On a CPU, in torch 2.11 to 2.15: Inductor says that `return_lse` is not supported yet. It can go
when `torch.compile(flex_attention)` with `AuxRequest(lse=True)` compiles on a CPU.
"""

import torch


def compiles_with_lse(device: torch.device) -> bool:
    return device.type != "cpu"
