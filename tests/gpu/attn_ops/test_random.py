"""Random calls of every backend on a GPU: long contexts, odd lengths and heads, all features.

`tests/conformance` has each feature by itself; more cases: `python -m tests.fuzz`.
"""

import pytest

from attn_ops import get_backend
from attn_ops.backends.registry import built_in_names
from tests.fuzz import blocksparse
from tests.fuzz.__main__ import parser
from tests.fuzz.attention import search

pytestmark = pytest.mark.gpu

SLOW = {"FLEX": 4, "FLASHINFER": 4}
"""Cases of those that compile for minutes a geometry."""


def backends() -> list[str]:
    known = (n for n in built_in_names() if "cuda" in get_backend(n).support.devices)
    return [name for name in known if name not in ("TORCH", "TORCH_MLA", "SDPA", "VARLEN")]


@pytest.mark.parametrize("name", backends())
def test_random_calls(name):
    if missing := get_backend(name).unavailable():
        pytest.skip(missing)
    run = search(parser().parse_args(["attention", "--device", "cuda", "--backends", name,
                                      "--longest", "3000"]))  # fmt: skip
    for seed in range(SLOW.get(name, 24)):
        run(seed)


@pytest.mark.parametrize(("backend", "number"), [("BLOCKSPARSE", 120), ("FLEX", 6)])
def test_random_layouts(backend, number):
    for seed in range(number):
        blocksparse.check(blocksparse.draw(seed, "cuda", 1000), backend, "cuda")
