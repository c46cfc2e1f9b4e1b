"""What a review found wrong in the first version: each of these failed then."""

import copy

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention, get_backend, write_kv
from attn_ops.integrations import transformers as integration
from attn_ops.integrations.merged import check_merged, merge_projections
from graphs import DecodeSession
from graphs.sampling import SamplingParams, argmax, sample
from graphs.sampling.params import Sampling, stacked


def tiny(kind="LlamaConfig", **options):
    import transformers

    integration.register()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = getattr(transformers, kind)(**(sizes | heads | {"pad_token_id": 0} | options))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops")
    return model.eval().requires_grad_(False)


def test_rope_that_depends_on_the_batch_is_refused():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = tiny("Phi3Config", rope_parameters=rope, original_max_position_embeddings=20)
    with pytest.raises(ValueError, match="max_tokens must be at most 20 with rope_type 'longrope'"):
        DecodeSession(model, max_batch_size=2, max_tokens=40)
    DecodeSession(model, max_batch_size=2, max_tokens=20)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="max_tokens must be at most the model's 64, got 65"):
        DecodeSession(tiny(), max_batch_size=1, max_tokens=65)


def test_unknown_layer_types_are_refused():
    model = tiny()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="layer_types must be supported, got linear_attention"):
        DecodeSession(model, max_batch_size=1, max_tokens=8)


def test_non_causal_layers_are_refused():
    model = tiny()
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"is_causal must be True of model.layers.0.self_attn"):
        DecodeSession(model, max_batch_size=1, max_tokens=8)


def test_assigned_weights_reach_the_merged_product():
    model, other = tiny(), tiny()
    merge_projections(model)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    check_merged(model)
    attn = model.model.layers[1].self_attn
    torch.testing.assert_close(
        attn.k_proj.merged.weight[attn.k_proj.begin : attn.k_proj.end],
        other.model.layers[1].self_attn.k_proj.weight,
    )


def test_weights_taken_apart_are_refused():
    model = tiny()
    merge_projections(model)
    model.double()
    with pytest.raises(ValueError, match=r"q_proj.weight must be a view of its merged weight"):
        DecodeSession(model, max_batch_size=1, max_tokens=8)


def test_cache_of_another_block_size_is_refused_and_not_written():
    spec, torch_backend = AttentionSpec(2, 2, 16, torch.float32), get_backend("TORCH")
    table = torch.tensor([[1]], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths([2], [2], table, 16)
    meta = torch_backend.builder(torch_backend, [spec], 16, "cpu").build(0, common)
    cache, row = torch.zeros(4, 2, 8, 2, 16), torch.ones(2, 2, 16)
    for call in (lambda: write_kv(row, row, cache, meta), lambda: attention(row, cache, meta, 1.0)):
        with pytest.raises(ValueError, match="must have the metadata's block_size 16, got 8"):
            call()
    assert not cache.any()


def test_tiny_temperatures_are_greedy():
    logits = torch.randn(3, 50)
    params = [SamplingParams(temperature=t) for t in (1e-40, 1e-7, 0.0)]
    tokens = sample(logits, stacked(params), torch.arange(3), Sampling.RANDOM)
    assert torch.equal(tokens, logits.argmax(-1))


def test_chunked_argmax_takes_the_first_of_equal_maxima():
    logits = torch.randint(0, 5, (7, 64 * 64)).float()
    assert torch.equal(argmax(logits), logits.argmax(-1))


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch):
    session = DecodeSession(tiny(), max_batch_size=2, max_tokens=32)
    free, original = session.cache.num_free_blocks, session._call

    def interrupt(step):
        if session.num_steps["called"] > 2:
            raise KeyboardInterrupt
        return original(step)

    monkeypatch.setattr(session, "_call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.generate([[1], [2], [3]], 20)
    assert session.num_unfinished == 0
    assert session.cache.num_free_blocks == free
    assert not session._requests


def test_an_interrupted_warm_up_is_repeated(monkeypatch):
    session = DecodeSession(tiny(), max_batch_size=1, max_tokens=8)
    compiled = []

    def once():
        compiled.append(1)
        if len(compiled) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(session, "_compile", once)
    with pytest.raises(KeyboardInterrupt):
        session.warm_up()
    session.warm_up()
    session.warm_up()
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "12"}, "prompt must be a sequence of token ids"),
        ({"prompt": [1.7]}, "prompt must hold ints, got 1.7"),
        ({"prompt": [1], "eos": "3"}, "eos must hold ints, got '3'"),
        ({"prompt": [1], "eos": 64}, "eos must hold token ids from 0 to 63, got 64"),
        ({"prompt": [1], "temperature": None}, "temperature must be a number"),
        ({"prompt": [1], "max_new_tokens": True}, "max_new_tokens must be a positive int"),
    ],
)
def test_wrong_requests(arguments, message):
    session = DecodeSession(tiny(), max_batch_size=1, max_tokens=8)
    with pytest.raises(ValueError, match=message):
        session.add(**arguments)
    assert session.num_unfinished == 0


def test_dynamic_batch_makes_one_graph_without_a_session():
    model = tiny()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    specs = integration.attention_specs(model)
    torch_backend = get_backend("TORCH")
    builder = torch_backend.builder(torch_backend, specs, 16, "cpu")
    caches = [torch.zeros(4, 2, 16, 2, 8) for _ in specs]
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for query, seq in (([5, 3], [5, 3]), ([1, 1], [6, 4]), ([1], [7])):
        table = torch.tensor([[1], [2]][: len(query)], dtype=torch.int32)
        common = CommonAttentionMetadata.from_lengths(query, seq, table, 16)
        rows = sum(query)
        batch = {
            "input_ids": torch.ones(1, rows, dtype=torch.int64),
            "position_ids": torch.zeros(1, rows, dtype=torch.int64),
            "slot_mapping": common.slot_mapping,
            "logits_to_keep": torch.arange(len(query)),
        }
        keywords = {"attn_metadata": builder.build(0, common), "kv_caches": caches}
        with torch.no_grad(), integration.dynamic_batch(**batch):
            compiled(**batch, **keywords, use_cache=False)
    assert graphs["unique_graphs"] - before == 1
