"""What is done to a model before a session sees it: to layers, masks, positions, logits, hooks.

A surgery takes the model and random numbers of its own; it returns what it did, in words. Done to
two equal models with equal random numbers, it does the same to both.
"""

import copy
import functools
import random
from typing import Any

import peft
import torch
from torch import nn

from tests.fuzz.wrappers import (
    AGAIN,
    MIXERS,
    Again,
    Around,
    Counter,
    Memory,
    Mixer,
    OtherMask,
    OwnAttention,
    Positions,
    first_of,
    like,
)


class Inapplicable(Exception):
    """The model has not got what a surgery is about."""


def core(layer: Any) -> Any:
    """A decoder layer without what was wrapped around it."""
    while not hasattr(layer, "self_attn"):
        layer = layer.inner
    return layer


def attention_of(layer: Any) -> Any:
    """The attention module of a layer, without what was wrapped around it."""
    attention = core(layer).self_attn
    while hasattr(attention, "inner"):
        attention = attention.inner
    return attention


def mlp_name(layer: Any) -> str:
    return "feed_forward" if hasattr(core(layer), "feed_forward") else "mlp"


# -- layers ----------------------------------------------------------------------------------------


def relisted(model: Any, rng: random.Random) -> str:
    """Layers in another order, one removed, or one twice; layer_idx and config follow or not."""
    layers, config = list(model.model.layers), model.config
    i, how = rng.randrange(len(layers)), rng.choice(("shuffled", "removed", "twice", "copied"))
    if how == "shuffled":
        rng.shuffle(layers)
    elif how == "removed":
        del layers[i]
    else:
        twin = layers[i] if how == "twice" else copy.deepcopy(layers[i])
        layers.insert(rng.choice((i + 1, len(layers))), twin)
    types = getattr(config, "layer_types", None)
    if types:
        config.layer_types = [types[attention_of(x).layer_idx] for x in layers]
    if renumber := rng.random() < 0.5:
        for place, layer in enumerate(layers):
            attention_of(layer).layer_idx = place
    if resize := rng.random() < 0.7:
        config.num_hidden_layers = len(layers)
    model.model.layers = nn.ModuleList(layers)
    return f"layer {i} {how}{', renumbered' * renumber}{', config resized' * resize}"


def shared(model: Any, rng: random.Random) -> str:
    layers = model.model.layers
    i, j = rng.sample(range(len(layers)), 2)
    what = rng.choice(("layer", "attention", "k_proj"))
    if what == "layer":
        layers[j] = layers[i]
    elif what == "attention":
        core(layers[j]).self_attn = core(layers[i]).self_attn
    else:
        attention_of(layers[j]).k_proj = attention_of(layers[i]).k_proj
    return f"{what} of layer {i} in layer {j} too"


def other_layer_idx(model: Any, rng: random.Random) -> str:
    layers = model.model.layers
    i, j = rng.sample(range(len(layers)), 2)
    first, second = attention_of(layers[i]), attention_of(layers[j])
    how = rng.choice(("swapped", "the same", "negative", "past the end"))
    if how == "swapped":
        first.layer_idx, second.layer_idx = second.layer_idx, first.layer_idx
    elif how == "the same":
        first.layer_idx = second.layer_idx
    else:
        first.layer_idx = -1 if how == "negative" else len(layers)
    return f"{how}: layers {i}, {j}"


def _mixer(rng: random.Random, size: int) -> tuple[nn.Module, str]:
    kind = rng.choice((*MIXERS, "counter buffer", "counter attribute", "memory", "positions"))
    if kind.startswith("counter"):
        return Counter(kind.endswith("buffer")), kind
    own = {"memory": Memory, "positions": Positions}
    return (own[kind](size) if kind in own else Mixer(kind)), kind


def mixed(model: Any, rng: random.Random) -> str:
    """Something is done to the rows before or after one module."""
    mixer, kind = _mixer(rng, model.config.hidden_size)
    layers = model.model.layers
    i, before = rng.randrange(len(layers)), rng.random() < 0.5
    place = rng.choice(("layer", "attention", "mlp", "embedding", "norm", "head"))
    if place == "layer":
        layers[i] = Around(layers[i], mixer, before)
    elif place == "embedding":
        model.model.embed_tokens = Around(model.model.embed_tokens, mixer, False)
    elif place == "head":
        model.lm_head = Around(model.lm_head, mixer, True)
    else:
        parent = model.model if place == "norm" else core(layers[i])
        name = {"attention": "self_attn", "mlp": mlp_name(layers[i])}.get(place, place)
        setattr(parent, name, Around(getattr(parent, name), mixer, before))
    return f"{kind} {'before' if before else 'after'} {place} {i}"


def called_again(model: Any, rng: random.Random) -> str:
    layers = model.model.layers
    i, kind = rng.randrange(len(layers)), rng.choice(AGAIN)
    if rng.random() < 0.5:
        layers[i] = Again(layers[i], kind)
        return f"layer {i}: {kind}"
    core(layers[i]).self_attn = Again(core(layers[i]).self_attn, kind)
    return f"attention {i}: {kind}"


def own_attention(model: Any, rng: random.Random) -> str:
    layer, adds = rng.choice(list(model.model.layers)), rng.random() < 0.5
    core(layer).self_attn = OwnAttention(attention_of(layer), adds)
    return f"sdpa {'beside' if adds else 'instead of'} the interface"


def own_config(model: Any, rng: random.Random) -> str:
    """One attention module has a config of its own, which names another implementation."""
    layer = attention_of(rng.choice(list(model.model.layers)))
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = kind = rng.choice(("eager", "sdpa"))
    return f"{kind} in one layer"


def layer_mask(model: Any, rng: random.Random) -> str:
    layers = model.model.layers
    i, width = rng.randrange(len(layers)), rng.choice((2, 4))
    layers[i] = OtherMask(layers[i], width)
    return f"layer {i} narrows its mask to {width}"


# -- attributes and configs ------------------------------------------------------------------------

MODULE_VALUES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, 2, 3, 50),
    "scaling": (0.1, 0.5, 1.0),
    "attn_logit_softcapping": (None, 1.0, 5.0),
    "is_causal": (False, None, 0),
    "attention_dropout": (0.3,),
    "is_sliding": (True, False),
    "attn_temperature_tuning": (True,),
}
CONFIG_VALUES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, 2, 4),
    "attn_logit_softcapping": (None, 3.0),
    "final_logit_softcapping": (None, 3.0),
    "attention_chunk_size": (3, 4),
    "num_key_value_heads": (1, 4),
    "num_attention_heads": (2, 8),
    "head_dim": (8, 32),
    "vocab_size": (50, 120),
    "max_position_embeddings": (8, 20),
    "is_causal": (False,),
    "use_bidirectional_attention": (True,),
    "use_cache": (True,),
    "num_hidden_layers": (1, 2, 7),
    "use_sliding_window": (True, False),
    "rms_norm_eps": (1.0,),
}


def module_value(model: Any, rng: random.Random) -> str:
    """An attribute of one attention module, which its config does not know of."""
    name, layers = rng.choice(list(MODULE_VALUES)), list(model.model.layers)
    i, value = rng.randrange(len(layers)), rng.choice(MODULE_VALUES[name])
    setattr(attention_of(layers[i]), name, value)
    return f"{name} = {value} in attention {i}"


def config_value(model: Any, rng: random.Random) -> str:
    """A field of the config, which modules that were built from it have read before."""
    name = rng.choice(list(CONFIG_VALUES))
    value = rng.choice(CONFIG_VALUES[name])
    setattr(model.config, name, value)
    return f"config.{name} = {value}"


def layer_types(model: Any, rng: random.Random) -> str:
    """Other layer types than those that the layers were built for."""
    types = getattr(model.config, "layer_types", None)
    if not types:
        raise Inapplicable("no layer_types")
    chunked = "chunked_attention" in types
    kinds = ["full_attention", "chunked_attention" if chunked else "sliding_attention"]
    if not chunked and getattr(model.config, "sliding_window", None) is None:
        model.config.sliding_window = 4
    model.config.layer_types = [rng.choice(kinds) for _ in types]
    return f"layer_types = {model.config.layer_types}"


def sinks(model: Any, rng: random.Random) -> str:
    layer = attention_of(rng.choice(list(model.model.layers)))
    layer.sinks = nn.Parameter(torch.randn(4) + 2, requires_grad=False)
    return "sinks that may not be passed on"


def other_rope(model: Any, rng: random.Random) -> str:
    config, rope = model.config, model.model.rotary_emb
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        raise Inapplicable("rope by layer type")
    kind = rng.choice(("theta", "linear", "dynamic", "yarn"))
    more: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "theta":
        more = {"rope_theta": rng.choice((100.0, 5e5))}
    elif kind == "dynamic":
        config.max_position_embeddings = 16
    elif kind == "yarn":
        more["original_max_position_embeddings"] = 16
    config.rope_parameters = parameters | more
    model.model.rotary_emb = type(rope)(config)
    return f"rope {kind}"


def trained(model: Any, rng: random.Random) -> str:
    """Training mode with dropout somewhere; the truth is the model in evaluation mode."""
    layer = rng.choice(list(model.model.layers))
    name = mlp_name(layer)
    inner = getattr(core(layer), name)
    setattr(core(layer), name, Around(inner, nn.Dropout(0.4), rng.random() < 0.5))
    module = rng.choice((model, layer))
    module.train()
    return f"{type(module).__name__} in training mode"


# -- forwards, hooks, adapters ---------------------------------------------------------------------


def _subclass(module: nn.Module, forward: Any) -> None:
    """Make the module one of a subclass that has `forward(base, self, ...)`."""
    base = type(module)

    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(base, self, *args, **kwargs)

    module.__class__ = type(f"Own{base.__name__}", (base,), {"forward": inside})


def _logits(kind: str, base: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    kept = kwargs.get("logits_to_keep", 0)
    num_kept = kept if isinstance(kept, int) else kept.shape[0]
    if kind in ("all rows", "last rows", "first rows"):
        kwargs["logits_to_keep"] = 0
    elif kind == "last row":
        kwargs["logits_to_keep"] = 1
    out = base.forward(self, *args, **kwargs)
    if kind == "last rows":
        out.logits = out.logits[:, -num_kept:]
    elif kind == "first rows":
        out.logits = out.logits[:, : num_kept or None]
    elif kind == "other order" and not isinstance(kept, int):
        out.logits = out.logits.flip(1)
    elif kind == "last row rolled" and out.logits.shape[1]:  # a processor put into the model
        last = out.logits[:, -1:].roll(1, dims=-1)
        out.logits = torch.cat((out.logits[:, :-1], last), 1)
    elif kind == "seen banned":  # no token comes twice
        seen = torch.zeros(out.logits.shape[-1])
        out.logits = out.logits - 1000.0 * seen.index_fill(0, kwargs["input_ids"].flatten(), 1.0)
    return out


def other_logits(model: Any, rng: random.Random) -> str:
    kind = rng.choice(("all rows", "last rows", "first rows", "last row", "other order",
                       "last row rolled", "seen banned"))  # fmt: skip
    _subclass(model, functools.partial(_logits, kind))
    return f"logits: {kind}"


def _inputs(kind: str, base: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    x, position_ids = kwargs.get("input_ids"), kwargs.get("position_ids")
    if kind == "positions halved":
        rows = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        kwargs["position_ids"] = rows // 2
    elif kind == "positions ignored":
        kwargs["position_ids"] = None
    elif kind == "positions counted":
        kwargs["position_ids"] = torch.ones_like(x).cumsum(-1) - 1
    elif kind == "mask of ones":
        kwargs["attention_mask"] = torch.ones_like(x)
    elif kwargs.get("attention_mask") is None:  # a mask of its own
        size = x.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril().triu(-3)
        kwargs["attention_mask"] = mask[None, None]
    return base.forward(self, *args, **kwargs)


def other_inputs(model: Any, rng: random.Random) -> str:
    kind = rng.choice(("positions halved", "positions ignored", "positions counted",
                       "mask of ones", "4D mask"))  # fmt: skip
    _subclass(model.model, functools.partial(_inputs, kind))
    return kind


def hooked(model: Any, rng: random.Random) -> str:
    """A hook or forward around a layer, its attention or its MLP."""
    layer = rng.choice(list(model.model.layers))
    module = rng.choice((layer, attention_of(layer), getattr(core(layer), mlp_name(layer))))
    kind = rng.choice(("scale", "scale", *MIXERS))
    how = rng.choice(("hook", "pre-hook", "forward", "class"))

    def after(out: Any) -> Any:
        return like(out, MIXERS[kind](first_of(out)))

    def before(m: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (MIXERS[kind](args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": MIXERS[kind](kwargs["hidden_states"])}

    if how == "hook":
        module.register_forward_hook(lambda m, args, out: after(out))
    elif how == "pre-hook":
        module.register_forward_pre_hook(before, with_kwargs=True)
    elif how == "forward":
        plain = module.forward
        module.forward = lambda *args, **kwargs: after(plain(*args, **kwargs))
    else:
        _subclass(module, lambda base, self, *a, **k: after(base.forward(self, *a, **k)))
    return f"{kind} by {how} of {type(module).__name__}"


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4, "init_lora_weights": False},
    "DORA": {"r": 4, "init_lora_weights": False, "use_dora": True},
    "ALORA": {"r": 4, "init_lora_weights": False, "alora_invocation_tokens": [33, 2]},
    "IA3": {"feedforward_modules": []},
    "VERA": {"r": 8},
    "OFT": {"oft_block_size": 4, "r": 0},
    "LOHA": {"r": 4},
    "LOKR": {"r": 4},
}


def adapter(model: Any, rng: random.Random) -> str:
    """An adapter of peft in the model's linear layers."""
    name, targets = rng.choice(list(ADAPTERS)), rng.sample(LINEARS, rng.randrange(1, 4))
    kind = peft.PeftType("LORA" if name in ("DORA", "ALORA") else name)
    options = ADAPTERS[name] | {"task_type": "CAUSAL_LM", "target_modules": targets}
    peft.get_peft_model(model, peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](**options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.eval().requires_grad_(False)
    return f"{name} of {targets}"


SURGERIES = {
    surgery.__name__: surgery
    for surgery in (
        relisted, shared, other_layer_idx, mixed, mixed, called_again, own_attention, own_config,
        layer_mask, module_value, config_value, layer_types, sinks, other_rope, trained,
        other_logits, other_inputs, hooked, adapter,
    )
}  # fmt: skip
