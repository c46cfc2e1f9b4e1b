"""On a GPU a second process loads what the first has compiled, also for caches of other sizes."""

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.gpu

PROCESS = """
    import json, sys, time
    import torch
    from torch._dynamo.utils import counters
    from tests.gpu.graph_cases import PROMPTS, compiled, wide
    from tests.kit.models import build_model
    from graphs import DecodeSession
    family, folder, cache_tokens = sys.argv[1:]
    torch.manual_seed(0)
    model = compiled(wide(build_model, family))
    options = {"max_batch_size": 8, "max_tokens": 256, "max_tokens_per_step": 64}
    begin = time.perf_counter()
    session = DecodeSession(
        model, cache_tokens=int(cache_tokens), compile_cache=folder, verify="always", **options
    )
    session.warm_up()
    seconds = time.perf_counter() - begin
    tokens = [result.token_ids for result in session.generate(PROMPTS, 24)]
    graphs = counters["stats"]["unique_graphs"]
    outcome, recompiles = session.report().compile_cache, session.counters.num_recompiles
    captured = session.num_steps["captured"]
    print(json.dumps([outcome, tokens, graphs, recompiles, captured, seconds]))
"""


def started(family, folder, cache_tokens):
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), family, folder, str(cache_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_second_process_with_another_cache(tmp_path, family):
    tmp_path.chmod(0o700)
    outcome, tokens, graphs, recompiles, captured, _ = started(family, tmp_path, 4096)
    assert "; saved in" in outcome
    assert (graphs, recompiles) == (1, 0)
    assert captured > 0
    for number in (8192, 2048):
        again = started(family, tmp_path, number)
        assert again[:4] == [f"loaded from {tmp_path}", tokens, 0, 0]
        assert again[4] == captured
