"""Brings attn_ops' forward keywords to the layers of models that drop them on the way.

Most models hand unknown keywords down from their forward to every layer. StableLM and Nemotron do
not. There, hooks carry them: one of the whole model takes them, one of each attention layer adds
them to what it is called with. Likewise `logits_to_keep`, where a model computes the logits of all
rows (Qwen2.5-Omni, MiniCPM-V 4.6): its head gets the rows that are asked for. Dynamo traces the
hooks.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

CARRIED = ("attn_metadata", "kv_caches", "slot_mapping", "kv_cache_dtype")
"""Keywords of `attention_forward` that the whole model is called with."""

_INSTALLING = threading.Lock()
"""Two sessions of one model may be made at a time; it gets its hooks once. Global, as the model."""


class KeywordCarrier:
    """Holds the keywords of one forward while it runs, and no longer.

    Args:
        names: of the keywords. A forward without any (training, `generate`) is left alone.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.keywords: dict[str, Any] | None = None
        self.thread: int | None = None

    def take(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before the model's forward: remember the keywords.

        Raises:
            RuntimeError: another forward of the model runs, in another thread.
        """
        given = {name: kwargs[name] for name in self.names if name in kwargs}
        if not given:
            return
        if self.keywords is not None and self.thread != _this_thread():
            raise RuntimeError(
                f"{type(model).__name__} must be called by one thread at a time: keywords of "
                "attn_ops, which it drops, are carried to its layers for one call"
            )
        self.keywords, self.thread = given, _this_thread()

    def deliver(
        self, layer: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Before an attention layer's forward: add them."""
        return args, {**kwargs, **(self.keywords or {})}

    def select(
        self, head: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Before the head's forward: of hidden states [1, T, D], the rows that are wanted."""
        rows = (self.keywords or {}).get("logits_to_keep")
        if not isinstance(rows, torch.Tensor):
            return args, kwargs
        return tuple(x[:, rows] for x in args), {name: x[:, rows] for name, x in kwargs.items()}

    def drop(self, model: Any, args: tuple, output: Any) -> None:
        """Behind the model's forward, also where it raises."""
        if self.thread == _this_thread():
            self.keywords = None


def _this_thread() -> int | None:
    """None while Dynamo traces."""
    return None if torch.compiler.is_compiling() else threading.get_ident()


def carried(layer: Any) -> dict[str, Any]:
    """What is carried to a layer now; empty where `carry_keywords` was not called."""
    carrier = getattr(layer, "keyword_carrier", None)
    return {} if carrier is None else carrier.keywords or {}


def carry_keywords(model: torch.nn.Module, layers: Sequence[Any]) -> None:
    """Install the hooks; does nothing if they are there.

    Args:
        model: the whole model, uncompiled.
        layers: its attention layers. Each hands unknown keywords to its attention, or asks for
            `carried`.
    """
    with _INSTALLING:
        if all(hasattr(layer, "keyword_carrier") for layer in layers):
            return
        carrier = KeywordCarrier(CARRIED)
        model.register_forward_pre_hook(carrier.take, with_kwargs=True)
        for layer in layers:
            layer.keyword_carrier = carrier
            layer.register_forward_pre_hook(carrier.deliver, with_kwargs=True)
        model.register_forward_hook(carrier.drop, always_call=True)


def select_logits(model: Any) -> None:
    """Let the head compute the rows of `logits_to_keep` alone; does nothing if it does already.

    Args:
        model: the whole model, uncompiled, whose forward takes that keyword and ignores it.

    Raises:
        ValueError: the model has no head, as `get_output_embeddings` names it.
    """
    with _INSTALLING:
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"model must have output embeddings, got {type(model).__name__}")
        if "logits_carrier" in vars(model):
            return
        model.logits_carrier = carrier = KeywordCarrier(("logits_to_keep",))
        model.register_forward_pre_hook(carrier.take, with_kwargs=True)
        head.register_forward_pre_hook(carrier.select, with_kwargs=True)
        model.register_forward_hook(carrier.drop, always_call=True)
