"""A model split over two GPUs of one host decodes what one of them decodes.

Needs two GPUs; a test takes a minute (predicted, not run yet).
"""

import pytest
import torch

from tests.gpu import graph_cases as cases
from tests.scenarios.test_ranks import PROMPTS, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

OPTIONS = {"backend": "TRITON", "cache_tokens": 2048, "max_tokens_per_step": 16}


@pytest.mark.parametrize("options", [{}, {"decode_steps": 4}, {"merge_projections": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_tokens_are_those_of_one_gpu(make_model, tmp_path, family, options):
    model = cases.wide(make_model, family, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    wanted = cases.tokens(cases.small(model, cudagraph_mode="NONE").generate(PROMPTS, 8))
    more = {"device": "cuda", "compile": True, "options": OPTIONS | {"verify": "always"} | options}
    (found,) = run(tmp_path, 2, **more)
    assert [rank.get("error") for rank in found] == [None, None]
    assert [rank["tokens"] for rank in found] == [wanted, wanted]
    assert all(rank["captured"] > 0 and rank["verified"] > 0 for rank in found)
    assert all(rank["breaks"] == rank["recompiles"] == 0 for rank in found)
