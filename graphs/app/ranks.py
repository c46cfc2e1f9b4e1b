"""`attn-ops run --nproc N`: the same command on every rank of a model that Transformers splits."""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

RANKS = "ATTN_OPS_RANKS"
"""In the environment of the processes that `start` starts."""


def start(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `attn-ops` with these arguments, but --nproc, on ranks of this host; the exit code."""
    rest, left = [], iter(arguments)
    for argument in left:
        if argument == "--nproc":
            next(left)
        elif not argument.startswith("--nproc="):
            rest.append(argument)
    os.environ[RANKS] = str(num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable()  # torchrun's account of a rank that has failed, which said itself what it is
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    command = ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "graphs.app.cli", *rest]
    try:
        torchrun(command)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    return 0


def num_ranks() -> int:
    """That `start` has started; 1: this process runs alone."""
    return int(os.environ.get(RANKS, "1"))


def leads() -> bool:
    """Whether this rank speaks for all."""
    return num_ranks() == 1 or os.environ["RANK"] == "0"


def device_of_rank(asked: str | None) -> str:
    """cpu, or the GPU of this rank's number on its host.

    Raises:
        ValueError: one GPU is asked for by number.
    """
    import torch

    if asked not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda with ranks, got {asked!r}")
    if asked == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ['LOCAL_RANK']}"


def split(load: Callable[..., Any], device: str, dtype: str | None) -> Any:
    """The model that `load(device=, dtype=)` makes, in parts: the first rank saves it for all.

    Raises:
        ValueError: it cannot be loaded, or Transformers has no plan to split it.
    """
    import torch
    import torch.distributed as dist

    from graphs.pretrained import model_of

    where, kind = torch.device(device), dtype or "auto"
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    with tempfile.TemporaryDirectory() as own:
        told: list[Any] = [own, None]
        if leads():
            try:
                load(device="cpu", dtype=dtype).save_pretrained(own)
            except ValueError as error:
                told[1] = str(error)
        dist.broadcast_object_list(told, device=torch.device("cpu"))
        if told[1] is not None:
            raise ValueError(told[1])
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of tp_plan
            model = model_of(told[0], where, kind, tp_plan="auto", local_files_only=True)
        dist.barrier()  # the folder goes with the first rank
    if not getattr(model, "_tp_size", None):
        raise ValueError(f"model must have a plan by which ranks split it, got {type(model)}")
    return model
