"""Sessions of a model in which dense and block-sparse layers alternate, like Phi-3-small."""

import copy
import os
from typing import Any

import pytest
import torch

import fx_passes
import graphs
from attn_ops.block_layout import BlockTables, sliding_global
from graphs import DecodeSession
from graphs.app.parity import Reference, compare, keeping_logits
from graphs.app.presets import load
from tests.kit.marks import long, slow
from tests.kit.sessions import poisoned, tokens_of
from tests.scenarios.test_fast_prefill import eager, matches

FILE = "examples/phi3_small.py"
SIZES = {"max_batch_size": 4, "max_tokens": 160, "max_tokens_per_step": 48, "block_size": 16}
LENGTHS = [1, 130, 33, 5, 2, 90]


@pytest.fixture(scope="module")
def model():
    return load(FILE)


def prompts_of(seed: int, vocab_size: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def check(session: DecodeSession, model: Any, kept: bool) -> None:
    """Prompts in chunks, over caches of NaN; tokens and logits are those of Transformers."""
    prompts = prompts_of(3)
    with keeping_logits(poisoned(session)) as logits:
        results = session.generate(prompts, 12)
    rows = [logits[i] for i in sorted(logits)] if kept else [[] for _ in prompts]
    parity = compare(Reference(model), prompts, results, rows)
    assert parity.num_identical == len(prompts)
    assert parity.max_logits_difference < 1e-4
    assert parity.num_distinct_tokens > 24


@pytest.mark.parametrize("backend", ["TORCH", "FLEX"])
def test_called_steps(model, backend):
    session = DecodeSession(model, cudagraph_mode="NONE", backend=backend, **SIZES)
    check(session, model, kept=True)


def test_the_blocks_matter(model):
    """Without the layout the model says something else, so that the other tests mean something."""
    layers = [m for m in model.modules() if getattr(m, "blocksparse", None) is not None]
    tables = [layer.blocksparse for layer in layers]
    session = DecodeSession(model, cudagraph_mode="NONE", **SIZES)
    sparse = session.generate(prompts_of(3), 12)
    try:
        for layer in layers:
            layer.blocksparse = None
        dense = DecodeSession(model, cudagraph_mode="NONE", **SIZES).generate(prompts_of(3), 12)
    finally:
        for layer, table in zip(layers, tables, strict=True):
            layer.blocksparse = table
    assert [r.token_ids for r in sparse] != [r.token_ids for r in dense]


def test_replayed_steps(model):
    session = DecodeSession(
        model, cudagraph_mode="FULL_DECODE_ONLY", debug="eager_replay", verify="always", **SIZES
    )
    check(session, model, kept=False)


@pytest.mark.slow
def test_compiled_and_dumped(model, tmp_path):
    """Layers of both kinds are compiled once each; the dump shows the blocks."""
    compiled: Any = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = DecodeSession(compiled, **SIZES)
    with graphs.dump(tmp_path / "dump") as directory:
        session.generate([[1, 2, 3]], 2)
    check(session, model, kept=True)
    report = session.report()
    assert (report.num_graphs, report.num_recompiles) == (1, 0)
    picture = (directory / "pictures" / "blocks_01.svg").read_text()
    assert picture.count("<polygon") == 4  # a stride of 4 has 4 phases
    index = (directory / "index.md").read_text()
    assert (
        "blocks of 16 tokens that model.layers.0.self_attn, model.layers.2.self_attn see" in index
    )


def test_layouts_too_short_for_a_session(model):
    """Told before anything is computed, drafts counted; a step would tell in its middle."""
    copied = copy.deepcopy(model)
    for layer in copied.model.layers[::2]:
        layer.self_attn.blocksparse = BlockTables(
            sliding_global(4, 2, 10, 16, window_blocks=2, global_blocks=1)
        )
    DecodeSession(copied, cudagraph_mode="NONE", **SIZES)  # 160 tokens each
    for change in ({"max_tokens": 161}, {"num_draft_tokens": 1}):
        with pytest.raises(ValueError, match=r"max_tokens .* must be at most 160, .* got 161"):
            DecodeSession(copied, cudagraph_mode="NONE", **SIZES | change)


def test_weights_from_a_folder(model, tmp_path):
    """Transformers puts empty memory in the place of buffers that are not saved."""
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="attn_ops")
    sessions = [DecodeSession(m, cudagraph_mode="NONE", **SIZES) for m in (model, loaded)]
    want, got = ([r.token_ids for r in s.generate(prompts_of(3)[:3], 4)] for s in sessions)
    assert got == want


def test_attention_that_would_see_all_blocks_is_refused(model):
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation must be attn_ops or eager, got sdpa"):
        copied(torch.tensor([[1, 2, 3]]))


def test_layouts_that_are_no_modules_are_refused(model):
    """They would be ignored, and every block seen."""
    copied = copy.deepcopy(model)
    layer = copied.model.layers[0].self_attn
    layout = layer.blocksparse.layout
    del layer.blocksparse
    layer.blocksparse = layout
    with pytest.raises(ValueError, match=r"blocksparse of .* must be None or BlockTables, got Bl"):
        DecodeSession(copied, cudagraph_mode="NONE", **SIZES)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton on a CPU")
@pytest.mark.parametrize("options", [{"share_prefixes": True}, {"decode_steps": 2}], ids=str)
def test_sessions_by_triton(model, options):
    """Prompts in chunks that begin within blocks, prefixes in shared blocks, steps in pairs."""
    prompts = [[*range(1, 60), i] for i in range(2)] + [[7]]
    by_torch = DecodeSession(model, cudagraph_mode="NONE", backend="TORCH", **SIZES)
    wanted = tokens_of(by_torch.generate(prompts, 3))
    modes = {"cudagraph_mode": "FULL_DECODE_ONLY", "debug": "eager_replay"}
    session = DecodeSession(model, backend="BLOCKSPARSE", **modes, **options, **SIZES)
    assert tokens_of(session.generate(prompts, 3)) == wanted


@pytest.mark.parametrize("backend", [*slow("TORCH"), *long("FLEX")])
def test_fast_prefill_of_the_last_layer(model, backend):
    """It sees the rows whose logits are wanted alone, each in its own row of the layout."""
    copied = copy.deepcopy(model)
    last, first = (copied.model.layers[i].self_attn for i in (3, 0))
    last.__class__, last.blocksparse = type(first), first.blocksparse
    wanted = tokens_of(
        DecodeSession(copied, cudagraph_mode="NONE", **SIZES).generate(prompts_of(3), 6)
    )
    with fx_passes.recording() as recorder:
        fast = torch.compile(copied, backend=eager, fullgraph=True)
        session = DecodeSession(fast, cudagraph_mode="NONE", backend=backend, **SIZES)
        assert tokens_of(session.generate(prompts_of(3), 6)) == wanted
    assert matches(recorder) == [True]
    assert session.counters.num_recompiles == 0
