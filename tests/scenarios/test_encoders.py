"""Encoders on packed batches, and decoders with cross-attention: what Transformers computes alone.

T rows of a batch, E rows of an encoder.
"""

import dataclasses
import random
from typing import Any

import pytest
import torch

import fx_passes
from attn_ops import CommonAttentionMetadata, PagedKVCache, get_backend, varlen_metadata
from attn_ops.integrations import transformers as integration
from fx_passes.observe import CompileCounters
from tests.kit.marks import long, slow

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ENCODERS = {
    "bert": ("BertConfig", {}),
    "xlm_roberta": ("XLMRobertaConfig", {}),
    # A layer that sees all, one that sees 3 to each side.
    "modernbert": ("ModernBertConfig", {"local_attention": 6, "global_attn_every_n_layers": 2}),
}
BLOCK = 4


def build(make, config, attn_implementation: str = "attn_ops") -> Any:
    """Weights so large that attention matters."""
    integration.register()
    torch.manual_seed(0)
    model = make(config, attn_implementation=attn_implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    return model.requires_grad_(False)


def encoder(name: str, attn_implementation: str = "attn_ops") -> Any:
    config_name, own = ENCODERS[name]
    config = getattr(transformers, config_name)(**SIZES, **own)
    return build(transformers.AutoModel.from_config, config, attn_implementation)


def random_ids(numbers: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[numbers.randrange(3, 64) for _ in range(n)] for n in lengths]


def packed(name: str, model: Any, ids: list[list[int]]) -> dict:
    """Forward keywords of a batch. XLM-R counts positions from behind its padding token's."""
    first = 1 if name == "xlm_roberta" else 0
    lengths = [len(x) for x in ids]
    spec = integration.attention_specs(model)[0]
    assert not spec.causal
    return {
        "input_ids": torch.tensor([[token for x in ids for token in x]]),
        "position_ids": torch.cat([torch.arange(n) + first for n in lengths])[None],
        "attn_metadata": varlen_metadata(lengths, spec, backend="TORCH"),
    }


# -- encoders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in ENCODERS),
        *slow(("modernbert", True)),
        *long(("bert", True), ("xlm_roberta", True)),
    ],
)
def test_packed_rows_equal_each_sequence_alone(name, compiled):
    model, reference = encoder(name), encoder(name, "eager")
    run, counters, numbers = model, CompileCounters(), random.Random(name)
    if compiled:
        run = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    for step in range(12):
        lengths = [numbers.randint(1, 30) for _ in range(numbers.randint(1, 5))]
        ids = random_ids(numbers, [5, 1, 17] if step == 0 else [1] if step == 1 else lengths)
        keywords = packed(name, model, ids)
        tensors = keywords["input_ids"], keywords["position_ids"]
        if step == 0:
            with integration.dynamic_batch(*tensors), counters.watching():
                rows_TD = run(**keywords).last_hidden_state[0]
            counters.warm()
        else:
            with counters.watching():
                rows_TD = run(**keywords).last_hidden_state[0]
        for x, got in zip(ids, rows_TD.split([len(x) for x in ids]), strict=True):
            wanted = reference(input_ids=torch.tensor([x])).last_hidden_state[0]
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    graphs = (counters.num_graphs, counters.num_breaks, counters.num_recompiles)
    assert graphs == ((1, 0, 0) if compiled else (0, 0, 0))


def test_neighbours_in_a_batch_would_matter():
    """Rows of one request change if they see those of another: the comparison above means it."""
    model = encoder("bert")
    ids = random_ids(random.Random(0), [5, 7])
    keywords = packed("bert", model, ids)
    apart = model(**keywords).last_hidden_state
    spec = integration.attention_specs(model)[0]
    together = model(**keywords | {"attn_metadata": varlen_metadata([12], spec, backend="TORCH")})
    assert (apart - together.last_hidden_state).abs().max() > 1e-2


def test_encoder_specs():
    windows = [s.sliding_window for s in integration.attention_specs(encoder("modernbert"))]
    assert windows == [None, 4]
    (spec, _) = integration.attention_specs(encoder("bert"))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.causal) == (4, 4, 16, False)


def test_encoders_refuse_what_they_cannot_do():
    model = encoder("bert")
    keywords = packed("bert", model, [[5, 6, 7]])
    with pytest.raises(ValueError, match="is_causal must be True with kv_caches, got False"):
        model(**keywords, kv_caches=[torch.zeros(1)] * 2)
    keywords["attn_metadata"].common.causal = True
    with pytest.raises(ValueError, match=r"attn_metadata must have common\.causal False"):
        model(**keywords)
    with pytest.raises(ValueError, match="attn_metadata and kv_caches must be forward keywords"):
        model(input_ids=torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="decoder must have causal and cross-attention layers"):
        integration.cross_attention_specs(model)


# -- encoder and decoder ---------------------------------------------------------------------------


class Translator:
    """Greedy generation of an encoder and a decoder, all requests in one batch."""

    def __init__(self, decoder: Any, run: Any = None) -> None:
        self.decoder, self.run = decoder, decoder if run is None else run
        specs = integration.attention_specs(decoder)
        cross_specs = integration.cross_attention_specs(decoder)
        backend = get_backend("TORCH")
        self.builder = backend.builder(backend, specs, BLOCK, "cpu")
        self.cross_builder = backend.builder(backend, cross_specs, BLOCK, "cpu")
        self.cache = PagedKVCache(specs, num_tokens=512, block_size=BLOCK)
        self.logits: list[torch.Tensor] = []  # [S, V] a step
        self.cross_cache = PagedKVCache(cross_specs, num_tokens=512, block_size=BLOCK)
        for cache in (*self.cache.tensors, *self.cross_cache.tensors):
            cache[1:] = float("nan")  # only what was written may be read

    def step(self, new: list[list[int]], seen: list[int], states_ED, encoder_lens) -> list[int]:
        """The next token of each request, after its `new` tokens behind `seen` ones."""
        lens, names = [len(x) for x in new], range(len(new))
        total = [a + b for a, b in zip(lens, seen, strict=True)]
        for i, n in enumerate(total):
            self.cache.reserve(i, n)
            self.cross_cache.reserve(i, encoder_lens[i])
        table = self.cache.block_table(names)
        common = CommonAttentionMetadata.from_lengths(lens, total, table, BLOCK)
        cross = integration.cross_metadata(
            self.cross_builder,
            lens,
            encoder_lens,
            self.cross_cache.block_table(names),
            write=states_ED is not None,
        )
        if states_ED is None:  # they are in the cache: one row stands for them, written nowhere
            states_ED = torch.zeros(1, self.decoder.config.hidden_size)
        assert common.positions is not None
        keywords = {
            "input_ids": torch.tensor([[token for x in new for token in x]]),
            "position_ids": common.positions[None].clone(),
            "encoder_hidden_states": states_ED[None].clone(),
            "attn_metadata": self.builder.build(0, common),
            "kv_caches": self.cache.tensors,
            "slot_mapping": common.slot_mapping,
            "cross_attn_metadata": cross,
            "cross_kv_caches": self.cross_cache.tensors,
            "cross_slot_mapping": cross.common.slot_mapping,
            "logits_to_keep": common.query_start_loc[1:].long() - 1,
            "use_cache": False,
        }
        self.logits.append(self.call(keywords))
        return self.logits[-1].argmax(dim=-1).tolist()

    def call(self, keywords: dict) -> torch.Tensor:
        names = ("input_ids", "position_ids", "slot_mapping", "logits_to_keep")
        torch._dynamo.mark_dynamic(keywords["encoder_hidden_states"], 1)
        torch._dynamo.mark_dynamic(keywords["cross_slot_mapping"], 0)
        with integration.dynamic_batch(**{n: keywords[n] for n in names}):
            return self.run(**keywords).logits[0]

    def generate(self, states: list[torch.Tensor], prompts, num_tokens: int) -> list[list[int]]:
        encoder_lens = [len(x) for x in states]
        new, seen, states_ED = prompts, [0] * len(prompts), torch.cat(states)
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            tokens = self.step(new, seen, states_ED, encoder_lens)
            seen = [a + len(b) for a, b in zip(seen, new, strict=True)]
            new, states_ED = [[t] for t in tokens], None
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        return outputs


def bert_to_bert(attn_implementation: str) -> tuple[Any, Any]:
    config = transformers.BertConfig(**SIZES)
    # With tied weights it repeats its last token.
    both = SIZES | {"is_decoder": True, "add_cross_attention": True, "tie_word_embeddings": False}
    encode = build(transformers.BertModel._from_config, config, attn_implementation)
    config = transformers.BertConfig(**both)
    decoder = build(transformers.BertLMHeadModel._from_config, config, attn_implementation)
    return encode, decoder


def generated(model: Any, source, prompt, num_tokens: int):
    """Tokens of Transformers, and the logits [tokens, V] they were chosen from."""
    ids = torch.tensor([source])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        decoder_input_ids=torch.tensor([prompt]),
        decoder_attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, eos_token_id=None,
            decoder_start_token_id=1, output_logits=True, return_dict_in_generate=True,
        ),
    )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


@pytest.mark.parametrize("compiled", [False, True])
def test_encoder_and_decoder_equal_generate(compiled):
    """Batches of ragged sources and prompts; prompts may be longer than their source."""
    encode, decoder = bert_to_bert("attn_ops")
    reference = transformers.EncoderDecoderModel(
        encoder=bert_to_bert("eager")[0], decoder=bert_to_bert("eager")[1]
    ).eval()
    run, counters, numbers = None, CompileCounters(), random.Random(0)
    if compiled:
        run = torch.compile(decoder, backend=fx_passes.attn_ops, fullgraph=True)
    for lengths in ([1, 9, 4, 17], [6], [3, 30, 1]):
        sources = random_ids(numbers, lengths)
        # generate() puts the start token in front of a prompt that does not begin with it.
        prompts = [[1, *x] for x in random_ids(numbers, [numbers.randint(0, 6) for _ in lengths])]
        rows_ED = encode(**packed("bert", encode, sources)).last_hidden_state[0]
        translator = Translator(decoder, run)
        with counters.watching():
            got = translator.generate(list(rows_ED.split(lengths)), prompts, 8)
        logits_STV = torch.stack(translator.logits, dim=1)
        for source, prompt, tokens, rows_TV in zip(sources, prompts, got, logits_STV, strict=True):
            wanted, wanted_TV = generated(reference, source, prompt, 8)
            assert tokens == wanted
            torch.testing.assert_close(rows_TV, wanted_TV, atol=1e-4, rtol=1e-4)
            assert wanted_TV.std() > 0.5
    if compiled:
        assert (counters.num_graphs, counters.num_breaks) == (1, 0)


def test_a_decoder_without_its_encoder_is_refused():
    _, decoder = bert_to_bert("attn_ops")
    translator = Translator(decoder)
    with pytest.raises(ValueError, match="encoder_lens must be at least 1"):
        translator.step([[1]], [0], torch.zeros(1, 64), [0])

    def call(keywords):
        del keywords["cross_kv_caches"]
        return decoder(**keywords).logits[0]

    translator.call = call
    with pytest.raises(ValueError, match="is_causal must be True with kv_caches, got False"):
        translator.step([[1]], [0], torch.zeros(1, 64), [1])


def test_a_compiled_encoder_refuses_a_causal_batch_as_an_eager_one_does():
    """Eager raises; compiled, every row silently sees no later one."""
    model = encoder("bert")
    keywords = packed("bert", model, [[5, 6, 7]])
    spec = dataclasses.replace(integration.attention_specs(model)[0], causal=True)
    keywords["attn_metadata"] = varlen_metadata([3], spec)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="causal"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**keywords)
