"""Attention stack for PyTorch. Exit codes: 0 fine, 1 no parity with Transformers, 2 bad input."""

import contextlib
import json
import logging
import os
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from graphs.app.presets import DTYPES, PRESETS, QUANTIZE
from graphs.app.ranks import leads, start

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

_EXTRAS = {"torchao": "quantize"} | dict.fromkeys(
    ("transformers", "tokenizers", "safetensors", "huggingface_hub"), "transformers"
)
"""The extra of attn-ops that installs a library."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass"}
"""By logger: what it says of torchao's other kernels when that is imported, used or not."""


def main() -> None:
    _quiet()
    app()


@app.command()
def run(
    model: Annotated[
        str,
        typer.Option(
            help=f"A preset ({', '.join(PRESETS)}), a directory with a saved model, "
            "or a Python file with MODEL and CONFIG (examples/phi3_small.py)."
        ),
    ] = "llama-tiny",
    backend: Annotated[str | None, typer.Option(help="An attention backend by name.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file with a prompt a line: text where the model has a tokenizer, else token "
            "ids between spaces; a JSON list of token ids anywhere. Default: questions, or random "
            "tokens."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 16,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token, more draws at random.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the most likely tokens with this much probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random draws.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}. Default: as saved.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")
    ] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write what was compiled to this directory.")
    ] = None,
    fast_prefill: Annotated[
        str, typer.Option(help="Drop rows that no logits need: off, auto or on.")
    ] = "off",
    quantize: Annotated[
        str,
        typer.Option(
            help="Linear layers in FP8 by torchao, and attention's output: "
            f"{', '.join(QUANTIZE)}. On a GPU the model is bfloat16 then."
        ),
    ] = "off",
    compile_cache: Annotated[
        Path | None, typer.Option(help="Keep compiled models in this directory, for later runs.")
    ] = None,
    nproc: Annotated[
        int, typer.Option(min=1, help="Ranks of this host to split the model over, a GPU each.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Generate with a model, compare with Transformers, report what was compiled and how fast."""
    if nproc > 1:
        raise typer.Exit(start(nproc, sys.argv[1:]))
    with _one_line_errors():
        from graphs.app.run import run as run_model  # from here on torch is imported
        from graphs.app.tables import print_run

        report = run_model(
            model, prompts=prompts, backend=backend, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, seed=seed, dtype=dtype, device=device,
            dump=dump, fast_prefill=fast_prefill, quantize=quantize, compile_cache=compile_cache,
        )  # fmt: skip
    if not leads():
        raise typer.Exit(0 if report.ok else 1)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_run(report, _console())
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def chat(
    model: Annotated[
        str, typer.Option(help="A preset or a directory whose tokenizer has a chat template.")
    ] = "smollm2",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token, more draws at random.")
    ] = 0.0,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
) -> None:
    """Talk with a model: a question a line; an empty line, /quit or the end of input ends it."""
    with _one_line_errors():
        from graphs.app.chat import chat as chat_with

        chat_with(model, max_new_tokens=max_new_tokens, temperature=temperature, system=system)


@app.command()
def backends(
    why: Annotated[
        str | None, typer.Option("--why", help="All that one backend supports, and does not.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The attention backends, and what keeps each from this machine."""
    with _one_line_errors():
        from attn_ops.support_table import row_of, support_rows
        from graphs.app.tables import backends_as_dicts, print_backend, print_backends

        rows = support_rows() if why is None else [row_of(why)]
    if as_json:
        typer.echo(json.dumps(backends_as_dicts(rows), indent=2))
    elif why is None:
        print_backends(rows, _console())
    else:
        print_backend(rows[0], _console())


@app.command()
def bench(
    backend: Annotated[str, typer.Argument(help="Any registered backend.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(help="REQUESTSxCONTEXT of decodes, TOKENS of one prompt; may be repeated."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of queries. Default: bfloat16, on a CPU float32.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Query heads, kv heads, head size, as 32,8,128.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, fp8_e4m3 or fp8_e5m2.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a block of the cache holds.")] = 16,
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    as_json: Json = False,
) -> None:
    """Time a backend beside TRITON and TORCH, in microseconds and percent of the bandwidth."""
    with _one_line_errors():
        from graphs.app.bench import as_dicts, print_bench
        from graphs.app.bench import bench as timed

        rows = timed(
            backend, shape or [], dtype=dtype, heads=heads, kv_cache_dtype=kv_cache_dtype,
            block_size=block_size, device=device,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(as_dicts(rows), indent=2))
    else:
        print_bench(rows, _console())


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="What `run --dump` or `graphs.dump` wrote.")],
    opens: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Make the page of a dump once more from its raw files, and print its path."""
    with _one_line_errors():
        from graphs.dumps.page import write_page

        page = write_page(directory.absolute())
    typer.echo(page)
    if opens:
        webbrowser.open(page.as_uri())


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A dump.")],
    b: Annotated[Path, typer.Argument(help="Another, to compare with it.")],
    as_json: Json = False,
) -> None:
    """What changed from dump A to dump B: passes, graphs, kernels, memory, and what got slower."""
    with _one_line_errors():
        from graphs.app.tables import print_comparison
        from graphs.dumps.compare import compare as compare_dumps

        found = compare_dumps(a.absolute(), b.absolute())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_comparison(found, _console())


def _quiet() -> None:
    """Keep lines off the screen that say nothing about a run; what is set already stays."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of Transformers, not those of sessions
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler: "USDT: profiler_start"
    for name, noise in _NOISE.items():
        logging.getLogger(name).addFilter(lambda record, of=noise: of not in record.getMessage())


def _console() -> Console:
    """At most 120 columns; a file has no width of its own."""
    terminal = Console()
    width = min(terminal.width, 120) if terminal.is_terminal else 120
    return Console(markup=False, width=width)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        _fail(f"{error}; pip install 'attn-ops[{extra}]'" if extra else str(error))
    except ValueError as error:
        _fail(str(error))
    except Exception as error:
        failed = _pass_error(error)
        if failed is None:
            raise
        _fail(str(failed))


def _pass_error(error: BaseException | None) -> Exception | None:
    """The error of a pass, where that is what stopped a compilation."""
    from fx_passes import PassError

    while error is not None and not isinstance(error, PassError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def _fail(message: str) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    main()
