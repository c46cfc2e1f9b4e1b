"""The page of results, from files alone: `python -m benchmarks.results`.

    pytest -m gpu --junitxml=gpu.xml
    python -m benchmarks.results --tests gpu.xml --commit COMMIT --device GPU
    python -m benchmarks.by_hand --json by_hand.json
    python -m benchmarks.results --figures by_hand.json

docs/results/ holds one JSON file a command: its newest run. History is git's. Nothing on the page
is typed by hand. A figures file has `command`, `commit`, `device`, `date`, `versions` and `rows`:
names of rows, each with columns, and perhaps a `note`: what the columns are, what was asked.
"""

import argparse
import json
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
HEAD = """# Results

Written by `python -m benchmarks.results` from the files in docs/results/: the newest run of each
command, with the card it ran on. Compare figures of one table only.
"""


def of_junit(paths: Sequence[Path], **origin: str) -> dict[str, Any]:
    """Counts by test file, beginnings of failed tests' names, and reasons of skipped ones.

    A test that several files have counts as in the last of them.
    """
    rows: dict[str, Counter[str]] = {}
    failed, skipped, seconds = Counter[str](), Counter[str](), Counter[str]()
    cases = (c for path in paths for c in ElementTree.parse(path).iter("testcase"))
    newest = {(c.get("classname"), c.get("name")): c for c in cases if c.get("name")}
    for case in newest.values():  # what was cut off has no name
        name = case.get("classname") or str(case.get("name"))  # a file that is not collected
        file = name.replace(".", "/") + ".py"
        outcome = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
        outcome = "failed" if outcome in ("failure", "error") else outcome
        rows.setdefault(file, Counter())[outcome] += 1
        seconds[file] += float(case.get("time", 0))  # pyright: ignore[reportArgumentType]
        if outcome == "failed":
            failed[f"{file}::{str(case.get('name')).partition('-')[0]}"] += 1
        if outcome == "skipped":
            skipped[str(case.find("skipped").get("message"))[:120]] += 1  # pyright: ignore
    names = ("passed", "failed", "skipped")
    table = {
        file: {name: rows[file][name] for name in names} | {"seconds": round(seconds[file], 1)}
        for file in sorted(rows)
    }
    total = {name: sum(row[name] for row in table.values()) for name in (*names, "seconds")}
    table["all"] = total | {"seconds": round(total["seconds"], 1)}
    date = str(ElementTree.parse(paths[0]).find(".//testsuite").get("timestamp"))  # pyright: ignore
    command = "python -m pytest -m gpu"
    rest = {"failed": dict(failed), "skipped because": dict(skipped.most_common())}
    return {"command": command, "date": date, **origin, "rows": table, **rest}


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, in Markdown; `results` by name of their files."""
    names = sorted(results)
    parts = [HEAD, _line(", ".join(f"[{name}](#{name})" for name in names)) + ".", ""]
    for name in names:
        result = results[name]
        versions = [f"{k} {v}" for k, v in dict(result.get("versions") or {}).items() if v]
        commit = str(result["commit"])[:9]  # None of a copy without .git
        where = [result["device"], f"commit {commit}", result["date"][:10], *versions]
        parts += [f"## {name}\n", _line(f"`{result['command']}`: {', '.join(where)}."), ""]
        parts += [_line(result["note"]), ""] if result.get("note") else []
        parts += [*_table(result["rows"]), ""]
        for what, form in (("failed", "`{}`"), ("skipped because", "{}")):
            found = dict(result.get(what, {}))
            parts += [_line(f"- {what}, {n}: {form.format(text)}") for text, n in found.items()]
        parts += [""]
    return re.sub("\n\n+", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _line(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = (_cell(row.get(column)) for column in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", nargs="+", type=Path, help="JUnit files, oldest first")
    parser.add_argument("--figures", nargs="+", type=Path, help="what benchmarks wrote by --json")
    parser.add_argument("--name", default="gpu_tests", help="of the tests' file in docs/results/")
    parser.add_argument("--note", default="", help="what the reader of the tests must know")
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", default="")
    args = parser.parse_args()
    if args.tests:
        found = of_junit(args.tests, commit=args.commit, device=args.device, note=args.note)
        (FOLDER / f"{args.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    for path in args.figures or ():
        found = json.loads(path.read_text())
        (FOLDER / path.name).write_text(json.dumps(found, indent=1) + "\n")
    results = {f.stem: json.loads(f.read_text()) for f in FOLDER.glob("*.json")}
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
