"""What is done to the layers of a model before a session sees it.

A surgery takes the model, random numbers of its own and a `Box`; it returns what it did, in words.
Done to two equal models with equal random numbers, it does the same to both.
"""

import copy
import dataclasses
import random
from typing import Any

import torch
from torch import nn

from benchmarks.programs.models import attention_of, core, decoder_layers, mlp_name
from benchmarks.programs.wrappers import (
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
)


@dataclasses.dataclass
class Box:
    """Where hooks find the session, and leave what it gave them; the truth's model has none."""

    session: Any = None
    nested: bool = False
    outputs: list[Any] = dataclasses.field(default_factory=list)


class Inapplicable(Exception):
    """The model has not got what a surgery or change is about."""


def relist(model: Any, layers: list[Any], rng: random.Random) -> str:
    """Give the model these layers; layer_idx and config follow or not."""
    types = getattr(model.config, "layer_types", None)
    renumber, resize = rng.random() < 0.5, rng.random() < 0.7
    if types:
        model.config.layer_types = [types[attention_of(x).layer_idx] for x in layers]
    if renumber:
        for i, layer in enumerate(layers):
            attention_of(layer).layer_idx = i
    model.model.layers = nn.ModuleList(layers)
    if resize:
        model.config.num_hidden_layers = len(layers)
    return (
        f"layer_idx {'renumbered' if renumber else 'kept'}, config {'resized' * resize or 'kept'}"
    )


def shared(model: Any, rng: random.Random, box: Box) -> str:
    layers = decoder_layers(model)
    i, j = rng.sample(range(len(layers)), 2)
    what = rng.choice(("layer", "attention", "k_proj", "q weight"))
    if what == "layer":
        layers[j] = layers[i]
    elif what == "attention":
        core(layers[j]).self_attn = core(layers[i]).self_attn
    elif what == "k_proj":
        attention_of(layers[j]).k_proj = attention_of(layers[i]).k_proj
    else:
        attention_of(layers[j]).q_proj.weight = attention_of(layers[i]).q_proj.weight
    return f"{what} of layer {i} in layer {j} too"


def reordered(model: Any, rng: random.Random, box: Box) -> str:
    layers = list(decoder_layers(model))
    rng.shuffle(layers)
    order = [attention_of(x).layer_idx for x in layers]
    return f"order {order}, {relist(model, layers, rng)}"


def removed(model: Any, rng: random.Random, box: Box) -> str:
    layers = list(decoder_layers(model))
    i = rng.randrange(len(layers))
    del layers[i]
    return f"layer {i}, {relist(model, layers, rng)}"


def doubled(model: Any, rng: random.Random, box: Box) -> str:
    layers = list(decoder_layers(model))
    i, how = rng.randrange(len(layers)), rng.choice(("same object", "copy", "copy, new layer_idx"))
    twin = layers[i] if how == "same object" else copy.deepcopy(layers[i])
    if how.endswith("layer_idx"):
        attention_of(twin).layer_idx = len(layers)
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = [*model.config.layer_types, model.config.layer_types[i]]
    layers.insert(rng.choice((i + 1, len(layers))), twin)
    return f"layer {i} as {how}, {relist(model, layers, rng)}"


def other_layer_idx(model: Any, rng: random.Random, box: Box) -> str:
    layers = decoder_layers(model)
    i, j = rng.sample(range(len(layers)), 2)
    first, second = attention_of(layers[i]), attention_of(layers[j])
    how = rng.choice(("swapped", "the same", "negative", "past the end", "a gap"))
    if how == "swapped":
        first.layer_idx, second.layer_idx = second.layer_idx, first.layer_idx
    elif how == "the same":
        first.layer_idx = second.layer_idx
    elif how == "negative":
        first.layer_idx = -1
    elif how == "past the end":
        first.layer_idx = len(layers)
    else:
        attention_of(layers[-1]).layer_idx = len(layers)
    return f"{how}: layers {i}, {j}"


def _mixer(rng: random.Random, size: int) -> tuple[nn.Module, str]:
    kind = rng.choice((*MIXERS, "counter buffer", "counter attribute", "memory", "positions"))
    if kind.startswith("counter"):
        return Counter(kind.endswith("buffer")), kind
    if kind == "memory":
        return Memory(size), kind
    if kind == "positions":
        return Positions(size), kind
    return Mixer(kind), kind


def mixed(model: Any, rng: random.Random, box: Box) -> str:
    """Something is done to the rows before or after one module."""
    mixer, kind = _mixer(rng, model.config.hidden_size)
    layers = decoder_layers(model)
    i, before = rng.randrange(len(layers)), rng.random() < 0.5
    place = rng.choice(("layer", "attention", "mlp", "embedding", "norm", "head"))
    if place == "layer":
        layers[i] = Around(layers[i], mixer, before)
    elif place == "attention":
        core(layers[i]).self_attn = Around(core(layers[i]).self_attn, mixer, before)
    elif place == "mlp":
        name = mlp_name(layers[i])
        setattr(core(layers[i]), name, Around(getattr(core(layers[i]), name), mixer, before))
    elif place == "embedding":
        model.model.embed_tokens = Around(model.model.embed_tokens, mixer, False)
    elif place == "norm":
        model.model.norm = Around(model.model.norm, mixer, before)
    else:
        model.lm_head = Around(model.lm_head, mixer, True)
    return f"{kind} {'before' if before else 'after'} {place} {i}"


def called_again(model: Any, rng: random.Random, box: Box) -> str:
    layers = decoder_layers(model)
    i, kind = rng.randrange(len(layers)), rng.choice(AGAIN)
    if rng.random() < 0.5:
        layers[i] = Again(layers[i], kind)
        return f"layer {i}: {kind}"
    core(layers[i]).self_attn = Again(core(layers[i]).self_attn, kind)
    return f"attention {i}: {kind}"


def own_attention(model: Any, rng: random.Random, box: Box) -> str:
    layer = rng.choice(list(decoder_layers(model)))
    fused, adds = rng.random() < 0.5, rng.random() < 0.5
    core(layer).self_attn = OwnAttention(attention_of(layer), fused, adds)
    return f"{'sdpa' if fused else 'softmax'} {'beside' if adds else 'instead of'} the interface"


def own_config(model: Any, rng: random.Random, box: Box) -> str:
    """One attention module has a config of its own, which names another implementation."""
    layer = attention_of(rng.choice(list(decoder_layers(model))))
    layer.config = copy.deepcopy(layer.config)
    kind = rng.choice(("eager", "sdpa"))
    layer.config._attn_implementation = kind
    return f"{kind} in one layer"


def module_scalar(model: Any, rng: random.Random, box: Box) -> str:
    """An attribute of one attention module, which its config does not know of."""
    name, values = rng.choice(
        (
            ("sliding_window", (None, 2, 3, 50)),
            ("scaling", (0.1, 0.5, 1.0)),
            ("attn_logit_softcapping", (None, 1.0, 5.0)),
            ("is_causal", (False, None, 0)),
            ("attention_dropout", (0.3,)),
            ("is_sliding", (True, False)),
            ("attn_temperature_tuning", (True,)),
        )
    )
    layers = list(decoder_layers(model))
    i, value = rng.randrange(len(layers)), rng.choice(values)
    setattr(attention_of(layers[i]), name, value)
    return f"{name} = {value} in attention {i}"


def sinks(model: Any, rng: random.Random, box: Box) -> str:
    layer = attention_of(rng.choice(list(decoder_layers(model))))
    if rng.random() < 0.4 and hasattr(layer, "sinks"):
        layer.sinks = nn.Parameter(torch.full_like(layer.sinks, -1e9), requires_grad=False)
        return "sinks far below"
    layer.sinks = nn.Parameter(torch.randn(4) + 2, requires_grad=False)
    return "sinks that may not be passed on"


def config_field(model: Any, rng: random.Random, box: Box) -> str:
    """A field of the config, which modules that were built from it have read before."""
    name, values = rng.choice(
        (
            ("sliding_window", (None, 2, 4)),
            ("attn_logit_softcapping", (None, 3.0)),
            ("final_logit_softcapping", (None, 3.0)),
            ("attention_chunk_size", (3, 4)),
            ("num_key_value_heads", (1, 4)),
            ("num_attention_heads", (2, 8)),
            ("head_dim", (8, 32)),
            ("vocab_size", (50, 120)),
            ("max_position_embeddings", (8, 20)),
            ("is_causal", (False,)),
            ("use_bidirectional_attention", (True,)),
            ("use_cache", (True,)),
            ("num_hidden_layers", (1, 2, 7)),
            ("use_sliding_window", (True, False)),
            ("rms_norm_eps", (1.0,)),
        )
    )
    value = rng.choice(values)
    setattr(model.config, name, value)
    return f"{name} = {value}"


def layer_types(model: Any, rng: random.Random, box: Box) -> str:
    """Other layer types than those that the layers were built for."""
    types = getattr(model.config, "layer_types", None)
    if not types:
        raise Inapplicable("no layer_types")
    kinds = ["full_attention", "sliding_attention"]
    if "chunked_attention" in types:
        kinds[1] = "chunked_attention"
    elif getattr(model.config, "sliding_window", None) is None:
        model.config.sliding_window = 4
    model.config.layer_types = [rng.choice(kinds) for _ in types]
    return f"layer_types = {model.config.layer_types}"


def built_with_window(model: Any, rng: random.Random, box: Box) -> str:
    """What `use_sliding_window` builds: modules and masks agree, and say it in their own ways."""
    if "use_sliding_window" not in model.config.to_dict():
        raise Inapplicable("no use_sliding_window")
    config = model.config
    config.use_sliding_window, config.sliding_window = True, 4
    types = [rng.choice(("full_attention", "sliding_attention")) for _ in config.layer_types]
    config.layer_types = types
    for layer, kind in zip(decoder_layers(model), types, strict=False):
        attention_of(layer).sliding_window = 4 if kind == "sliding_attention" else None
    return f"use_sliding_window with {types}"


def layer_mask(model: Any, rng: random.Random, box: Box) -> str:
    layers = decoder_layers(model)
    i, width = rng.randrange(len(layers)), rng.choice((2, 4))
    layers[i] = OtherMask(layers[i], width)
    return f"layer {i} narrows its mask to {width}"


SURGERIES = (
    shared,
    reordered,
    removed,
    doubled,
    other_layer_idx,
    mixed,
    called_again,
    own_attention,
    own_config,
    module_scalar,
    sinks,
    config_field,
    layer_types,
    built_with_window,
    layer_mask,
)
