"""Text of tokens: what streams is what decodes whole, and stop strings cut where `find` says."""

import random

import pytest

from graphs.requests.text import TextOfTokens
from tests.kit.text import byte_level

tokenizers = pytest.importorskip("tokenizers")

SAMPLE = "The cat sat on the mat. Łódź, naïve café — 你好，世界! 👩‍👩‍👧 ok\n\tx = {'a': 1}\n" * 20


def byte_fallback():
    """As Llama 2's: a space is a symbol, and unknown characters are tokens of bytes."""
    special = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=special[:2])
    tokenizer.train_from_iterator(["The cat sat on the mat. naive cafe ok"], trainer)
    model = tokenizer.get_vocab()
    for token in special[2:]:
        model.setdefault(token, len(model))
    merged = tokenizers.models.BPE(vocab=model, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer.model = merged
    return tokenizer


MAKERS = {"byte level": lambda: byte_level([SAMPLE], 400), "byte fallback": byte_fallback}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request):
    return MAKERS[request.param]()


def random_text(rng: random.Random) -> str:
    ranges = [(32, 126), (0xA0, 0x17F), (0x4E00, 0x4EFF), (0x1F600, 0x1F64F), (0x0300, 0x036F)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 30)))


def streamed(text: TextOfTokens, ids) -> str:
    pieces = []
    for token in ids:
        if text.push(token) is not None:
            break
        pieces.append(text.take())
        assert not pieces[-1].endswith("\N{REPLACEMENT CHARACTER}")
    text.finish()
    return "".join(pieces) + text.take(finished=True)


def test_1000_texts_stream_as_they_decode_whole(tokenizer):
    rng = random.Random(0)
    for _ in range(1000):
        ids = tokenizer.encode(random_text(rng)).ids
        assert streamed(TextOfTokens(tokenizer), ids) == tokenizer.decode(ids)


def test_random_tokens_too():
    """A model may write half characters; the text is the tokenizer's all the same.

    Not with byte fallback: it turns a whole run of bytes into marks when its last one is wrong,
    also those that were characters before.
    """
    rng, tokenizer = random.Random(1), byte_level([SAMPLE], 400)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 20))]
        assert streamed(TextOfTokens(tokenizer), ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_where_find_says(tokenizer, include):
    rng = random.Random(2)
    num_cut = 0
    for _ in range(500):
        ids = tokenizer.encode(random_text(rng) + random_text(rng)).ids
        whole = tokenizer.decode(ids)
        begin = rng.randrange(len(whole))
        stops = [whole[begin : begin + rng.randint(1, 4)], "no such text"]
        text = TextOfTokens(tokenizer, stops, include_stop=include)
        got = streamed(text, ids)
        at = whole.find(stops[0])
        assert got == whole[: at + len(stops[0]) * include]
        assert text.stop_reason == stops[0]
        num_cut += 1
    assert num_cut == 500


def test_early_stop_strings_may_begin_but_not_end(tokenizer):
    """Of the first tokens of a request with `min_tokens`, whose text is whole all the same."""
    rng, found, cut = random.Random(3), 0, 0
    for _ in range(500):
        ids = tokenizer.encode(random_text(rng) + random_text(rng)).ids
        whole, begin = tokenizer.decode(ids), rng.randrange(10)
        stop, early = whole[begin : begin + rng.randint(1, 4)] or "x", rng.randint(1, 12)
        text, before = TextOfTokens(tokenizer, [stop]), 0
        for number, token in enumerate(ids):
            if text.push(token, stops=number >= early) is not None:
                break
            before = len(text.text) if number < early else before
        at = whole.find(stop, max(0, before - len(stop) + 1))
        if text.stop_reason is None:  # the last characters may come with `finish`, which cuts none
            assert text.finish() == whole
        else:
            assert text.text == whole[:at]
            found += at < before
            cut += 1
    assert found > 5
    assert cut > 50


def test_special_tokens():
    tokenizer = byte_level([SAMPLE], 400)
    ids = [*tokenizer.encode("ok").ids, tokenizer.token_to_id("<eos>")]
    assert streamed(TextOfTokens(tokenizer), ids) == "ok"
    assert streamed(TextOfTokens(tokenizer, skip_special_tokens=False), ids) == "ok<eos>"


def test_what_may_begin_a_stop_string_is_held_back():
    tokenizer = byte_level([SAMPLE], 400)
    text = TextOfTokens(tokenizer, ["mat."])
    for token in tokenizer.encode("the ma").ids:
        text.push(token)
    assert text.take() == "the "
    for token in tokenizer.encode("p").ids:
        text.push(token)
    assert text.take() == "map"


class BytesInARow:
    """Decodes as byte fallback does: one wrong byte makes marks of the whole run of them."""

    def decode(self, ids, skip_special_tokens=True):
        text, run = "", b""
        for token in [*ids, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\N{REPLACEMENT CHARACTER}" * len(run)
            run = b""
            text += "" if token is None else " word"
        return text


def test_text_goes_on_behind_characters_that_were_changed():
    text = TextOfTokens(BytesInARow(), ["stop"])
    for token in (300, *"京".encode(), 0xE6, 301, 302, *b"stop"):
        text.push(token)
    assert text.text.endswith(" word word")
    assert text.stop_reason == "stop"


@pytest.mark.parametrize("include", [False, True])
def test_special_tokens_are_stop_strings(include):
    """Although texts leave them out."""
    text = TextOfTokens(BytesInARow(), ["<end>"], ends={300: "<end>"}, include_stop=include)
    assert text.push(300, stops=False) is None
    found = [text.push(token) for token in (*b"so", 300)]
    assert found == [None, None, "<end>"]
    assert text.take() == text.text == " wordso" + "<end>" * include
