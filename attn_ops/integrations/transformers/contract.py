"""What a model must do to be decoded over a paged cache: checked by forwards of a few rows.

A packed batch holds rows of several requests. Each gets what the model alone would give it if three
things hold. Rows meet in attention only. Each layer attends once, over its own cache. The operators
compute what the layer asks for. docs/contract.md has the list.

V vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from attn_ops.integrations.transformers.forward import KeywordsMissing
from attn_ops.integrations.transformers.keywords import carry_keywords, select_logits
from attn_ops.integrations.transformers.latent import check_expansion
from attn_ops.integrations.transformers.layers import blocksparse, shares_cache
from attn_ops.integrations.transformers.masks import check_masks
from attn_ops.integrations.transformers.probe import LogitsOfAllRows, ProbedCall
from attn_ops.integrations.transformers.rows import (
    NUM_ROWS,
    Forward,
    Probes,
    Run,
    check_positions,
    check_rows,
    differ,
    embedding_of,
    module_names,
)
from attn_ops.integrations.transformers.specs import attention_layers
from attn_ops.integrations.transformers.states import OURS, in_both_ways
from attn_ops.metadata import AttentionSpec
from attn_ops.states import StateSpec
from attn_ops.tracing import PATCHING

_HARMLESS = frozenset(
    (
        "cache_position",
        "config",
        "is_causal",
        "is_cross_attention",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)
"""Keywords of attention functions that do not change the result. Flags do not either."""


class Contract:
    """The contract of one model with its caches.

    Args:
        model: as Transformers made it.
        specs: of its `attention_specs`.
        forward: calls the model.
        vocab_size: V, number of token ids that a request may hold.
        longest: most tokens of a request.
    """

    def __init__(
        self,
        model: Any,
        specs: Sequence[AttentionSpec],
        forward: Forward,
        vocab_size: int,
        longest: int,
    ) -> None:
        self.model, self.specs, self.vocab_size, self.longest = model, specs, vocab_size, longest
        self._caches: list[int] | None = None  # in the order in which layers attend to them
        self._probes = Probes(model, forward, vocab_size, max(1, min(NUM_ROWS, longest)))

    def prepare(self) -> None:
        """Where the model drops the keywords of attn_ops, have them carried to its layers.

        Comes before `check`, and before anybody remembers the model's hooks.
        """
        with PATCHING, contextlib.suppress(Exception):  # `check` says what it is
            try:
                self._probes.in_order()
            except KeywordsMissing:
                carry_keywords(self.model, attention_layers(self.model))
                self._probes.in_order()
            try:
                self._probes.another()
            except LogitsOfAllRows:
                select_logits(self.model)

    def check(self) -> None:
        """Raise a ValueError unless batches give what the model alone gives.

        Threads check one at a time: masks and Dynamo's stance belong to the process.
        """
        with PATCHING:
            self._check()

    def _check(self) -> None:
        check_eval(self.model)
        _check_embeddings(self.model, self.vocab_size)
        layers = attention_layers(self.model)
        for tables in filter(None, map(blocksparse, layers)):
            tables.check_length(self.longest, "max_tokens and num_draft_tokens")
        first = self._probes.in_order()
        names = module_names(self.model)
        _check_calls(first.calls, layers, self.specs, names)
        _check_states(first.states)
        check_masks(first.calls, self.longest)
        for call in first.calls:
            check_expansion(call)
        if first.states:
            _check_state_layers(self._probes.another(), names)
        check_positions(first, self._probes.placed())
        for run in (self._probes.some(), *self._probes.parts()):
            _check_calls(run.calls, layers, self.specs, names)
            if [c.asked() for c in run.calls] != [c.asked() for c in first.calls]:
                raise ValueError(
                    "layers must attend in the same way in every forward, got calls of attention "
                    f"that differ between {first.rows.numel()} and {run.rows.numel()} tokens"
                )
            if run.states != first.states:
                raise ValueError(
                    "layers must use the same states in every forward, got others for "
                    f"{first.rows.numel()} and {run.rows.numel()} tokens"
                )
            check_rows(first, run, self._probes)
        _check_columns(first.logits, self.vocab_size)
        caches = [call.cache for call in first.calls]
        if self._caches not in (None, caches):
            raise ValueError(
                f"layers must attend to the caches {self._caches}, as when this was first checked, "
                f"got {caches}"
            )
        self._caches = caches


def check_contract(
    model: Any, specs: Sequence[AttentionSpec], forward: Forward, vocab_size: int, longest: int
) -> None:
    """Raise a ValueError unless batches over paged caches give what the model alone gives.

    `Contract` documents the arguments.
    """
    Contract(model, specs, forward, vocab_size, longest).check()


def check_eval(model: Any) -> None:
    """Raise a ValueError if the model, or a dropout in it, is in training mode.

    Other random modules show when the forwards are compared: their rows differ.
    """
    for name, module in model.named_modules():
        draws = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (module is model or draws):
            raise ValueError(
                f"{name or 'model'}.training must be False, got True; call model.eval()"
            )


def _check_calls(
    calls: Sequence[ProbedCall],
    layers: Sequence[Any],
    specs: Sequence[AttentionSpec],
    names: dict[int, str],
) -> None:
    """Every layer attends once, as its spec says, over its own cache or one written before.

    A layer that never attends (cross-attention without an encoder) needs no cache.
    """
    known = {id(layer) for layer in layers}
    owners: dict[int, str] = {}
    attended: set[int] = set()
    for call in calls:
        if id(call.layer) not in known:
            raise ValueError(
                f"is_causal must be True of {call.name}, and layer_idx its own, got a call of "
                f"attention that is none of the model's {len(layers)} causal layers"
            )
        if id(call.layer) in attended:
            raise ValueError(
                f"{call.name} must attend once in a forward, got more calls of its attention; "
                "supported: layers with a cache of their own that are run once"
            )
        attended.add(id(call.layer))
        _check_cache(call, owners, len(specs))
        _check_spec(call, specs[call.cache], call.name)
        _check_extras(call)
    if layers and not calls:
        raise ValueError(
            f"{names[id(layers[0])]} must call the attention function of its config, got no call "
            "of any layer; supported: layers that attend by Transformers' interface"
        )


def _check_cache(call: ProbedCall, owners: dict[int, str], num_caches: int) -> None:
    """The cache exists, and one layer writes it: this one, or the earlier one that it names."""
    if not 0 <= call.cache < num_caches:
        raise ValueError(
            f"layer_idx of {call.name} must be from 0 to {num_caches - 1}, one a layer, "
            f"got {call.layer.layer_idx}"
        )
    if shares_cache(call.layer):
        if call.cache not in owners:
            raise ValueError(f"{call.name} must attend behind the layer whose cache it shares")
    elif call.cache in owners:
        raise ValueError(
            f"{call.name} must have a layer_idx of its own, got {call.layer.layer_idx}, that of "
            f"{owners[call.cache]} too; they would write one cache"
        )
    owners.setdefault(call.cache, call.name)


def _check_spec(call: ProbedCall, spec: AttentionSpec, name: str) -> None:
    """The layer asks for what its batches are planned for."""
    for field in dataclasses.fields(spec):
        if field.name in ("kv_cache_dtype", "alibi"):
            continue  # a call does not ask for these
        if field.name == "num_kv_heads" and shares_cache(call.layer):
            continue  # its own keys are not read
        got, wanted = getattr(call.spec, field.name), getattr(spec, field.name)
        if got != wanted:
            raise ValueError(
                f"{field.name} of {name}'s attention must be {wanted}, as the layer's attributes "
                f"and config say, got {got}"
            )
    if call.latent is None and call.v.shape != call.k.shape and not shares_cache(call.layer):
        raise ValueError(
            f"values of {name} must have the shape of its keys {list(call.k.shape)}, "
            f"got {list(call.v.shape)}"
        )


def _check_extras(call: ProbedCall) -> None:
    """Attention is given nothing that it would ignore."""
    if isinstance(call.mask, torch.Tensor) and call.mask.dim() != 2:
        raise ValueError(f"attention_mask of {call.name} must be None, got a tensor of its own")
    passed = {
        key: value
        for key, value in call.extras.items()
        if not isinstance(value, bool | str | None) and key not in _HARMLESS
    }
    if passed:
        raise ValueError(
            f"attention of {call.name} must ask for what the operators compute, "
            f"got the keywords {', '.join(sorted(passed))}; supported: scaling, sliding_window, "
            "softcap, s_aux, is_causal"
        )


def _check_states(states: Sequence[StateSpec]) -> None:
    """Every state is used once in a forward."""
    places = [spec.place for spec in states]
    for place in places:
        if places.count(place) > 1:
            kind, layer, number = place
            raise ValueError(
                f"layers must use a state once in a forward, got {places.count(place)} times "
                f"{kind} state {number} of layer {layer}"
            )


def _check_state_layers(run: Run, names: dict[int, str]) -> None:
    """Layers that keep states compute of a prompt what their own code computes of it."""
    for layer, args, kwargs in run.state_layers:
        specs = [spec for spec in run.states if spec.place[1] == layer.layer_idx]
        own, ours = in_both_ways(layer, args, kwargs, specs)
        if own.shape != ours.shape or differ(own[0], ours[0], own.dtype):
            raise ValueError(
                f"{names[id(layer)]} must compute what {', '.join(OURS)} say, as "
                "attn_ops.ops.states documents them, got a layer whose own code computes another "
                f"prompt of {run.rows.numel()} tokens"
            )


def _check_embeddings(model: Any, vocab_size: int) -> None:
    """Every token that a request may hold can be looked up."""
    count = getattr(embedding_of(model), "num_embeddings", vocab_size)
    if count < vocab_size:
        raise ValueError(
            f"input embeddings must have the config's vocab_size {vocab_size}, got {count}"
        )


def _check_columns(logits: torch.Tensor, vocab_size: int) -> None:
    """Every token that can be drawn can be looked up, and edits of logits find every token."""
    if logits.shape[-1] != vocab_size:
        raise ValueError(
            f"logits must have the config's vocab_size of {vocab_size} columns, "
            f"got {logits.shape[-1]}"
        )
