"""What the backend compiled, kept for whoever writes it to a file: the calls and their pieces."""

import contextvars
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

import torch._functorch.config as functorch_config
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from fx_passes.analysis.values import noted


@dataclasses.dataclass
class CompiledGraph:
    """One graph of Dynamo after its compilation.

    Attributes:
        gm: calls the pieces in its nodes; a graph left whole is as the passes left it.
        whole: whether the graph is one piece.
        sources: Dynamo's names of its inputs, `L['input_ids']`; nodes forget them.
        pieces: compiled functions, in the order in which `gm` first calls them.
        shape_env: knows the symbols of its sizes.
        traced_code: code objects that Dynamo has traced.
        modified: objects that the model's Python changes in a call; a compiled call changes them
            too, by code of Dynamo that is not kept.
    """

    gm: GraphModule
    whole: bool
    sources: list[str]
    pieces: list[Callable[..., Any]]
    shape_env: Any
    traced_code: list[Any]
    modified: list[str]


@dataclasses.dataclass
class Keeper:
    """Collects graphs that are compiled while its recorder is active.

    Attributes:
        graphs: in order of compilation.
        nonce: part of the keys of AOTAutograd's cache, so that no graph is taken from there; passes
            would not run.
    """

    graphs: list[CompiledGraph] = dataclasses.field(default_factory=list)
    nonce: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    def keep(self, gm: GraphModule, pieces: list[Callable[..., Any]], *, whole: bool) -> None:
        """Called by the backend at the end of a compilation, inside Dynamo's trace."""
        context = TracingContext.get()
        fake_mode = context.fake_mode
        code = list(getattr(context, "traced_code", None) or ())
        env = None if fake_mode is None else fake_mode.shape_env
        sources = [_source(node) for node in gm.graph.find_nodes(op="placeholder")]
        self.graphs.append(CompiledGraph(gm, whole, sources, pieces, env, code, _modified()))


def autograd_cache(keeper: Keeper | None) -> Any:
    """The settings of AOTAutograd's cache for a compilation.

    A hit would skip our passes, and their counts with them. So it is off, or, where pieces are
    kept, on with a key that nothing has: only then has a compiled piece a form for a file.
    """
    if keeper is None:
        return functorch_config.patch(enable_autograd_cache=False)
    return functorch_config.patch(
        enable_autograd_cache=True,
        force_autograd_cache=True,
        bundled_autograd_cache=True,
        bypass_autograd_cache_key=True,
    )


def _source(node: Node) -> str:
    source = getattr(noted(node, "grapharg"), "source", None)
    name = getattr(source, "name", "")  # a method until torch 2.11
    return str(name() if callable(name) else name)


def _modified() -> list[str]:
    """What Dynamo's code changes besides the graph; new objects do not count."""
    effects = InstructionTranslator.current_tx().output.side_effects
    found = []
    for variable in effects._get_modified_vars():
        kind = type(getattr(variable, "mutation_type", None)).__name__
        if kind == "AttributeMutationNew" or kind == "ValueMutationNew":
            continue
        name = type(variable).__name__
        value = getattr(variable, "value", None)
        if isinstance(value, contextvars.ContextVar) or "ContextVar" in type(value).__name__:
            continue  # set and set back
        found.append(f"{name} {getattr(variable, 'source', None)}")
    return found
