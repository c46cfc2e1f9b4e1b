"""Reports for people, by rich, and for programs, as JSON."""

import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from attn_ops.support_table import COLUMNS, SupportRow
from graphs.app.parity import Parity
from graphs.report import SessionReport, pass_lines
from graphs.session import DecodeSession


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one decode step of `batch` requests; None where there is none."""

    batch: int
    eager_ms: float | None
    compiled_ms: float | None
    captured_ms: float | None


@dataclasses.dataclass(frozen=True)
class Output:
    """The tokens generated for one prompt. Texts are None without a tokenizer."""

    prompt_ids: list[int]
    prompt: str | None
    token_ids: list[int]
    text: str | None
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class RunReport:
    """The result of `attn-ops run`."""

    model: str
    outputs: list[Output]
    random_prompts: bool  # token ids, as none were given
    dtype: str
    backends_against: dict[str, list[str]]
    skipped: list[str]
    parity: Parity
    outputs_vary: bool
    ok: bool
    steps: StepTimes
    tokens_per_second: float
    cache_bytes: int
    workspace_bytes: int  # of latent attention, with the most that is up-projected at a time
    max_tokens_per_step: int
    dump: str | None
    session: SessionReport

    @classmethod
    def of(cls, session: DecodeSession, *, parity: Parity, **measured: Any) -> "RunReport":
        """What `session` knows of itself, with what was measured."""
        passes = session.compile_record.passes
        return cls(
            dtype=str(session.original.dtype).removeprefix("torch."),
            backends_against=session.backend_selection.reasons_against,
            skipped=list(
                dict.fromkeys(f"{p.pass_name}: {reason}" for p in passes for reason in p.skipped)
            ),
            parity=parity,
            outputs_vary=parity.varied,
            cache_bytes=session.cache.num_bytes,
            workspace_bytes=_workspace_bytes(session),
            max_tokens_per_step=session.scheduler.max_tokens_per_step,
            session=session.report(),
            **measured,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: these fields, and those of the session's report beside them."""
        found = dataclasses.asdict(self)
        return found["session"] | found


def print_run(report: RunReport, console: Console) -> None:
    """The report as a table of two columns."""
    table = Table(
        title="attn-ops run", show_header=False, box=None, title_justify="left", padding=(0, 1)
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(report):
        table.add_row(name, value)
    console.print(table)


def _lines(r: RunReport) -> list[tuple[str, str]]:
    rank = r.session.rank
    lines = [
        ("model", f"{r.model}, {r.dtype}, on {r.session.device}{rank and f', rank {rank}'}"),
        ("backend", f"{r.session.backend}: {r.session.backend_why}; the others: attn-ops backends"),
        ("CUDA graphs", r.session.mode_in_words),
        *(("", line) for line in r.session.kinds),
        (
            "graphs",
            f"{r.session.num_graphs}, {r.session.num_breaks} breaks, "
            f"{r.session.num_recompiles} recompiles after warm-up",
        ),
        *pass_lines(r.session),
        *([("left alone", _left_alone(r))] if r.skipped else []),
        ("parity", _parity(r)),
        (
            "outputs vary",
            f"{'yes' if r.outputs_vary else 'no'}, {r.parity.num_distinct_tokens} distinct tokens",
        ),
        (
            "decode step",
            f"{_ms(r.steps.eager_ms)} eager, {_ms(r.steps.compiled_ms)} compiled, {_captured(r)}",
        ),
        ("tokens", f"{r.tokens_per_second:,.0f} a second, prefill included"),
        ("memory", _memory(r)),
        ("compile", f"{r.session.compile_seconds:.1f} s"),
        ("dump", f"{r.dump}/index.html" if r.dump else "none; --dump DIR writes one"),
        *_output_lines(r),
    ]
    return lines


def _left_alone(r: RunReport) -> str:
    where = "see the dump" if r.dump else "--dump DIR and --json say why"
    return f"{_count(len(r.skipped), 'place', 'places')} by passes; {where}"


def _output_lines(r: RunReport) -> list[tuple[str, str]]:
    """Prompt and output, token ids where there is no text; random ones take a line each."""
    lines: list[tuple[str, str]] = []
    for number, output in enumerate(r.outputs):
        prompt = _short(_words(output.prompt, output.prompt_ids, 4), 40)
        text = _words(output.text, output.token_ids, 8 if r.random_prompts else None)
        text = _short(text, 60) if r.random_prompts else text
        name = "" if number else "outputs"
        lines.append((name, f"{prompt} -> {text} ({output.finish_reason})"))
    return lines


def _words(text: str | None, token_ids: list[int], most: int | None) -> str:
    """Text as it would be typed in Python, or token ids, `most` of them."""
    if text is not None:
        return json.dumps(text, ensure_ascii=False)
    shown = " ".join(map(str, token_ids[:most]))
    more = len(token_ids) - len(token_ids[:most])
    return f"{shown} ... {len(token_ids)} tokens" if more else shown


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _parity(r: RunReport) -> str:
    p = r.parity
    verdict = "PASS" if r.ok else "FAIL"
    return (
        f"{verdict}: tokens identical to Transformers' generate for {p.num_identical} of "
        f"{_count(p.num_prompts, 'prompt', 'prompts')} "
        f"(batched, at most {r.max_tokens_per_step} tokens a step); "
        f"largest logits difference {p.max_logits_difference:.1e}"
        + (f"; tokens may differ within {p.tolerance:.1e}" if p.tolerance else "")
    )


def _captured(r: RunReport) -> str:
    batch = f"batch {r.steps.batch}"
    if r.steps.captured_ms is not None:
        return f"{_ms(r.steps.captured_ms)} captured; {batch}"
    return f"n/a ({'CPU' if r.session.device == 'cpu' else 'not captured'}) captured; {batch}"


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f} ms"


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _workspace_bytes(session: DecodeSession) -> int:
    workspace = getattr(session.builder, "workspace", None)
    return 0 if workspace is None else workspace.num_bytes + workspace.up_projected_bytes


def _memory(r: RunReport) -> str:
    parts = f"KV cache {_bytes(r.cache_bytes)}, CUDA graphs {_bytes(r.session.graph_bytes)}"
    if r.workspace_bytes:
        parts += f", latents of prefills at most {_bytes(r.workspace_bytes)}"
    return parts


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def print_comparison(found: dict[str, list[tuple[str, str, str, str]]], console: Console) -> None:
    """Two dumps side by side, a table a part."""
    if not found:
        console.print("The dumps say the same.")
    for part, rows in found.items():
        table = Table(title=part, box=None, title_justify="left", padding=(0, 1))
        for name in ("", "A", "B", "change"):
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)


SHORT = ("backend", "devices", "dtypes", "head sizes")
"""Columns of the support table that fit on a screen."""


def print_backends(rows: list[SupportRow], console: Console) -> None:
    """A line a backend, with what keeps it from this machine; the rest is for `--why`."""
    title = "attn-ops backends, in the order of preference"
    table = Table(title=title, title_justify="left", box=None, expand=True, padding=(0, 1))
    for name in SHORT:
        table.add_column(name, no_wrap=True)
    table.add_column("on this machine", overflow="ellipsis", no_wrap=True, ratio=1)
    places = [COLUMNS.index(name) for name in SHORT]
    for row in rows:
        table.add_row(*(row.cells[i] for i in places), row.unavailable or "available")
    console.print(table)
    console.print("attn-ops backends --why NAME says all of one.")


def print_backend(row: SupportRow, console: Console) -> None:
    """All that one backend supports, and what keeps it from this machine."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for name, cell in zip(COLUMNS, row.cells, strict=True):
        table.add_row(name, cell)
    table.add_row("on this machine", row.unavailable or "available")
    console.print(table)


def backends_as_dicts(rows: list[SupportRow]) -> list[dict[str, Any]]:
    keys = [column.lower().replace(" ", "_") for column in COLUMNS]
    return [
        dict(zip(keys, row.cells, strict=True))
        | {"available": row.unavailable is None, "reason": row.unavailable}
        for row in rows
    ]
