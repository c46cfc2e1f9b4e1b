"""Sessions of models in which some layers have a window: those have few blocks of their own."""

# pyright: reportOptionalMemberAccess=false
import dataclasses

import pytest
import torch

import fx_passes
from attn_ops import CommonAttentionMetadata, PagedKVCache, get_backend, register_backend
from attn_ops.backends import registry
from attn_ops.integrations.transformers import attention_specs
from attn_ops.metadata import AttentionMetadata
from attn_ops.prefixes import NO_MATCH
from graphs import cache_size
from graphs.capture.verifier import VerificationError
from tests.fuzz.sessions import results_alone, run_session
from tests.kit.marks import long, slow
from tests.kit.models import build_model
from tests.kit.sessions import captured_lazily, drafted, is_empty, make_session, poisoned, tokens_of

PROMPTS = [list(range(1, 61)), [7] * 30, [3, 4], list(range(5, 50)), [9] * 8]
OPTIONS = {"max_tokens": 96, "max_tokens_per_step": 8}
SAMPLED = {"temperature": 1.5, "seed": 5}


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """For a batch of requests that reserve few tokens in advance, and nothing behind them."""
    monkeypatch.setattr(cache_size, "STRIDE", 4)
    monkeypatch.setattr(cache_size, "SHARED_TIMES", 1)


def longer(family):
    """Tokens differ, and depend on those before."""
    torch.manual_seed(0)
    made = build_model(family, max_position_embeddings=128)
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
    return made


@pytest.fixture(scope="module")
def model():
    return longer("gemma2")


@pytest.fixture(scope="module")
def want(model):
    session = make_session(model, max_batch_size=1, reserve="length", **OPTIONS)
    found = session.generate(PROMPTS, 20, **SAMPLED)
    assert len({token for one in found for token in one.token_ids}) > 20
    return found


@pytest.mark.parametrize("make", [make_session, captured_lazily])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_tokens_are_right_and_blocks_few(model, want, make, decode_steps):
    session = poisoned(make(model, decode_steps=decode_steps, **OPTIONS))
    sizes = [cache.shape[0] for cache in session.cache.tensors]
    own = session.cache.window_blocks
    assert own < sizes[1] // 1.5
    assert sizes == [own, session.cache.num_blocks] * (len(sizes) // 2)
    assert f"have {own} blocks of their own" in str(session.report().cache)
    for _ in range(2):
        assert session.generate(PROMPTS, 20, **SAMPLED) == want
    assert is_empty(session)


@pytest.mark.parametrize("family", ["gemma2", *slow("gpt_oss"), *long("gemma3n")])
def test_families(family):
    """Compiled, in one graph; with layers that share caches and compute last rows only."""
    made = longer(family)
    want = make_session(made, max_batch_size=1, reserve="length", **OPTIONS).generate(
        PROMPTS, 8, **SAMPLED
    )
    torch._dynamo.reset()
    compiled = torch.compile(made, backend=fx_passes.attn_ops, fullgraph=True)
    session = poisoned(make_session(compiled, debug="eager_replay", **OPTIONS))
    assert session.cache.window_blocks
    assert session.generate(PROMPTS, 8, **SAMPLED) == want
    assert (session.counters.num_graphs, session.counters.num_recompiles) == (1, 0)


def test_what_padding_writes_is_read_by_nobody(model, want):
    session = poisoned(captured_lazily(model, **OPTIONS))
    ids = [session.add(p, 20, **SAMPLED) for p in PROMPTS]
    while session.num_unfinished:
        for cache in session.cache.tensors:
            cache[0] = float("nan")
        session.step()
    assert [session.result(i) for i in ids] == want


def test_drafts(model, want):
    session = poisoned(captured_lazily(model, num_draft_tokens=2, **OPTIONS))
    propose = lambda following: [*following[:1], 5]  # noqa: E731
    assert drafted(session, PROMPTS, tokens_of(want), propose, **SAMPLED)[0] == want


def test_verified(model, want):
    """Of each layer the rows are compared that it writes."""
    session = captured_lazily(model, verify="always", **OPTIONS)
    assert session.generate(PROMPTS, 20, **SAMPLED) == want
    assert session.verifier.num_checked > 20


def with_old(graph, tensors, name):
    """The graph's replay over what a tensor holds now."""
    replay, old = graph.replay, tensors.device[name].clone()

    def frozen(metadata=None):
        tensors.device[name].copy_(old)
        replay(metadata)

    return frozen


@pytest.mark.parametrize("name", ["window_slot_mapping", "window_block_table"])
def test_a_frozen_table_is_caught(model, name):
    """A replay whose tensors of layers with a window stay as they were."""
    session = captured_lazily(model, verify="always", **OPTIONS)
    session.generate(PROMPTS, 20, **SAMPLED)
    for captured in session.graphs:
        captured.graph.graph.replay = with_old(captured.graph.graph, captured.tensors, name)
    with pytest.raises(VerificationError, match=r"kv_caches|window|logits"):
        session.generate(PROMPTS, 20, **SAMPLED)


def test_a_small_cache(model, want):
    """Requests are preempted by what layers that see all keys need."""
    session = poisoned(make_session(model, cache_tokens=130, **OPTIONS))
    assert session.cache.window_blocks
    assert session.generate(PROMPTS, 20, **SAMPLED) == want
    assert session.report().preemptions.num_preemptions > 0
    assert is_empty(session)


SYSTEM = list(range(1, 42))
"""Ten blocks of four tokens, of which layers with a window see the last two."""


def shared(model, **options):
    session = poisoned(captured_lazily(model, share_prefixes=True, **(OPTIONS | options)))
    assert session.cache.window_pool
    return session


def test_a_prefix_is_found_in_both_kinds_of_blocks(model):
    prompts = [[*SYSTEM, last] for last in (50, 51, 52)]
    alone = make_session(model, max_batch_size=1, reserve="length", **OPTIONS)
    want = alone.generate(prompts, 12, **SAMPLED)
    session = shared(model)
    assert [session.generate([p], 12, **SAMPLED)[0] for p in prompts] == want
    counts = session.report().prefixes
    assert (counts.num_hits, counts.num_shared_tokens) == (2, 2 * 40)
    assert session.generate(prompts, 12, **SAMPLED) == want
    assert is_empty(session)


def test_a_prefix_whose_window_is_gone_is_computed_again(model):
    """Its blocks of layers that see all keys alone are of no use."""
    alone = make_session(model, max_batch_size=1, reserve="length", **OPTIONS)
    want = alone.generate([[*SYSTEM, 50]], 12, **SAMPLED)
    session = shared(model)
    assert session.generate([[*SYSTEM, 50]], 12, **SAMPLED) == want
    window = session.cache.window_pool
    for block in list(window.index.contents):
        window.index.drop(block)
        window.kept.pop(block, None)
        window.free_blocks.append(block)
    found = session.report().prefixes.num_shared_tokens
    assert session.generate([[*SYSTEM, 50]], 12, **SAMPLED) == want
    assert session.report().prefixes.num_shared_tokens == found
    session.forget_prefixes()
    assert session.generate([[*SYSTEM, 50]], 12, **SAMPLED) == want


@pytest.mark.parametrize("options", [{"reserve": "length"}, {"max_tokens": 16}], ids=str)
def test_where_all_layers_have_the_same_blocks(model, options):
    session = make_session(model, **(OPTIONS | options))
    assert session.cache.window_pool is None
    assert len({cache.shape[0] for cache in session.cache.tensors}) == 1


class OwnBuilder(get_backend("TORCH").builder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return AttentionMetadata(common_attn_metadata, self.backend, {}, self.block_size)


def test_a_backend_that_builds_by_itself(model, want, monkeypatch):
    """It knows nothing of blocks of windows: all layers share theirs."""
    monkeypatch.setattr(registry, "_registered", {})
    register_backend(dataclasses.replace(get_backend("TORCH"), name="OWN", builder=OwnBuilder))
    session = poisoned(make_session(model, backend="OWN", **OPTIONS))
    assert session.cache.window_pool is None
    assert session.generate(PROMPTS, 20, **SAMPLED) == want


@pytest.mark.parametrize("number", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_random_sessions(number, monkeypatch):
    """With as few blocks as let the longest chunk of one request run, or some more; half share."""
    made = build_model("gemma2")
    alone = results_alone(made, share_prefixes=False, reserve="need")
    for seed in range(number):
        monkeypatch.setattr(
            cache_size, "_blocks_of_a_batch",
            lambda _, options, more=seed % 4: 8 + options.max_tokens_per_step // 4 + 2 * more,
        )  # fmt: skip
        options = {"cache_tokens": 256, "max_tokens_per_step": [3, 8, 16][seed % 3]}
        run_session(made, alone, seed, reserve="need", **options)


def test_by_hand(model):
    """Slots of both kinds reach their layers; those of one kind are refused."""
    specs = attention_specs(model)
    cache = PagedKVCache(specs, num_tokens=40, window_blocks=9, block_size=4)
    cache.window_pool.reserve("other", 8, NO_MATCH)  # so that tables differ
    cache.reserve("a", 20)
    tables = [cache.block_table(["a"], windows=windows) for windows in (False, True)]
    whole, own = (CommonAttentionMetadata.from_lengths([20], [20], table, 4) for table in tables)
    split = whole.replace(
        window_block_table_tensor=own.block_table_tensor, window_slot_mapping=own.slot_mapping
    )
    backend = get_backend("TORCH")
    builder = backend.builder(backend, specs, 4, "cpu")
    pair = (whole.slot_mapping, own.slot_mapping)
    same = PagedKVCache(specs, num_tokens=40, block_size=4)
    logits = []
    for batch, slots, caches in (
        (split, pair, cache),
        (whole, pair[0], same),
        (split, pair[0], cache),
        (whole, pair, same),
    ):
        arguments = {"attn_metadata": builder.build(0, batch), "slot_mapping": slots}
        arguments |= {"kv_caches": caches.tensors, "use_cache": False}
        ids = torch.arange(20).unsqueeze(0)
        if len(logits) < 2:
            logits.append(model(input_ids=ids, position_ids=ids, **arguments).logits)
            continue
        with pytest.raises(ValueError, match=r"slot_mapping must be a (pair|tensor), as attn_meta"):
            model(input_ids=ids, position_ids=ids, **arguments)
    assert torch.equal(*logits)
