"""The workload in Transformers' continuous batching: what `generate_batch` does.

`generate_batch` takes one length for all requests, so they are given to its manager one by one.
"""

import time
from typing import Any

from tqdm import tqdm

from benchmarks.workload.requests import Wish, Workload, num_output_tokens

PATIENCE = 600
"""Seconds without a finished request after which a run is given up."""


def measure(
    model: Any, workload: Workload, wishes: list[Wish], rounds: int
) -> tuple[str, dict[str, float], list[list[int]]]:
    """Name and figures of one manager, warmed up by an eighth of the requests, and tokens."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    small: dict[str, Any] = {"num_blocks": 16, "page_size": 64}
    config = ContinuousBatchingConfig(
        max_batch_tokens=workload.max_tokens_per_step,
        max_requests_per_batch=workload.max_batch_size,
        allow_block_sharing=False,
        **({} if model.device.type == "cuda" else small),
    )
    generation = GenerationConfig(
        do_sample=False, eos_token_id=-1, max_new_tokens=workload.output[1]
    )
    around = model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=60
    )
    with around as manager:
        run_all(manager, wishes[: max(4, len(wishes) // 8)])
        runs = [run_all(manager, wishes) for _ in range(rounds)]
        attention = model.config._attn_implementation
    seconds = min(seconds for seconds, _ in runs)
    row = {"wall, s": seconds, "output tokens/s": num_output_tokens(wishes) / seconds}
    return f"Transformers' continuous batching, {attention}", row, runs[-1][1]


def run_all(manager: Any, wishes: list[Wish]) -> tuple[float, list[list[int]]]:
    """Seconds from the first request to the last token, and the tokens."""
    begin = last = time.perf_counter()
    ids = [manager.add_request(wish.prompt, max_new_tokens=wish.num_new) for wish in wishes]
    results: dict[str, Any] = {}
    with tqdm(total=len(ids), desc="Transformers", mininterval=5) as progress:
        while len(results) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(f"Transformers' continuous batching failed: {result.error}")
                results[result.request_id] = result
                last = time.perf_counter()
                progress.update()
            elif not manager.is_running() or time.perf_counter() - last > PATIENCE:
                raise RuntimeError("Transformers' continuous batching has stopped")
    tokens = [list(results[request].generated_tokens) for request in ids]
    assert list(map(len, tokens)) == [wish.num_new for wish in wishes], "every token is there"
    return last - begin, tokens
