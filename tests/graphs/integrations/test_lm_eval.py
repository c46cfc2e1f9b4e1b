"""lm-eval's tasks on a session: every number is that of lm-eval's own model `hf`."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")  # of lm-eval's `hf`

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from graphs.app.presets import source
from graphs.integrations.lm_eval import AttnOpsLM
from tests.kit.marks import long
from tests.kit.models import build_model
from tests.kit.text import TEXTS, small_tokenizer

ROOT = Path(__file__).parents[3]
LENGTH = 128
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}", train: "{data}"}}
test_split: test
training_split: train
fewshot_split: train
"""
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "tiny_generate": """
output_type: generate_until
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: "{{said}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
UNTIL = {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False}


def saved(path: Path, tokenizer) -> Path:
    """A folder with a small model and a tokenizer."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH}
    model = build_model("llama", "eager", eos_token_id=tokenizer.eos_token_id, **sizes)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), small_tokenizer())


@pytest.fixture(scope="module")
def theirs(folder) -> HFLM:
    return hf(folder)


@pytest.fixture(scope="module")
def ours(folder) -> AttnOpsLM:
    return made(folder)


def hf(folder, **options) -> HFLM:
    return HFLM(str(folder), **({"device": "cpu", "dtype": "float32", "batch_size": 1} | options))


def made(folder, **options) -> AttnOpsLM:
    args = {"pretrained": str(folder), "compile": False, "batch_size": 4}
    return AttnOpsLM.create_from_arg_obj(args | options)


def asked(kind: str, arguments: Sequence[tuple]) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, theirs) -> Path:
    """A folder of tasks; half of the documents expect what the model says without examples."""
    path = tmp_path_factory.mktemp("tasks")
    docs = []
    for i, (a, b) in enumerate(zip(WORDS, reversed(WORDS), strict=True)):
        question = f"{a} fox {b}"
        request = asked("generate_until", [(f"Q: {question}\nA:", UNTIL)])
        said = theirs.generate_until(request)[0] if i % 2 else "no"
        text = TEXTS[i % 3] * (1 + i)  # the longest need several windows
        choices = [a, b, "lazy dog"]
        docs.append({"question": question, "choices": choices, "answer": i % 3, "text": text})
        docs[-1]["said"] = said
    return written(path, docs, TASKS)


def written(path: Path, docs: list[dict], tasks: dict[str, str]) -> Path:
    """A folder of tasks on the documents, which are their examples too."""
    (path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    for name, rest in tasks.items():
        head = YAML.format(name=name, data=path / "docs.jsonl")
        (path / f"{name}.yaml").write_text(head + rest)
    return path


def evaluated(model, folder, names=tuple(TASKS), **options):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = {"bootstrap_iters": 0, "task_manager": manager} | options
    return lm_eval.simple_evaluate(model, tasks=list(names), **options)


def numbers(results) -> dict[str, float]:
    """Every metric of every task."""
    return {
        f"{task} {name}": value
        for task, found in results["results"].items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }


def answers(results) -> list:
    """Every answer of every document, in order."""
    samples = results["samples"].values()
    found = [sorted(some, key=lambda sample: sample["doc_id"]) for some in samples]
    return [answer for some in found for sample in some for answer in sample["filtered_resps"]]


def same(found, expected) -> None:
    """Equal texts and flags, and log-probabilities up to 1e-4 of themselves."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, tuple):
            assert ours[1] == theirs[1]
            ours, theirs = ours[0], theirs[0]
        assert ours == (pytest.approx(theirs, rel=1e-4) if isinstance(theirs, float) else theirs)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("num_fewshot", [0, 2])
def test_numbers_are_those_of_hf(ours, theirs, tasks, num_fewshot, chat):
    options = {"num_fewshot": num_fewshot, "apply_chat_template": chat}
    options |= {"fewshot_as_multiturn": chat}
    expected, found = (evaluated(lm, tasks, **options) for lm in (theirs, ours))
    same(answers(found), answers(expected))
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-4)
    assert {"tiny_choice acc_norm,none", "tiny_perplexity word_perplexity,none"} < {*numbers(found)}
    if not num_fewshot and not chat:
        assert numbers(found)["tiny_generate exact_match,none"] == 0.5


LONG = " ".join(TEXTS * 3)
PAIRS = [
    ("The quick", " brown fox"),
    ("The quick", " brown fox"),  # twice
    ("The quick ", "brown"),  # the space goes to the continuation
    ("The quick", " dog"),
    ("", " jumps over"),
    ("", "o"),  # one token after the prefix
    ("one", "x"),
    (LONG, " lazy"),  # longer than what the model sees
    (LONG, LONG[:60]),
    ("a", LONG[:100]),
    ("<eos>one", " two"),
    ("<eos>", " two"),
]


def test_scores_are_those_of_hf(ours, theirs):
    greedy = asked("generate_until", [(word, {"max_gen_toks": 1}) for word in WORDS])
    likeliest = filter(None, theirs.generate_until(greedy))
    pairs = [*PAIRS, *zip(WORDS, likeliest, strict=False)]
    assert len(ours.tok_encode(LONG)) > LENGTH
    expected = theirs.loglikelihood(asked("loglikelihood", pairs))
    found = ours.loglikelihood(asked("loglikelihood", pairs))
    same(found, expected)
    assert {is_greedy for _, is_greedy in found} == {False, True}
    texts = [(LONG * 2,), ("",), ("o",), (LONG,), ("<eos>one two",), ("one two",), ("one two",)]
    expected = theirs.loglikelihood_rolling(asked("loglikelihood_rolling", texts))
    same(ours.loglikelihood_rolling(asked("loglikelihood_rolling", texts)), expected)
    assert ours.loglikelihood([]) == ours.loglikelihood_rolling([]) == ours.generate_until([]) == []


GENERATIONS = [
    {"until": ["e", "\n"], "max_gen_toks": 20},
    {"until": "S", "max_new_tokens": 9, "temperature": 0},
    {"until": [], "max_gen_toks": 100, "num_beams": 1},  # leaves 28 tokens for a context
    {"max_gen_toks": 1, "do_sample": False, "temperature": 0.7, "top_p": 0.9},
    {"until": ["o", " j", "never there"], "max_gen_toks": 30, "repetition_penalty": 1.3},
]


def test_generations_are_those_of_hf(ours, theirs):
    contexts = ["The quick", "one two three", LONG, "one two", "<eos>one", "The quick", "x"]
    requests = [(text, dict(kwargs)) for kwargs in GENERATIONS for text in contexts]
    expected = theirs.generate_until(asked("generate_until", requests))
    assert len({*expected}) > len(requests) // 2
    assert ours.generate_until(asked("generate_until", requests)) == expected


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_bos_is_that_of_hf(tmp_path, add_bos_token):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    options = {"add_bos_token": add_bos_token}
    expected, found = (make(saved(tmp_path, tokenizer), **options) for make in (hf, made))
    assert found.tok_encode("one") == expected.tok_encode("one")
    assert (found.tok_encode("one")[0] == begin) == (add_bos_token is not False)
    pairs = [*PAIRS, ("<s>one", " two"), ("", "<s>one")]
    for kind, requests in (
        ("loglikelihood", pairs),
        ("loglikelihood_rolling", [(LONG,), ("",), ("<s>one two",)]),
        ("generate_until", [("one", {"max_gen_toks": 9}), ("<s>one", {"max_gen_toks": 9})]),
    ):
        same(*(getattr(lm, kind)(asked(kind, requests)) for lm in (found, expected)))


def test_stops_of_special_tokens_are_those_of_hf(tmp_path):
    """Alone, and with other text around: a session's text has neither."""
    tokenizer = copy.deepcopy(small_tokenizer())
    special = tokenizer.convert_ids_to_tokens([359, 296])  # which the model says
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    assert special == ["tags", "ll"]
    theirs, ours = (make(saved(tmp_path, tokenizer)) for make in (hf, made))
    untils = [["tags"], ["llM"], ["llM", "never there"], ["ve", "tags", "llM"], ["taxs"]]
    requests = [
        (word, {"until": until, "max_gen_toks": 20})
        for until in untils
        for word in ("one", "one two")
    ]
    expected = theirs.generate_until(asked("generate_until", requests))
    assert len({*expected}) > 4
    assert ours.generate_until(asked("generate_until", requests)) == expected


def test_answers_come_from_the_cache(ours, tasks, tmp_path):
    options = {"use_cache": str(tmp_path / "cache"), "num_fewshot": 2}
    first = evaluated(ours, tasks, **options)
    steps = dict(ours.session.num_steps)
    again = evaluated(ours, tasks, **options)
    assert steps == ours.session.num_steps
    same(answers(again), answers(first))


def test_prefixes_are_shared(folder, tasks):
    lm = made(folder)
    evaluated(lm, tasks, num_fewshot=2)
    counts = lm.session.scheduler.prefixes.counts()
    assert counts.num_hits > counts.num_requests // 2
    assert counts.num_shared_tokens > counts.num_prompt_tokens // 4


def test_thoughts_are_cut(ours, theirs):
    ask = asked("generate_until", [("one", {"max_gen_toks": 20})])
    whole = ours.generate_until(ask)[0]
    end = whole[4:7]
    lm = AttnOpsLM(ours.session, think_end_token=end, enable_thinking=True)
    assert lm.generate_until(ask)[0] == whole.split(end)[-1].lstrip()
    with pytest.raises(ValueError, match="enable_thinking must be off"):
        lm.loglikelihood(asked("loglikelihood", PAIRS))


def test_sampling_differs_by_request_and_repeats_by_seed(folder):
    ask = asked("generate_until", [("one", {"do_sample": True, "temperature": 1.0})] * 4)
    for request in ask:
        request.args[1]["max_gen_toks"] = 12
    found = [made(folder, seed=seed).generate_until(ask) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert len({*found[0]}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft": "x"}, "model_args must be known, got peft='x'; supported: pretrained, add_bos"),
        ({"max_tokens": 9}, "model_args must be known, got max_tokens=9"),
        ({"batch_size": 0}, "batch_size must be a positive int or auto, got 0"),
        ({"batch_size": "many"}, "batch_size must be a positive int or auto, got 'many'"),
        ({"dtype": "foo"}, "dtype must be"),
        ({"think_end_token": 3}, "think_end_token must be a text"),
        ({"enable_thinking": True}, "think_end_token must be a text where enable_thinking=True"),
        ({"pretrained": str(ROOT / "docs")}, "pretrained must be a folder with a model, got"),
    ],
)
def test_bad_arguments_of_the_model(folder, options, message):
    with pytest.raises(ValueError, match=message):
        made(folder, **options)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"num_beams": 4, "max_gen_toks": 3}, "must be known, got num_beams"),
        ({"max_length": 30, "max_gen_toks": 3}, "must be known, got max_length"),
        ({"max_gen_toks": LENGTH}, "max_gen_toks must be under max_length=128, got 128"),
        ({}, "max_gen_toks must be under max_length=128, got 256"),
        ({"do_sample": True}, "temperature must be above 0 with do_sample=True"),
        ({"until": [3], "max_gen_toks": 3}, "stop must be a text"),
    ],
)
def test_bad_arguments_of_a_generation(ours, wanted, message):
    with pytest.raises(ValueError, match=message):
        ours.generate_until(asked("generate_until", [("one", wanted)]))


def test_continuations_that_cannot_be_scored(ours):
    for pair in (("one", ""), ("one", LONG * 2), ("", "<eos>")):
        with pytest.raises(ValueError, match="continuation must have 1 to max_length=128 tokens"):
            ours.loglikelihood(asked("loglikelihood", [pair]))


def run(program: list[str], home: Path) -> subprocess.CompletedProcess:
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *program], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_command_line(folder, tasks, theirs, tmp_path):
    """Its own defaults: the model is compiled, and lm-eval names a GPU that is not here."""
    program = ["-m", "graphs.integrations.lm_eval", "run", "--model", "attn-ops"]
    program += ["--model_args", f"pretrained={folder}", "--include_path", str(tasks)]
    program += ["--tasks", ",".join(TASKS), "--num_fewshot", "2", "--batch_size", "auto"]
    program += ["--output_path", str(tmp_path / "out")]
    ran = run(program, tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "tiny_perplexity" in ran.stdout
    (file,) = tmp_path.glob("out/**/results*.json")
    expected = evaluated(theirs, tasks, num_fewshot=2)
    assert numbers(json.loads(file.read_text())) == pytest.approx(numbers(expected), rel=1e-4)


@pytest.mark.slow
def test_the_program_of_the_page(folder, tasks, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/lm_eval.md").read_text(), re.DOTALL)
    (tmp_path / "my_model").symlink_to(folder)
    (tmp_path / "my_tasks").symlink_to(tasks)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("capitals", "tiny_choice"), {})
    assert "acc_norm,none" in capsys.readouterr().out


REAL = {
    "capitals": """
output_type: multiple_choice
doc_to_text: "Question: What is the capital of {{country}}?\\nAnswer:"
doc_to_choice: [Paris, Berlin, Rome, Madrid, London, Lisbon]
doc_to_target: "{{city}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "capitals_said": """
output_type: generate_until
doc_to_text: "What is the capital of {{country}}? Answer with its name alone."
doc_to_target: "{{city}}"
generation_kwargs: {until: ["\\n", "<|im_end|>"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, regexes_to_ignore: ["^ "]}]
""",
}
COUNTRIES = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid"}
COUNTRIES |= {"the United Kingdom": "London", "Portugal": "Lisbon"}


@pytest.fixture(scope="module", params=["folder", *long("GGUF")])
def trained(smollm2, request) -> list:
    """SmolLM2-135M-Instruct; `hf` has it as it was read from its GGUF file before."""
    path, loading = source("smollm2") if request.param == "GGUF" else (smollm2, {})
    return [made(path, max_length=512, **loading), hf(smollm2, max_length=512)]


@pytest.mark.slow
@pytest.mark.parametrize(("num_fewshot", "chat"), [*long((0, True), (2, False)), (2, True)])
def test_a_trained_model_answers_as_with_hf(trained, tmp_path, num_fewshot, chat):
    docs = [{"country": a, "city": b} for a, b in COUNTRIES.items()]
    written(tmp_path, docs, REAL)
    options = {"num_fewshot": num_fewshot, "apply_chat_template": chat}
    options |= {"fewshot_as_multiturn": chat}
    found, expected = (evaluated(lm, tmp_path, REAL, **options) for lm in trained)
    same(answers(found), answers(expected))
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-4)
    assert numbers(found)["capitals acc,none"] == 1
    said = [answer for answer in answers(found) if isinstance(answer, str)]
    assert "Paris" in said[0]
    assert not num_fewshot or numbers(found)["capitals_said exact_match,none"] > 0.8
