"""What requests ask for, in captured steps on a GPU, against Transformers one by one."""

import pytest
import torch

from tests.fuzz import options
from tests.fuzz.__main__ import parser
from tests.kit.models import build_model
from tests.kit.sessions import make_session
from tests.kit.text import small_tokenizer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def run_mix():
    return options.search(parser().parse_args(["options", "--device", "cuda"]))


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_mixes(run_mix, first):
    for seed in range(first, first + 50):
        run_mix(seed)


def test_a_large_vocabulary():
    """Kernels of log-probabilities and edits at a size that has many chunks."""
    model = build_model("llama", vocab_size=128_256).cuda()
    session = make_session(model, decode_steps=4)
    prompts = [[5, 9, 3], list(range(20))]
    asked = {"logprobs": 64, "prompt_logprobs": 20, "logit_bias": {128_000: 1.0}}
    results = session.generate(prompts, 8, eos=(), bad_words=[[7]], **asked)
    model.set_attn_implementation("eager")
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + result.token_ids], device="cuda")).logits[0]
        raw = logits.float().log_softmax(-1).cpu()
        for number, found in enumerate(result.logprobs):
            row = raw[len(prompt) + number - 1]
            assert len(found) in (64, 65)
            assert all(abs(one.logprob - row[t].item()) < 1e-4 for t, one in found.items())
        for at, found in enumerate(result.prompt_logprobs[1:]):
            assert all(abs(one.logprob - raw[at, t].item()) < 1e-4 for t, one in found.items())


def test_structured_outputs():
    pytest.importorskip("xgrammar")
    tokenizer = small_tokenizer()
    model = build_model("llama", vocab_size=len(tokenizer)).cuda()
    session = make_session(model, tokenizer=tokenizer, decode_steps=4)
    asked = {"structured_outputs": {"choice": ["seven eight", "Yes"]}, "eos": 0}
    for result in session.generate(["one two", "three"] * 4, 20, **asked):
        assert result.text in ("seven eight", "Yes")
    assert session.num_steps["captured"] > 0
