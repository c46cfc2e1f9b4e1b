"""The way of a token: the product files that run while a warm session generates, and no others.

`python -m tests.test_way` prints them. docs/tour.md walks the first ten.
"""

import collections
import sys
from pathlib import Path
from types import CodeType

from graphs import DecodeSession
from tests.kit.models import build_model

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("attn_ops", "fx_passes", "graphs"))
BESIDE = ("graphs/saved", "graphs/dumps", "graphs/capture/verifier", "graphs/app")
TOUR = (
    "attn_ops/metadata/common.py",
    "attn_ops/layers.py",
    "attn_ops/ops/attention.py",
    "attn_ops/backends/torch_backend.py",
    "attn_ops/backends/triton/decode.py",
    "fx_passes/pipeline.py",
    "fx_passes/passes/layers.py",
    "graphs/capture/recorder.py",
    "graphs/requests/scheduler.py",
    "graphs/loop.py",
    "examples/own_model.py",
)


def functions_on_the_way() -> dict[str, set[CodeType]]:
    """Functions by file that run during `generate`, after a first one has warmed everything up."""
    session = DecodeSession(build_model("llama"), max_batch_size=4, max_tokens=64, backend="TORCH")
    prompts = [[1, 2, 3], [4], list(range(1, 20))]
    session.generate(prompts, 4)
    ran: dict[str, set[CodeType]] = collections.defaultdict(set)

    def seen(frame, event, arg):
        code = frame.f_code
        if code.co_filename.startswith(PACKAGES):
            ran[str(Path(code.co_filename).relative_to(ROOT))].add(code)

    before = sys.gettrace()
    sys.settrace(seen)
    try:
        session.generate(prompts, 4)
    finally:
        sys.settrace(before)
    return ran


def num_lines(name: str) -> int:
    return (ROOT / name).read_text().count("\n")


def test_a_token_passes_few_files():
    ran = functions_on_the_way()
    assert not [name for name in ran if name.startswith(BESIDE)]
    # The bars of issue R are 30 files and 6,500 lines; these only fall until it is there.
    assert len(ran) <= 43
    assert sum(map(num_lines, ran)) <= 10_347


def test_the_tour_is_short():
    assert sum(map(num_lines, TOUR)) <= 2_800


if __name__ == "__main__":
    found = functions_on_the_way()
    for name, functions in sorted(found.items()):
        print(f"{num_lines(name):5} {len(functions):3} {name}")
    print(f"{sum(map(num_lines, found)):5} {sum(map(len, found.values())):3} in {len(found)} files")
