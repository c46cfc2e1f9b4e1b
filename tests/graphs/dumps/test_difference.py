"""Two graphs side by side: what is a change, and which lines stand beside each other."""

from graphs.dumps.difference import rows

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


def test_lines_of_one_name_stand_side_by_side():
    found = rows(BEFORE, AFTER)["rows"]
    assert [(kind, i, j) for kind, i, _, j, _ in found] == [
        ("=", 1, 1), ("=", 2, 2), ("-", 3, 0), ("-", 5, 0), ("+", 0, 5), ("~", 6, 6), ("=", 7, 7),
    ]  # fmt: skip


def test_blank_lines_comments_and_ended_variables_are_no_change():
    text = "\n\n".join(f"    # here\n{line}" for line in BEFORE.splitlines())
    assert rows(BEFORE, text.replace(";  x = None", "")) == {"rows": [], "num_left_out": 0}


def test_the_numbers_of_lines_are_those_of_the_files():
    for _, i, left, j, right in rows(BEFORE, AFTER)["rows"]:
        assert not i or BEFORE.splitlines()[i - 1].startswith(left)
        assert not j or AFTER.splitlines()[j - 1].startswith(right)


def test_rows_beyond_the_limit_are_counted():
    long = "\n".join(f"x_{i} = f({i})" for i in range(1000))
    assert rows("", long)["num_left_out"] == 600
