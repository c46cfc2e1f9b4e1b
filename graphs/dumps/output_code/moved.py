"""Bytes that a call of Inductor's output code reads and writes, by the sizes of its arguments.

A tensor counts whole, and once. Where a kernel computes the index from data (embedding, KV write),
the tensor counts as many rows as the data has entries.
"""

import ast
import dataclasses
import math
import re

from graphs.dumps.output_code.buffers import Buffer, Buffers, dtype_of
from graphs.dumps.output_code.sizes import Size, in_words, total

_TYPES = {
    "fp32": "float32", "float": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16",
    "at::bfloat16": "bfloat16", "c10::bfloat16": "bfloat16", "fp16": "float16", "half": "float16",
    "at::half": "float16", "fp64": "float64", "double": "float64", "i1": "bool", "bool": "bool",
    "i8": "int8", "int8_t": "int8", "u8": "uint8", "uint8_t": "uint8", "i16": "int16",
    "int16_t": "int16", "i32": "int32", "int32_t": "int32", "int": "int32", "i64": "int64",
    "int64_t": "int64", "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2",
    "at::float8_e4m3fn": "float8_e4m3fn", "at::float8_e5m2": "float8_e5m2",
}  # fmt: skip
_PRODUCTS = re.compile(
    r"^(?:extern_kernels\.|torch\.ops\.aten\.)_?(?:scaled_)?(?:add|badd|b)?mm(?:\.\w+)?$|"
    r"^torch\.ops\.attn_ops\.(?:skinny_mm|norm_mm)\.default$"
)
_GATED_MLP = "torch.ops.attn_ops.gated_mlp.default"
_CPP_HEAD = re.compile(r"kernel\((.*?)\)\s*\{", re.DOTALL)
_TRITON_HEAD = re.compile(r"^def \w+\((.*?)\):", re.MULTILINE | re.DOTALL)
_SIGNATURE = re.compile(r"'signature': (\{.*?\})")
_ACCESS = re.compile(r"\b(\w*ptr\d+)\s*(?:\+\s*(?:static_cast<int64_t>)?\(|\[)")
_DATA = re.compile(r"\btmp\d+\b")


@dataclasses.dataclass(frozen=True)
class Moved:
    """What a call moves; None: not known."""

    read: Size | None = None
    written: Size | None = None
    detail: str = ""  # what a product computes
    parts: tuple["Moved", ...] = ()  # of a call that is several products: each of them


@dataclasses.dataclass(frozen=True)
class _Parameter:
    name: str
    dtype: str


def moved_by_kernel(source: str, call: ast.Call, buffers: Buffers) -> Moved:
    """What a kernel that Inductor wrote moves."""
    parameters, indices = _parameters(source), _indices(source)
    arguments = [
        (parameter, buffers.of(node))
        for parameter, node in zip(parameters, call.args, strict=False)
        if parameter.dtype
    ]
    if not arguments or len(call.args) < len(arguments):
        return Moved()
    rows = _rows([(p, b) for p, b in arguments if not indices.get(p.name)])
    inputs, outputs = [], []
    for parameter, buffer in arguments:
        size = _touched(parameter, buffer, indices.get(parameter.name, set()), rows)
        if parameter.name.startswith(("in_", "arg_")):
            inputs.append(size)
        if parameter.name.startswith(("in_out", "out_")):
            outputs.append(size)
        if not parameter.name.startswith(("in_", "arg_", "out_")):
            return Moved()
    return Moved(total(inputs), total(outputs))


def moved_by_product(name: str, call: ast.Call, buffers: Buffers) -> tuple[Moved, Buffer | None]:
    """What a product outside of Inductor's kernels moves, and what it returns.

    Nothing where it is no product or an argument is not known.
    """
    tensors = [buffer for node in call.args if (buffer := buffers.of(node)) is not None]
    if name == _GATED_MLP and len(tensors) == 5:
        return _moved_by_mlp(*tensors)
    if not _PRODUCTS.match(name) or len(tensors) < 2:
        return Moved(), None
    has_bias = re.search(r"\.b?addmm", name) is not None
    first, second = tensors[has_bias : has_bias + 2]
    if name.endswith("norm_mm.default"):
        second = tensors[2] if len(tensors) > 2 else Buffer(None)
    if first.shape is None or second.shape is None or not first.shape or not second.shape:
        return Moved(), None
    keywords = {k.arg: k.value for k in call.keywords}
    given = buffers.of(keywords["out"]) if "out" in keywords else None
    dtype = first.dtype or second.dtype  # the code does not say it of what an operator returns
    made = Buffer((*first.shape[:-1], second.shape[-1]), _out_dtype(call) or dtype)
    out = made if given is None else Buffer(made.shape, given.dtype or made.dtype)
    inputs = [tensor.num_bytes(dtype or out.dtype) for tensor in tensors]
    inputs += [b.num_bytes() for k, v in keywords.items() if k != "out" and (b := buffers.of(v))]
    detail = " x ".join(_shape(tensor) for tensor in (first, second))
    return Moved(total(inputs), out.num_bytes(dtype), detail), out


def _moved_by_mlp(
    x: Buffer, residual: Buffer, norm: Buffer, up: Buffer, down: Buffer
) -> tuple[Moved, Buffer | None]:
    """Of `gated_mlp` where two kernels compute it: what is between them is written and read."""
    if x.shape is None or down.shape is None or not x.shape or not down.shape:
        return Moved(), None
    dtype = x.dtype or up.dtype
    gated, out = Buffer((*x.shape[:-1], down.shape[0]), dtype), Buffer(x.shape, dtype)
    parts = []
    for inputs, pair, result in (
        ((x, residual, norm, up), (x, up), gated),
        ((gated, down, x, residual), (gated, down), out),
    ):
        detail = " x ".join(map(_shape, pair))
        read = total([tensor.num_bytes(dtype) for tensor in inputs])
        parts.append(Moved(read, result.num_bytes(), detail))
    both = " and ".join(part.detail for part in parts)
    read, written = (total([getattr(p, name) for p in parts]) for name in ("read", "written"))
    return Moved(read, written, both, tuple(parts)), out


def _touched(
    parameter: _Parameter, buffer: Buffer | None, indices: set[str], rows: Size | None
) -> Size | None:
    if buffer is None or buffer.shape is None:
        return None
    if not indices:
        return buffer.num_bytes(parameter.dtype)
    # Caches are [P, 2, B, K, H] and [P, B, L]: a token's row is what follows the place in a block.
    leading = {5: 3, 3: 2}.get(len(buffer.shape), 1)
    number = sum(_keys_and_values(index, buffer.shape) for index in indices)
    row = Buffer((rows, {"": number}, *buffer.shape[leading:]), buffer.dtype)
    return row.num_bytes(parameter.dtype)


def _keys_and_values(index: str, shape: tuple[Size | None, ...]) -> int:
    """2 where one index of a cache [P, 2, B, K, H] runs over keys and values, else 1."""
    if len(shape) != 5:
        return 1
    sizes = [size.get("", 0) if size else 0 for size in shape[1:]]
    runs = re.search(rf"\b{math.prod(sizes[1:])}L?\*\(*[xr]\b", index)
    return sizes[0] if runs else 1


def _rows(arguments: list[tuple[_Parameter, Buffer | None]]) -> Size | None:
    """Entries of the data that indices come from: the integers that a kernel reads."""
    found = [
        buffer.num_elements
        for parameter, buffer in arguments
        if buffer is not None and parameter.dtype.startswith(("int", "uint"))
    ]
    known = [size for size in found if size]
    return min(known, key=lambda size: (set(size) <= {""}, sum(size.values())), default=None)


def _parameters(source: str) -> list[_Parameter]:
    """Of a Triton or C++ kernel; those without a dtype are no tensors."""
    signature = _SIGNATURE.search(source)
    if signature:
        head = _TRITON_HEAD.search(source)
        kinds = ast.literal_eval(signature[1])
        names = [p.partition(":")[0].strip() for p in head[1].split(",")] if head else []
        return [_Parameter(name, _dtype(kinds.get(name, ""))) for name in names]
    head = _CPP_HEAD.search(source)
    return [_cpp_parameter(text) for text in head[1].split(",")] if head else []


def _dtype(kind: str) -> str:
    return _TYPES.get(kind[1:].lower(), "") if kind.startswith("*") else ""


def _cpp_parameter(text: str) -> _Parameter:
    kind, _, name = text.strip().removeprefix("const ").rpartition(" ")
    kind = kind.replace(" const", "").strip()
    return _Parameter(name, _TYPES.get(kind[:-1].lower(), "") if kind.endswith("*") else "")


def _indices(source: str) -> dict[str, set[str]]:
    """By tensor, its different indices, where all of them are computed from data."""
    found: dict[str, set[str]] = {}
    direct: set[str] = set()
    for match in _ACCESS.finditer(source):
        index = _inside(source, match.end() - 1)
        if _DATA.search(index):
            plain = re.sub(r"\b(tmp|x|r)\d+(?:_\w+)?\b", r"\1", index)
            found.setdefault(match[1], set()).add(plain)
        else:
            direct.add(match[1])
    return {name: indices for name, indices in found.items() if name not in direct}


def _inside(text: str, begin: int) -> str:
    """What stands between the bracket at `begin` and the one that closes it."""
    depth = 0
    for i in range(begin, min(len(text), begin + 2000)):
        depth += (text[i] in "([") - (text[i] in ")]")
        if depth == 0:
            return text[begin + 1 : i]
    return ""


def _out_dtype(call: ast.Call) -> str:
    nodes = [*call.args, *(k.value for k in call.keywords)]
    return next((dtype for node in nodes if (dtype := dtype_of(node))), "")


def _shape(buffer: Buffer) -> str:
    return f"[{', '.join(in_words(size) for size in buffer.shape or ())}]"
