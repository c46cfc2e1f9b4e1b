"""Prefill with and without its dead rows: `python -m benchmarks.fast_prefill`.

    off, on         time until the last request has its first token, through `DecodeSession.step`
    gain            1 - on / off, the median over pairs of turns, one behind the other
    from, to        its 95 percent interval, by the pairs' order statistics; about 90 percent where
                    pairs ended because it was narrow
    theory          part of the floating point operations, attention's too, that is not done
    memory          of the captured step of a whole chunk, beyond weights and caches
    decode          one captured decode step, on / off, in turn

bf16, random weights; prefill steps of whole chunks are CUDA graphs on both sides. A prefill's time
varies by a percent or two, and Llama's whole gain is three: pairs are run until the interval is
narrow, whatever the gain. A turn is 1.5 s of prefills of one side, or one that takes longer, and
the median of their times: in turns of one prefill of 0.4 s (Llama, 4x4096, one H200, b6ca7d7,
2026-11-21) the times of both sides correlate by -0.5, in longer ones they do not.
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fx_passes
from benchmarks.decode_step import build
from benchmarks.figures import Bar, bar_table, free, origin, write
from benchmarks.shapes import llama_3_8b
from benchmarks.timing import median_ms
from fx_passes.observe import recording
from graphs import BatchDescriptor, CUDAGraphMode, DecodeSession

Prompts = tuple[int, int, int]
"""Requests, tokens of each, and tokens of a step."""

CASES: list[Prompts] = [
    (1, 512, 2048), (16, 512, 2048), (1, 4096, 2048), (1, 4096, 8192), (4, 4096, 8192),
    (16, 4096, 8192), (1, 32768, 8192),
]  # fmt: skip
SHARE, DECODE, FROM = 0.90, 1.01, 4096
"""Bars: part of the theoretical gain, from prompts of so many tokens on; decode on / off."""
WITHIN, MOST_SECONDS = 0.05, 180.0
"""Pairs are run until half of a barred gain's interval is so much of the theory, or for so long."""
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


def tiny() -> Any:
    """For a run on a CPU, whose figures mean nothing."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=256,
    )  # fmt: skip


SHAPES = {"gemma3n-e4b": gemma3n_e4b, "gemma4-e4b": gemma4_e4b, "llama-3-8b": llama, "tiny": tiny}


@dataclasses.dataclass
class Case:
    """Prompts of one kind through both sessions."""

    shape: str
    num_reqs: int
    prompt_len: int
    chunk: int
    off_ms: float  # medians
    on_ms: float
    gain: float
    low: float  # of the gain's 95 percent interval
    high: float
    num_pairs: int
    theory: float  # part of the operations that is not done

    def as_dict(self) -> dict[str, Any]:
        tokens = self.num_reqs * self.prompt_len
        rates = {
            "off_tokens_s": tokens / self.off_ms * 1e3,
            "on_tokens_s": tokens / self.on_ms * 1e3,
        }
        return dataclasses.asdict(self) | rates

    @classmethod
    def of(
        cls, shape: str, prompts: Prompts, off: list[float], on: list[float], theory: float
    ) -> "Case":
        medians = statistics.median(off), statistics.median(on)
        return cls(shape, *prompts, *medians, *gain_of(off, on), len(off), theory)


def gain_of(off: list[float], on: list[float]) -> tuple[float, float, float]:
    """1 - on / off, the median over pairs, and the ends of its 95 percent interval.

    The ends are two of the sorted gains: in so many of 100 samples the median of all that could be
    measured lies between them, whatever the distribution. Of fewer than 6 pairs, the extremes.
    """
    gains = sorted(1.0 - b / a for a, b in zip(off, on, strict=True))
    return statistics.median(gains), gains[num_outside(len(gains))], gains[~num_outside(len(gains))]


def num_outside(num_pairs: int) -> int:
    """Gains below the interval, and above: half of all are below their median, up to chance."""
    probability, below = 0.0, -1
    while probability <= 0.025:
        below += 1
        probability += math.comb(num_pairs, below) / 2**num_pairs
    return max(below - 1, 0)


def compiled(model: Any, fast_prefill: str) -> Any:
    options = {"fast_prefill": fast_prefill}
    return torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True, options=options)


def make_session(model: Any, cases: list[Prompts], chunk: int, device: str) -> Any:
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


def decode_ms(session: DecodeSession, batch: int) -> float:
    captured = session.runner.captured(
        BatchDescriptor(batch, batch, uniform=True), CUDAGraphMode.FULL
    )
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
    sides: list[Side], cases: list[Prompts], chunk: int, args: argparse.Namespace
) -> None:
    """Both sides in turn, each first every other time, so that a clock that drifts meets both."""
    sessions = [side.session(cases, chunk, args.device) for side in sides]
    for case in cases:
        if case[2] == chunk:
            measure_case(sides, sessions, case, args)
    if args.device == "cuda" and not sides[0].decode_ms:
        for batch in sorted({1, max(n for n, _, _ in cases)}):
            measure_decode(sides, sessions, batch)
    for session in sessions:
        assert session.num_steps["called"] == 0, "every step is a graph"
        session.release()


def measure_case(
    sides: list[Side], sessions: list[DecodeSession], case: Prompts, args: argparse.Namespace
) -> None:
    """`--repeats` pairs, and more where a bar asks for a narrower interval."""
    num_reqs, length, _ = case
    for session in sessions:  # warms up
        prefill_ms(session, num_reqs, length)
    off, on = (side.ms.setdefault(case, []) for side in sides)
    width = 2 * args.within * theory(sides[0].model, sides[1].facts, num_reqs, length)
    end = time.perf_counter() + args.seconds
    while len(off) < args.repeats or (
        length >= FROM and time.perf_counter() < end and is_wide(off, on, width)
    ):
        pair = [(off, sessions[0]), (on, sessions[1])]
        for times, session in pair if len(off) % 2 else reversed(pair):
            times.append(turn_ms(session, num_reqs, length))


def turn_ms(session: DecodeSession, num_reqs: int, prompt_len: int) -> float:
    """Median of the prefills of a turn."""
    times: list[float] = []
    while sum(times) < 1e3 * TURN_SECONDS:
        times.append(prefill_ms(session, num_reqs, prompt_len))
    return statistics.median(times)


def is_wide(off: list[float], on: list[float], width: float) -> bool:
    _, low, high = gain_of(off, on)
    return high - low > width


def measure_decode(sides: list[Side], sessions: list[DecodeSession], batch: int) -> None:
    """Medians over turns, as a single measurement is off by 1 to 2 percent."""
    turns = [[decode_ms(session, batch) for session in sessions] for _ in range(DECODE_TURNS)]
    for side, found in zip(sides, zip(*turns, strict=True), strict=True):
        side.decode_ms[batch] = statistics.median(found)


def measure_shape(name: str, cases: list[Prompts], args: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    model = build(SHAPES[name](), "attn_ops", args.device)
    sides = [Side(compiled(model, mode)) for mode in ("off", "on")]
    for chunk in sorted({chunk for _, _, chunk in cases}):
        measure_chunk(sides, cases, chunk, args)
        free()
    off, on = sides
    rows = [
        Case.of(name, case, off.ms[case], on.ms[case], theory(model, on.facts, *case[:2]))
        for case in cases
    ]
    return {
        "shape": name,
        "backend": on.backend,
        "facts": on.facts,
        "turns_ms": {str(case): (off.ms[case], on.ms[case]) for case in cases},
        "compile_s": {"off": off.compile_s, "on": on.compile_s},
        "cases": [row.as_dict() for row in rows],
        "bytes": {chunk: (off.num_bytes[chunk], on.num_bytes[chunk]) for chunk in on.num_bytes},
        "decode_ms": {batch: (off.decode_ms[batch], on.decode_ms[batch]) for batch in on.decode_ms},
    }


def all_bars(shapes: list[dict[str, Any]]) -> Iterator[Bar]:
    for shape in shapes:
        name = shape["shape"]
        for case in shape["cases"]:
            if case["prompt_len"] >= FROM:
                what = f"gain / theory: {name} {case['num_reqs']}x{case['prompt_len']}"
                share = case["gain"] / case["theory"]
                yield Bar(f"{what}, chunk {case['chunk']}", ">=", SHARE, share)
        for batch, (off, on) in shape["decode_ms"].items():
            yield Bar(f"decode on / off: {name} batch {batch}", "<=", DECODE, on / off)
        for chunk, (off, on) in shape["bytes"].items():
            yield Bar(f"memory on / off: {name} chunk {chunk}", "<=", 1.0, on / max(off, 1))


def parsed(case: str) -> Prompts:
    """`4x4096x8192` as numbers."""
    num_reqs, length, chunk = map(int, case.split("x"))
    return num_reqs, length, chunk


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
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES)[:-1], choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=None, help="like 4x4096x8192")
    parser.add_argument("--repeats", type=int, default=9, help="pairs at least")
    parser.add_argument(
        "--within",
        type=float,
        default=WITHIN,
        help="half of a barred gain's interval, of the theory",
    )
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="a barred case at most")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", default=None)
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    cases = CASES
    if args.cases:
        cases = [parsed(case) for case in args.cases]
    console, shapes = Console(width=120), []
    for name in args.shapes:
        shapes.append(measure_shape(name, cases, args))
        free()
        console.print(table_of(shapes[-1]))
    found = [bar.as_dict() for bar in all_bars(shapes)]
    console.print(bar_table(found))
    write(args.json, {**origin(args), "shapes": shapes, "bars": found})


if __name__ == "__main__":
    main()
