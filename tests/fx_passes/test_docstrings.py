"""Every pass does what its docstring says: `Before::` becomes `After::`, and each line of
"Skipped when" has a test.
"""

import ast
import inspect
import operator
import re
from pathlib import Path

import pytest
import torch

from fx_passes.base import Pass
from fx_passes.config import PassConfig
from fx_passes.pipeline import pass_classes
from tests.fx_passes.fx_text import Parsed, normal, text

TESTS = Path(__file__).parent
ON = PassConfig(
    attn_quant="always",
    experts="always",
    skinny_products="always",
    fused_mlp="always",
    norm_products="always",
)
"""With passes that a CPU gains nothing by."""
BUILT_IN = [one for one in pass_classes() if one.__module__.startswith("fx_passes.")]


def block(one: type[Pass], title: str) -> str:
    """What is indented below `title::` in the docstring."""
    found = re.search(rf"^{title}::\n\n((?: +.*\n|\n)+)", inspect.getdoc(one) + "\n", re.MULTILINE)
    assert found, f"the docstring of {one.__name__} has no block {title}::"
    return found.group(1)


def skipped_when(one: type[Pass]) -> list[str]:
    """The lines of "Skipped when", each as one text."""
    found = re.search(r"^Skipped when:\n((?: +.*\n)+)", inspect.getdoc(one) + "\n", re.MULTILINE)
    assert found, f'the docstring of {one.__name__} has no list "Skipped when:"'
    lines = " ".join(found.group(1).split()).removeprefix("- ").split(" - ")
    return [line.rstrip(";.") for line in lines]


def check(one: type[Pass]) -> None:
    """Parse, apply, print, apply again: nothing new, the same numbers."""
    before = block(one, "Before")
    parsed, unchanged = Parsed(before, one.stage), Parsed(before, one.stage)
    assert text(parsed.gm) == normal(before), "the block is what FX would print"
    rewrite = one.of(ON)
    assert rewrite.run(parsed.gm.graph) > 0
    parsed.gm.recompile()
    assert text(parsed.gm) == normal(block(one, "After"))
    assert rewrite.run(parsed.gm.graph) == 0
    assert text(parsed.gm) == normal(block(one, "After"))
    torch.testing.assert_close(parsed.run(parsed.gm), unchanged.run(unchanged.gm))


@pytest.mark.parametrize("one", BUILT_IN, ids=lambda one: one.name)
def test_before_becomes_after(one):
    check(one)


class Doubled(Pass):
    """Write a sum of equal terms as a product.

    Before::

        x: f32[3]
        y = x + x
        return y

    After::

        y = x * 2
        return y

    Skipped when:
        - never.
    """

    name, stage, factor = "doubled", "aten", 2

    def apply(self, graph):
        found = graph.find_nodes(op="call_function", target=operator.add)
        for node in found:
            node.target, node.args = operator.mul, (node.args[0], self.factor)
        return len(found)


def test_a_pass_of_a_third_party_is_checked():
    check(Doubled)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"factor": 3}, r"x \* 3"),
        ({"__doc__": Doubled.__doc__.replace("* 2", "* 3"), "factor": 3}, "not close"),
        ({"__doc__": Doubled.__doc__.replace("After::", "Afterwards::")}, "no block After::"),
        ({"__doc__": "Nothing is said."}, "no block Before::"),
        ({"apply": lambda self, graph: 1}, r"x \+ x"),
        ({"apply": lambda self, graph: 0}, "0 > 0"),
    ],
    ids=["another graph", "other numbers", "no After", "no blocks", "no change", "no match"],
)
def test_what_is_wrong_is_found(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check(type("Wrong", (Doubled,), wrong))


# -- skipped when ----------------------------------------------------------------------------------


def claims() -> dict[str, list[str]]:
    """By pass, how the lines begin that tests are marked with: `skipped_when(Pass, "the line")`."""
    found: dict[str, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.skipped_when":
                one, line = call.args
                found.setdefault(ast.unparse(one), []).append(ast.literal_eval(line))
    return found


@pytest.mark.parametrize("one", BUILT_IN, ids=lambda one: one.name)
def test_every_line_of_skipped_when_has_a_test(one):
    lines, tested = skipped_when(one), claims().get(one.__name__, [])
    for line in lines:
        assert any(line.startswith(begin) for begin in tested), f"no test of: {line}"
    for begin in tested:
        assert sum(line.startswith(begin) for line in lines) == 1, f"no line, or several: {begin}"
