"""One model on several GPUs, or on several processes of a CPU: the same program on every rank.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py my_model

Transformers splits the weights over the ranks. Each rank makes the same calls, so nothing is sent
between them but rows of the layers.
"""

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from attn_ops.integrations.transformers import register
from graphs import DecodeSession

PROMPTS = [[5, 9, 3], [7] * 20, [1], [11, 12]]


def main(arguments: Sequence[str]) -> None:
    """Print the first rank's tokens."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")  # ranks agree on the CPU
    else:
        dist.init_process_group("gloo")
    register()
    model = AutoModelForCausalLM.from_pretrained(
        arguments[0], attn_implementation="attn_ops", tp_plan="auto"
    ).eval()
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True)
    session = DecodeSession(compiled, max_batch_size=4, max_tokens=64, cache_tokens=256)
    results = session.generate(PROMPTS, 16)
    if dist.get_rank() == 0:
        print(session.report().rank, [len(result.token_ids) for result in results])
        for result in results:
            print(*result.token_ids)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
