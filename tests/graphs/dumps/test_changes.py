"""What a pass changed: lines side by side, and which nodes were replaced by which."""

import re

import pytest

from graphs.dumps.changes import places, rows
from tests.graphs.dumps.dumped import block

BEFORE = """\
def forward(self, x):
    mm: "f32[8]" = aten.mm(x, x);  x = None
    view: "f32[8]" = aten.view(mm, [8]);  mm = None

    view_1: "f32[8]" = aten.view(view, [8]);  view = None
    mul: "f32[8]" = aten.mul(view_1, 2);  view_1 = None
    return mul
"""
AFTER = """\
def forward(self, x):
    mm: "f32[8]" = aten.mm(x, x)

    # No stacktrace found for following nodes
    as_strided: "f32[8]" = aten.as_strided(mm, [8]);  mm = x = None
    mul: "f32[8]" = aten.mul(as_strided, 2);  as_strided = None
    return mul
"""


def test_lines_of_one_name_are_side_by_side():
    found = rows(BEFORE, AFTER)["rows"]
    assert [(kind, i, j) for kind, i, _, j, _ in found] == [
        ("=", 1, 1), ("=", 2, 2), ("-", 3, 0), ("-", 5, 0), ("+", 0, 5), ("~", 6, 6), ("=", 7, 7),
    ]  # fmt: skip
    for _, i, left, j, right in found:
        assert not i or BEFORE.splitlines()[i - 1].startswith(left)
        assert not j or AFTER.splitlines()[j - 1].startswith(right)


def test_a_difference_shows_only_what_changed():
    before = "\n".join(f"line {i}" for i in range(20))
    found = rows(before, before.replace("line 9\n", "line nine\nnew\n"))
    assert found["num_left_out"] == 0
    assert [(kind, i, j) for kind, i, _, j, _ in found["rows"]] == [
        ("...", 0, 0), ("=", 8, 8), ("=", 9, 9), ("~", 10, 10), ("+", 0, 11),
        ("=", 11, 12), ("=", 12, 13),
    ]  # fmt: skip
    text = "\n\n".join(f"    # here\n{line}" for line in BEFORE.splitlines())
    assert rows(BEFORE, text.replace(";  x = None", "")) == {"rows": [], "num_left_out": 0}
    long = "\n".join(f"x_{i} = f({i})" for i in range(1000))
    assert rows("", long)["num_left_out"] == 600


def graph(*lines: str) -> list[dict]:
    """Nodes of a graph of x, w: `b = view(a)`; the last one is returned."""
    found = [("x", "placeholder", []), ("w", "placeholder", [])]
    for line in lines:
        name, op, inputs = re.fullmatch(r"(\w+) = (\w+)\((.*)\)", line).groups()
        found.append((name, op, inputs.split(", ")))
    found.append(("output", "output", [found[-1][0]]))
    return [
        {"name": name, "op": op, "target": op, "type": "f32[8]", "args": "", "inputs": inputs}
        for name, op, inputs in found
    ]


def ops(before, after) -> list[tuple[dict[str, int], dict[str, int], int]]:
    kinds = places(graph(*before), graph(*after))
    return [(one["before"], one["after"], one["num"]) for one in kinds]


def own(side) -> list[str]:
    return [node["name"] for node in side if node["own"]]


def test_a_chain_that_one_node_replaces():
    """What both read and who reads both is drawn around it."""
    before = ["a = mm(x, w)", "b = view(a)", "c = view(b)", "d = mul(c)", "e = add(d, c)"]
    (kind,) = places(graph(*before), graph(before[0], "s = as_strided(a)", "d = mul(s)",
                                           "e = add(d, s)"))  # fmt: skip
    assert (kind["before"], kind["after"], kind["num"]) == ({"view": 2}, {"as_strided": 1}, 1)
    (drawn,) = kind["drawn"]
    assert [node["name"] for node in drawn["before"]] == ["a", "b", "c", "d", "e"]
    assert [node["name"] for node in drawn["after"]] == ["a", "s", "d", "e"]
    assert (own(drawn["before"]), own(drawn["after"])) == (["b", "c"], ["s"])
    assert drawn["after"][1] == {
        "name": "s", "type": "f32[8]", "op": "as_strided", "args": "", "inputs": ["a"], "own": True,
    }  # fmt: skip


def test_equal_places_are_one_kind():
    before = ["a = neg(x)", "b = view(a)", "c = exp(b)", "d = view(c)", "e = abs(d)"]
    after = ["a = neg(x)", "b_1 = alias(a)", "c = exp(b_1)", "d_1 = alias(c)", "e = abs(d_1)"]
    (kind,) = places(graph(*before), graph(*after))
    assert kind["num"] == 2
    assert [own(one["before"]) for one in kind["drawn"]] == [["b"], ["d"]]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # Two arguments of one node.
        (
            ["a = neg(x)", "b = view(a)", "c = exp(x)", "d = t(c)", "e = add(b, d)"],
            ["a = neg(x)", "b_1 = alias(a)", "c = exp(x)", "d_1 = clone(c)", "e = add(b_1, d_1)"],
            [({"view": 1}, {"alias": 1}, 1), ({"t": 1}, {"clone": 1}, 1)],
        ),
        # Nothing replaces it.
        (
            ["a = neg(x)", "b = clone(a)", "c = exp(b)"],
            ["a = neg(x)", "c = exp(a)"],
            [({"clone": 1}, {}, 1)],
        ),
        # Another operator of the same name, and what the graph returns.
        (["a = neg(x)", "b = exp(a)"], ["a = abs(x)", "b = exp(a)"], [({"neg": 1}, {"abs": 1}, 1)]),
        (["a = neg(x)", "b = exp(a)"], ["a = neg(x)", "c = abs(a)"], [({"exp": 1}, {"abs": 1}, 1)]),
        (["a = neg(x)"], ["a = neg(x)"], []),
    ],
)
def test_what_belongs_together(before, after, expected):
    assert ops(before, after) == expected


def test_many_places_are_counted_and_few_are_drawn():
    numbers = range(100)
    ends = [f"b_{i} = {{}}(a_{i})" for i in numbers]
    sides = [
        [*(f"a_{i} = neg(x)" for i in numbers), *(line.format(op) for line in ends)]
        for op in ("exp", "abs")
    ]
    (kind,) = places(*(graph(*side) for side in sides))
    assert (kind["num"], len(kind["drawn"])) == (100, 60)
    long = ["a = neg(x)", *(f"b_{i} = view({f'b_{i - 1}' if i else 'a'})" for i in numbers)]
    (kind,) = places(graph(*long), graph("a = neg(x)"))
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
    views = next(one for one in changed if one["name"] == "collapse_views")
    assert sum(kind["num"] for kind in views["places"]) == views["matches"]
    assert {"before": {"view": 2, "permute": 1}, "after": {"as_strided": 1}, "num": 2}.items() <= (
        views["places"][0].items()
    )
