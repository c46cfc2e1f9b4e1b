"""`attn-ops run --nproc N`: the same command on every rank of a model that Transformers splits."""

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any


def start(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `attn-ops` with these arguments, but --nproc, on ranks of this host; the exit code.

    torchrun's own account of a rank that has failed is left out: the rank has said what it is.
    """
    rest, left = [], iter(arguments)
    for argument in left:
        if argument == "--nproc":
            next(left)
        elif not argument.startswith("--nproc="):
            rest.append(argument)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "-m", "graphs.app.cli", *rest]
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL"}
    return subprocess.run(command, env={**quiet, **os.environ}, check=False).returncode


def num_ranks() -> int:
    """Of this program; 1: it runs alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads() -> bool:
    """Whether this rank speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def device_of_rank(asked: str | None) -> str:
    """cpu, or the GPU of this rank's number on its host."""
    import torch

    if asked == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ['LOCAL_RANK']}"


def split(load: Callable[..., Any], device: str, dtype: str | None) -> Any:
    """The model that `load(device=, dtype=)` makes, in parts: the first rank saves it for all.

    Raises:
        ValueError: Transformers has no plan to split it.
    """
    import torch
    import torch.distributed as dist

    from graphs.pretrained import model_of

    if device != "cpu":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    with tempfile.TemporaryDirectory() as own:
        named = [own]
        dist.broadcast_object_list(named, device=torch.device("cpu"))
        if leads():
            load(device="cpu", dtype=dtype).save_pretrained(named[0])
        dist.barrier()
        where, kind = torch.device(device), dtype or "auto"
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of tp_plan
            model = model_of(named[0], where, kind, tp_plan="auto", local_files_only=True)
        dist.barrier()  # the folder goes with the first rank
    if not getattr(model, "_tp_size", None):
        raise ValueError(f"model must have a plan by which ranks split it, got {type(model)}")
    return model
