"""Transformers models with layers that keep states, by hand, and what is refused of them."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv, causal_conv1d_update

from attn_ops import CommonAttentionMetadata, PagedKVCache, get_backend
from attn_ops.integrations import transformers as integration
from attn_ops.integrations.transformers.states import CACHES, StateCache, keep_states, state_layers
from attn_ops.states import StatePool
from tests.kit.sessions import make_session, tokens_of
from tests.kit.state_models import build_state_model

BLOCK = 4


def refused(model, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_session(model)


def test_the_states_of_layers():
    """A forward of two tokens finds them; attention layers between them have the caches."""
    model = build_state_model("qwen3_next")
    assert len(integration.attention_specs(model)) == 1
    assert integration.cache_index(model.model.layers[2].self_attn) == 0
    places = {spec.place: (spec.shape, spec.dtype) for spec in integration.state_specs(model)}
    conv, recurrent = ((128, 3), torch.float32), ((4, 16, 16), torch.float32)
    kinds = {"conv": conv, "recurrent": recurrent}
    assert places == {(kind, i, 0): kinds[kind] for i in (0, 1, 3) for kind in kinds}
    half = copy.deepcopy(model).bfloat16()
    dtypes = {spec.place[0]: spec.dtype for spec in integration.state_specs(half)}
    assert dtypes == {"conv": torch.bfloat16, "recurrent": torch.float32}
    specs = integration.state_specs(build_state_model("nemotron_h"))
    assert {spec.prompt_dt for spec in specs} == {(0.001, None)}
    assert {spec.place[0]: spec.by_columns for spec in specs} == {"conv": True, "recurrent": False}
    pool = StatePool(integration.state_specs(model), num_requests=2)
    assert pool.tensors["conv", 0, 0].stride() == (3 * 128, 1, 128)
    assert pool.tensors["recurrent", 0, 0].stride() == (4 * 256, 256, 1, 16)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "nemotron_h"])
@pytest.mark.parametrize("compiled", [False, True])
def test_by_hand(name, compiled):
    """Two prompts in chunks of any size give the logits of the model alone."""
    model = build_state_model(name)
    model.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in (9, 6)]
    want = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    model.set_attn_implementation("attn_ops")
    specs, backend = integration.attention_specs(model), get_backend("TORCH")
    cache = PagedKVCache(specs, num_tokens=64, block_size=BLOCK)
    pool = StatePool(integration.state_specs(model), 2)
    builder = backend.builder(backend, specs, BLOCK, "cpu")
    slots = torch.tensor([pool.take(request) for request in range(2)])
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for request, prompt in enumerate(prompts):
        cache.reserve(request, len(prompt))
    done = [0, 0]
    for sizes in ([4, 1], [1, 3], [4, 2]):
        ends = [begin + size for begin, size in zip(done, sizes, strict=True)]
        table = cache.block_table(range(2))
        common = CommonAttentionMetadata.from_lengths(sizes, ends, table, BLOCK)
        places = [range(*place) for place in zip(done, ends, strict=True)]
        ids = [prompt[i] for prompt, p in zip(prompts, places, strict=True) for i in p]
        lens = torch.tensor([9, 6])
        states = integration.StateCache(pool, slots, common.query_start_loc, common.seq_lens, lens)
        out = run(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([[i for p in places for i in p]]),
            attn_metadata=builder.build(0, common),
            kv_caches=cache.tensors,
            use_cache=False,
            **{integration.cache_name(model): states},
        ).logits[0]
        wanted = torch.cat([rows[p.start : p.stop] for rows, p in zip(want, places, strict=True)])
        torch.testing.assert_close(out, wanted, atol=2e-4, rtol=1e-3)
        done = ends


@pytest.mark.parametrize("name", ["mamba", "lfm2"])
def test_the_keyword_of_a_compiled_model(name):
    """It takes any keyword, and drops the cache that it knows by another one."""
    model = build_state_model(name)
    keyword = integration.cache_name(model)
    assert keyword in inspect.signature(model.forward).parameters
    assert integration.cache_name(torch.compile(model, backend="eager")) == keyword


def test_a_copy_has_layers_of_its_own():
    model = build_state_model("lfm2")
    keep_states(model)
    for layer in state_layers(copied := copy.deepcopy(model)):
        assert layer.forward.__self__ is layer
    keep_states(copied)


def test_a_replaced_forward_is_refused():
    model = build_state_model("lfm2")
    layer = state_layers(model)[0]
    layer.forward = lambda *args, **kwargs: args[0]
    refused(model, "forward of Lfm2ShortConv must be its class's, got <function")


def cache_of(kwargs):
    return next(kwargs[name] for name in CACHES if name in kwargs)


class Looks(Lfm2ShortConv):
    """Computes with its state, which is an argument of the function by place."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        state = cache_of(kwargs).get_conv_state(self.layer_idx)
        return causal_conv1d_update(hidden_states, state.mean(), self.conv.weight)


class Halves(Looks):
    """Takes a part of its state that is none of one head."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        state = cache_of(kwargs).get_conv_state(self.layer_idx)
        return causal_conv1d_update(hidden_states, state[:, :2], self.conv.weight)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Looks, "layers with a state must only hand it to .* has no attribute 'mean'"),
        (Halves, r"a part of a state must be state\[:, number\], got .*slice\(None, 2, None\)"),
    ],
)
def test_a_layer_that_looks_at_its_state_is_refused(kind, match):
    model = build_state_model("lfm2")
    model.model.layers[0].conv.__class__ = kind
    refused(model, match)


def test_layers_that_are_told_their_number_and_states_of_single_heads():
    model = build_state_model("zamba")
    assert len(integration.attention_specs(model)) == 2
    attending = [m for n, m in model.named_modules() if n.endswith("self_attn")]
    assert [(layer.layer_idx, layer.cache_number) for layer in attending] == [(1, 0), (3, 1)]
    places = {spec.place for spec in integration.state_specs(model)}
    heads = {("recurrent", layer, head) for layer in range(4) for head in range(2)}
    assert places == heads | {("conv", layer, 0) for layer in range(4)}


class Mixes(nn.Module):
    """Adds the row before to every row."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, *args, **kwargs):
        return self.inner(x + 0.5 * x.roll(1, dims=-2), *args, **kwargs)


def test_rows_that_meet_outside_the_states_are_refused():
    model = build_state_model("lfm2")
    model.model.layers[1].feed_forward = Mixes(model.model.layers[1].feed_forward)
    refused(model, "rows of a batch must meet in attention only")


def test_a_state_that_two_layers_share_is_refused():
    model = build_state_model("lfm2")
    model.model.layers[1].conv.layer_idx = 0
    refused(model, "layers must use a state once in a forward, got 2 times conv state 0 of layer 0")


def test_a_batch_without_handles_is_refused():
    """The model's own code would compute one sequence of all rows."""
    model = build_state_model("lfm2")
    session = make_session(model)
    step = session.runner.inputs
    step.has_states = False
    with pytest.raises(ValueError, match="the cache must be a StateCache"):
        session.generate([[1, 2, 3]], 2)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "jamba"])
def test_a_layer_that_computes_something_else_is_refused(name, monkeypatch):
    """Its prompts show what its own functions do, which ours might not."""
    model = build_state_model(name)
    layer = state_layers(model)[1]
    scope = inspect.unwrap(type(layer).forward).__globals__
    own = scope["causal_conv1d_fn"]

    def without_activation(*args, activation=None, **kwargs):
        return own(*args, activation=None, **kwargs)

    monkeypatch.setitem(scope, "causal_conv1d_fn", without_activation)
    refused(model, "must compute what causal_conv1d_update, .* say, .* got a layer whose own code")


def test_layers_are_copied_and_pickled_as_before():
    """With their own weights: nothing of a layer holds another one."""
    model = build_state_model("lfm2")
    make_session(model)
    model.set_attn_implementation("sdpa")
    tokens = torch.tensor([[5, 9, 3, 7]])
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(tokens, use_cache=False).logits, wanted)
        layer = model.model.layers[0].conv
        twin = copy.copy(layer)
        twin._modules = dict(layer._modules)
        twin.in_proj = copy.deepcopy(layer.in_proj)
        twin.in_proj.weight.data.zero_()
        x = torch.randn(1, 5, layer.in_proj.in_features)
        assert not torch.equal(twin(x), layer(x))
    for one in (model, again):
        one.set_attn_implementation("attn_ops")
    assert tokens_of(make_session(again).generate([[5, 9]], 5)) == tokens_of(
        make_session(model).generate([[5, 9]], 5)
    )


def test_clamps_need_the_lengths_of_prompts():
    model = build_state_model("nemotron_h", time_step_floor=0.3, time_step_min=0.3)
    session = make_session(model)
    pool = session.cache.states
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^prompt_lens must be given for layers that clamp step"):
        StateCache(pool, one, torch.tensor([0, 1]), one)


def test_a_model_of_peft_takes_states():
    peft = pytest.importorskip("peft")
    model = build_state_model("mamba")
    wanted = tokens_of(make_session(model).generate([[5, 9, 3]], 6))
    config = peft.LoraConfig(r=4, target_modules=["in_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    assert tokens_of(make_session(adapted).generate([[5, 9, 3]], 6)) == wanted
