"""Random sessions on ranks: every request gets the tokens that one rank gives it alone.

python -m torch.distributed.run --nproc-per-node 2 -m tests.fuzz.ranks 500

Every rank runs the same calls; a rank that would not is an error on all.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.fuzz.sessions import results_alone, run_session
from tests.kit.models import build_model


def main() -> None:
    torch.set_num_threads(1)
    whole, number = build_model(), int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        dist.init_process_group("gloo")  # from now on Transformers saves on one rank alone
        split = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="attn_ops", tp_plan="auto", dtype=torch.float32
        )
    split.eval().generation_config = whole.generation_config
    alone = results_alone(whole)
    for seed in range(number):
        run_session(split, alone, seed)
        if seed % 50 == 49 and dist.get_rank() == 0:
            print(f"{seed + 1} of {number}", flush=True)
    print(f"rank {dist.get_rank()}: {number} right", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
