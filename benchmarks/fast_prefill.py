"""Prefill with and without its dead rows: `python -m benchmarks.fast_prefill`.

    off, on         time until the last request has its first token, through `DecodeSession.step`
    gain            1 - on / off, the median over pairs of turns; in brackets a pair's extremes
    theory          part of the floating point operations, attention's too, that is not done
    memory          of the captured step of a whole chunk, beyond weights and caches
    decode          one captured decode step, on / off, in turn

bf16, random weights; prefill steps of whole chunks are CUDA graphs on both sides. A turn is 1.5 s
of prefills of one side, or one that takes longer, and the median of their times. `--json x.json`
has the times; memory, decodes and compilation go to x_steps.json.
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import fx_passes
from benchmarks.attention import command_of
from benchmarks.decode_step import build
from benchmarks.harness import free, median_ms, origin, parser_of, write
from benchmarks.shapes import llama_3_8b, tiny_llama
from fx_passes.observe import recording
from graphs import BatchDescriptor, CUDAGraphMode, DecodeSession

Prompts = tuple[int, int, int]
"""Requests, tokens of each, and tokens of a step."""

CASES: list[Prompts] = [
    (1, 512, 2048), (16, 512, 2048), (1, 4096, 2048), (1, 4096, 8192), (4, 4096, 8192),
    (16, 4096, 8192), (1, 32768, 8192),
]  # fmt: skip
TURN_SECONDS = 1.5
DECODE_TURNS = 9
SHAPES = ("gemma3n-e4b", "gemma4-e4b", "llama-3-8b", "tiny")
TEXT = 262144
"""Gemma 3n's tokens from here on are images and sounds, for which its layers have no inputs."""


def config_of(name: str) -> Any:
    from transformers import Gemma3nTextConfig, Gemma4TextConfig

    if name == "gemma3n-e4b":
        return Gemma3nTextConfig(max_position_embeddings=40960)
    if name == "gemma4-e4b":
        return Gemma4TextConfig(
            hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_attention_heads=8,
            num_key_value_heads=2, num_kv_shared_layers=18,
        )  # fmt: skip
    config = llama_3_8b() if name == "llama-3-8b" else tiny_llama(2)
    config.max_position_embeddings = 40960
    return config


def make_session(model: Any, cases: list[Prompts], chunk: int, device: str) -> DecodeSession:
    requests = max(n for n, _, _ in cases)
    longest = max(length for _, length, _ in cases)
    sizes = sorted({min(chunk, n * length) for n, length, size in cases if size == chunk})
    session = DecodeSession(
        model, max_batch_size=requests, max_tokens=longest + 1, max_tokens_per_step=chunk,
        cache_tokens=max(n * (length + 16) for n, length, _ in cases),
        cudagraph_mode="FULL", capture_sizes=[1, requests], mixed_capture_sizes=sizes,
        debug=None if device == "cuda" else "eager_replay",
    )  # fmt: skip
    session.warm_up()
    return session


def prefill_ms(session: DecodeSession, num_reqs: int, prompt_len: int) -> float:
    """From the first step to the last request's first token."""
    generator = torch.Generator().manual_seed(0)
    ids = []
    for _ in range(num_reqs):
        prompt = torch.randint(1, min(session.vocab_size, TEXT), (prompt_len,), generator=generator)
        ids.append(session.add(prompt.tolist(), 1, eos=()))
    begin = time.perf_counter()
    while session.num_unfinished:
        session.step()
    milliseconds = 1e3 * (time.perf_counter() - begin)
    for request in ids:
        session.discard(request)
    return milliseconds


def turn_ms(session: DecodeSession, num_reqs: int, prompt_len: int) -> float:
    """Median of the prefills of a turn."""
    times: list[float] = []
    while sum(times) < 1e3 * TURN_SECONDS:
        times.append(prefill_ms(session, num_reqs, prompt_len))
    return statistics.median(times)


def decode_ms(session: DecodeSession, batch: int) -> float:
    captured = session.graphs.get(BatchDescriptor(batch, batch, uniform=True), CUDAGraphMode.FULL)
    assert captured is not None
    captured.tensors.host["seq_lens"].fill_(1024)
    captured.tensors.upload()
    return median_ms(lambda: captured.graph.replay(), repeats=50)


def theory(model: Any, facts: dict[str, Any], num_reqs: int, prompt_len: int) -> float:
    """Products and attention that are not done, by all that are."""
    tokens, rows = num_reqs * prompt_len, num_reqs  # chunks before a prompt's last want no logits
    attends = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj")]
    attention = [num_reqs * _attention_flops(m, prompt_len) for m in attends]
    dead = sum(attention[len(attention) - facts["num_attentions"] :])
    removed = facts["flops_per_row"] * (tokens - rows) + dead * (1 - rows / tokens)
    return removed / (facts["of_flops_per_row"] * tokens + sum(attention))


def _attention_flops(layer: Any, length: int) -> float:
    window = getattr(layer, "sliding_window", None) or length
    keys = sum(min(p + 1, window) for p in range(length))
    heads = layer.q_proj.out_features // layer.head_dim
    return 4.0 * heads * layer.head_dim * keys


@dataclasses.dataclass
class Side:
    """The pass off or on: the compiled model, and what was measured of its sessions."""

    model: Any
    ms: dict[Prompts, list[float]] = dataclasses.field(default_factory=dict)
    num_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    decode_ms: dict[int, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    compile_s: float = 0.0
    backend: str = ""

    def session(self, cases: list[Prompts], chunk: int, device: str) -> DecodeSession:
        with recording() as record:
            session = make_session(self.model, cases, chunk, device)
        found = [one.facts for one in record.passes if one.pass_name == "fast_prefill"]
        self.facts = next(filter(None, found), self.facts)
        self.backend = session.backend_selection.backend.name
        self.compile_s = max(self.compile_s, session.compile_seconds)
        largest = max(session.graphs or (), key=lambda captured: captured.key.num_tokens)
        self.num_bytes[chunk] = largest.graph.num_bytes
        return session


def measure_chunk(
    sides: list[Side], cases: list[Prompts], chunk: int, device: str, repeats: int
) -> None:
    """Both sides in turn, each first every other time, so that a clock that drifts meets both."""
    sessions = [side.session(cases, chunk, device) for side in sides]
    pair = list(zip(sides, sessions, strict=True))
    for case in (case for case in cases if case[2] == chunk):
        for session in sessions:  # warms up
            prefill_ms(session, *case[:2])
        for turn in range(repeats):
            for side, session in pair if turn % 2 else reversed(pair):
                side.ms.setdefault(case, []).append(turn_ms(session, *case[:2]))
    if device == "cuda" and not sides[0].decode_ms:
        for batch in sorted({1, max(n for n, _, _ in cases)}):
            turns = [[decode_ms(s, batch) for s in sessions] for _ in range(DECODE_TURNS)]
            for side, found in zip(sides, zip(*turns, strict=True), strict=True):
                side.decode_ms[batch] = statistics.median(found)
    for session in sessions:
        assert session.num_steps["called"] == 0, "every step is a graph"
        session.release()


def row_of(case: Prompts, off: list[float], on: list[float], part: float) -> dict[str, Any]:
    """Medians, and gains by pairs: both of a pair meet the same clock."""
    gains = sorted(1.0 - b / a for a, b in zip(off, on, strict=True))
    gain, low, high = statistics.median(gains), gains[0], gains[-1]
    tokens, off_ms, on_ms = case[0] * case[1], statistics.median(off), statistics.median(on)
    return {
        "off, ms": off_ms, "on, ms": on_ms, "tokens/s off": round(tokens / off_ms * 1e3),
        "tokens/s on": round(tokens / on_ms * 1e3), "gain": gain, "theory": part,
        "gain / theory": f"{gain / part:.2f} ({low / part:.2f} to {high / part:.2f})",
    }  # fmt: skip


def steps_row(off: Side, on: Side) -> dict[str, str]:
    """What changes besides the time of prompts."""

    def ratios(what: str, before: dict[int, Any], after: dict[int, Any]) -> dict[str, str]:
        key = f"{what} {', '.join(map(str, after))}"
        return {key: ", ".join(f"{after[n] / max(before[n], 1e-9):.3f}" for n in after)}

    facts = on.facts
    return {
        "backend": on.backend,
        "attentions on logits rows": f"{facts['num_attentions']} of {facts['of_attentions']}",
        "products": f"{facts['num_products']} of {facts['of_products']}",
        **ratios("decode on / off, batch", off.decode_ms, on.decode_ms),
        **ratios("memory of the step's graph on / off, chunk", off.num_bytes, on.num_bytes),
        "compile, s, off, on": f"{off.compile_s:.0f}, {on.compile_s:.0f}",
    }


def measure_shape(
    name: str, cases: list[Prompts], device: str, repeats: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Rows of the cases by name, and that of the steps."""
    torch._dynamo.reset()
    model: Any = build(config_of(name), "attn_ops", device)
    off, on = (
        Side(
            torch.compile(
                model, backend=fx_passes.attn_ops, fullgraph=True, options={"fast_prefill": mode}
            )
        )
        for mode in ("off", "on")
    )
    for chunk in sorted({chunk for _, _, chunk in cases}):
        measure_chunk([off, on], cases, chunk, device, repeats)
        free()
    rows = {
        f"{name}, {case[0]} x {case[1]}, chunk {case[2]}": row_of(
            case, off.ms[case], on.ms[case], theory(model, on.facts, *case[:2])
        )
        for case in cases
    }
    return rows, steps_row(off, on)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES[:-1], choices=SHAPES)
    parser.add_argument("--cases", nargs="+", help="like 4x4096x8192")
    parser.add_argument("--repeats", type=int, default=9, help="pairs")
    args = parser.parse_args()
    cases = CASES
    if args.cases:
        cases = [tuple(map(int, case.split("x"))) for case in args.cases]
    rows, steps = {}, {}
    shared = {"command": command_of("fast_prefill", None), **origin(args)}
    for name in args.shapes:
        found, steps[name] = measure_shape(name, cases, args.device, args.repeats)
        rows |= found
        free()
        if args.json:
            path = Path(args.json)
            write(args.json, shared | {"rows": rows})
            write(str(path.with_stem(f"{path.stem}_steps")), shared | {"rows": steps})
    for name, row in (rows | steps).items():
        print(name, row)


if __name__ == "__main__":
    main()
