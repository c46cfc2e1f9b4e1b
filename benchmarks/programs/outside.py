"""What is done to a model around its layers: masks, positions, logits, hooks, RoPE, modes."""

import functools
import random
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.programs.models import attention_of, core, decoder_layers, mlp_name
from benchmarks.programs.surgeries import Box, Inapplicable
from benchmarks.programs.wrappers import MIXERS, Around, Mixer, first_of, like


def _subclass(module: nn.Module, forward: Any) -> None:
    """Make the module one of a subclass that has `forward(base, self, ...)`."""
    base = type(module)

    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(base, self, *args, **kwargs)

    module.__class__ = type(f"Own{base.__name__}", (base,), {"forward": inside})


def _num_kept(logits_to_keep: Any) -> int:
    return logits_to_keep if isinstance(logits_to_keep, int) else logits_to_keep.shape[0]


def _all_rows(base: Any, self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
    return base.forward(self, *args, **kwargs)


def _last_rows(base: Any, self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
    out = base.forward(self, *args, **kwargs)
    out.logits = out.logits[:, -_num_kept(logits_to_keep) :]
    return out


def _first_rows(base: Any, self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
    out = base.forward(self, *args, **kwargs)
    out.logits = out.logits[:, : _num_kept(logits_to_keep) or None]
    return out


def _other_order(base: Any, self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
    out = base.forward(self, *args, logits_to_keep=logits_to_keep, **kwargs)
    if not isinstance(logits_to_keep, int):
        out.logits = out.logits.flip(1)
    return out


def _last_only(base: Any, self: Any, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
    return base.forward(self, *args, logits_to_keep=1, **kwargs)


def _last_changed(base: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The last row's logits are other ones: a processor that was put into the model."""
    out = base.forward(self, *args, **kwargs)
    if out.logits.shape[1]:
        last = out.logits[:, -1:].roll(1, dims=-1)
        out.logits = torch.cat((out.logits[:, :-1], last), 1)
    return out


def _seen_banned(base: Any, self: Any, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """No token comes twice: those of the input are banned from the logits."""
    out = base.forward(self, input_ids=input_ids, **kwargs)
    seen = torch.zeros(out.logits.shape[-1]).index_fill(0, input_ids.flatten(), 1.0)
    out.logits = out.logits - 1000.0 * seen
    return out


def other_logits(model: Any, rng: random.Random, box: Box) -> str:
    kinds = (_all_rows, _last_rows, _first_rows, _other_order, _last_only, _last_changed)
    kind = rng.choice((*kinds, _seen_banned))
    _subclass(model, kind)
    return kind.__name__.removeprefix("_")


def resized_head(model: Any, rng: random.Random, box: Box) -> str:
    """Columns that the vocabulary has not, or has not got."""
    rows, weight = rng.choice((80, 113, 128)), model.lm_head.weight
    head = nn.Linear(weight.shape[1], rows, bias=False)
    more = 1.5 * torch.randn(max(0, rows - weight.shape[0]), weight.shape[1])
    head.weight = nn.Parameter(torch.cat((weight.data, more))[:rows].clone(), requires_grad=False)
    model.lm_head = head
    if rows > weight.shape[0]:
        table = torch.cat((model.model.embed_tokens.weight.data, more))
        model.model.embed_tokens.weight = nn.Parameter(table, requires_grad=False)
    return f"lm_head has {rows} rows"


def other_positions(model: Any, rng: random.Random, box: Box) -> str:
    kind = rng.choice(("ignored", "from mask", "halved"))

    def forward(
        base: Any, self: Any, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        x = kwargs.get("input_ids")
        if kind == "halved" and position_ids is None and x is not None:
            position_ids = torch.arange(x.shape[1])[None] // 2
        elif kind == "halved" and position_ids is not None:
            position_ids = position_ids // 2
        elif kind == "from mask":
            position_ids = torch.ones_like(x).cumsum(-1) - 1
        else:
            position_ids = None
        return base.forward(self, *args, position_ids=position_ids, **kwargs)

    _subclass(model.model, forward)
    return f"position_ids {kind}"


def _mask_4d(width: int, base: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    x, mask = kwargs.get("input_ids"), kwargs.pop("attention_mask", None)
    if mask is None and x is not None:
        size = x.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril().triu(-width)[None, None]
    return base.forward(self, *args, attention_mask=mask, **kwargs)


def _hole(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q == k) | (k % 3 != 1)


def _prefix(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k < 3


def own_mask(model: Any, rng: random.Random, box: Box) -> str:
    """A mask of the model's own: a tensor, or a function given to `create_causal_mask`."""
    kind = rng.choice(("4d", "and", "or", "2d ones"))
    if kind == "4d":
        _subclass(model.model, functools.partial(_mask_4d, rng.choice((1, 3))))
        return "a 4D mask"
    if kind == "2d ones":
        _subclass(model.model, _ones)
        return "a 2D mask of ones"
    modeling = sys.modules[
        type(model).__mro__[1 if "Own" in type(model).__name__ else 0].__module__
    ]
    functions = {f"{kind}_mask_function": _hole if kind == "and" else _prefix}
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        made = getattr(modeling, name, None)
        if made is not None and not isinstance(made, functools.partial):
            setattr(modeling, name, functools.partial(made, **functions))
    return f"create_causal_mask with {kind}_mask_function"


def _ones(base: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    x = kwargs.get("input_ids")
    if x is not None:
        kwargs["attention_mask"] = torch.ones_like(x)
    return base.forward(self, *args, **kwargs)


def trained(model: Any, rng: random.Random, box: Box) -> str:
    """Training mode with dropout somewhere; the truth is the model in evaluation mode."""
    layers = list(decoder_layers(model))
    if rng.random() < 0.6:
        layer = rng.choice(layers)
        name = mlp_name(layer)
        inner = getattr(core(layer), name)
        setattr(core(layer), name, Around(inner, nn.Dropout(0.4), rng.random() < 0.5))
    if rng.random() < 0.5:
        model.train()
        return "the model in training mode"
    layer = rng.choice(layers)
    layer.train()
    return "one layer in training mode"


def hooked(model: Any, rng: random.Random, box: Box) -> str:
    layers = list(decoder_layers(model))
    layer = rng.choice(layers)
    module = rng.choice((layer, attention_of(layer), getattr(core(layer), mlp_name(layer))))
    kind = rng.choice(("scale", "scale", *MIXERS))
    if rng.random() < 0.5:
        module.register_forward_hook(lambda m, args, out: like(out, MIXERS[kind](first_of(out))))
        return f"{kind} in a hook behind {type(module).__name__}"
    if module is attention_of(layer):
        module = core(layer)

    def before(m: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (MIXERS[kind](args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": MIXERS[kind](kwargs["hidden_states"])}

    module.register_forward_pre_hook(before, with_kwargs=True)
    return f"{kind} in a hook before {type(module).__name__}"


def stepping_hook(model: Any, rng: random.Random, box: Box) -> str:
    """A hook that steps the session in which it runs."""

    def hook(*args: Any) -> None:
        if box.session is not None and not box.nested:
            box.nested = True
            try:
                box.outputs += box.session.step()
            finally:
                box.nested = False

    rng.choice(list(decoder_layers(model))).register_forward_hook(hook)
    return "a hook that calls session.step()"


def other_rope(model: Any, rng: random.Random, box: Box) -> str:
    config, rope = model.config, model.model.rotary_emb
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        raise Inapplicable("rope by layer type")
    kind = rng.choice(("theta", "linear", "dynamic", "yarn"))
    more: dict[str, Any] = {"rope_theta": rng.choice((100.0, 5e5))}
    if kind != "theta":
        more = {"rope_type": kind, "factor": 4.0}
    if kind == "dynamic":
        config.max_position_embeddings = 16
    if kind == "yarn":
        more["original_max_position_embeddings"] = 16
    config.rope_parameters = parameters | more
    model.model.rotary_emb = type(rope)(config)
    return f"rope {kind}"


def other_buffer(model: Any, rng: random.Random, box: Box) -> str:
    names = sorted(n for n, _ in model.named_buffers() if n.endswith("inv_freq"))
    names = [n for n in names if "original" not in n]
    if not names:
        raise Inapplicable("no inv_freq")
    module = model.get_submodule(names[0].rpartition(".")[0])
    name = names[0].rpartition(".")[2]
    setattr(module, name, getattr(module, name) * rng.choice((0.3, 2.0)))
    return f"{names[0]} replaced"


def head_on_rows(model: Any, rng: random.Random, box: Box) -> str:
    """A head that normalizes over the rows whose logits are wanted."""
    kind = rng.choice(("mean", "batch_norm", "first_row", "num_rows", "max_rows"))
    model.lm_head = Around(model.lm_head, Mixer(kind), True)
    return f"{kind} before lm_head"


OUTSIDE = (
    other_logits,
    resized_head,
    other_positions,
    own_mask,
    trained,
    hooked,
    stepping_hook,
    other_rope,
    other_buffer,
    head_on_rows,
)
