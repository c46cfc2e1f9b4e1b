"""Make numbers on the device that needs them: none are copied from the host in a step."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fx_passes.analysis.values import value_of
from fx_passes.base import Pass

CPU = torch.device("cpu")


class DeviceConstants(Pass):
    """Replace a number's copy from the host by a fill on the device.

    Gemma 3n's epsilon and sparsity are such numbers. A copy from memory that is not pinned makes
    the host wait, which no CUDA graph can record. Inductor takes a fill for a constant and does not
    round it to the tensor's dtype. So the number is rounded here, as `torch.tensor` does.

    Before::

        x: cuda.f32[4]
        epsilon = torch.tensor(1e-05); to = epsilon.to('cuda')
        maximum = torch.maximum(x, to)
        sparsity = torch.tensor(0.95, dtype=torch.bfloat16, device='cuda')
        mul = maximum * sparsity
        return mul

    After::

        epsilon_1 = torch.full((), 9.999999747378752e-06, dtype=torch.float32, device='cuda')
        to = epsilon_1.to('cuda')
        maximum = torch.maximum(x, to)
        sparsity_1 = torch.full((), 0.94921875, dtype=torch.bfloat16, device='cuda')
        mul = maximum * sparsity_1
        return mul

    Skipped when:
        - the number is used on the host, too;
        - it is a list of numbers, or an argument of the step, whose value may change;
        - the tensor requires grad.
    """

    name = "device_constants"
    stage = "dynamo"
    looks_for = "number that is copied from the host"

    def apply(self, graph: Graph) -> int:
        matches = 0
        for node in graph.find_nodes(op="call_function", target=torch.tensor):
            if _is_number(node):
                rewrite = _fill_at_copies if _device(node) == CPU else _fill_in_place
                matches += rewrite(node)
        return matches


def _number(node: Node) -> object:
    return node.args[0] if node.args else node.kwargs.get("data")


def _is_number(node: Node) -> bool:
    fake = isinstance(value_of(node), FakeTensor)
    plain = fake and not node.kwargs.get("requires_grad")
    return plain and isinstance(_number(node), bool | int | float)


def _device(node: Node) -> torch.device:
    return value_of(node).device


def _filled(node: Node, device: torch.device) -> Node:
    """The number as a new node on `device`, where the graph stands."""
    fake = value_of(node)
    value = torch.tensor(_number(node), dtype=fake.dtype, device="cpu").item()
    how = {"dtype": fake.dtype, "device": device}
    full = node.graph.create_node("call_function", torch.full, ((), value), how, name=node.name)
    full.meta = {key: of for key, of in node.meta.items() if key != "example_value"}
    with fake.fake_mode:
        full.meta["example_value"] = torch.full((), value, dtype=fake.dtype, device=device)
    return full


def _fill_in_place(node: Node) -> int:
    """The number stands on its device already."""
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(_filled(node, _device(node)))
    node.graph.erase_node(node)
    return 1


def _fill_at_copies(node: Node) -> int:
    """Every `.to(device)` of a number on the host gets one on its device; how many."""
    copies = list(node.users)
    if not all(_is_copy(user, node) for user in copies):
        return 0  # what else uses it may write to it
    for copy in copies:
        with node.graph.inserting_before(copy):
            copy.update_arg(0, _filled(node, _device(copy)))
    node.graph.erase_node(node)
    return len(copies)


def _is_copy(user: Node, node: Node) -> bool:
    named = user.op == "call_method" and user.target in ("to", "cuda")
    fake = value_of(user)
    return named and user.args[0] is node and isinstance(fake, FakeTensor) and fake.device != CPU
