"""Merged projections: the same numbers and keys, updates, copies, layers left alone."""

import copy

import pytest
import torch
from torch import nn

from attn_ops.integrations import merged
from attn_ops.integrations.merged import MergedSlice, merge_projections
from attn_ops.integrations.merged_views import MergedViews
from graphs import DecodeSession
from tests.kit.models import CONFIGS, build_model
from tests.kit.state_models import build_state_model


def test_assigned_weights_reach_the_merged_product():
    model, other = build_model(), build_model()
    merge_projections(model)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    MergedViews(model).check()
    attn = model.model.layers[1].self_attn
    torch.testing.assert_close(
        attn.k_proj.merged.weight[attn.k_proj.begin : attn.k_proj.end],
        other.model.layers[1].self_attn.k_proj.weight,
    )


def test_weights_taken_apart_are_refused():
    model = build_model()
    merge_projections(model)
    model.double()
    with pytest.raises(ValueError, match=r"q_proj.weight must be a view of its merged weight"):
        DecodeSession(model, max_batch_size=1, max_tokens=8)
    with pytest.raises(ValueError, match=r"merge_projections must be known, got 'yes'"):
        DecodeSession(model, max_batch_size=1, max_tokens=8, merge_projections="yes")


def test_a_session_mends_what_was_taken_apart():
    """The numbers are those of the slices."""
    model = build_model()
    state = copy.deepcopy(model.state_dict())
    assert merge_projections(model) == 4
    model.double()
    session = DecodeSession(model, max_batch_size=1, max_tokens=8, merge_projections=True)
    assert session.report().products == "4 groups of projections share a product"
    MergedViews(model).check()
    assert all(
        torch.equal(value, state[name].double()) for name, value in model.state_dict().items()
    )
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight.data.fill_(2)
    assert (attention.q_proj.merged.weight[: attention.q_proj.end] == 2).all()


@pytest.mark.slow
def test_sessions_merge_when_they_are_asked(make_model):
    """The same tokens, names and gradients; on a CPU not unasked."""
    model = make_model()
    names = list(model.state_dict())
    options = {"max_batch_size": 2, "max_tokens": 40}
    plain = DecodeSession(model, **options)
    assert plain.report().products == "not merged: merge_projections is False"
    assert DecodeSession(model, merge_projections="auto", **options).products == (
        "not merged: the model is not compiled: each layer computes its own product"
    )
    wanted = plain.generate([[1, 2, 3], [4]], max_new_tokens=5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    auto = DecodeSession(compiled, merge_projections="auto", **options)
    assert "no gain was measured on a cpu" in auto.products
    merged = DecodeSession(compiled, merge_projections=True, **options)
    assert merged.report().products == "4 groups of projections share a product"
    assert list(model.state_dict()) == names
    assert merged.generate([[1, 2, 3], [4]], max_new_tokens=5) == wanted
    again = DecodeSession(compiled, merge_projections=False, **options)
    assert again.report().products == "4 groups of projections share a product"


def test_gradients_reach_the_layers_own_weights():
    model = Projections(*(nn.Linear(4, 4) for _ in range(3)))
    merge_projections(model)
    compiled = torch.compile(model.k_proj, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        wanted = compiled(torch.ones(2, 4))
    out = compiled(torch.ones(2, 4))
    torch.testing.assert_close(out, wanted)
    out.sum().backward()
    torch.testing.assert_close(model.k_proj.weight.grad, torch.full((4, 4), 2.0))


class Wrapped(torch.Tensor):
    """As libraries hold quantized weights."""


def test_quantized_weights_are_left_alone_unasked():
    """Asked for, they are refused, as by `merge_projections`."""
    model = Projections(*(nn.Linear(4, 4) for _ in range(3)))
    cuda = torch.device("cuda")
    assert merged.why_unmerged(model, cuda, compiled=True) is None
    model.q_proj.weight = nn.Parameter(torch.ones(4, 4).as_subclass(Wrapped))
    assert merged.why_unmerged(model, cuda, compiled=True) == "the weights are quantized"
    assert "no layers are siblings by the names" in str(
        merged.why_unmerged(nn.Linear(2, 2), cuda, compiled=True)
    )


LENGTHS = [1, 5, 13, 2]  # of prompts; the windows of the tiny models are 6 and 7


@pytest.mark.parametrize(
    ("name", "groups"), [("llama", 4), ("qwen3", 4), ("gemma2", 4), ("phi3", 0)]
)
def test_merging_changes_no_eager_number_and_no_key(make_model, make_prompts, name, groups):
    model = make_model(name)
    keywords = make_prompts(model, LENGTHS).keywords
    state, wanted = copy.deepcopy(model.state_dict()), model(**keywords).logits
    names = [n for n, _ in model.named_parameters()]
    assert merge_projections(model) == groups
    assert torch.equal(model(**keywords).logits, wanted)
    after = model.state_dict()
    assert list(after) == list(state)
    assert [n for n, _ in model.named_parameters()] == names
    assert all(torch.equal(after[n], state[n]) for n in state)
    assert merge_projections(model) == 0, "merging again changes nothing"


SIBLINGS = {  # groups, and the siblings of one
    "deepseek_v2": (4, "q_a_proj_kv_a_proj_with_mqa"),
    "qwen3_next": (8, "in_proj_qkvz_in_proj_ba"),
    "qwen3_5_text": (8, "in_proj_qkv_in_proj_z_in_proj_b_in_proj_a"),
    "olmo_hybrid": (8, "q_proj_k_proj_v_proj_a_proj_b_proj_g_proj"),
    "kimi_linear": (8, "q_proj_k_proj_v_proj_b_proj_g_a_proj"),
    "bailing_hybrid": (8, "q_proj_k_proj_v_proj_b_proj_g_proj"),
    "lfm2": (5, "w1_w3"),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_are_in_one_group_each(name):
    model = build_model(name) if name in CONFIGS else build_state_model(name)
    groups, siblings = SIBLINGS[name]
    assert merge_projections(model) == groups
    found = [n for n, _ in model.named_modules() if n.endswith("_merged")]
    assert len(found) == groups
    assert any(n.endswith(f".{siblings}_merged") for n in found)


@pytest.mark.parametrize("bias", [False, True])
def test_in_place_updates_reach_the_merged_product(make_model, make_prompts, bias):
    model = make_model(attention_bias=bias)
    keywords = make_prompts(model, LENGTHS).keywords
    assert merge_projections(model) == 4
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = compiled(**keywords).logits
    torch.testing.assert_close(before, model(**keywords).logits, atol=1e-5, rtol=1e-5)
    attention = model.model.layers[1].self_attn
    attention.k_proj.weight.data.mul_(2)
    if bias:
        attention.v_proj.bias.data.add_(1)
    model.model.layers[0].mlp.up_proj.weight.data.normal_()
    after = compiled(**keywords).logits
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, model(**keywords).logits, atol=1e-5, rtol=1e-5)
    other = make_model(attention_bias=bias)
    other.lm_head.weight.data.mul_(0.5)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(
        compiled(**keywords).logits, other(**keywords).logits, atol=1e-5, rtol=1e-5
    )


class Projections(nn.Module):
    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = q, k, v


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


def patched() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias) + 1
    return layer


def saving() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.register_state_dict_post_hook(lambda *args: None)
    return layer


UNLIKE = {
    "no such layers": nn.Sequential(nn.Linear(4, 4)),
    "one is missing": nn.ModuleDict({"gate_proj": nn.Linear(4, 4)}),
    "bias": Projections(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)),
    "input size": Projections(nn.Linear(4, 4), nn.Linear(5, 4), nn.Linear(4, 4)),
    "dtype": Projections(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4)),
    "device": Projections(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4)),
    "subclass": Projections(nn.Linear(4, 4), Scaled(4, 4), nn.Linear(4, 4)),
    "hook": Projections(nn.Linear(4, 4), hooked(), nn.Linear(4, 4)),
    "forward of its own": Projections(nn.Linear(4, 4), patched(), nn.Linear(4, 4)),
    "hook of the state dict": Projections(nn.Linear(4, 4), saving(), nn.Linear(4, 4)),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_other_layers_are_left_alone(case):
    model = UNLIKE[case]
    before = dict(model.named_modules())
    assert merge_projections(model) == 0
    assert dict(model.named_modules()) == before
    assert not any(isinstance(m, MergedSlice) for m in model.modules())


def test_a_copy_of_a_merged_model_is_merged_too():
    """Updates of its weights reach its product, and not the original's; it keeps hooks too."""
    x = torch.randn(2, 4)
    model = Projections(*(nn.Linear(4, 4) for _ in range(3))).requires_grad_(False)
    merge_projections(model)
    model.q_proj.register_forward_hook(lambda module, args, output: output * 2)
    model.v_proj.forward = lambda x: 3 * x
    twin = copy.deepcopy(model)
    twin.k_proj.weight.data.mul_(3)
    wanted = twin.k_proj(x)
    torch.testing.assert_close(torch.compile(twin.k_proj, backend="aot_eager")(x), wanted)
    torch.testing.assert_close(torch.compile(model.k_proj, backend="aot_eager")(x), model.k_proj(x))
    assert torch.equal(twin.q_proj(x), model.q_proj(x))
    assert torch.equal(twin.v_proj(x), 3 * x)


def test_a_patched_class_is_left_alone(monkeypatch):
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) + 1)
    assert merge_projections(Projections(*(nn.Linear(4, 4) for _ in range(3)))) == 0


def test_tied_weights_are_left_alone():
    """One tensor cannot be rows of two merged weights."""
    model = build_model()
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    second.q_proj.weight = first.q_proj.weight
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    assert merge_projections(model) == 2 * len(model.model.layers) - 4
    MergedViews(model).check()
    assert second.q_proj.weight is first.q_proj.weight


def test_a_weight_parametrized_after_merging_is_computed_alone():
    class Twice(nn.Module):
        def forward(self, w):
            return w * 2

    model = build_model()
    merge_projections(model)
    layer = model.model.layers[0].self_attn.q_proj
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    MergedViews(model).check()
    x = torch.randn(3, layer.in_features)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="eager")(x), layer(x))
