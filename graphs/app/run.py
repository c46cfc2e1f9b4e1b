"""`attn-ops run`: generates, compares with Transformers, times the steps and reports."""

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fx_passes
from attn_ops import get_backend
from graphs.app.parity import Parity, Reference, compare, keeping_logits
from graphs.app.presets import DTYPES, PRESETS, QUANTIZE, load
from graphs.app.prompts import Prompts, questions, read_prompts, tokenizer_of
from graphs.app.ranks import device_of_rank, num_ranks, split
from graphs.app.tables import Output, RunReport, StepTimes
from graphs.dumps.dump import dump as dumping
from graphs.dumps.folder import check_room
from graphs.modes import CUDAGraphMode
from graphs.sampling import SamplingParams
from graphs.sampling.params import check_positive
from graphs.session import DecodeSession, Generation

PROMPT_LENGTHS = (1, 2, 17, 200, 33, 5, 64, 100)
"""Lengths of the random prompts of a model without a tokenizer, when none are given."""

GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "eos": ()}
"""What `Reference` does, whatever the model's generation config says."""


def run(
    model: str = "llama-tiny",
    *,
    prompts: Path | None = None,
    backend: str | None = None,
    max_new_tokens: int = 16,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    dump: Path | None = None,
    fast_prefill: str = "off",
    quantize: str = "off",
    compile_cache: Path | None = None,
) -> RunReport:
    """Run a model through everything: one batch, the longest prompt prefilled in chunks.

    The arguments are the options of the command.

    Raises:
        ValueError: an argument is out of range or not supported. Most are checked before the model
            is loaded.
    """
    check_positive(max_new_tokens=max_new_tokens)
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    SamplingParams(**sampling, seed=seed)
    if backend is not None:
        get_backend(backend)
    if dump is not None:
        dump = dump / f"rank{os.environ['RANK']}" if num_ranks() > 1 else dump
        check_room(dump)
    switches = _switches(fast_prefill, quantize)
    tokenizer, subject = tokenizer_of(model), _subject(model, device, dtype, quantize)
    asked = _prompts(prompts, tokenizer, subject.config.get_text_config().vocab_size)
    options = {**_sizes(asked, max_new_tokens), "backend": backend, "seed": seed}
    uncaptured = {"cudagraph_mode": CUDAGraphMode.NONE, **options}
    eager = DecodeSession(subject, **uncaptured)
    compiled: Any = torch.compile(
        subject, backend=fx_passes.attn_ops, fullgraph=True, options=switches
    )
    session = called = DecodeSession(compiled, **options, compile_cache=compile_cache)
    with dumping(dump) if dump is not None else contextlib.nullcontext():
        session.warm_up()
        begin = time.perf_counter()
        results = session.generate(asked.token_ids, max_new_tokens, **sampling)
        seconds = time.perf_counter() - begin
    if session.graphs is not None:  # replayed steps hand out no logits
        called = DecodeSession(compiled, **uncaptured, compile_cache=compile_cache)
    reference = Reference(subject, in_fp8=quantize != "off")
    parity = _parity(session, called, reference, asked.token_ids, max_new_tokens)
    steps = StepTimes(
        batch=options["max_batch_size"],
        eager_ms=_step_ms(eager),
        compiled_ms=_step_ms(called),
        captured_ms=_step_ms(session) if session.graphs is not None else None,
    )
    return RunReport.of(
        session,
        model=model,
        outputs=_outputs(asked, results, tokenizer),
        random_prompts=prompts is None and tokenizer is None,
        parity=parity,
        ok=parity.ok and (parity.varied or model not in PRESETS),
        steps=steps,
        tokens_per_second=sum(len(r.token_ids) for r in results) / seconds,
        dump=str(dump) if dump is not None else None,
    )


def _sizes(asked: Prompts, max_new_tokens: int) -> dict[str, Any]:
    """Options of the session; on ranks the cache has the same size on each."""
    longest = max(map(len, asked.token_ids))
    batch = min(8, len(asked.token_ids))
    max_tokens = longest + max_new_tokens
    return {
        "max_batch_size": batch,
        "max_tokens": max_tokens,
        "max_tokens_per_step": max(batch, longest // 3),
        "cache_tokens": 2 * batch * max_tokens if num_ranks() > 1 else None,
    }


def _switches(fast_prefill: str, quantize: str) -> dict[str, Any]:
    """Options of the passes, checked."""
    _check_known("quantize", quantize, QUANTIZE)
    switches: dict[str, Any] = {"fast_prefill": fast_prefill}
    if quantize != "off":
        switches |= {"attn_quant": "always", "emulate_precision_casts": True}
    fx_passes.PassConfig.split(switches)
    return switches


def _subject(model: str, device: str | None, dtype: str | None, quantize: str) -> Any:
    """The model, on its device and quantized."""
    _check_known("dtype", dtype, (None, *DTYPES))
    where = device_of(device)
    if quantize != "off" and where.type == "cuda":
        dtype = dtype or "bfloat16"
        _check_known("dtype with quantize on a GPU", dtype, ["bfloat16"])
    if num_ranks() > 1:
        _check_known("quantize with ranks", quantize, ["off"])
        return split(functools.partial(load, model), device_of_rank(device), dtype)
    subject = load(model, where, dtype=dtype)
    if quantize != "off":
        quantize_linear_layers(subject)
    return subject


def _parity(
    session: DecodeSession,
    called: DecodeSession,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> Parity:
    """Greedy tokens of the session, and logits of the one whose steps are called, compared."""
    greedy, logits = _greedy(session, prompts, max_new_tokens)
    if called is not session:
        again, logits = _greedy(called, prompts, max_new_tokens)
        if again != greedy:
            raise AssertionError("captured steps generated other tokens than called ones")
    return compare(reference, prompts, greedy, logits)


def quantize_linear_layers(model: Any) -> None:
    """Quantize linear layers but the head to FP8 by torchao, a scale a row; on a CPU too.

    Raises:
        ValueError: no layer has sizes that products in FP8 take.
    """
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.common import KernelPreference
    from torchao.quantization.quantize_.workflows import (
        Float8Tensor,
        QuantizeTensorToFloat8Kwargs,
    )

    # As `quantize_` with Float8DynamicActivationFloat8WeightConfig, which asks for a GPU.
    how: dict[str, Any] = {"granularity": PerRow(), "kernel_preference": KernelPreference.TORCH}
    how["mm_config"] = Float8MMConfig(use_fast_accum=True)
    rows = QuantizeTensorToFloat8Kwargs(**how)
    head = model.get_output_embeddings()
    layers = [
        m for m in model.modules()
        if type(m) is nn.Linear and m is not head and not any(n % 16 for n in m.weight.shape)
    ]  # fmt: skip
    if not layers:
        raise ValueError("model must have linear layers whose sizes are multiples of 16, got none")
    for layer in layers:
        weight = Float8Tensor.from_hp(layer.weight, act_quant_kwargs=rows, **how)
        layer.weight = nn.Parameter(weight, requires_grad=False)


def _check_known(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        supported = ", ".join(k for k in known if k is not None)
        raise ValueError(f"{name} must be known, got {value!r}; supported: {supported}")


def device_of(asked: str | None) -> torch.device:
    """The device of that name; None: a GPU if there is one."""
    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked not in known and not (asked == "cuda" and len(known) > 1):
        raise ValueError(f"device must be present, got {asked}; supported: {', '.join(known)}")
    return torch.device(asked)


def _prompts(path: Path | None, tokenizer: Any | None, vocab_size: int) -> Prompts:
    if path is not None:
        return read_prompts(path, tokenizer, vocab_size)
    if tokenizer is not None:
        return questions(tokenizer)
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
    ]
    return Prompts(drawn, [None] * len(drawn))


def _greedy(
    session: DecodeSession, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[list[Generation], list[list[torch.Tensor]]]:
    """A result a prompt, and its logits, [V] a token, where no step is replayed."""
    with keeping_logits(session) as logits:
        results = session.generate(prompts, max_new_tokens, **GREEDY)
    return results, [logits[request_id] for request_id in sorted(logits)]


def _outputs(asked: Prompts, results: Sequence[Generation], tokenizer: Any | None) -> list[Output]:
    def text(tokens: list[int]) -> str | None:
        return None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)

    return [
        Output(
            prompt_ids=tokens,
            prompt=text(tokens) if given is None else given,
            token_ids=result.token_ids,
            text=text(result.token_ids),
            finish_reason=result.finish_reason,
        )
        for tokens, given, result in zip(asked.token_ids, asked.texts, results, strict=True)
    ]


def _step_ms(session: DecodeSession, num_steps: int = 20) -> float | None:
    """Median time of a decode step of a full batch, of fewer steps where they take seconds.

    None where the session holds too few tokens.
    """
    num_steps = min(num_steps, session.max_tokens - 4)
    if num_steps < 1:
        return None
    ids = [session.add([1], num_steps + 3, **GREEDY) for _ in range(session.max_batch_size)]
    session.step()  # the prompts
    session.step()
    seconds: list[float] = []
    while len(seconds) < num_steps and (sum(seconds) < 2 or num_ranks() > 1):  # ranks take as many
        begin = time.perf_counter()
        session.step()  # ends with the tokens on the host
        seconds.append(time.perf_counter() - begin)
    for request_id in ids:
        session.discard(request_id)
    return 1000 * statistics.median(seconds)
