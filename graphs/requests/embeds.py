"""Prompts of embeddings, and of images by a model's own encoders.

    processor(images, text) -> the model up to its decoder -> rows [L, D] -> a request

L tokens of a prompt, D the width of the model's embeddings.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attn_ops.integrations.transformers import keeping_attention

MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
"""Keys of what a processor makes of images, videos and sound."""

NEUTRAL = frozenset((
    "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "return_dict",
))  # fmt: skip
"""Arguments of a decoder that a session gives in its own way."""

NEEDS_TOKENS = {
    "prompt_logprobs": None, "bad_words": None, "logits_processor": None,
}  # fmt: skip
"""What a request may not ask for whose prompt has no tokens, and what asks for nothing."""


class Embeds:
    """A prompt's rows.

    Args:
        rows_LD: [L, D], of the model's dtype, on its device.
    """

    def __init__(self, rows_LD: torch.Tensor) -> None:
        self.rows_LD = rows_LD
        self._keys: list[int] = []

    def __len__(self) -> int:
        return self.rows_LD.shape[0]

    @property
    def keys(self) -> list[int]:
        """A negative number a row, equal for equal rows: in place of tokens where prefixes are."""
        if not self._keys:
            rows = self.rows_LD.cpu().contiguous().view(torch.uint8).numpy()
            digests = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
            self._keys = [-1 - (int.from_bytes(digest, "little") >> 1) for digest in digests]
        return self._keys


def embedded(prompts: Any, model: Any) -> Any:
    """Prompts of a call, with `Embeds` in place of mappings that hold embeddings or media.

    Args:
        prompts: as a caller gave them.
        model: of Transformers, uncompiled.

    Raises:
        ValueError: embeddings do not fit the model, or it takes images in a way of its own.
    """
    if isinstance(prompts, Mapping):
        if "inputs_embeds" in prompts:
            return _given(prompts, model)
        return _encoded(prompts, model) if _has_media(prompts) else prompts
    if not isinstance(prompts, list | tuple):
        return prompts
    found: list[Any] = []
    for prompt in prompts:
        made = embedded(prompt, model) if isinstance(prompt, Mapping) else prompt
        several = isinstance(made, list) and made and isinstance(made[0], Embeds)
        if several and len(made) != 1:
            raise ValueError(f"prompt must be one, got a mapping of {len(made)}")
        found.append(made[0] if several else made)
    return found


def check_embeds(wanted: Mapping[str, Any], repetition_penalty: float) -> None:
    """Refuse what looks at a prompt's tokens.

    Raises:
        ValueError: `wanted` names it.
    """
    for name, neutral in NEEDS_TOKENS.items():
        if wanted[name] is not neutral:
            raise ValueError(
                f"{name} must not be given with a prompt of embeddings, which has no tokens, "
                f"got {wanted[name]!r:.80}"
            )
    if repetition_penalty != 1:
        raise ValueError(
            "repetition_penalty must be 1 with a prompt of embeddings, which has no tokens, "
            f"got {repetition_penalty}"
        )


def fill_embeds(
    embeds_TD: torch.Tensor, parts: Sequence[tuple[int, int, int, Embeds]]
) -> torch.Tensor:
    """Rows of prompts in place of those of placeholder tokens.

    Args:
        embeds_TD: of a step's tokens; written.
        parts: the first row of the step, the first and last of the prompt, and the prompt.
    """
    for begin, first, end, embeds in parts:
        embeds_TD[begin : begin + end - first] = embeds.rows_LD[first:end]
    return embeds_TD


def _has_media(prompt: Mapping[str, Any]) -> bool:
    return any(prompt.get(name) is not None for name in MEDIA)


def _given(prompt: Mapping[str, Any], model: Any) -> list[Embeds]:
    rows = prompt["inputs_embeds"]
    more = [name for name in prompt if name not in ("inputs_embeds", "attention_mask")]
    if more:
        raise ValueError(
            f"prompt must hold inputs_embeds and attention_mask alone, got also {more}"
        )
    width = _embedding_of(model).weight.shape[1]
    fits = isinstance(rows, torch.Tensor) and rows.is_floating_point() and rows.ndim in (2, 3)
    if not fits or rows.shape[-1] != width:
        raise ValueError(
            f"inputs_embeds must be a float tensor [L, {width}] or [S, L, {width}], "
            f"got {getattr(rows, 'dtype', type(rows).__name__)} {list(getattr(rows, 'shape', []))}"
        )
    return _unpadded(rows if rows.ndim == 3 else rows[None], prompt.get("attention_mask"), model)


def _unpadded(rows_SLD: torch.Tensor, mask: Any, model: Any) -> list[Embeds]:
    weight = _embedding_of(model).weight
    rows_SLD = rows_SLD.detach().to(weight.device, weight.dtype)
    if mask is None:
        return [Embeds(rows.clone()) for rows in rows_SLD]
    mask = torch.as_tensor(mask).to(weight.device).bool()
    mask = mask[None] if mask.ndim == 1 else mask
    if mask.shape != rows_SLD.shape[:2]:
        raise ValueError(
            f"attention_mask must be {list(rows_SLD.shape[:2])}, got {list(mask.shape)}"
        )
    return [Embeds(rows[kept]) for rows, kept in zip(rows_SLD, mask, strict=True)]


def _embedding_of(model: Any) -> Any:
    text = model.config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", None):
        raise ValueError(
            f"prompts of embeddings need a model whose layers see embeddings alone, got "
            f"{type(model).__name__}, whose layers look tokens up themselves"
        )
    return model.get_input_embeddings()


# -- media -----------------------------------------------------------------------------------------


class _Reached(Exception):
    """The decoder is called."""


@torch.no_grad()
def _encoded(inputs: Mapping[str, Any], model: Any) -> list[Embeds]:
    """What the model hands its decoder: the encoders have run, and their rows stand in place."""
    decoder, name = model.get_decoder(), type(model).__name__
    found: dict[str, Any] = {}

    def stop(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        del module, args
        found.update(kwargs)
        raise _Reached

    device, dtype = next(model.parameters()).device, model.dtype
    moved = {
        key: value.to(device, dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in inputs.items()
    }
    handle = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with keeping_attention(model) as configs, contextlib.suppress(_Reached):
            for config in configs:  # encoders see both ways, and masks are made, so that they show
                config._attn_implementation = "eager"
            model(**moved, use_cache=False)
    finally:
        handle.remove()
    more = [k for k, v in found.items() if k not in NEUTRAL and isinstance(v, torch.Tensor | list)]
    positions, mask = found.get("position_ids"), found.get("attention_mask")
    kept = inputs.get("attention_mask")
    reason = None
    if found.get("inputs_embeds") is None:
        reason = "its decoder is not given embeddings"
    elif more:
        reason = f"its decoder is also given {', '.join(more)}"
    elif not _are_plain(positions, kept):
        reason = "positions of its images are not those of text"
    elif isinstance(mask, Mapping) or getattr(mask, "ndim", 2) != 2:
        reason = "its images see what comes behind them"
    if reason is not None:
        raise ValueError(
            f"model must take images as rows among those of text, got {name}: {reason}"
        )
    return _unpadded(found["inputs_embeds"], kept, model)


def _are_plain(positions: torch.Tensor | None, mask: Any) -> bool:
    """Whether positions count the tokens of each row from 0."""
    if positions is None:
        return True
    rows = positions.reshape(-1, positions.shape[-1])
    if mask is None:
        return bool((rows == torch.arange(rows.shape[1], device=rows.device)).all())
    kept = torch.as_tensor(mask).to(rows.device).bool().repeat(rows.shape[0] // len(mask), 1)
    return all(
        bool((row[k] == torch.arange(int(k.sum()), device=row.device)).all())
        for row, k in zip(rows, kept, strict=True)
    )


def media_tokens(config: Any) -> dict[int, str]:
    """Tokens that stand for an image, a video or sound, with their names in a model's config."""
    kinds = [
        f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")
    ]
    values = [(getattr(config, name, None), name) for name in kinds]
    found = {token: name for token, name in values if isinstance(token, int)}
    for part in vars(config).values():
        if hasattr(part, "to_diff_dict"):  # of a vision or audio encoder
            found |= media_tokens(part)
    return found
