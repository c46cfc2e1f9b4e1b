"""The tensors of Inductor's output code: shape and dtype of every name, line by line, by its text.

Inductor asserts sizes of arguments, allocates buffers with sizes and dtypes, and makes views.
"""

import ast
import dataclasses
import re
from collections.abc import Mapping

from graphs.dumps.output_code.sizes import Size, product, read_size

_EXAMPLE = re.compile(r"^ +(\w+) = rand_strided\(.*dtype=torch\.(\w+)\)", re.MULTILINE)
_ITEM_SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2,
    "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor of the code."""

    shape: tuple[Size | None, ...] | None
    dtype: str = ""  # "float32"; empty: not known

    @property
    def num_elements(self) -> Size | None:
        return None if self.shape is None else product(self.shape)

    def num_bytes(self, dtype: str = "") -> Size | None:
        """Args:
        dtype: where the code does not say it of this buffer.
        """
        item = item_size(self.dtype or dtype)
        return None if item is None else product((self.num_elements, {"": item}))


def item_size(dtype: str) -> int | None:
    """Bytes of an element; None: the dtype is not known."""
    return 1 if dtype.startswith("float8") else _ITEM_SIZES.get(dtype)


class Buffers:
    """What the lines until now have said.

    Args:
        code: all of it; at its end, examples of the arguments say their dtypes.
        symbols: other names for Inductor's.
    """

    def __init__(self, code: str, symbols: Mapping[str, str]) -> None:
        self._dtypes: dict[str, str] = dict(_EXAMPLE.findall(code))
        self._found: dict[str, Buffer] = {}
        self._symbols = dict(symbols)

    def take(self, line: str) -> None:
        """A line of the code; those that say nothing of a tensor change nothing."""
        try:
            statements = ast.parse(line.strip()).body
        except (SyntaxError, ValueError):
            return
        for one in statements:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
                self._assertion(one.value)
            elif isinstance(one, ast.Assign) and len(one.targets) == 1:
                self._assignment(one.targets[0], one.value)

    def of(self, node: ast.expr) -> Buffer | None:
        """The tensor that an argument of a call is; None: not known, or no tensor."""
        if isinstance(node, ast.Name):
            return self._found.get(node.id)
        if isinstance(node, ast.Subscript):
            return None
        if not isinstance(node, ast.Call):
            return None
        name = ast.unparse(node.func)
        if name.endswith("reinterpret_tensor") and len(node.args) >= 2:
            base = self.of(node.args[0])
            return Buffer(self._shape(node.args[1]), base.dtype if base else "")
        if "empty_strided" in name and len(node.args) >= 3:
            return Buffer(self._shape(node.args[0]), dtype_of(node.args[2]))
        if name.endswith("alloc_from_pool") and len(node.args) >= 4:
            return Buffer(self._shape(node.args[3]), dtype_of(node.args[2]))
        return None

    def _assertion(self, call: ast.Call) -> None:
        """Of one tensor; from torch 2.15 on of several, in tuples."""
        name = ast.unparse(call.func)
        if len(call.args) < 2:
            return
        targets, shapes = call.args[:2]
        if name == "assert_size_stride":
            self._assert_one(targets, shapes)
        elif name == "assert_size_stride_grouped":
            for target, shape in zip(_elements(targets), _elements(shapes), strict=False):
                self._assert_one(target, shape)

    def _assert_one(self, target: ast.expr, shape: ast.expr) -> None:
        if isinstance(target, ast.Name):
            known = self._found.get(target.id)
            dtype = known.dtype if known else self._dtypes.get(target.id, "")
            self._found[target.id] = Buffer(self._shape(shape), dtype)

    def _assignment(self, target: ast.expr, source: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            return
        buffer = self.of(source)
        if buffer is not None:
            self._found[target.id] = buffer
        elif isinstance(source, ast.Name) and target.id.startswith(("s", "u", "ks")):
            # `s70 = s27`, another name; `s27 = arg3_1` begins one.
            known = self._symbols.get(target.id, target.id)
            self._symbols[target.id] = self._symbols.get(source.id, known)
        elif isinstance(source, ast.Subscript):
            if ast.unparse(source.value).endswith("_size"):
                self._symbols.setdefault(target.id, target.id)
            self._found.pop(target.id, None)

    def note(self, name: str, buffer: Buffer) -> None:
        """What a call leaves under a name."""
        self._found[name] = buffer

    def _shape(self, node: ast.expr) -> tuple[Size | None, ...] | None:
        if not isinstance(node, ast.Tuple):
            return None
        return tuple(read_size(one, self._symbols) for one in node.elts)


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else []


def dtype_of(node: ast.expr) -> str:
    """`float32` of `torch.float32`."""
    text = ast.unparse(node)
    return text.removeprefix("torch.") if text.startswith("torch.") else ""
