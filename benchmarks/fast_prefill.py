"""Prefill with and without its dead rows: `python -m benchmarks.fast_prefill`.

    off, on         time until the last request has its first token, through `DecodeSession.step`
    gain            1 - on / off, the median over pairs of turns, one after the other
    from, to        the least and the largest gain of a pair
    theory          part of the floating point operations, attention's too, that is not done
    memory          of the captured step of a whole chunk, beyond weights and caches
    decode          one captured decode step, on / off, in turn

bf16, random weights; prefill steps of whole chunks are CUDA graphs on both sides. A turn is 1.5 s
of prefills of one side, or one that takes longer, and the median of their times.
"""

import dataclasses
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fx_passes
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
TEXT = 262144
"""Gemma 3n's tokens from here on are images and sounds, for which its layers have no inputs."""


def gemma3n_e4b() -> Any:
    from transformers import Gemma3nTextConfig

    return Gemma3nTextConfig(max_position_embeddings=40960)


def gemma4_e4b() -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_attention_heads=8,
        num_key_value_heads=2, num_kv_shared_layers=18,
    )  # fmt: skip


def llama() -> Any:
    config = llama_3_8b()
    config.max_position_embeddings = 40960
    return config


SHAPES = {
    "gemma3n-e4b": gemma3n_e4b,
    "gemma4-e4b": gemma4_e4b,
    "llama-3-8b": llama,
    "tiny": lambda: tiny_llama(2),
}


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
    tokens, off_ms, on_ms = case[0] * case[1], statistics.median(off), statistics.median(on)
    return {
        "num_reqs": case[0], "prompt_len": case[1], "chunk": case[2], "off_ms": off_ms,
        "on_ms": on_ms, "gain": statistics.median(gains), "low": gains[0], "high": gains[-1],
        "num_pairs": len(gains), "theory": part, "on_tokens_s": tokens / on_ms * 1e3,
    }  # fmt: skip


def measure_shape(name: str, cases: list[Prompts], device: str, repeats: int) -> dict[str, Any]:
    torch._dynamo.reset()
    model: Any = build(SHAPES[name](), "attn_ops", device)
    sides = [
        Side(
            torch.compile(
                model, backend=fx_passes.attn_ops, fullgraph=True, options={"fast_prefill": mode}
            )
        )
        for mode in ("off", "on")
    ]
    for chunk in sorted({chunk for _, _, chunk in cases}):
        measure_chunk(sides, cases, chunk, device, repeats)
        free()
    off, on = sides
    rows = [
        row_of(case, off.ms[case], on.ms[case], theory(model, on.facts, *case[:2]))
        for case in cases
    ]
    return {
        "shape": name,
        "backend": on.backend,
        "facts": on.facts,
        "compile_s": {"off": off.compile_s, "on": on.compile_s},
        "cases": rows,
        "bytes": {chunk: (off.num_bytes[chunk], on.num_bytes[chunk]) for chunk in on.num_bytes},
        "decode_ms": {batch: (off.decode_ms[batch], on.decode_ms[batch]) for batch in on.decode_ms},
    }


def table_of(shape: dict[str, Any]) -> Table:
    facts = shape["facts"]
    table = Table(
        title=f"{shape['shape']}, {shape['backend']}: {facts['num_attentions']} of "
        f"{facts['of_attentions']} attentions and {facts['num_products']} of "
        f"{facts['of_products']} products on logits rows"
    )
    columns = ("prompts", "chunk", "off, ms", "on, ms", "tokens/s on")
    for column in (*columns, "gain", "from", "to", "pairs", "theory"):
        table.add_column(column, justify="right")
    for case in shape["cases"]:
        table.add_row(
            f"{case['num_reqs']} x {case['prompt_len']}", str(case["chunk"]),
            f"{case['off_ms']:.1f}", f"{case['on_ms']:.1f}", f"{case['on_tokens_s']:,.0f}",
            *(f"{case[name]:.4f}" for name in ("gain", "low", "high")), str(case["num_pairs"]),
            f"{case['theory']:.4f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES)[:-1], choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=None, help="like 4x4096x8192")
    parser.add_argument("--repeats", type=int, default=9, help="pairs")
    args = parser.parse_args()
    cases = CASES
    if args.cases:
        cases = [tuple(map(int, case.split("x"))) for case in args.cases]
    console, shapes = Console(width=120), []
    for name in args.shapes:
        shapes.append(measure_shape(name, cases, args.device, args.repeats))
        free()
        console.print(table_of(shapes[-1]))
        for what in ("decode_ms", "bytes"):
            for key, (off, on) in shapes[-1][what].items():
                console.print(f"{what} {key}, on / off: {on / max(off, 1e-9):.3f}")
        write(args.json, {**origin(args), "shapes": shapes})


if __name__ == "__main__":
    main()
