"""A decode step whose output projection is quantized: `python -m benchmarks.quantized_step`.

The Llama-3-8B shape in bf16, merged projections. Only the output projections take FP8, so that
what attention writes for them is the only quantization. Milliseconds of a captured step, by what
`attn_quant` is:

    never    Inductor's kernel quantizes behind attention
    always   attention writes FP8
    auto     the default: what the pass chooses for each batch

Groups are multiplied out behind the quantization, in all three. Sessions over the same weights are
made and released in turns, so that all have their cache in the same memory: where it lies makes a
step of 256 requests up to 4 percent slower. Times are medians of such rounds.
"""

import argparse
import copy
import gc
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fx_passes
from attn_ops.integrations.merged import merge_projections
from benchmarks.decode_step import build, ours_ms, session_of
from benchmarks.figures import commit, write
from benchmarks.quantized_linear import QuantizedLinear
from benchmarks.shapes import MODELS

SCHEMES = ["fp8_row", "fp8_static", "fp8_group128", "fp8_group64"]
CHOICES = ["never", "always", "auto"]


def quantize_output_projections(model: nn.Module, scheme: str) -> int:
    """In place; how many. A static scale is one of values up to 448 * 0.01."""
    found = [m for m in model.modules() if isinstance(getattr(m, "o_proj", None), nn.Linear)]
    for module in found:
        linear: Any = module.o_proj
        amax = torch.tensor(4.48, device=linear.weight.device) if scheme == "fp8_static" else None
        module.o_proj = QuantizedLinear(linear, scheme, amax)
    return len(found)


def measure_scheme(
    config: Any, scheme: str, cases: list[tuple[int, int]], rounds: int
) -> list[dict[str, Any]]:
    """A row a case: milliseconds by choice."""
    model = build(copy.deepcopy(config), "attn_ops")
    merge_projections(model)
    quantize_output_projections(model, scheme)
    torch._dynamo.reset()
    compiled = {
        choice: torch.compile(
            model, backend=fx_passes.attn_ops, fullgraph=True, options={"attn_quant": choice}
        )
        for choice in CHOICES
    }
    times: dict[str, list[list[float]]] = {choice: [] for choice in CHOICES}
    said = {}
    for _ in range(rounds):
        for choice in CHOICES:
            session = session_of(compiled[choice], cases, None)
            said.setdefault(choice, session.compile_record.summaries().get("quantize_output"))
            times[choice].append([ours_ms(session, *case) for case in cases])
            session.release()
            del session
            gc.collect()
    rows = []
    for i, (batch, context) in enumerate(cases):
        taken = {choice: [found[i] for found in times[choice]] for choice in CHOICES}
        medians = {choice: statistics.median(found) for choice, found in taken.items()}
        shape = {"scheme": scheme, "shape": f"{batch}x{context}"}
        rows.append({**shape, **medians, "rounds": taken, "said": said})
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="decode step, ms")
    for column in ("scheme", "shape", *CHOICES, "never / always", "auto / never"):
        shown.add_column(column, justify="right")
    for row in rows:
        times = [f"{row[choice]:.3f}" for choice in CHOICES]
        ratios = row["never"] / row["always"], row["auto"] / row["never"]
        shown.add_row(row["scheme"], row["shape"], *times, *(f"{ratio:.3f}" for ratio in ratios))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--cases", nargs="+", default=["1x1024", "8x1024", "64x1024", "256x1024"])
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default=None, help="write the result here")
    args = parser.parse_args()
    cases = [(int(b), int(c)) for b, c in (case.split("x") for case in args.cases)]
    config = MODELS[args.model](args.layers)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit(),
        "model": args.model, "layers": config.num_hidden_layers, "rows": [],
    }  # fmt: skip
    for scheme in args.schemes:
        result["rows"] += measure_scheme(config, scheme, cases, args.rounds)
        write(args.json, result)  # what is measured is kept if the time runs out
        gc.collect()
        torch.cuda.empty_cache()
    Console(width=120).print(table(result["rows"]))


if __name__ == "__main__":
    main()
