"""Memory of the device: how much there is, and what the largest step of a session takes."""

import dataclasses

import torch

from attn_ops.block_pool import NULL_BLOCK, BlockTable
from graphs.requests.batch import Rows, Scheduled
from graphs.requests.requests import Request
from graphs.runner import StepRunner
from graphs.sampling import SamplingParams
from graphs.sampling.params import Sampling

LOGITS_BYTES = 8
"""A logit in float32, twice: what sampling takes at a time."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU, whoever uses them."""

    total: int
    in_use: int


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """What a step takes."""

    peak: int  # bytes while it runs
    after: DeviceMemory  # when it is over: with workspaces that stay


def is_rationed(device: torch.device) -> bool:
    """Whether a cache takes what is left of the device: of a GPU."""
    return device.type == "cuda"


def memory_of(device: torch.device) -> DeviceMemory | None:
    """That of a GPU; None of another device."""
    if not is_rationed(device):
        return None
    torch.cuda.empty_cache()  # what the allocator keeps for later counts as left
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, total - free)


def measured(runner: StepRunner, max_tokens: int, max_tokens_per_step: int) -> StepMemory:
    """Run the largest step, uncompiled, and see what it takes.

    Compiled steps take less, as Inductor uses buffers again.

    Args:
        runner: of the uncompiled model on a small cache: requests have the null block everywhere.
        max_tokens: of a request.
        max_tokens_per_step: token budget.

    Raises:
        ValueError: the step does not fit into the memory of the device.
    """
    rows = largest_step(max_tokens, runner.max_batch_size, max_tokens_per_step)
    null = BlockTable([NULL_BLOCK] * runner.max_blocks)
    for pool in (runner.cache.pool, runner.cache.window_pool):
        if pool is not None:
            pool.tables.update({s.request.id: null for s in rows})
    memory_of(runner.device)
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_reserved(runner.device)
    try:
        runner.builder.profile_run(max_tokens_per_step)
        with torch.compiler.set_stance("force_eager"):
            runner.call(rows, Sampling.GREEDY)
        torch.cuda.synchronize(runner.device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "max_tokens_per_step must fit into the memory of the device, "
            f"got {max_tokens_per_step:,} tokens: {error}"
        ) from error
    peak = torch.cuda.max_memory_reserved(runner.device) - before
    after = memory_of(runner.device)
    assert after is not None, "the device is a GPU"
    return StepMemory(peak + len(rows) * runner.vocab_size * LOGITS_BYTES, after)


def largest_step(max_tokens: int, max_batch_size: int, budget: int) -> Rows:
    """A step of as many tokens and requests as there may be, all of them at their longest.

    Decodes come first, then prompts.
    """
    num_prompts = min(max_batch_size, -(-budget // max_tokens))
    num_decodes = max(0, min(max_batch_size, budget) - num_prompts)
    rest = min(budget - num_decodes, num_prompts * max_tokens)
    lengths = [1] * num_decodes
    lengths += [rest // num_prompts + (i < rest % num_prompts) for i in range(num_prompts)]
    prompt = [0] * max_tokens
    none: frozenset[int] = frozenset()
    sampling = SamplingParams(seed=0)
    rows = []
    for number in lengths:
        request = Request(len(rows), prompt, 1, sampling, none, none, max_tokens)
        rows.append(Scheduled(request, number, max_tokens - number, max_tokens, True, max_tokens))
    return Rows(rows)
