"""What is done between two steps of a session.

A change takes the model and random numbers of its own, does the same to equal models, and returns
what it did, in words; or that and a context manager to be entered around each later step.

The truth after a change, where the session does not refuse it:

- `SAME`: the model computes what it did, or (training mode) is meant to. Tokens are the old ones.
- all others: tokens handed out before are the old model's; later ones are the new model's over the
  keys and values that the old one left. Tokens launched before the change may be the old one's.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.programs.models import attention_of, core, decoder_layers, mlp_name
from benchmarks.programs.surgeries import Inapplicable
from benchmarks.programs.wrappers import MIXERS, first_of, like

Around = Callable[[], Any]
Done = str | tuple[str, Around]


def train_all(model: Any, rng: random.Random) -> Done:
    if rng.random() < 0.3:  # else what the family drops: Phi its residuals
        for layer in decoder_layers(model):
            attention_of(layer).attention_dropout = 0.3
    model.train()
    return "model.train()"


def train_one(model: Any, rng: random.Random) -> Done:
    layer = rng.choice(list(decoder_layers(model)))
    layer.train()
    attention_of(layer).attention_dropout = 0.3
    return "one layer .train(), attention_dropout 0.3"


def eager(model: Any, rng: random.Random) -> Done:
    kind = rng.choice(("eager", "sdpa"))
    if model.config._attn_implementation == "attn_ops":  # the truth is eager anyway
        model.set_attn_implementation(kind)
    return f"set_attn_implementation({kind!r})"


def eager_in_one(model: Any, rng: random.Random) -> Done:
    layer = attention_of(rng.choice(list(decoder_layers(model))))
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"
    return "eager in a config of one layer"


def inference_mode(model: Any, rng: random.Random) -> Done:
    return "inference_mode around steps", torch.inference_mode


def grad_enabled(model: Any, rng: random.Random) -> Done:
    model.requires_grad_(True)
    return "gradients enabled around steps", torch.enable_grad


def checkpointing(model: Any, rng: random.Random) -> Done:
    model.gradient_checkpointing_enable()
    return "gradient_checkpointing_enable()"


def autocast(model: Any, rng: random.Random) -> Done:
    return "autocast around steps", lambda: torch.autocast("cpu", dtype=torch.bfloat16)


def module_scalar(model: Any, rng: random.Random) -> Done:
    layers = list(decoder_layers(model))
    i = rng.randrange(len(layers))
    name, value = rng.choice(
        (
            ("scaling", 0.05),
            ("scaling", 1.0),
            ("sliding_window", 2),
            ("sliding_window", None),
            ("attn_logit_softcapping", 1.0),
            ("is_causal", False),
            ("layer_idx", (i + 1) % len(layers)),
        )
    )
    setattr(attention_of(layers[i]), name, value)
    return f"{name} = {value} in attention {i}"


def norm_eps(model: Any, rng: random.Random) -> Done:
    norm = model.model.norm if hasattr(model.model, "norm") else model.model.final_layernorm
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            setattr(norm, name, 3.0)
            return f"{name} = 3.0 in the last norm"
    raise Inapplicable("no eps")


def config_field(model: Any, rng: random.Random) -> Done:
    name, value = rng.choice(
        (
            ("sliding_window", 2),
            ("sliding_window", None),
            ("attention_chunk_size", 3),
            ("num_hidden_layers", 1),
            ("num_hidden_layers", 2),
            ("final_logit_softcapping", 2.0),
            ("is_causal", False),
            ("vocab_size", 50),
            ("layer_types", ["full_attention"] * 5),
            ("layer_types", ["sliding_attention"] * 5),
            ("max_position_embeddings", 8),
            ("use_bidirectional_attention", True),
            ("use_cache", True),
        )
    )
    if name == "layer_types" and not getattr(model.config, name, None):
        raise Inapplicable("no layer_types")
    setattr(model.config, name, value)
    return f"config.{name} = {value}"


def model_scalar(model: Any, rng: random.Random) -> Done:
    """Numbers that the modules around attention have read from the config."""
    for name in ("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier"):
        for module in (model, model.model, *decoder_layers(model)):
            if hasattr(module, name):
                setattr(module, name, 0.4)
                return f"{name} = 0.4 in {type(module).__name__}"
    raise Inapplicable("no such number")


def forward_patched(model: Any, rng: random.Random) -> Done:
    layer = rng.choice(list(decoder_layers(model)))
    module = rng.choice((attention_of(layer), getattr(core(layer), mlp_name(layer))))
    plain = module.forward
    kind = rng.choice(("scale", "mean", "shift_causal"))

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        return like(out, MIXERS[kind](first_of(out)))

    module.forward = forward
    return f"{kind} by a patched forward of {type(module).__name__}"


def hook_added(model: Any, rng: random.Random) -> Done:
    module = core(rng.choice(list(decoder_layers(model))))
    kind = rng.choice(("scale", "scale", "mean", "shift_causal"))
    module.register_forward_hook(lambda m, args, out: like(out, MIXERS[kind](first_of(out))))
    return f"a hook added: {kind}"


def hook_removed(model: Any, rng: random.Random) -> Done:
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
            return f"hooks of {type(module).__name__} removed"
    raise Inapplicable("no hooks")


def _weight(model: Any, rng: random.Random) -> tuple[str, nn.Parameter]:
    """A weight of the model that decides something, by name."""
    names = [n for n, p in sorted(model.named_parameters()) if p.dim() > 1]
    name = rng.choice(names)
    return name, model.get_parameter(name)


def _other(p: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(p.numel())
    return p.data * 0.5 + 0.5 * p.data.std() * torch.randn(p.shape)


def in_place(model: Any, rng: random.Random) -> Done:
    name, p = _weight(model, rng)
    with torch.no_grad():
        p.copy_(_other(p))
    return f"{name}.copy_(new)"


def data_new(model: Any, rng: random.Random) -> Done:
    name, p = _weight(model, rng)
    p.data = _other(p)
    return f"{name}.data = new"


def parameter_new(model: Any, rng: random.Random) -> Done:
    name, p = _weight(model, rng)
    parent = model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], nn.Parameter(_other(p), requires_grad=False))
    return f"{name} = Parameter(new)"


def assigned(model: Any, rng: random.Random) -> Done:
    torch.manual_seed(1)
    state = {n: _other(t) if t.dim() > 1 else t.clone() for n, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return "load_state_dict(new, assign=True)"


def loaded(model: Any, rng: random.Random) -> Done:
    state = {n: _other(t) if t.dim() > 1 else t.clone() for n, t in model.state_dict().items()}
    model.load_state_dict(state)
    return "load_state_dict(new)"


def buffer_new(model: Any, rng: random.Random) -> Done:
    names = sorted(n for n, _ in model.named_buffers() if n.endswith("inv_freq"))
    names = [n for n in names if "original" not in n]
    if not names:
        raise Inapplicable("no inv_freq")
    parent = model.get_submodule(names[0].rpartition(".")[0])
    name = names[0].rpartition(".")[2]
    if rng.random() < 0.3:
        getattr(parent, name).mul_(0.3)
        return f"{names[0]}.mul_"
    setattr(parent, name, getattr(parent, name) * 0.3)
    return f"{names[0]} = new"


def layer_replaced(model: Any, rng: random.Random) -> Done:
    layers = decoder_layers(model)
    i, how = rng.randrange(len(layers)), rng.choice(("new", "swapped", "deleted", "doubled"))
    if how == "new":
        layers[i] = copy.deepcopy(layers[i])
        for p in layers[i].parameters():
            p.data = _other(p) if p.dim() > 1 else p.data
    elif how == "swapped":
        j = (i + 1) % len(layers)
        layers[i], layers[j] = layers[j], layers[i]
    elif how == "deleted":
        del layers[i]
    else:
        layers.append(layers[i])
        model.config.num_hidden_layers = len(layers)
    return f"layer {i} {how}"


def mlp_replaced(model: Any, rng: random.Random) -> Done:
    layer = core(rng.choice(list(decoder_layers(model))))
    setattr(layer, mlp_name(layer), nn.Linear(64, 64).requires_grad_(False))
    if "router_logits" in str(type(layer).forward.__code__.co_names):
        raise Inapplicable("a mixture of experts")
    return "an MLP replaced"


def head_replaced(model: Any, rng: random.Random) -> Done:
    head = nn.Linear(64, model.lm_head.weight.shape[0], bias=False).requires_grad_(False)
    torch.manual_seed(3)
    head.weight.data = torch.randn(head.weight.shape)
    model.lm_head = head
    return "lm_head replaced"


def dtype_changed(model: Any, rng: random.Random) -> Done:
    kind = rng.choice((torch.float64, torch.bfloat16))
    model.to(kind)
    return f"model.to({kind})"


def class_changed(model: Any, rng: random.Random) -> Done:
    base = type(model.model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = base.forward(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state.flip(-1)
        return out

    model.model.__class__ = type("Changed", (base,), {"forward": forward})
    return "class of the decoder replaced"


SAME = (train_all, train_one, eager, eager_in_one, inference_mode, grad_enabled, checkpointing)

OTHER = (
    autocast,
    module_scalar,
    norm_eps,
    config_field,
    model_scalar,
    forward_patched,
    hook_added,
    hook_removed,
    in_place,
    in_place,
    data_new,
    parameter_new,
    assigned,
    loaded,
    buffer_new,
    layer_replaced,
    mlp_replaced,
    head_replaced,
    dtype_changed,
    class_changed,
)

DRIVERS = ("two threads", "a thread generates", "default dtype", "release")
"""Changes of who steps, and how: the session's driver does them. Tokens are the old ones."""
