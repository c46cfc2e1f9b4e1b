"""What `attn-ops run` does: generate, compare with Transformers, time the steps, report."""

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import fx_passes
from graphs.app.arguments import RunArguments
from graphs.app.parity import Reference, compare, keeping_logits
from graphs.app.presets import PRESETS, load, vocab_size
from graphs.app.prompts import Line, Prompts, encoded, has_tokenizer
from graphs.app.quantized_linear import quantize_linear_layers
from graphs.app.tables import Output, RunReport, StepTimes
from graphs.dumps.dump import dump
from graphs.modes import CUDAGraphMode
from graphs.session import DecodeSession, Generation

PROMPT_LENGTHS = (1, 2, 17, 200, 33, 5, 64, 100)
"""Of the prompts that are used when none are given."""

GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "eos": ()}
"""What `Reference` does, whatever the model's generation config says."""


def run(arguments: RunArguments, lines: Sequence[Line] | None = None) -> RunReport:
    """Run a model through everything: one batch, the longest prompt prefilled in chunks.

    Args:
        lines: of a prompts file; default: random prompts of `PROMPT_LENGTHS`.

    Raises:
        ValueError: anything of it is not supported.
    """
    device, tokenizer = _device(arguments.device), _tokenizer(arguments.model)
    asked = _prompts(arguments.model, lines, tokenizer)
    prompts, max_new_tokens = asked.token_ids, arguments.max_new_tokens
    subject = load(arguments.model, device, dtype=arguments.dtype)
    options = _session_options(prompts, arguments)
    if arguments.quantize != "off":
        _quantize(subject, arguments.quantize, prompts, options)
    eager = DecodeSession(subject, cudagraph_mode=CUDAGraphMode.NONE, **options)
    compiled = _compiled(subject, arguments)
    folder: dict[str, Any] = {"compile_cache": arguments.compile_cache}
    session = called = DecodeSession(compiled, **options, **folder)
    with dump(arguments.dump) if arguments.dump is not None else contextlib.nullcontext():
        session.warm_up()
        begin = time.perf_counter()
        results = session.generate(prompts, max_new_tokens, **arguments.sampling)
        seconds = time.perf_counter() - begin
    greedy, logits = _greedy(session, prompts, max_new_tokens)
    if session.graphs is not None:  # replayed steps hand out no logits
        called = DecodeSession(compiled, cudagraph_mode=CUDAGraphMode.NONE, **options, **folder)
        again, logits = _greedy(called, prompts, max_new_tokens)
        if again != greedy:
            raise AssertionError("captured steps generated other tokens than called ones")
    reference = Reference(subject, in_fp8=arguments.quantize != "off")
    parity = compare(reference, prompts, greedy, logits)
    steps = StepTimes(
        batch=options["max_batch_size"],
        eager_ms=_step_ms(eager),
        compiled_ms=_step_ms(called),
        captured_ms=_step_ms(session) if session.graphs is not None else None,
    )
    return RunReport.of(
        session,
        model=arguments.model,
        outputs=_outputs(asked, results, tokenizer),
        random_prompts=lines is None,
        parity=parity,
        ok=parity.ok and (parity.varied or arguments.model not in PRESETS),
        steps=steps,
        tokens_per_second=sum(len(r.token_ids) for r in results) / seconds,
        dump=str(arguments.dump) if arguments.dump is not None else None,
    )


def _device(asked: str | None) -> torch.device:
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, num_gpus = torch.device(asked), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        supported = ", ".join(["cpu", *(f"cuda:{i}" for i in range(num_gpus))])
        raise ValueError(f"device must be present, got {asked}; supported: {supported}")
    return device


def _tokenizer(model: str) -> Any | None:
    """Of the model's directory; None where it has none."""
    if not has_tokenizer(model):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # of whatever library it is made with
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model must have a tokenizer that loads, got {model!r}: {reason}"
        ) from error


def _prompts(model: str, lines: Sequence[Line] | None, tokenizer: Any | None) -> Prompts:
    if lines is not None:
        return encoded(lines, tokenizer, vocab_size(model))
    generator, size = torch.Generator().manual_seed(1), vocab_size(model)
    drawn = [torch.randint(0, size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return Prompts(drawn, [None] * len(drawn))


def _quantize(
    model: Any, scheme: str, prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> None:
    """Linear layers in FP8; static scales are those of the prompts."""

    def calibrate() -> None:
        session = DecodeSession(model, cudagraph_mode=CUDAGraphMode.NONE, **options)
        session.generate(prompts, 1, **GREEDY)

    quantize_linear_layers(model, scheme, calibrate)


def _compiled(model: Any, arguments: RunArguments) -> Any:
    switches: dict[str, Any] = {"fast_prefill": arguments.fast_prefill}
    if arguments.quantize != "off":
        switches["attn_quant"] = "always"
    return torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True, options=switches)


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


def _session_options(prompts: Sequence[Sequence[int]], arguments: RunArguments) -> dict[str, Any]:
    batch = min(8, len(prompts))
    longest = max(len(p) for p in prompts)
    return {
        "max_batch_size": batch,
        "max_tokens": longest + arguments.max_new_tokens,
        "max_tokens_per_step": max(batch, longest // 3),
        "backend": arguments.backend,
        "seed": arguments.seed,
    }


def _step_ms(session: DecodeSession, num_steps: int = 20) -> float | None:
    """Median time of a decode step of a full batch; None where the session holds too few tokens."""
    num_steps = min(num_steps, session.max_tokens - 4)
    if num_steps < 1:
        return None
    for _ in range(session.max_batch_size):
        session.add([1], num_steps + 3, **GREEDY)
    session.step()  # the prompts
    session.step()
    seconds = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        session.step()  # ends with the tokens on the host
        seconds.append(time.perf_counter() - begin)
    while session.num_unfinished:
        session.step()
    return 1000 * statistics.median(seconds)
