"""Sizes as sums with whole numbers: `{"": 64, "s27": 2}` is 64 + 2 * s27. Nothing is evaluated."""

import ast
from collections.abc import Iterable, Mapping

Size = dict[str, int]


def product(factors: Iterable[Size | None]) -> Size | None:
    """None where a factor is not known, or two of them have symbols."""
    result: Size = {"": 1}
    for factor in factors:
        if factor is None:
            return None
        small, large = (factor, result) if set(factor) <= {""} else (result, factor)
        if not set(small) <= {""}:
            return None
        result = {name: n * small.get("", 0) for name, n in large.items()}
    return {name: n for name, n in result.items() if n}


def total(terms: Iterable[Size | None]) -> Size | None:
    """None where a term is not known."""
    result: Size = {}
    for term in terms:
        if term is None:
            return None
        for name, n in term.items():
            result[name] = result.get(name, 0) + n
    return {name: n for name, n in result.items() if n}


def read_size(node: ast.expr, symbols: Mapping[str, str]) -> Size | None:
    """The size that an expression of Inductor's names.

    Args:
        symbols: what a symbol is called here, where it has another name.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return {"": node.value} if node.value else {}
    if isinstance(node, ast.Name):
        return {symbols.get(node.id, node.id): 1}
    if not isinstance(node, ast.BinOp):
        return None
    left, right = read_size(node.left, symbols), read_size(node.right, symbols)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Mult):
        return product((left, right))
    if isinstance(node.op, ast.Add):
        return total((left, right))
    if isinstance(node.op, ast.Sub):
        return total((left, {name: -n for name, n in right.items()}))
    by = right.get("", 0) if set(right) == {""} else 0
    if isinstance(node.op, ast.FloorDiv) and by and not any(n % by for n in left.values()):
        return {name: n // by for name, n in left.items()}
    return None


def value(size: Mapping[str, int], numbers: Mapping[str, int]) -> int | None:
    """The size with numbers for its symbols; None: not all are given."""
    if not set(size) - {""} <= set(numbers):
        return None
    return sum(n * (1 if name == "" else numbers[name]) for name, n in size.items())


def in_words(size: Size | None) -> str:
    """`64 + 2*s27`; `?` where it is not known."""
    if size is None:
        return "?"
    parts = [
        str(n) if name == "" else name if n == 1 else f"{n}*{name}" for name, n in size.items()
    ]
    return " + ".join(parts) or "0"
