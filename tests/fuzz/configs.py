"""Random configs and padding: a session gives the tokens of `generate`, or names what it refuses.

    python -m tests.fuzz configs

Draws are compared too: `generate` draws from its probabilities as a session does from its own.
"""

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from graphs import DecodeSession
from graphs.sampling import FIELDS, sample
from graphs.sampling.params import Sampling
from tests.kit.models import build_model
from tests.kit.sessions import make_session

SEED = 3

VALUES: dict[str, list[Any]] = {
    # taken
    "do_sample": [True, False], "temperature": [0.5, 1.0, 1.7], "top_k": [0, 1, 5, 50, 500],
    "top_p": [0.3, 0.9, 1.0], "min_p": [0.0, 0.2], "repetition_penalty": [1.0, 1.8],
    "eos_token_id": [1, [2, 3], list(range(20)), 64, -1], "pad_token_id": [0, 63],
    "max_new_tokens": [1, 5], "max_length": [12, 20],
    # idle
    "early_stopping": [True], "length_penalty": [2.0], "num_beam_groups": [2],
    "diversity_penalty": [0.5], "low_memory": [True], "use_cache": [True, False],
    "max_cache_len": [32], "cache_config": [{}], "output_scores": [True],
    "output_logits": [True], "output_attentions": [False], "output_hidden_states": [True],
    "disable_compile": [True], "assistant_confidence_threshold": [0.9],
    "num_assistant_tokens": [3], "num_assistant_tokens_schedule": ["heuristic"],
    "max_matching_ngram_size": [2], "assistant_lookbehind": [3], "target_lookbehind": [3],
    "bos_token_id": [1], "decoder_start_token_id": [1], "renormalize_logits": [True],
    "transformers_version": ["4.40.0"], "return_dict_in_generate": [False],
    # refused
    "suppress_tokens": [[], list(range(1, 50))], "begin_suppress_tokens": [[], list(range(50))],
    "bad_words_ids": [[[5], [6, 7]]], "min_new_tokens": [0, 4], "min_length": [0, 9],
    "no_repeat_ngram_size": [0, 1, 2], "encoder_no_repeat_ngram_size": [0, 1],
    "encoder_repetition_penalty": [1.0, 3.0], "sequence_bias": [[[[5], 30.0]]],
    "exponential_decay_length_penalty": [(1, 2.0)], "guidance_scale": [1, 1.5],
    "forced_bos_token_id": [5], "forced_eos_token_id": [5], "remove_invalid_values": [False, True],
    "token_healing": [False, True], "typical_p": [0.2, 1.0], "top_h": [0.3],
    "epsilon_cutoff": [0.0, 0.1], "eta_cutoff": [0.0, 0.1], "num_beams": [1, 3],
    "constraints": [[]], "force_words_ids": [[[5]]], "penalty_alpha": [0.0, 0.6],
    "dola_layers": ["high"], "num_return_sequences": [1, 2], "is_assistant": [False, True],
    "max_time": [1e-6], "stop_strings": ["a"], "watermarking_config": [{"bias": 9.0}],
    "assistant_ensemble_weight": [0.5], "cache_implementation": ["dynamic", "static", "quantized"],
}  # fmt: skip
"""Some values of every field that the tests' models can be asked for."""


def drawn_config(rng: random.Random) -> Any:
    """A config of up to four fields; half of them sample."""
    import transformers

    config = transformers.GenerationConfig()
    config.do_sample = rng.random() < 0.5
    for name in rng.sample(sorted(VALUES), rng.randrange(5)):
        setattr(config, name, rng.choice(VALUES[name]))
    return config


def padded(prompts: list[list[int]], pad: int, side: str) -> dict[str, torch.Tensor]:
    """As tokenizers pad, on the "left" or "right"."""
    longest = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        fill = longest - len(prompt)
        row, mask = [*[pad] * fill, *prompt], [*[0] * fill, *[1] * len(prompt)]
        rows.append(row if side == "left" else row[fill:] + row[:fill])
        masks.append(mask if side == "left" else mask[::-1])
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def generated(
    model: Any, prompt: list[int], max_new_tokens: int | None, num_padding: int = 0
) -> list[int]:
    """By `generate`, whose draws are those of a session's kernels with its probabilities.

    It finds the padding at a prompt's left itself.
    """
    length = len(prompt) - num_padding

    def drawn(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        nonlocal length
        fields = {name: torch.full((1,), fill, dtype=d) for name, (d, fill) in FIELDS.items()}
        fields["temperature"].fill_(1.0)
        fields["seed"].fill_(SEED)
        token = sample(probs.log(), fields, torch.tensor([length]), Sampling.RANDOM)
        length += 1
        return token[:, None]

    ids = torch.tensor([prompt])
    keywords: dict[str, Any] = {} if num_padding else {"attention_mask": torch.ones_like(ids)}
    if max_new_tokens is not None:
        keywords["max_new_tokens"] = max_new_tokens
    with mock.patch.object(torch, "multinomial", drawn):
        out = model.generate(ids, **keywords)
    return out[0, len(prompt) :].tolist()


def compare(session: DecodeSession, reference: Any, seed: int) -> str:
    """ "equal", "refused", or what differs, for one random config and prompts, padded or not."""
    rng = random.Random(seed)
    config = drawn_config(rng)
    session.model.generation_config = reference.generation_config = config
    prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 9))] for _ in range(3)]
    form = rng.choice(["lists", "left", "right", "array"])
    pad = rng.randrange(64) if config.pad_token_id is None else config.pad_token_id
    batch: Any = prompts if form == "lists" else padded(prompts, pad, form.replace("array", "left"))
    num_padding = [0, 0, 0]
    if form == "array":
        batch = batch["input_ids"]
        if config.pad_token_id is not None:  # else it is text
            num_padding = [batch.shape[1] - len(prompt) for prompt in prompts]
        prompts = batch.tolist()
    unnamed = config.max_new_tokens is None and config.max_length is None
    new = 8 if unnamed or form == "array" else rng.choice([8, None])
    try:
        results = session.generate(batch, new, seed=SEED)
    except ValueError as error:
        name = str(error).removeprefix("generation_config.").partition(" ")[0]
        asked = getattr(config, name, None) in VALUES.get(name, [None])
        unclear = name == "prompts" and form == "array" and config.pad_token_id is not None
        return "refused" if unclear or asked else f"{config}, {batch}: {error}"
    ours = [result.token_ids for result in results]
    theirs = [generated(reference, p, new, n) for p, n in zip(prompts, num_padding, strict=True)]
    return "equal" if ours == theirs else f"{config}, {batch}: {ours}, not {theirs}"


def search(args: Any = None) -> Callable[[int], str]:
    session, reference = make_session(build_model()), build_model(attn_implementation="eager")

    def run(seed: int) -> str:
        outcome = compare(session, reference, seed)
        assert outcome in ("equal", "refused"), outcome
        return outcome

    return run
