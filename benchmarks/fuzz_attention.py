"""Random testing of the backends: `python -m benchmarks.fuzz_attention --batches 10000`.

Each case is drawn from one integer: backend, a geometry that it declares, lengths, padding, cache
layout, whether this step's tokens are written first. Results are compared with a float64 oracle,
as a whole and row by row; caches are full of NaN where no token is, and every byte that the call
may not change is compared with its copy: guard blocks beside every owned one, the rest of the
cache, what stands around q and lse, block table and lengths.

A failing case prints the command that runs it alone. The run goes on and exits with 1 at the end.
What a backend refuses counts as a failure too: only what it declares is drawn.
"""

import argparse
import dataclasses
import json
import shlex
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attn_ops import backend_names, get_backend
from benchmarks.fuzz_cases import LONGEST
from benchmarks.fuzz_run import Config, Outcome, run_here, run_in_workers

FAILURES = ("mismatch", "stray", "error")
SHOWN = 20
"""Failing cases printed in full; the JSON file has all."""


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    config = Config(
        backends=_available(args.backends, args.device),
        device=args.device,
        num_geometries=args.geometries,
        geometry_seed=args.geometry_seed,
        longest=args.longest,
    )
    seeds = list(range(args.seed, args.seed + args.batches))
    workers = args.workers or (12 if args.device == "cuda" and args.batches >= 100 else 1)
    begin = time.monotonic()
    deadline = begin + args.seconds
    if workers == 1:
        outcomes = run_here(config, seeds, deadline)
    else:
        outcomes = run_in_workers(config, seeds, deadline, workers)
    console = Console()
    done = _follow(console, outcomes, config, len(seeds))
    report = _report(config, args, done, time.monotonic() - begin)
    _print(console, report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 1 if any(o.kind in (*FAILURES, "refused") for o in done) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000, help="cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--backends", help="comma separated; default: all that run here")
    parser.add_argument("--seconds", type=float, default=300, help="stop then")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--geometries", type=int, default=60, help="of each backend, at most")
    parser.add_argument("--geometry-seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=LONGEST, help=f"seq_len; {LONGEST}: a tail")
    parser.add_argument("--workers", type=int, default=0, help="processes; default 12 on CUDA")
    parser.add_argument("--json", help="file for the report")
    return parser


def _available(names: str | None, device: str) -> tuple[str, ...]:
    """The requested backends, or all that run on this machine's `device`.

    Raises:
        ValueError: a requested one does not, or none does.
    """
    against = {}
    for name in names.split(",") if names else backend_names():
        backend = get_backend(name)
        missing = backend.missing()
        if torch.device(device).type not in backend.support.devices:
            missing = f"it does not run on {device}"
        against[name] = missing
    usable = tuple(name for name, missing in against.items() if missing is None)
    if not usable or (names and len(usable) < len(against)):
        reasons = "; ".join(f"{n}: {m}" for n, m in against.items() if m is not None)
        raise ValueError(f"backends must run on {device}, got {names or 'none'}; {reasons}")
    return usable


def reproduction(config: Config, seed: int) -> str:
    """The command that runs the case of `seed` alone."""
    return (
        f"python -m benchmarks.fuzz_attention --batches 1 --seed {seed} --device {config.device} "
        f"--backends {shlex.quote(','.join(config.backends))} "
        f"--geometries {config.num_geometries} --geometry-seed {config.geometry_seed} "
        f"--longest {config.longest}"
    )


def _follow(
    console: Console, outcomes: Iterable[Outcome], config: Config, total: int
) -> list[Outcome]:
    """All outcomes; failures are printed as they come."""
    done, shown = [], 0
    with Progress(console=console) as progress:
        task = progress.add_task("cases", total=total)
        for outcome in outcomes:
            done.append(outcome)
            progress.advance(task)
            if outcome.kind not in FAILURES:
                continue
            shown += 1
            if shown <= SHOWN:
                text = f"{outcome.kind}, seed {outcome.seed}: {outcome.reason}\n{outcome.case}\n"
                command = reproduction(config, outcome.seed)
                console.print(f"{text}  {command}", markup=False, highlight=False, soft_wrap=True)
    return sorted(done, key=lambda o: o.seed)


def _report(
    config: Config, args: argparse.Namespace, done: list[Outcome], seconds: float
) -> dict[str, object]:
    """What the table and the JSON file show."""
    rows = []
    for name in config.backends:
        mine = [o for o in done if o.backend == name]
        kinds = Counter(o.kind for o in mine)
        rows.append(
            {
                "backend": name,
                "cases": len(mine),
                "mismatches": kinds["mismatch"],
                "stray writes": kinds["stray"],
                "errors": kinds["error"],
                "refused": kinds["refused"],
                "quantized": sum(o.scheme != "" for o in mine),
                "in the kernel": sum(o.in_kernel for o in mine),
                "worst error": max((o.error for o in mine if o.kind == "ok"), default=0.0),
            }
        )
    on_cuda = torch.device(config.device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_cuda else config.device,
        "torch": torch.__version__,
        "config": dataclasses.asdict(config),
        "seed": args.seed,
        "asked for": args.batches,
        "cases": len(done),
        "seconds": round(seconds, 1),
        "backends": rows,
        "refused": Counter(f"{o.backend}: {o.reason}" for o in done if o.kind == "refused"),
        "refused first": {
            f"{o.backend}: {o.reason}": reproduction(config, o.seed)
            for o in reversed(done)
            if o.kind == "refused"
        },
        "failures": [
            dataclasses.asdict(o) | {"command": reproduction(config, o.seed)}
            for o in done
            if o.kind in FAILURES
        ],
    }


def _print(console: Console, report: dict) -> None:
    title = f"{report['cases']} of {report['asked for']} cases, {report['seconds']} s"
    table = Table(title=f"{report['device']}, torch {report['torch']}: {title}")
    for column in report["backends"][0]:
        table.add_column(column, justify="left" if column == "backend" else "right")
    for row in report["backends"]:
        table.add_row(*(f"{x:.1e}" if isinstance(x, float) else str(x) for x in row.values()))
    console.print(table)
    for reason, count in report["refused"].items():
        text = f"refused {count} times by {reason}\n  {report['refused first'][reason]}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
