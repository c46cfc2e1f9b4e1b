"""Attention stack for PyTorch. Exit codes: 0 fine, 1 no parity with Transformers, 2 bad input."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    app()


@app.command()
def run(
    model: Annotated[
        str, typer.Option(help="A preset, or a directory with a saved model.")
    ] = "llama-tiny",
    backend: Annotated[str | None, typer.Option(help="An attention backend by name.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt a line: token ids between spaces, or a JSON list.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 16,
    dump: Annotated[
        Path | None, typer.Option(help="Write what was compiled to this directory.")
    ] = None,
    fast_prefill: Annotated[
        str, typer.Option(help="Drop rows that no logits need: off, auto or on.")
    ] = "off",
    as_json: Json = False,
) -> None:
    """Generate with a model, compare with Transformers, report what was compiled and how fast."""
    with _one_line_errors():
        from graphs.app.run import read_prompts
        from graphs.app.run import run as run_model
        from graphs.app.tables import print_run

        report = run_model(
            model,
            backend=backend,
            prompts=None if prompts is None else read_prompts(prompts),
            max_new_tokens=max_new_tokens,
            dump_directory=dump,
            fast_prefill=fast_prefill,
        )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_run(report, Console(markup=False))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def backends(as_json: Json = False) -> None:
    """What every attention backend supports, and what keeps it from this machine."""
    with _one_line_errors():
        from attn_ops.support_table import support_rows
        from graphs.app.tables import backends_as_dicts, print_backends

        rows = support_rows()
    if as_json:
        typer.echo(json.dumps(backends_as_dicts(rows), indent=2))
    else:
        print_backends(rows, Console(markup=False))


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        _fail(f"{error}; pip install 'attn-ops[transformers]'")
    except ValueError as error:
        _fail(str(error))


def _fail(message: str) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    main()
