"""What became what in a pass: which nodes that went and that came belong together."""

import re

import pytest

from graphs.dumps.places import places
from tests.graphs.dumps.dumped import block


def graph(*nodes: str, end: str = "x") -> str:
    """A graph's text; `b = view(a, 3)` stands for `b: "f32[8]" = torch.ops.aten.view...`."""
    made = [
        re.sub(r"^(\w+) = (\w+)\(", r'\1: "f32[8][1]" = torch.ops.aten.\2.default(', node)
        for node in nodes
    ]
    first = 'def forward(self, x: "f32[8]", w: "f32[8]", n: "Sym(s0)"):'
    return "\n    ".join([first, *made, f"return ({end},)"])


def ops(*sides: list[str]) -> list[tuple[dict[str, int], dict[str, int], int]]:
    return [(one["before"], one["after"], one["num"]) for one in places(*map(graph_of, sides))]


def graph_of(nodes: list[str]) -> str:
    return graph(*nodes, end=nodes[-1].split(" ")[0])


def own(side) -> list[str]:
    return [node["name"] for node in side if node["own"]]


TWO = ["a = mm(x, w)", "b = view(a, 1)", "c = view(b, 2)", "d = mul(c, 3)", "e = add(d, c)"]


def test_a_chain_that_one_node_replaces():
    """By its users; what both read and who reads both stands around it."""
    after = [TWO[0], "s = as_strided(a)", "d = mul(s, 3)", "e = add(d, s)"]
    (kind,) = places(graph_of(TWO), graph_of(after))
    assert (kind["before"], kind["after"], kind["num"]) == ({"view": 2}, {"as_strided": 1}, 1)
    (drawn,) = kind["drawn"]
    assert [node["name"] for node in drawn["before"]] == ["a", "b", "c", "d", "e"]
    assert [node["name"] for node in drawn["after"]] == ["a", "s", "d", "e"]
    assert (own(drawn["before"]), own(drawn["after"])) == (["b", "c"], ["s"])
    assert drawn["after"][1] == {
        "name": "s", "type": "f32[8]", "op": "as_strided", "args": "(a)", "inputs": ["a"],
        "own": True,
    }  # fmt: skip


def test_arguments_of_one_user_are_places_of_their_own():
    before = ["a = neg(x)", "b = view(a)", "c = exp(x)", "d = t(c)", "e = add(b, d)"]
    after = ["a = neg(x)", "b_1 = alias(a)", "c = exp(x)", "d_1 = clone(c)", "e = add(b_1, d_1)"]
    assert ops(before, after) == [({"view": 1}, {"alias": 1}, 1), ({"t": 1}, {"clone": 1}, 1)]


def test_one_user_is_enough():
    """What came reads another node than what went."""
    before = ["a = neg(x)", "b = exp(a)", "c = view(b)", "d = mul(c)", "e = add(d, b)"]
    after = ["a = neg(x)", "b = exp(a)", "s = alias(a)", "d = mul(s)", "e = add(d, b)"]
    assert ops(before, after) == [({"view": 1}, {"alias": 1}, 1)]


def test_equal_places_are_one_kind():
    before = ["a = neg(x)", "b = view(a)", "c = exp(b)", "d = view(c)", "e = abs(d)"]
    after = ["a = neg(x)", "b_1 = alias(a)", "c = exp(b_1)", "d_1 = alias(c)", "e = abs(d_1)"]
    (kind,) = places(graph_of(before), graph_of(after))
    assert kind["num"] == 2
    assert [own(one["before"]) for one in kind["drawn"]] == [["b"], ["d"]]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # What stays reads other nodes that stay: what went became nothing.
        (
            ["a = neg(x)", "b = clone(a)", "c = exp(b)"],
            ["a = neg(x)", "c = exp(a)"],
            [({"clone": 1}, {}, 1)],
        ),
        # Nobody reads a write; both read the same keys.
        (
            ["k = neg(x)", "v = exp(x)", "o = put(k, w)", "e = abs(v)"],
            ["k = neg(x)", "v = exp(x)", "p = write(k, w)", "q = sum(v)", "e = abs(v)"],
            [({"put": 1}, {"write": 1}, 1), ({}, {"sum": 1}, 1)],
        ),
        # Another operator under the name of the one before, and other numbers.
        (["a = neg(x)", "b = exp(a)"], ["a = abs(x)", "b = exp(a)"], [({"neg": 1}, {"abs": 1}, 1)]),
        (
            ["a = sum(x, 0)", "b = exp(a)"],
            ["a = sum(x, 1)", "b = exp(a)"],
            [({"sum": 1}, {"sum": 1}, 1)],
        ),
        # What is returned is read by the graph's end.
        (["a = neg(x)", "b = exp(a)"], ["a = neg(x)", "c = abs(a)"], [({"exp": 1}, {"abs": 1}, 1)]),
        # No call: a constant, a part of a tuple, a product of sizes.
        (
            ["c = self._c", "m = n * 64", "a = topk(x, m)", "g = a[0]", "e = add(g, c)"],
            ["a = topk(x, 8)", "e = add(a, 1)"],
            [({"constant": 1}, {}, 1), ({"*": 1}, {}, 1), ({"getitem": 1}, {}, 1)],
        ),
        (TWO, TWO, []),
    ],
)
def test_what_belongs_together(before, after, expected):
    assert ops(before, after) == expected


def test_many_places_are_counted_and_few_are_drawn():
    nodes = range(100)
    before = [f"{n}_{i} = {n}({'x' if n == 'a' else f'a_{i}'})" for i in nodes for n in "ab"]
    after = [line.replace("= b(", "= c(") for line in before]
    (kind,) = places(graph(*before), graph(*after))
    assert (kind["num"], len(kind["drawn"])) == (100, 60)
    long = ["a = neg(x)", *(f"b_{i} = view({f'b_{i - 1}' if i else 'a'})" for i in range(100))]
    (kind,) = places(graph_of(long), graph("a = neg(x)", end="a"))
    assert (kind["before"], kind["num"], kind["drawn"]) == ({"view": 100}, 1, [])


def test_the_page_has_what_the_files_have(dumped):
    """Every node that is in one file alone is in one place."""
    directory = dumped[0]
    passes = block(directory / "index.html")["passes"]
    changed = [one for one in passes if one["files"] and one["stage"] == "aten"]
    assert changed
    for one in changed:
        texts = [(directory / name).read_text() for name in one["files"]]
        names = [set(re.findall(r"^ +(\w+)(?:: \"[^\"]*\")? = ", t, re.MULTILINE)) for t in texts]
        drawn = [pair for kind in one["places"] for pair in kind["drawn"]]
        gone = [name for pair in drawn for name in own(pair["before"])]
        come = [name for pair in drawn for name in own(pair["after"])]
        assert sorted(gone) == sorted(names[0] - names[1])
        assert sorted(come) == sorted(names[1] - names[0])
        for kind in one["places"]:
            assert kind["num"] == len(kind["drawn"])
            assert sum(kind["before"].values()) == len(own(kind["drawn"][0]["before"]))
    views = next(one for one in changed if one["name"] == "collapse_views")
    assert sum(kind["num"] for kind in views["places"]) == views["matches"]
    assert {"before": {"view": 2, "permute": 1}, "after": {"as_strided": 1}, "num": 2}.items() <= (
        views["places"][0].items()
    )
