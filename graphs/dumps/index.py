"""The raw files of a dump, and the index that lists them in order."""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

from torch._inductor.codecache import get_path

from attn_ops.block_layout import BlockTables, distinct, svg
from fx_passes.naming import safe_name
from fx_passes.observe import PassRecord, Recorder
from graphs.dumps import trace
from graphs.dumps.folder import MARKER, put

SECTIONS = {
    "passes": "Passes, in the order in which they ran",
    "pictures": "Layouts of block-sparse layers",
    "final": "Graphs handed to Inductor",
    "inductor": "Inductor's output code",
    "timeline": "A decode step as a timeline",
    "depyf": "depyf's files",
    "data": "Data",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the list."""

    section: str  # a key of SECTIONS
    text: str  # one line, Markdown
    files: list[str]  # relative to the dump
    skipped: list[str] = dataclasses.field(default_factory=list)  # what a pass left alone, and why


@dataclasses.dataclass(frozen=True)
class Index:
    """What index.md and the page's list say."""

    num_graphs: int
    matches: dict[str, str]  # by pass, in words
    summaries: dict[str, str]  # by pass, what it did to a step
    sessions: list[str]
    compiled: list[str]  # functions in order, and why again
    notes: list[str]
    entries: list[Entry]

    def markdown(self) -> str:
        lines = [MARKER, "# From Dynamo's graph to Inductor's code", ""]
        lines += [f"Graphs that Dynamo handed to the backend: {self.num_graphs}.", ""]
        lines += ["Matches:" if self.matches else "Matches: no pass ran.", ""]
        lines += [f"- {name} {words}" for name, words in self.matches.items()]
        for name, line in self.summaries.items():
            lines += ["", f"{name.replace('_', ' ').capitalize()}: {line}."]
        lines += ["", *(f"- compiled {line}" for line in self.compiled)]
        for session in self.sessions:
            lines += ["", f"Session: {session}."]
        for note in self.notes:
            lines += ["", f"> {note}"]
        numbered = list(enumerate(self.entries, 1))
        for key, title in SECTIONS.items():
            found = [(number, one) for number, one in numbered if one.section == key]
            lines += ["", f"## {title}", ""] if found else []
            for number, one in found:
                lines.append(f"{number}. {one.text}")
                lines += [f"    - [{file}]({file})" for file in one.files]
                lines += [f"    - left alone: {reason}" for reason in one.skipped]
        return "\n".join(lines)


def pass_entry(directory: Path, number: int, record: PassRecord) -> Entry:
    stage = "Dynamo" if record.stage == "dynamo" else "ATen"
    text = (
        f"{stage} pass `{record.pass_name}` on graph `{record.graph_name}`: "
        f"matches {_one_line(record.matches_in_words())}"
    )
    if record.error is not None:
        text += f"; failed with {_one_line(record.error)}"
    skipped = [_one_line(reason) for reason in record.skipped]
    if record.before == record.after:
        return Entry("passes", f"{text}; the graph stayed as it was, so no files", [], skipped)
    stem = f"{number:02d}-{record.pass_name}-{safe_name(record.graph_name)}"
    files = [
        put(directory, f"passes/{stem}.before.py", record.before or ""),
        put(directory, f"passes/{stem}.after.py", record.after or ""),
    ]
    return Entry("passes", text, files, skipped)


def layout_entries(directory: Path, models: list[Any]) -> list[Entry]:
    """A picture of every block layout, with the layers that have it."""
    layers: dict[BlockTables, list[str]] = {}
    for model in models:
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, BlockTables):
                layers.setdefault(module, []).append(name.rpartition(".")[0])
    entries = []
    for number, (tables, names) in enumerate(layers.items(), 1):
        layout, users = tables.layout, ", ".join(dict.fromkeys(names))
        file = put(directory, f"pictures/blocks_{number:02d}.svg", svg(layout, distinct(layout)))
        text = (
            f"blocks of {layout.block_size} tokens that {_one_line(users)} see, "
            f"{layout.density():.3f} of all; one of the heads that see the same is drawn"
        )
        entries.append(Entry("pictures", text, [file]))
    return entries


def final_entries(directory: Path, recorder: Recorder) -> list[Entry]:
    return [
        Entry(
            "final",
            f"ATen graph `{name}` after all passes, as Inductor got it",
            [put(directory, f"final/{number:02d}-{safe_name(name)}.py", text)],
        )
        for number, (name, text) in enumerate(recorder.final_graphs, 1)
    ]


def inductor_entries(directory: Path, modules: list[ModuleType]) -> list[Entry]:
    """One file a compiled graph; it holds the kernels too, so their own modules are left out."""
    entries = []
    for module in (m for m in modules if hasattr(m, "call") and m.__file__):
        loaded = Path(module.__file__ or "")  # depyf loads from a copy of its own
        code = loaded.read_text("utf-8") if loaded.exists() else f"# {loaded} is gone"
        file = put(directory, f"inductor/{len(entries) + 1:02d}-{module.key}.py", code)
        cached = get_path(module.key, "py")[2]
        text = f"Inductor's output code, in its cache `{cached}`"
        entries.append(Entry("inductor", text, [file]))
    return entries


def depyf_entries(directory: Path) -> list[Entry]:
    entries = []
    for path in sorted((directory / "depyf").glob("*.py")):
        if path.name.startswith("full_code_for_"):
            text = "the compiled function as Python, with its guards"
        elif path.name.startswith("__transformed_code_"):
            text = "the frame's bytecode after Dynamo, decompiled"
        else:
            text = f"graph or code at the stage `{path.name.split('.')[1]}`"
        entries.append(Entry("depyf", f"depyf: {text}", [f"depyf/{path.name}"]))
    return entries


def trace_entries(directory: Path) -> list[Entry]:
    if not (directory / trace.FILE).is_file():
        return []
    return [Entry("data", "torch's structured trace; `tlparse` makes pages of it", [trace.FILE])]


def _one_line(text: str) -> str:
    """A reason is one item of a list, even if a pass writes several lines."""
    return " ".join(text.split())
