"""A model split over ranks by Transformers decodes the tokens of a whole one: gloo, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.models import build_model
from tests.kit.sessions import make_session

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 9, 3], [7] * 20, [1], [11, 12]]


def run(folder, ranks, jobs=None, **wanted) -> list[list[dict]]:
    """What each rank wrote of each job; {} of one that ended before.

    `jobs`: by the folder of a model, what is wanted of it; None: one, "model".
    """
    jobs = jobs or {"model": {}}
    settings = {"prompts": PROMPTS, "options": {"max_tokens_per_step": 16}, "jobs": jobs} | wanted
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    path = str(ROOT / "tests" / "scenarios" / "ranks_program.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--standalone", path, str(folder)]
    done = subprocess.run(
        [*command, json.dumps(settings)], env=environment, capture_output=True, text=True,
        check=False, timeout=400,
    )  # fmt: skip
    found = []
    for name in jobs:
        paths = [folder / name / f"{rank}.json" for rank in range(ranks)]
        found.append([json.loads(p.read_text()) if p.exists() else {} for p in paths])
        assert any(found[-1]), done.stderr[-2000:]
    return found


def saved(name, folder, place="model", **sizes):
    model = build_model(name, **sizes)
    model.save_pretrained(folder / place)
    return model


def check_families(folder, ranks, names, **others):
    """Sessions of one rank, the heads of each rank, and what came of other jobs."""
    sessions = {name: make_session(saved(name, folder, name)) for name in names}
    found = run(folder, ranks, {name: {} for name in names} | others)
    heads = {}
    for name, of_ranks in zip(names, found, strict=False):
        wanted = [result.token_ids for result in sessions[name].generate(PROMPTS, 8)]
        assert [rank.get("error") for rank in of_ranks] == [None] * ranks, name
        assert [rank["tokens"] for rank in of_ranks] == [wanted] * ranks, name
        heads[name] = of_ranks[0]["heads"]
    return sessions, heads, found[len(names) :]


OPTIONS = {
    "merge_projections": True, "share_prefixes": True, "decode_steps": 4, "debug": "eager_replay",
    "verify": "first",
}  # fmt: skip
COMPILED = {
    "compile": True,
    "options": {"max_tokens_per_step": 16, "debug": "eager_replay", "verify": "first"},
}


@pytest.mark.slow
def test_tokens_are_those_of_one_rank(tmp_path):
    """By families, drawn, compiled, and asked by one rank. All on the same two: a start takes 8 s.

    One key and value head is on both; one query head cannot be split.

    Transformers splits no attention of GPT-OSS and Phi-3. Scaled embeddings, norms of heads and
    experts compile as layers of one rank do.
    """
    names = ("llama", "qwen3", "gemma3", "deepseek_v2", "gpt_oss", "qwen2_moe", "phi3")
    asked = {"temperature": 0.9, "top_k": 20, "seed": 3}
    jobs = {
        "drawn": {"asked": asked},
        "options": {"compile": True, "options": OPTIONS},
        "embeddings": COMPILED,
        "norms": COMPILED,
        "experts": COMPILED | {"passes": {"experts": "always"}},
        "seeds": {"options_of": {"1": {"seed": 5}}},
        "caches": {"options": {"compile_cache": "x"}},
        "one head": {},
        "few": {},
        "leads": {"leads": True},
        "left": {"deserts": True, "patience": 4},  # the last, as ranks part
    }
    kinds = {"embeddings": "gemma2", "norms": "qwen3", "experts": "qwen2_moe"}
    sizes = {"one head": {"num_key_value_heads": 1}}
    sizes["few"] = {"num_attention_heads": 1, "num_key_value_heads": 1}
    models = {
        place: saved(kinds.get(place, "llama"), tmp_path, place, **sizes.get(place, {}))
        for place in jobs
    }
    sessions, heads, others = check_families(tmp_path, 2, names, **jobs)
    for name, session in sessions.items():
        parts = 1 if name in ("gpt_oss", "phi3") else 2
        assert heads[name][0] == session.specs[0].num_heads // parts, name
    found = dict(zip(jobs, others, strict=True))
    for place in ("drawn", "options", "one head", *kinds):
        session = make_session(models[place])
        results = session.generate(PROMPTS, 8, **jobs[place].get("asked", {}))
        for rank in found[place]:
            assert rank.get("error") is None, place
            assert rank["tokens"] == [result.token_ids for result in results], place
            assert (rank["breaks"], rank["recompiles"], rank["parts"]) == (0, 0, True), place
            assert (rank["matches"].get("experts", 0) > 0) == (place == "experts"), place
    for rank in found["seeds"]:
        assert "got other settings of the session or another model on rank" in rank["error"]
    for rank in found["caches"]:
        assert "compile_cache must be the same decision on every" in rank["error"]
    for rank in found["few"]:
        assert "must be a multiple of the ranks, and num_key_value_heads a" in rank["error"]
    check_calls_of_one_rank(*found["leads"], make_session(models["leads"]))
    check_that_nobody_waits_for_ever(*found["left"])


def check_calls_of_one_rank(first, second, session):
    assert first.get("error") is second.get("error") is None
    assert first["tokens"] == [r.token_ids for r in session.generate(PROMPTS, 8)]
    assert second["steps"] == first["steps"] > 50
    for message, error in zip(
        [
            "arguments of generate must be picklable where one rank leads",
            "top_p must be",
            "update_weights must be called on every rank",
            "rank 0 must lead and the others follow, got rank 0, which would follow",
            "DecodeSession.generate() missing 1 required",
        ],
        first["errors"],
        strict=True,
    ):
        assert error.startswith(message)


def check_that_nobody_waits_for_ever(first, second):
    no_answer, unled, own = first["left"]
    assert no_answer.startswith("generate must be heard by all ranks within 4 s, got no answer")
    assert "has no answer from the others within 4 s" in unled
    assert own == '"the caller\'s"'
    assert second == {"left": []}


@pytest.mark.slow
def test_ranks_that_disagree_are_told(tmp_path):
    """On both, before the step is launched; then they may go on with other sessions."""
    jobs = {
        "request": {"without_last": 1},
        "length": {"longer": 1},
        "seed": {"draws": 1},
        "weights": {"has_other": 1, "other": "other"},
        "model": {"has_other": 1, "other": "another"},
        "raises": {"raises": 1, "again": True},
        "ends": {"ends": 1},
    }
    models = [saved("llama", tmp_path, place) for place in jobs]
    saved("llama", tmp_path, "another", rms_norm_eps=1e-3)
    trained = build_model("llama")
    trained.model.norm.weight.mul_(1.5)
    trained.save_pretrained(tmp_path / "other")
    *others, weights, model, again, (left, _) = run(tmp_path, 2, jobs, patience=6)
    for ranks in others:
        for rank in ranks:
            assert rank["error"].startswith("RanksDiffer: ranks must run the same calls on"), rank
    for rank in (*weights, *model):
        assert "got other settings of the session or another model on rank" in rank["error"]
    wanted = [r.token_ids for r in make_session(models[-1]).generate(PROMPTS, 8)]
    assert [len(rank["errors"]) for rank in again] == [1, 1]
    assert [rank["tokens"] for rank in again] == [wanted, wanted]
    assert "has no answer from the others within 6 s" in left["error"]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["hangs", "raises"])
def test_a_rank_that_does_not_go_on_is_told(fault, tmp_path):
    saved("llama", tmp_path)
    ((first, second),) = run(tmp_path, 2, patience=6, **{fault: 1})
    assert "has no answer from the others within 6 s" in first["error"]
    assert fault != "raises" or "of one rank" in second["error"]


@pytest.mark.long
def test_fewer_key_and_value_heads_than_ranks(tmp_path):
    """Two of them, on four ranks: a pair of ranks has the same one."""
    _, heads, _ = check_families(tmp_path, 4, ("llama",))
    assert heads["llama"] == [1, 1]


@pytest.mark.long
def test_more_families_on_four_ranks(tmp_path):
    """Norms, experts, latent attention, sinks: Transformers splits no attention of GPT-OSS."""
    names = ("deepseek_v2", "gemma3", "gpt_oss", "qwen2_moe", "qwen3")
    sessions, heads, _ = check_families(tmp_path, 4, names)
    for name, session in sessions.items():
        assert heads[name][0] == session.specs[0].num_heads // (1 if name == "gpt_oss" else 4), name


def program(*command: str) -> str:
    """What a program of several ranks prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.long
def test_random_sessions():
    """More of them: `tests/fuzz/ranks.py`."""
    assert "rank 1: 6 right" in program(*TORCHRUN, "-m", "tests.fuzz.ranks", "6")


@pytest.mark.long
def test_the_example(tmp_path):
    model = saved("llama", tmp_path)
    printed = program(*TORCHRUN, "examples/tensor_parallel.py", str(tmp_path / "model"))
    results = make_session(model).generate(PROMPTS, 16)
    wanted = ["0 of 2 [16, 16, 16, 16]", *(" ".join(map(str, r.token_ids)) for r in results)]
    assert printed.splitlines() == wanted


@pytest.mark.slow
def test_the_command():
    """It compares with Transformers' `generate` on the same parts; the first rank alone prints."""
    printed = program("graphs.app.cli", "run", "--nproc", "2", "--max-new-tokens", "4", "--json")
    report = json.loads(printed)
    assert report["parity"]["ok"]
    assert report["session"]["rank"] == "0 of 2"
