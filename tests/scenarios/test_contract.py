"""What a model must do to be decoded, and what finds it when it does not (docs/contract.md).

Every model here gave other tokens than its own `generate`, silently, before it was refused.
"""

import copy

import pytest
import torch
from torch import nn

import fx_passes
from attn_ops.integrations.transformers import attention_specs
from graphs.app.parity import Reference
from tests.fuzz.wrappers import MIXERS, Again, Around, OwnAttention
from tests.kit.models import build_model
from tests.kit.sessions import chunked, make_session, refuses, tokens_of

PROMPTS = [[5, 9, 3], list(range(20)), [60]]


@pytest.fixture
def model(make_model):
    return make_model("llama", num_layers=4)


def of_class(model, **methods):
    """The model as an instance of a subclass of its class with other methods."""
    model.__class__ = type("Changed", (type(model),), methods)
    return model


# -- logits ----------------------------------------------------------------------------------------


def ignores_rows(self, *args, logits_to_keep=0, **kwargs):
    return super(type(self), self).forward(*args, **kwargs)


def takes_the_last_rows(self, *args, logits_to_keep=0, **kwargs):
    count = logits_to_keep.numel() if isinstance(logits_to_keep, torch.Tensor) else logits_to_keep
    return super(type(self), self).forward(*args, logits_to_keep=count, **kwargs)


def turns_rows_around(self, *args, **kwargs):
    output = super(type(self), self).forward(*args, **kwargs)
    output.logits = output.logits.flip(1)
    return output


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_ignores_logits_to_keep(model, compiled):
    """Its head gets the rows that are wanted, once, however many sessions there are."""
    want = tokens_of(chunked(copy.deepcopy(model)).generate(PROMPTS, 6))
    of_class(model, forward=ignores_rows)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for session in (chunked(run), chunked(run)):
        assert tokens_of(session.generate(PROMPTS, 6)) == want
        assert session.report().num_recompiles == 0
    assert len(model.lm_head._forward_pre_hooks) == 1


def test_two_models_that_ignore_logits_to_keep_and_share_a_head(model):
    want = tokens_of(chunked(copy.deepcopy(model)).generate(PROMPTS, 6))
    other = of_class(copy.deepcopy(model), forward=ignores_rows)
    other.lm_head = model.lm_head
    of_class(model, forward=ignores_rows)
    for one in (model, other, model):
        assert tokens_of(chunked(one).generate(PROMPTS, 6)) == want


def test_a_model_that_ignores_logits_to_keep_and_names_no_head(model):
    of_class(model, forward=ignores_rows, get_output_embeddings=lambda self: None)
    refuses(model, r"logits must have shape \[1, .*logits_to_keep")


@pytest.mark.parametrize("forward", [takes_the_last_rows, turns_rows_around])
def test_logits_of_other_rows(model, forward):
    refuses(of_class(model, forward=forward), "got another row of logits")


def test_logits_are_counted_at_every_step(model):
    session = chunked(model)
    session.generate(PROMPTS, 2)
    of_class(model, forward=ignores_rows)
    with pytest.raises(ValueError, match="logits must have shape"):
        session.generate(PROMPTS, 2)


@pytest.mark.parametrize("columns", [50, 80])
def test_an_lm_head_of_another_size(model, columns):
    model.lm_head = nn.Linear(64, columns, bias=False)
    refuses(model, f"logits must have the config's vocab_size of 64 columns, got {columns}")


def test_fewer_embeddings_than_the_vocabulary(model):
    model.model.embed_tokens = nn.Embedding(50, 64)
    refuses(model, "input embeddings must have the config's vocab_size 64, got 50")


# -- each cache is written and attended once -------------------------------------------------------


def test_a_layer_that_is_run_twice(model):
    model.model.layers[3] = model.model.layers[2]
    refuses(model, "model.layers.2.self_attn must attend once in a forward")


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_with_one_layer_idx(model, compiled):
    model.model.layers[3] = copy.deepcopy(model.model.layers[2])
    wrapped = torch.compile(model, backend=fx_passes.attn_ops) if compiled else model
    refuses(wrapped, "model.layers.3.self_attn must have a layer_idx of its own, got 2, that of")


def test_a_gap_between_layers(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 3
    refuses(model, "layer_idx of model.layers.2.self_attn must be from 0 to 2, .* got 3")


def test_layers_in_another_order_are_decoded(model):
    layers = model.model.layers
    layers[1], layers[2] = layers[2], layers[1]
    reference = Reference(model)
    wanted = [reference.generate(p, 6)[0] for p in PROMPTS]
    assert [r.token_ids for r in chunked(model).generate(PROMPTS, 6)] == wanted


def test_a_layer_that_never_attends(model):
    class Skipped(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention  # there, with its layer_idx, and not called

        def forward(self, hidden_states, **kwargs):
            return self.attention.v_proj(hidden_states).repeat(1, 1, 2), None

    layer = model.model.layers[1]
    layer.self_attn = Skipped(layer.self_attn)
    chunked(model)  # rows do not meet in it
    for layer in (layer for i, layer in enumerate(model.model.layers) if i != 1):
        layer.self_attn = Skipped(layer.self_attn)
    refuses(model, "model.layers.0.self_attn.* must call the attention function")


def test_a_layer_that_attends_by_itself(model):
    layer = model.model.layers[1]
    layer.self_attn = OwnAttention(layer.self_attn, adds=False)
    refuses(model, "rows of a batch must meet in attention only")


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_an_mlp_that_attends_by_likeness(model, num_layers, seed):
    """Each row sees itself alone, to rounding, unless two rows are nearly equal.

    On a CPU a row of NaN spoils all rows there, as one FP8 scale for all does.
    """
    torch.manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.2)
    for layer in model.model.layers[:num_layers]:

        def attends(x, plain=layer.mlp.forward):
            y = plain(x)
            return y + nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)

        layer.mlp.forward = attends
    refuses(model, "rows of a batch must meet in attention only")


def test_a_layer_that_attends_now_and_then(model):
    model.model.layers[1] = Again(model.model.layers[1], "unless_short")
    refuses(model, "layers must attend in the same way in every forward|rows of a batch")


# -- what attention is asked for -------------------------------------------------------------------


@pytest.fixture
def qwen2_moe():
    """It holds a window and does not hand it to attention; its masks have it."""
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return build_model("qwen2_moe", **window)


def test_a_window_that_stands_in_the_mask_alone(qwen2_moe):
    """Tokens are compared in tests/fuzz/test_fuzz.py."""
    assert [s.sliding_window for s in make_session(qwen2_moe).specs] == [6, None]


def test_a_window_that_no_mask_has(qwen2_moe):
    qwen2_moe.model.layers[1].self_attn.sliding_window = 6
    qwen2_moe.config.layer_types = ["sliding_attention", "full_attention"]
    attention = qwen2_moe.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config.layer_types = ["sliding_attention"] * 2
    refuses(qwen2_moe, r"layers.1.self_attn must be given the mask that its options describe")


def test_a_window_that_only_the_mask_knows(make_model):
    model = make_model("mistral", num_layers=2)
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config.sliding_window = None
    refuses(model, "must be given the mask that its options describe .*sliding_window=None")


def test_a_mask_with_holes(model, monkeypatch):
    from transformers.models.llama import modeling_llama

    made = modeling_llama.create_causal_mask

    def with_holes(*args, **kwargs):
        even = lambda batch, head, row, key: (key % 2 == 0) | (key == row)  # noqa: E731
        return made(*args, **kwargs, and_mask_function=even)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", with_holes)
    refuses(model, "mask that its options describe .*does not see token")


def test_a_bias_on_the_mask(model, monkeypatch):
    from transformers.models.llama import modeling_llama

    made = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *a, **k: made(*a, **k) * 2.0)
    refuses(model, "attention_mask must reach attention as it was made.*mul")


def test_a_part_of_the_mask(model):
    class Narrow(type(model.model.layers[1])):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            if attention_mask is not None:
                attention_mask = attention_mask[..., 2:]
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)

    model.model.layers[1].__class__ = Narrow
    refuses(model, "attention_mask must reach attention as it was made.*a part of it")


def test_keywords_that_attention_would_not_look_at(model):
    attention = type(model.model.layers[0].self_attn)

    class Biased(attention):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states, *args, alibi=torch.ones(4), **kwargs)

    model.model.layers[2].self_attn.__class__ = Biased
    refuses(model, "attention of model.layers.2.self_attn .*got the keywords alibi")


@pytest.mark.parametrize("family", ["exaone4", "exaone_moe"])
def test_full_layers_have_no_window(family):
    """EXAONE-4's full layers hold the window of its sliding ones, and do not use it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        family, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, intermediate_size=96, sliding_window=6, sliding_window_pattern="LLLG",
        layer_types=["sliding_attention"] * 3 + ["full_attention"], moe_intermediate_size=32,
        num_experts=4, num_experts_per_tok=2, mlp_layer_types=["dense"] * 2 + ["sparse"] * 2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops")
    assert [s.sliding_window for s in attention_specs(model)] == [6, 6, 6, None]
    chunked(model.eval())


# -- rows meet in attention only -------------------------------------------------------------------


MIXTURES = {
    **{name: mix for name, mix in MIXERS.items() if name not in ("scale", "attend_rows")},
    "a norm over tokens": lambda x: x / x.norm(dim=1, keepdim=True),
    "draws": lambda x: nn.functional.dropout(x, 0.3, training=True),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_rows_that_meet_outside_attention(model, name):
    model.model.layers[1] = Around(model.model.layers[1], MIXTURES[name], before=False)
    refuses(model, "rows of a batch must meet in attention only")


def test_positions_counted_by_the_model(model):
    def counts(self, *args, position_ids=None, **kwargs):
        return super(type(self), self).forward(*args, **kwargs)

    refuses(of_class(model, forward=counts), "rows of a batch must meet in attention only.*")


def test_positions_that_the_models_own_generate_leaves_out(model):
    """Kosmos-2.5 counts them from behind its padding token's, where it is given none."""

    def leaves_out(self, *args, **kwargs):
        made = super(type(self), self).prepare_inputs_for_generation(*args, **kwargs)
        return made | {"position_ids": None}

    def counts_from_2(self, *args, position_ids=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(2, 2 + kwargs["input_ids"].shape[1])[None]
        return super(type(self), self).forward(*args, position_ids=position_ids, **kwargs)

    kind = type(model)
    of_class(model, prepare_inputs_for_generation=leaves_out)
    assert make_session(model).generate(PROMPTS, 2)
    model.__class__ = kind
    of_class(model, prepare_inputs_for_generation=leaves_out, forward=counts_from_2)
    refuses(model, "position_ids must count from 0, .* another query of model.layers.0.self_attn")


def test_positions_that_the_models_own_generate_makes(model):
    def doubles(self, *args, position_ids, **kwargs):
        made = super(type(self), self).prepare_inputs_for_generation(*args, **kwargs)
        return made | {"position_ids": 2 * position_ids}

    refuses(
        of_class(model, prepare_inputs_for_generation=doubles), "position_ids must count from 0"
    )


def test_what_rows_do_alone_is_theirs(model):
    model.model.layers[1] = Around(model.model.layers[1], MIXERS["scale"], before=False)
    chunked(model)
