"""A small tokenizer, trained when it is asked for."""

import functools
from typing import Any

TEXTS = [
    "The quick brown fox jumps over the lazy dog. STOP here, naïve café — 東京 🦊!",
    '{"name": "fox", "age": 3, "tags": ["a", "b"]} [1, 2.5, -3e7] true false null',
    "one two three four five six seven eight nine ten. Yes. No.",
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level(texts: list[str], vocab_size: int, special: tuple[str, ...] = ("<eos>",)) -> Any:
    """Byte-level BPE of `tokenizers`, trained on texts; special tokens have the first ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


@functools.cache
def small_tokenizer() -> Any:
    """One of Transformers' kind, with eos and a chat template; ids below 400."""
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast(tokenizer_object=byte_level(TEXTS, 400), eos_token="<eos>")
    found.chat_template = TEMPLATE
    return found
