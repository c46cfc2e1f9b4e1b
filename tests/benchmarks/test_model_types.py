"""Model types of Transformers: some of them, equal or refused as docs/models.md says."""

import multiprocessing

import pytest

pytest.importorskip("transformers")

from benchmarks.model_types import prepared_types, run_all

EQUAL = [
    *("llama", "qwen2", "gemma3_text", "deepseek_v2", "gpt_oss", "exaone4", "phi"),
    "gemma4_unified_text",
    *("qwen2_moe", "phimoe"),  # windows that only their masks say
    *("stablelm", "nemotron"),  # drop keywords
    *("gptj", "gpt_neo", "falcon"),  # classes of their own
    "gpt_neox",
    "whisper",
    *("qwen3_next", "kimi_linear", "lfm2", "nemotron_h", "jamba", "mamba", "zamba2"),  # states
    *("image-text/llava", "image-text/qwen2_vl"),  # given text alone
    "image-text/minicpmv4_6",  # computes logits of all rows
    "image-text/deepseek_vl_hybrid",  # a class of its own for images
]
REFUSED = ["diffllama", "hrm_text", "mvp", "xglm", "moshi", "trocr", "bart", "git", "bloom"]
REFUSED += ["minimax", "zaya", "deepseek_v32"]
REFUSED += ["image-text/kosmos-2.5", "image-text/t5gemma2"]
QUICK = ["llama", "image-text/deepseek_vl_hybrid", "phimoe", "stablelm", "gptj"]
QUICK += ["diffllama", "bart"]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([*EQUAL, *REFUSED], marks=pytest.mark.long)], ids=["some", "all"]
)
def test_model_types_are_equal_or_refused(names):
    known = prepared_types()
    types = [name for name in names if name in known]
    outcomes = {o.model_type: o.kind for o in run_all(types, jobs=2, timeout=120)}
    wanted = {name: "equal" if name in EQUAL else "refused" for name in types}
    assert outcomes == wanted
