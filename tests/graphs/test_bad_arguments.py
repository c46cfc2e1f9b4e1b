"""Wrong arguments of sessions, keys and groups: a ValueError that names them, nothing changed."""

# pyright: reportArgumentType=false
import copy
import pickle

import pytest
import torch

from attn_ops.backends.grouped import grouped_backend
from graphs import CUDAGraphMode, DecodeSession
from graphs.capture.dispatch import CudagraphDispatcher
from graphs.modes import BatchDescriptor, default_capture_sizes
from tests.kit.sessions import captured_lazily, make_session

SESSIONS = [
    *({"cache_tokens": bad} for bad in (0, -5, 10.5, "x", True)),
    *({"capture_sizes": bad} for bad in (3, [1.5], ["a"], [True], "12", torch.tensor(3))),
    *({"mixed_capture_sizes": bad} for bad in (7, [2.5], [0])),
    *({"seed": bad} for bad in ("x", 1.5, None, True)),
    *({"cudagraph_mode": bad} for bad in (None, 1, "NONE")),
    *({name: bad} for name in ("strict", "lazy_capture") for bad in ("yes", 1, None)),
    {"strict": True, "on_capture_failure": "continue"},
    *({"max_batch_size": 0}, {"max_tokens": -1}, {"max_tokens_per_step": 2.0}),
    *({"decode_steps": 1025}, {"capture_sizes": [1, 9]}, {"backend": "NOPE"}),
]


@pytest.mark.parametrize("options", SESSIONS, ids=str)
def test_bad_sessions(model, options):
    with pytest.raises(ValueError, match=f"^{list(options)[-1]} must "):
        captured_lazily(model, **options)


CALLS = {
    "0-d prompt": (lambda s: s.add(torch.tensor(3)), "prompt must be a sequence of token ids"),
    "bool": (lambda s: s.add([True]), "prompt must hold ints, got True"),
    "dict": (lambda s: s.add({1: 2}), "prompt must be a sequence of token ids"),
    "set": (lambda s: s.add({1, 2}), "prompt must have an order"),
    "0-d eos": (lambda s: s.add([1], 3, eos=torch.tensor(3)), "eos must be a sequence"),
    "name": (
        lambda s: s.add([1], 3, temprature=1),
        "got temprature; supported: temperature, top_k",
    ),
    "huge": (lambda s: s.add([1], 3, temperature=10**400), "temperature must be a number in range"),
    "no drafts": (lambda s: s.verify_draft(None), "drafts must be a mapping"),
    "draft": (lambda s: s.verify_draft({(1, 2): [1]}), "drafts must be for requests"),
    "result": (lambda s: s.result([1]), r"request_id must come from add\(\), got \[1\]"),
    "no result": (lambda s: s.result(5), r"request_id must come from add\(\), got 5"),
    "discard": (lambda s: s.discard([1]), r"request_id must come from add\(\), got \[1\]"),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_calls_change_nothing(model, case):
    session = captured_lazily(model, num_draft_tokens=2)
    call, message = CALLS[case]
    with pytest.raises(ValueError, match=message):
        call(session)
    assert (session.num_unfinished, session.book.next_id, session._requests) == (0, 0, {})


FULL = CUDAGraphMode.FULL
DISPATCH = {
    "mode": (lambda: CudagraphDispatcher("FULL", [1], [1], 1), "mode must be a CUDAGraphMode"),
    "size": (lambda: CudagraphDispatcher(FULL, [1.5], [1], 2), "decode_sizes must be ints from 1"),
    "most": (lambda: CudagraphDispatcher(FULL, [1], [1], None), "max_num_reqs must be ints"),
    "key": (lambda: BatchDescriptor(1.5, 1), "num_tokens must be an int, got 1.5"),
    "keys": (lambda: CudagraphDispatcher(FULL, [1], [8], 4).keys("FULL"), "mode must be a CUDA"),
    "kind": (
        lambda: CudagraphDispatcher(FULL, [1], [8], 4).dispatch(2, 2, 1, "GREEDY"),
        "sampling must be a Sampling, got 'GREEDY'; supported: GREEDY, RANDOM",
    ),
    "default": (lambda: default_capture_sizes(0), "max_batch_size must be a positive int, got 0"),
    "groups": (lambda: grouped_backend([("a", "b")], default="TORCH"), "groups must be a mapping"),
    "lower": (lambda: grouped_backend({len: "FLEX"}, default="TORCH", name="x"), "name must be up"),
    "named 3": (lambda: grouped_backend({len: "FLEX"}, default="TORCH", name=3), "name must be up"),
}


@pytest.mark.parametrize("case", DISPATCH)
def test_bad_keys_and_groups(case):
    call, message = DISPATCH[case]
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": [1.7]}, "prompt must hold ints, got 1.7"),
        ({"prompt": []}, "prompt must hold at least one token, got an empty one"),
        ({"prompt": [1] * 9}, "prompt must be at most max_tokens=8 long, got 9 tokens"),
        ({"prompt": [-1]}, "prompt must hold token ids from 0 to 63, got -1"),
        ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens must be a positive int, got 0"),
        ({"prompt": [1], "eos": "3"}, "eos must hold ints, got '3'"),
        ({"prompt": [1], "eos": 64}, "eos must hold token ids from 0 to 63, got 64"),
        ({"prompt": [1], "temperature": None}, "temperature must be a number"),
        ({"prompt": [1], "max_new_tokens": True}, "max_new_tokens must be a positive int"),
    ],
)
def test_wrong_requests(model, arguments, message):
    session = make_session(model, max_batch_size=1, max_tokens=8)
    with pytest.raises(ValueError, match=message):
        session.add(**arguments)
    assert session.num_unfinished == 0


TOKENIZE = r"tokenize first, e\.g\. tokenizer\(text\)\['input_ids'\]"
MESSAGE = {"role": "user", "content": "hello"}
TEMPLATE = r"tokenize first, e\.g\. tokenizer\.apply_chat_template\(messages\)\['input_ids'\]"
TEXTS = {
    "text": ("hello", f"prompts must be a sequence of prompts, got 'hello'; {TOKENIZE}"),
    "texts": (["hello"], f"prompt must be a sequence of token ids, got 'hello'; {TOKENIZE}"),
    "words": ([["hello", "you"]], f"prompt must hold ints, got 'hello'; {TOKENIZE}"),
    "mapping": ({"ids": [[1]]}, "prompts must be a sequence of prompts, got {'ids'"),
    "images": (
        {"input_ids": [[1]], "pixel_values": 1},
        "model must take images as rows among those of text, got LlamaForCausalLM: its decoder is",
    ),
    "rows": ({"input_ids": [[1]], "attention_mask": []}, "attention_mask must have 1 rows, got 0"),
    "mask": ({"input_ids": [1], "attention_mask": [0.0]}, "prompt must be a sequence .* got 1"),
    "messages": ([MESSAGE], f"prompt must be a sequence of .*; {TEMPLATE}"),
    "conversations": ([[MESSAGE]], f"prompt must hold ints, got .*; {TEMPLATE}"),
    "flat": ([1, 2], "prompt must be a sequence of .* got 1; several prompts are a list of lists"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_prompts_that_are_no_tokens(model, case):
    prompts, message = TEXTS[case]
    session = make_session(model, max_batch_size=1, max_tokens=8)
    with pytest.raises(ValueError, match=f"^{message}"):
        session.generate(prompts, 2)
    assert session.num_unfinished == 0


@pytest.mark.parametrize("mask", [[1, 0, 1], [1, 2, 1], [0, float("-inf"), 0], [1, 1], [[1, 1, 1]]])
def test_masks_that_are_no_padding(model, mask):
    session = make_session(model, max_batch_size=1, max_tokens=8)
    with pytest.raises(
        ValueError, match=r"^(attention_mask must hold 0 or 1|prompts must be padded)"
    ):
        session.add({"input_ids": [1, 2, 3], "attention_mask": mask}, 2)
    with pytest.raises(ValueError, match=r"got attention_mask; .*may be a tokenizer's mapping"):
        session.add([1, 2, 3], 2, attention_mask=[1, 1, 1])
    assert session.num_unfinished == 0


def test_do_sample_is_a_temperature(model):
    session = make_session(model, max_batch_size=1, max_tokens=8)
    with pytest.raises(ValueError, match=r"got do_sample; supported: .*eos.*; temperature=0 is"):
        session.add([1], do_sample=True)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_sessions_are_not_copied(model, copied):
    session = make_session(model, max_batch_size=1, max_tokens=8)
    with pytest.raises(TypeError, match=r"^a DecodeSession cannot be pickled or copied: "):
        copied(session)


@pytest.mark.parametrize("cache_tokens", [1, 7])
def test_a_cache_smaller_than_a_block(model, cache_tokens):
    message = f"^cache_tokens must hold a block of block_size=8 tokens, got {cache_tokens}"
    with pytest.raises(ValueError, match=message):
        make_session(model, cache_tokens=cache_tokens, block_size=8)
    assert make_session(model, cache_tokens=8, block_size=8).generate([[1]], 2)


@pytest.mark.parametrize("cache_tokens", [10**12, 10**15, 10**18])  # torch, too, refuses the last
def test_a_cache_larger_than_the_memory(model, cache_tokens):
    num_bytes = make_session(model, cache_tokens=8, block_size=8).cache.bytes_per_block
    needed = (cache_tokens // 8 + 1) * num_bytes
    message = (
        r"^num_tokens \(cache_tokens of a session\) must fit into the memory of cpu of [\d,]+ bytes"
        f", got {cache_tokens:,} tokens, which take {needed:,} bytes$"
    )
    with pytest.raises(ValueError, match=message):
        make_session(model, cache_tokens=cache_tokens, block_size=8)


def test_an_unknown_option_is_named_with_its_neighbour(model):
    wanted = "option must be known, got 'cuda_graph_mode', which may mean 'cudagraph_mode'; suppo"
    with pytest.raises(TypeError, match=wanted):
        DecodeSession(model, max_batch_size=1, max_tokens=8, cuda_graph_mode="NONE")
    with pytest.raises(TypeError, match="option must be known, got 'zzz'; supported: max_batch"):
        DecodeSession(model, max_batch_size=1, max_tokens=8, zzz=1)
