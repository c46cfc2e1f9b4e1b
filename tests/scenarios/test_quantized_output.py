"""Sessions of quantized models whose attention writes FP8: one rewrite a layer, the same tokens.

T tokens, W = N * H values of a row.
"""

import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from benchmarks.quantized_linear import QuantizedLinear
from fx_passes import Recorder, attn_ops, recording
from tests.kit.marks import long, slow
from tests.kit.models import build_model, build_prompts
from tests.kit.sessions import chunked, make_session, tokens_of

PROMPTS = [[5, 9, 33, 2, 61], [7], [11, 12]]
FP8, MAX = torch.float8_e4m3fn, 448.0
# Inductor leaves out roundings to bfloat16 between nodes that it fuses, unless it is told to keep
# them. Then a compiled model gives the tokens of an eager one.
OPTIONS = {"attn_quant": "always", "emulate_precision_casts": True}


@pytest.fixture
def by_torchao(monkeypatch) -> Callable:
    """Quantizes linear layers of a model on a CPU: torchao asks for a GPU, and needs none."""
    torchao = pytest.importorskip("torchao.quantization")
    monkeypatch.setattr(torchao.quant_api, "_check_hardware_support", lambda granularity: None)

    def quantize(model, granularity: str, **how):
        of = getattr(torchao, granularity)()
        config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=of)
        torchao.quantize_(model.model, config, **how)
        return model

    return quantize


def number_of_sites(recorder: Recorder) -> int:
    """In a call of the model: a layer's graph is compiled once and called often."""
    runs = [run for run in recorder.passes if run.pass_name == "quantize_output"]
    return sum(run.matches * run.num_calls for run in runs)


def check(model, num_sites: int, session=make_session, recompiles=0, **options) -> Recorder:
    """Compiled, one site is rewritten in every layer, and tokens are those of the eager model."""
    wanted = tokens_of(session(model, backend="TORCH").generate(PROMPTS, 6))
    assert len({token for row in wanted for token in row}) > 3
    with recording() as recorder:
        compiled = torch.compile(model, backend=attn_ops, fullgraph=True, options=OPTIONS | options)
        compiled = session(compiled, backend="TORCH")
        assert tokens_of(compiled.generate(PROMPTS, 6)) == wanted
    report = compiled.report()
    assert (report.num_graphs, report.num_breaks, report.num_recompiles) == (1, 0, recompiles)
    assert number_of_sites(recorder) == num_sites
    return recorder


def schemes(recorder: Recorder) -> set[str]:
    facts = [run.facts for run in recorder.passes if run.pass_name == "quantize_output"]
    return {scheme for one in facts for scheme in one.get("sites", {}).values()}


@pytest.mark.parametrize(
    "family", [*slow("qwen3"), *long("gemma2", "gpt_oss", "mistral", "gemma4")]
)
def test_torchao_per_row(by_torchao, family):
    """Gemma 3n is not among them: Inductor's C++ of it does not compile with these options."""
    model = build_model(family, tie_word_embeddings=False).to(torch.bfloat16)
    recorder = check(by_torchao(model, "PerRow"), model.config.num_hidden_layers)
    assert schemes(recorder) == {"fp8_row"}


@pytest.fixture
def llama():
    return build_model(tie_word_embeddings=False).to(torch.bfloat16)


def projections(model) -> list[nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def is_projection(module: nn.Module, name: str) -> bool:
    return name.endswith("o_proj")


@pytest.mark.parametrize("scheme", [*slow("fp8_row"), *long("fp8_static")])
def test_latent_attention_of_a_quantized_model(scheme):
    """Its output is rounded behind W_UV; attention is that of latents."""
    model = build_model("deepseek_v3", v_head_dim=16).to(torch.bfloat16)
    for attention in cast(Any, projections(model)):
        given = (torch.tensor(4.0),) if scheme == "fp8_static" else ()
        attention.o_proj = QuantizedLinear(attention.o_proj, scheme, *given)
    latent = lambda model, backend: make_session(model)  # noqa: E731
    assert schemes(check(model, 2, latent)) == {scheme}


@pytest.mark.slow
def test_torchao_on_a_warm_cache(by_torchao, llama):
    """Matches, and what the report says of them, survive a hit in Inductor's cache."""
    by_torchao(llama, "PerRow", filter_fn=is_projection)
    seen = []
    with fresh_cache():
        for hits in (False, True):
            torch._dynamo.reset()
            counters.clear()
            recorder = check(llama, 2)
            assert bool(counters["inductor"]["fxgraph_cache_hit"]) == hits
            words, says = recorder.matches_in_words(), recorder.summaries()
            seen.append((words["quantize_output"], says["quantize_output"], schemes(recorder)))
    assert seen[0] == seen[1]
    assert (seen[0][0], seen[0][2]) == ("1 x 2 layers", {"fp8_row"})
    assert seen[0][1].startswith("attention writes fp8_row")


@pytest.mark.parametrize("mode", [*slow("FULL"), *long("PIECEWISE")])
def test_torchao_captured_with_fast_prefill(by_torchao, llama, mode):
    """Reduced batches, and attention between graphs: its break in a step is the new operator.

    torchao asks whether x has one row, so a step of one logits row compiles again, pass or no pass.
    """
    by_torchao(llama, "PerRow", filter_fn=is_projection)

    def session(model, **options):
        compiled = isinstance(model, torch._dynamo.eval_frame.OptimizedModule)
        how = {"debug": "eager_replay", "verify": "always", "mixed_capture_sizes": [16]}
        return chunked(model, **options, **(how if compiled else {}), cudagraph_mode=mode)

    check(llama, 4, session, recompiles=1, fast_prefill="on")


@pytest.mark.slow
def test_torchao_per_tensor(by_torchao, llama):
    """Rows depend on each other, which a session refuses: the model is called by itself."""
    by_torchao(llama, "PerTensor", filter_fn=is_projection)
    with pytest.raises(ValueError, match="rows of a batch must meet in attention only"):
        make_session(llama).generate(PROMPTS, 2)
    keywords = build_prompts(llama, [3, 2]).keywords
    wanted = llama(**keywords).logits
    with recording() as recorder:
        run = torch.compile(llama, backend=attn_ops, fullgraph=True, options=OPTIONS)
        got = run(**build_prompts(llama, [3, 2]).keywords).logits
    assert torch.equal(got, wanted)
    assert number_of_sites(recorder) == 2
    assert schemes(recorder) == {"fp8_tensor"}


@pytest.mark.slow
def test_captured_decodes_are_quantized_by_attention(llama, monkeypatch):
    """TRITON's kernel writes FP8 for single tokens; prompts are quantized after attention."""
    after, module = set(), sys.modules["attn_ops.ops.attention_quant"]
    quantize = module.quantize_output
    monkeypatch.setattr(
        module, "quantize_output", lambda x, *a: (after.add(x.shape[0]), quantize(x, *a))[1]
    )
    for attention in projections(llama):
        attention.o_proj = QuantizedLinear(attention.o_proj, "fp8_static", torch.tensor(0.02))
    with recording() as recorder:
        compiled = torch.compile(llama, backend=attn_ops, fullgraph=True, options=OPTIONS)
        how = {"debug": "eager_replay", "verify": "always", "cudagraph_mode": "FULL_DECODE_ONLY"}
        session = chunked(compiled, backend="TRITON", block_size=16, **how)
        session.generate(PROMPTS, 6)
    assert 8 in after, "chunks of prompts"
    assert not after & {1, 2, 4}, "captured decodes"
    report = session.report()
    assert (report.num_graphs, report.num_recompiles) == (1, 0)
    assert report.num_steps["captured"] > 0
    assert number_of_sites(recorder) == 2
    assert report.passes["quantize_output"] == "attention writes fp8_static"


# -- static scales ---------------------------------------------------------------------------------


class StaticLinear(nn.Module):
    """A linear layer in FP8 whose scale of activations is a parameter, as a checkpoint has it."""

    def __init__(self, linear: nn.Linear, scale: float) -> None:
        super().__init__()
        size = linear.weight.abs().max().float() / MAX
        self.weight = nn.Parameter((linear.weight.float() / size).to(FP8), requires_grad=False)
        self.weight_scale = nn.Parameter(size.view(1), requires_grad=False)
        self.input_scale = nn.Parameter(torch.tensor([scale]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        rows = (rows.float() / self.input_scale).clamp(-MAX, MAX).to(FP8)
        return torch._scaled_mm(
            rows, self.weight.t(), self.input_scale, self.weight_scale, out_dtype=x.dtype
        ).view(*x.shape[:-1], -1)


def test_a_static_scale_stays_a_tensor(llama):
    """A scale that is loaded anew counts in the next step of the same graph."""
    for attention in projections(llama):
        attention.o_proj = StaticLinear(attention.o_proj, 0.004)
    with recording() as recorder:
        compiled = torch.compile(llama, backend=attn_ops, fullgraph=True, options=OPTIONS)
        session, tokens = make_session(compiled, backend="TORCH"), []
        for scale in (0.004, 0.0003):
            for attention in projections(llama):
                attention.o_proj.input_scale.data.fill_(scale)
            tokens.append(tokens_of(session.generate(PROMPTS, 6)))
            assert tokens[-1] == tokens_of(make_session(llama).generate(PROMPTS, 6))
    assert tokens[0] != tokens[1], "the second scale is too small for the values"
    assert session.report().num_recompiles == 0
    assert number_of_sites(recorder) == 2
    assert schemes(recorder) == {"fp8_static"}


@pytest.mark.slow
def test_compressed_tensors(llama):
    """Its own function, static FP8. Its modules' forward swaps weights: Dynamo cannot trace it."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    args = quantization.QuantizationArgs(num_bits=8, type="float", strategy="tensor")

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(fake_quantize(x, self.input_scale, None, args))

    for attention in projections(llama):
        attention.o_proj.__class__ = Linear
        scale = torch.tensor([0.004], dtype=torch.bfloat16)
        attention.o_proj.input_scale = nn.Parameter(scale, requires_grad=False)
    assert schemes(check(llama, 2)) == {"fp8_static"}
