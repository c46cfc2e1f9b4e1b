"""The raw files of a dump, and the lines of the index that name them."""

from pathlib import Path
from types import ModuleType
from typing import Any

from torch._inductor.codecache import get_path

from attn_ops.block_layout import BlockTables, distinct, svg
from fx_passes.naming import safe_name
from fx_passes.observe import PassRecord, Recorder
from graphs.dumps import trace
from graphs.dumps.folder import put
from graphs.dumps.index import Entry


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


def picture_entries(directory: Path, passes: list[PassRecord]) -> dict[int, Entry]:
    """Flowcharts by run of a pass; of a second graph of that name, with its pass's number."""
    entries: dict[int, Entry] = {}
    stems = set()
    for number, record in enumerate(passes, 1):
        if record.pictures is None:
            continue
        stem = f"{safe_name(record.graph_name)}_{record.pass_name}"
        stem += f"_{number:02d}" if stem in stems else ""
        stems.add(stem)
        files = [
            put(directory, f"pictures/{stem}_{when}.mmd", text)
            for when, text in zip(("before", "after"), record.pictures, strict=True)
        ]
        text = f"`{record.pass_name}` on graph `{record.graph_name}`, before and after"
        entries[number - 1] = Entry("pictures", text, files, [])
    return entries


def layout_entries(directory: Path, models: list[Any]) -> list[Entry]:
    """A picture of every layout that layers have, with their names."""
    layers: dict[int, list[str]] = {}
    tables: dict[int, BlockTables] = {}
    for model in models:
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, BlockTables):
                tables[id(module)] = module
                layers.setdefault(id(module), []).append(name.rpartition(".")[0])
    entries = []
    for number, (key, found) in enumerate(tables.items(), 1):
        layout, users = found.layout, list(dict.fromkeys(layers[key]))
        file = put(directory, f"pictures/blocks_{number:02d}.svg", svg(layout, distinct(layout)))
        text = (
            f"blocks of {layout.block_size} tokens that {_one_line(', '.join(users))} see, "
            f"{layout.density():.3f} of all; one of the heads that see the same is drawn"
        )
        entries.append(Entry("pictures", text, [file], []))
    return entries


def final_entries(directory: Path, recorder: Recorder) -> list[Entry]:
    entries = []
    for number, (name, text) in enumerate(recorder.final_graphs, 1):
        file = put(directory, f"final/{number:02d}-{safe_name(name)}.py", text)
        entries.append(
            Entry("final", f"ATen graph `{name}` after all passes, as Inductor got it", [file], [])
        )
    return entries


def inductor_entries(directory: Path, modules: list[ModuleType]) -> list[Entry]:
    """One file a compiled graph; it holds the kernels too, so their own modules are left out."""
    entries = []
    for module in (m for m in modules if hasattr(m, "call") and m.__file__):
        loaded = Path(module.__file__ or "")  # depyf loads from a copy of its own
        cached = get_path(module.key, "py")[2]
        name = f"inductor/{len(entries) + 1:02d}-{module.key}.py"
        file = put(
            directory,
            name,
            loaded.read_text("utf-8") if loaded.exists() else f"# {loaded} is gone",
        )
        entries.append(
            Entry("inductor", f"Inductor's output code, in its cache `{cached}`", [file], [])
        )
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
        entries.append(Entry("depyf", f"depyf: {text}", [f"depyf/{path.name}"], []))
    return entries


def trace_entries(directory: Path) -> list[Entry]:
    if not (directory / trace.FILE).is_file():
        return []
    return [
        Entry("data", "torch's structured trace; `tlparse` makes pages of it", [trace.FILE], [])
    ]


def _one_line(text: str) -> str:
    """A reason is one item of a list, whatever a pass says."""
    return " ".join(text.split())
