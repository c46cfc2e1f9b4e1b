"""What a request takes from the model's generation config where its caller says nothing.

Every field of Transformers' `GenerationConfig` stands here once: taken, idle in a session, or
refused where it asks for something. A field of a newer Transformers is refused until it is listed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from graphs.requests.tokens import ints, listed_ids
from graphs.sampling import SamplingParams
from graphs.sampling.params import check_positive

DRAWN = ("temperature", "top_k", "top_p", "min_p")
"""Fields that count only for requests that draw: where the config says `do_sample`, or they do."""

TAKEN = frozenset((
    "do_sample", *DRAWN, "repetition_penalty", "eos_token_id", "pad_token_id", "max_new_tokens",
    "max_length", "min_new_tokens", "bad_words_ids", "suppress_tokens", "stop_strings",
))  # fmt: skip

IDLE = {
    "it shapes a search with beams, and num_beams is refused": (
        "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory",
    ),
    "it says how a cache is kept, which a session decides": (
        "use_cache", "cache_config", "max_cache_len", "prefill_chunk_size",
        "continuous_batching_config",
    ),
    "it says how a model is compiled, which its owner decides": (
        "compile_config", "disable_compile",
    ),
    "it says what generate returns beside tokens": (
        "output_attentions", "output_hidden_states", "output_scores", "output_logits",
        "return_dict_in_generate",
    ),
    "it says how generate drafts tokens, which changes the speed and no token": (
        "use_mtp", "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    ),
    "it stands for a prompt, and prompts are never empty": (
        "bos_token_id", "decoder_start_token_id",
    ),
    "it moves all logits of a row alike": ("renormalize_logits",),
    "it says who wrote the file": ("transformers_version",),
}  # fmt: skip
"""Fields that change no token of a session, by the reason."""

REFUSED: dict[str, tuple[Any, ...]] = {
    # what is drawn
    "begin_suppress_tokens": ([],), "min_length": (0,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,),
    "sequence_bias": (), "exponential_decay_length_penalty": (), "guidance_scale": (1.0,),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "watermarking_config": (),
    "remove_invalid_values": (False,), "token_healing": (False,),
    "typical_p": (1.0,), "top_h": (), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
    # how it is searched for, and when that ends
    "num_beams": (1,), "constraints": (), "force_words_ids": (), "penalty_alpha": (0.0,),
    "dola_layers": (), "num_return_sequences": (1,), "is_assistant": (False,),
    "assistant_ensemble_weight": (), "max_time": (),
    # all but "quantized", which changes numbers
    "cache_implementation": (
        "dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid",
        "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked", "paged",
    ),
}  # fmt: skip
"""Fields that sessions do not obey: the values, beside None, with which they ask for nothing."""

_LISTED = TAKEN.union(*IDLE.values())


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The ends, lengths and sampling of requests, as `generate` of Transformers has them.

    A field is checked when a request takes it: a bad one stands in nobody's way who names another.
    """

    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `TAKEN`, not None

    @classmethod
    def of(cls, own: Any, given: Any = None) -> "Defaults":
        """Those of a model's `GenerationConfig`, or of one that stands in its place.

        Args:
            own: the model's; it may have none.
            given: in place of it; None: nothing is. Where it names no eos and pad, `own` does.

        Raises:
            ValueError: a field asks for what sessions do not do.
        """
        config = own if given is None else given
        if config is not None and not hasattr(config, "eos_token_id"):
            kind = "mapping" if isinstance(config, Mapping) else type(config).__name__
            raise ValueError(f"generation_config must be a GenerationConfig, got a {kind}")
        fields = {} if config is None else vars(config)
        if config is not own and own is not None:
            ends = {name: getattr(own, name, None) for name in ("eos_token_id", "pad_token_id")}
            fields = ends | {name: value for name, value in fields.items() if value is not None}
        given = {name: value for name, value in fields.items() if value is not None}
        for name in given:
            if name not in _LISTED and _asks(config, name):
                neutral = ", ".join(map(repr, (None, *REFUSED.get(name, ()))))
                raise ValueError(
                    f"generation_config.{name} must be neutral, as sessions do not obey it, got "
                    f"{given[name]!r:.80}; supported: {neutral}; "
                    f"model.generation_config.{name} = None generates without it"
                )
        return cls({name: value for name, value in given.items() if name in TAKEN})

    def tokens(self, name: str) -> frozenset[int]:
        """Token ids of a field: none, one or several."""
        with _naming_the_config():
            return frozenset(ints(name, listed_ids(name, self.given.get(name))))

    def params(self, own: Mapping[str, Any]) -> SamplingParams:
        """The sampling of a request that names `own` fields.

        With `do_sample` a temperature that is not given is 1 and a top_k is 50, as in `generate`.
        """
        names, fields = ("repetition_penalty",), {}
        if self.given.get("do_sample"):
            names, fields = (*DRAWN, *names), {"temperature": 1.0, "top_k": 50}
        elif own.get("temperature"):
            names = (*DRAWN, *names)
        fields |= {name: self.given[name] for name in names if name in self.given}
        fields = {name: value for name, value in fields.items() if name not in own}
        if fields:
            with _naming_the_config():
                SamplingParams.of(fields)
        return SamplingParams.of({**fields, **own})

    def edits(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """`min_tokens`, `bad_words` and `stop` where a request does not name its `own`."""
        with _naming_the_config():
            tokens = listed_ids("suppress_tokens", self.given.get("suppress_tokens"))
            suppressed = [[token] for token in ints("suppress_tokens", tokens)]
        theirs = {"min_tokens": "min_new_tokens", "bad_words": "bad_words_ids"}
        theirs |= {"stop": "stop_strings"}
        found = {
            name: self.given.get(field) if own.get(name) is None else own[name]
            for name, field in theirs.items()
        }
        if own.get("bad_words") is None and isinstance(found["bad_words"], list):
            ends = [[token] for token in self.tokens("eos_token_id")]  # allowed, as in `generate`
            found["bad_words"] = [word for word in found["bad_words"] if word not in ends] or None
        if suppressed and not isinstance(found["bad_words"], str):  # which is refused
            found["bad_words"] = [*(found["bad_words"] or ()), *suppressed]
        return found

    def max_new_tokens(self, num_prompt: int) -> int:
        """New tokens of a prompt at most: 16 where the config does not say."""
        with _naming_the_config():
            longest, new = self.given.get("max_length"), self.given.get("max_new_tokens")
            if new is not None or longest is None:
                new = 16 if new is None else new
                check_positive(max_new_tokens=new)
                return new
            check_positive(max_length=longest)
            if longest <= num_prompt:
                raise ValueError(
                    f"max_length must be above the {num_prompt} tokens of the prompt, got {longest}"
                )
            return longest - num_prompt


def _asks(config: Any, name: str) -> bool:
    """Whether `generate` obeys the field and its value is no neutral one."""
    if name not in REFUSED and (name.startswith("_") or name not in vars(type(config)())):
        return False  # generate does not know it either
    value = getattr(config, name)
    simple = isinstance(value, int | float | str | list)  # others may compare elementwise
    return not (simple and value in REFUSED.get(name, ()))


@contextlib.contextmanager
def _naming_the_config() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        advice = "an argument of the request comes before it"
        raise ValueError(f"generation_config.{error}; {advice}") from None
