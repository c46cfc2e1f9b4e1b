"""FX graphs as text: a block of a pass's docstring becomes a graph, and a graph becomes text.

    T: int; x: f32[T, 8]            inputs: a size, and a tensor of such sizes
    y: cuda.f32[8]                  the same on a GPU: torch's device `meta` stands for it
    mm = aten.mm(x, w)              an operator; one without an overload is its `default`
    view = mm.view(T, 2, 4)         a method. x[0] is operator.getitem, x + y operator.add
    q = F.linear(x, w)  # layers.0  a node that was traced in the module `layers.0`
    call = self.layer_0(x)          a submodule; the text begins with `def layer_0(...)`
    return q

T is 7 and R is 2. Inputs named `meta`, `slots`, `rows` and `kv_cache` are those of a batch of two
prompts; of `rows`, R rows whose logits are wanted. Other inputs are random whole numbers.
"""

import ast
import dataclasses
import operator
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_aggregate
from torch.nn import functional

from attn_ops import AttentionSpec, CommonAttentionMetadata, get_backend
from fx_passes.analysis.fake_run import run_node

SIZES = {"T": 7, "R": 2}
DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16,
    "i32": torch.int32, "i64": torch.int64, "b8": torch.bool,
}  # fmt: skip
NAMES = {
    "aten": torch.ops.aten, "prims": torch.ops.prims, "attn_ops": torch.ops.attn_ops,
    "torch": torch, "F": functional,
}  # fmt: skip
OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.MatMult: operator.matmul,
}
SIGNS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.matmul: "@"}


@dataclasses.dataclass
class Input:
    """What an annotation says. No dtype: a size, or the batch's metadata."""

    name: str
    shape: tuple[str | int, ...] = ()
    dtype: torch.dtype | None = None
    device: str = "cpu"

    def sizes(self, of: dict[str, Any]) -> list[Any]:
        return [of[size] if isinstance(size, str) else size for size in self.shape]


def statements(block: str) -> list[tuple[ast.stmt, str | None]]:
    """The statements of a block, and of each the module path in the comment behind it."""
    found, lines = [], []
    for line in textwrap.dedent(block).splitlines():
        lines.append(line)
        try:
            body = ast.parse("\n".join(lines)).body
        except SyntaxError:  # it goes on in the next line
            continue
        comment = line.partition("  # ")[2].strip()
        found += [(one, comment or None) for one in body]
        lines = []
    assert not lines, f"this is no statement: {lines}"
    return found


def normal(block: str) -> str:
    """A block without its inputs and comments, one statement a line."""
    tree = ast.parse(textwrap.dedent(block))
    tree.body = [one for one in tree.body if not isinstance(one, ast.AnnAssign)]
    return ast.unparse(tree)


class Parsed:
    """A block as a graph.

    Attributes:
        gm: the graph in a module; nodes have the values that Dynamo or AOTAutograd would note.
        inputs: what was declared, in order.
    """

    def __init__(self, block: str, stage: str) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.key = "example_value" if stage == "dynamo" else "val"
        self.graph, self.inputs = Graph(), []
        self.nodes: dict[str, Node] = {}
        self.values: dict[Node, Any] = {}
        self.batch = batch()
        with self.mode, self.env.suppress_guards():
            for one, path in statements(block):
                self._add(one, path)
        self.gm = GraphModule(torch.nn.Module(), self.graph)
        self.gm.graph.lint()

    def _add(self, one: ast.stmt, path: str | None) -> None:
        if isinstance(one, ast.AnnAssign):
            assert isinstance(one.target, ast.Name)
            declared = _declared(one.target.id, one.annotation)
            self.inputs.append(declared)
            node = self.graph.placeholder(declared.name)
            node._rename(declared.name)  # FX would write T as t
            self._note(node, self._fake(declared), declared.name)
        elif isinstance(one, ast.Return):
            assert one.value is not None
            self.graph.output(self._argument(one.value))
        else:
            assert isinstance(one, ast.Assign | ast.Expr), ast.unparse(one)
            node = self._called(one.value)
            if path is not None:
                node.meta["nn_module_stack"] = {path: (path, torch.nn.Module)}
            name = None
            if isinstance(one, ast.Assign):
                assert isinstance(one.targets[0], ast.Name)
                name = one.targets[0].id
                node._rename(name)
                assert node.name == name, f"FX would call it {node.name}"
            self._note(node, run_node(node, self.values), name)

    def _note(self, node: Node, value: Any, name: str | None) -> None:
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            value = self.mode.from_tensor(value)  # `torch.tensor` on `meta` is no fake
        node.meta[self.key] = self.values[node] = value
        if name is not None:
            self.nodes[name] = node

    def _fake(self, declared: Input) -> Any:
        if declared.name in SIZES:
            size = SIZES[declared.name]
            source = ConstantSource(declared.name)
            symbol = self.env.create_symbol(size, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            return self.env.create_symintnode(symbol, hint=size, source=source)
        if declared.dtype is None:
            return self.batch[declared.name]
        sizes = declared.sizes({name: self.values[n] for name, n in self.nodes.items()})
        return torch.empty(sizes, dtype=declared.dtype, device=declared.device)

    def _called(self, value: ast.expr) -> Node:
        """The node of an expression; its arguments are names and constants."""
        if isinstance(value, ast.Subscript):
            arguments = self._argument(value.value), self._argument(value.slice)
            return self.graph.call_function(operator.getitem, arguments)
        if isinstance(value, ast.BinOp):
            arguments = self._argument(value.left), self._argument(value.right)
            return self.graph.call_function(OPERATORS[type(value.op)], arguments)
        assert isinstance(value, ast.Call), f"this is no call: {ast.unparse(value)}"
        assert isinstance(value.func, ast.Attribute)
        arguments = tuple(map(self._argument, value.args))
        named = {str(k.arg): self._argument(k.value) for k in value.keywords}
        owner = value.func.value
        if isinstance(owner, ast.Name) and owner.id in self.nodes:
            arguments = (self.nodes[owner.id], *arguments)
            return self.graph.call_method(value.func.attr, arguments, named)
        target = eval(ast.unparse(value.func), NAMES)
        target = target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
        return self.graph.call_function(target, arguments, named)

    def _argument(self, value: ast.expr) -> Any:
        if isinstance(value, ast.Name):
            return self.nodes[value.id]
        if isinstance(value, ast.List | ast.Tuple):
            kind = list if isinstance(value, ast.List) else tuple
            return kind(map(self._argument, value.elts))
        if isinstance(value, ast.Slice):
            ends = (value.lower, value.upper, value.step)
            return slice(*(end and self._argument(end) for end in ends))
        constant = eval(ast.unparse(value), dict(NAMES))
        return "meta" if constant == "cuda" else constant

    def run(self, gm: GraphModule) -> tuple[Any, list[torch.Tensor]]:
        """What a graph of these inputs gives for numbers, and what it leaves in its inputs."""
        given = self._numbers()
        result = on_host(gm)(*given)
        return result, [x for x in given if isinstance(x, torch.Tensor)]

    def _numbers(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        found: list[Any] = []
        for one in self.inputs:
            if one.name in SIZES or one.name in self.batch:
                value = SIZES.get(one.name, self.batch.get(one.name))
                found.append(value.clone() if isinstance(value, torch.Tensor) else value)
            else:
                numbers = torch.randint(-4, 5, one.sizes(SIZES), generator=generator)
                found.append(numbers.to(one.dtype))
        return found


def _declared(name: str, annotation: ast.expr) -> Input:
    if not isinstance(annotation, ast.Subscript):
        return Input(name)
    device, _, dtype = ast.unparse(annotation.value).rpartition(".")
    sizes = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    shape = tuple(s.id if isinstance(s, ast.Name) else ast.literal_eval(s) for s in sizes)
    return Input(name, shape, DTYPES[dtype], "meta" if device else "cpu")


def batch() -> dict[str, Any]:
    """Two prompts, of 4 and 3 tokens, in blocks of 4; 2 heads of 8."""
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths([4, 3], [4, 3], table, 4)
    rows = torch.tensor([3, 6])
    common = common.replace(logits_indices=rows)
    backend = get_backend("TORCH")
    builder = backend.builder(backend, [AttentionSpec(2, 2, 8, torch.float32)], 4, "cpu")
    return {
        "meta": builder.build(0, common),
        "rows": rows,
        "slots": common.slot_mapping.clone(),
        "kv_cache": torch.zeros(3, 2, 4, 2, 8),
    }


# -- printing --------------------------------------------------------------------------------------


def text(gm: GraphModule) -> str:
    """A graph as a block, without its inputs; submodules that it calls stand on top."""
    called = dict.fromkeys(str(n.target) for n in gm.graph.find_nodes(op="call_module"))
    parts = [_function(name, gm.get_submodule(name)) for name in called]
    return ast.unparse(ast.parse("\n".join([*parts, *_lines(gm.graph)])))


def _function(name: str, gm: Any) -> str:
    inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    body = textwrap.indent("\n".join(_lines(gm.graph)), "  ")
    return f"def {name}({', '.join(inputs)}):\n{body}"


def _lines(graph: Graph) -> list[str]:
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_shown(node.args[0])}")
        elif node.op != "placeholder":
            lines.append((f"{node.name} = " if node.users else "") + _call(node))
    return lines


def _call(node: Node) -> str:
    shown = [_shown(a) for a in node.args]
    if node.target in SIGNS:
        return f"{shown[0]} {SIGNS[node.target]} {shown[1]}"
    if node.target is operator.getitem:
        return f"{shown[0]}[{_index(node.args[1])}]"
    named = [f"{name}={_shown(value)}" for name, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{shown[0]}.{node.target}({', '.join([*shown[1:], *named])})"
    name = f"self.{node.target}" if node.op == "call_module" else _name(node.target)
    return f"{name}({', '.join([*shown, *named])})"


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    for prefix, module in (("torch", torch), ("F", functional)):
        if getattr(module, target.__name__, None) is target:
            return f"{prefix}.{target.__name__}"
    return f"{target.__module__}.{target.__name__}"


def _index(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_index, value)) + "," * (len(value) == 1)
    if isinstance(value, slice):
        start, stop = ("" if end is None else _shown(end) for end in (value.start, value.stop))
        return f"{start}:{stop}" + ("" if value.step is None else f":{_shown(value.step)}")
    return _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_shown, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, torch.device) or value == "meta":
        return repr("cuda" if str(value) == "meta" else str(value))
    return value.name if isinstance(value, Node) else repr(value)


# -- running ---------------------------------------------------------------------------------------


def on_host(gm: GraphModule) -> GraphModule:
    """The graph with `cpu` where it names a GPU."""

    def host(value: Any) -> Any:
        return "cpu" if value in ("meta", torch.device("meta")) else value

    graph, nodes = Graph(), {}
    for node in gm.graph.nodes:
        nodes[node] = new = graph.node_copy(node, nodes.__getitem__)
        new.args = map_aggregate(new.args, host)
        new.kwargs = map_aggregate(new.kwargs, host)
    return GraphModule(gm, graph)
