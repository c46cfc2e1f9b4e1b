"""Addresses of the tensors of a captured step, compared before every replay.

A graph reads and writes addresses: if a tensor moves, a replay still uses the old memory.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Place:
    """What a graph relies on of one tensor."""

    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Place":
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def difference(self, now: "Place | None") -> str:
        """What is different now; empty if nothing is."""
        if now is None:
            return "gone"
        for name in ("device", "dtype", "shape", "stride"):
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                return f"of {name} {_plain(after)}, not {_plain(before)}"
        return "at another address" if self.pointer != now.pointer else ""


@dataclasses.dataclass(frozen=True)
class Link:
    """`holder[key] is held`: a tensor, or a container on the way to one."""

    name: str
    holder: Any
    key: Any
    held: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.held, torch.Tensor)


class AddressBook:
    """Names and addresses of tensors, with the containers in which they were found.

    Make one with `of`. It keeps the tensors alive, so that nothing a graph reads is freed.

    Attributes:
        places: by name, where each tensor was.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self._roots = roots
        links = list(_walk(roots))
        self._skips_host = any(link.is_tensor and not link.held.is_cpu for link in links)
        self.places = self._places(links)
        self._modules = _modules(links)
        self._remember(links)

    @classmethod
    def of(cls, **objects: Any) -> "AddressBook":
        """A book of all tensors in `objects`, under the names that they are given.

        Seen are tensors; what lists, tuples, mappings and dataclasses hold; attributes of objects
        of `attn_ops` (`AttentionMetadata`: batch, plans, virtual batches, both parts of a cascade);
        parameters, buffers and submodules of modules. Not seen are attributes of other objects.
        Beside tensors on a device those in pageable host memory are left out, as no kernel reads
        them.
        """
        return cls(objects)

    def __len__(self) -> int:
        return len(self.places)

    def moved(self) -> list[str]:
        """Names of tensors that are gone, elsewhere, or of another shape, and of replaced modules.

        Names are only looked at where something has moved. Otherwise two comparisons are enough:
        the containers hold the same containers, their tensors have the same addresses.
        """
        try:
            if self._stayed():
                return []
        except (LookupError, TypeError):
            pass  # an entry has gone, or is no tensor any more
        return list(self.changes())

    def changes(self) -> dict[str, str]:
        """By name, what is different about everything that `moved` names."""
        links = list(_walk(self._roots))
        now = self._places(links)
        changes = {
            name: difference
            for name, place in self.places.items()
            if (difference := place.difference(now.get(name)))
        }
        modules = _modules(links)
        replaced = [n for n, module in self._modules.items() if modules.get(n) is not module]
        changes |= dict.fromkeys(replaced, "another module")
        if not changes:
            self._remember(links)  # other objects over the same memory, as new views are
        return changes

    def _stayed(self) -> bool:
        """The comparison in few calls, each of which runs along a list in C."""
        inner = map(operator.getitem, self._holders, self._keys)
        if not all(map(operator.is_, inner, self._inner)):
            return False
        tensors = self._states.now()
        if not all(map(operator.is_, tensors, self._kept)):
            return False  # perhaps another view of the same memory; `changes` looks closer
        if list(map(torch.Tensor.numel, tensors)) != self._sizes:
            return False
        tensors += self._weights.now()
        # Most of the time goes here, 40 ns a tensor. torch's own comparison of a list of tensors
        # with a list of addresses takes as long (AMD EPYC, 2026-11-21).
        return list(map(torch.Tensor.data_ptr, tensors)) == self._pointers

    def _places(self, links: Sequence[Link]) -> dict[str, Place]:
        return {link.name: Place.of(link.held) for link in links if self._counts(link)}

    def _counts(self, link: Link) -> bool:
        if not link.is_tensor:
            return False
        return not (self._skips_host and link.held.is_cpu and not link.held.is_pinned())

    def _remember(self, links: Sequence[Link]) -> None:
        """Spread the links over the flat lists along which `_stayed` runs."""
        inner = [link for link in links if not link.is_tensor]
        self._holders = [link.holder for link in inner]
        self._keys = [link.key for link in inner]
        self._inner = [link.held for link in inner]
        counted = [link for link in links if self._counts(link)]
        # Other tensors may be resized in place or viewed in another way; weights never are.
        weights = [link for link in counted if isinstance(link.held, torch.nn.Parameter)]
        states = [link for link in counted if not isinstance(link.held, torch.nn.Parameter)]
        self._states, self._weights = Lookup.of(states), Lookup.of(weights)
        tensors = self._states.now()
        self._sizes = [tensor.numel() for tensor in tensors]
        self._kept = tensors + self._weights.now()
        self._pointers = [tensor.data_ptr() for tensor in self._kept]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Where tensors are found: entry by entry, and in lists that hold nothing else."""

    holders: list[Any]
    keys: list[Any]
    lists: Sequence[Sequence[torch.Tensor]]

    @classmethod
    def of(cls, links: Sequence[Link]) -> "Lookup":
        groups: dict[int, list[Link]] = {}
        for link in links:
            groups.setdefault(id(link.holder), []).append(link)
        whole = [
            group[0].holder
            for group in groups.values()
            if isinstance(group[0].holder, list | tuple) and len(group[0].holder) == len(group)
        ]
        lists = {id(holder) for holder in whole}
        others = [link for link in links if id(link.holder) not in lists]
        return cls([link.holder for link in others], [link.key for link in others], whole)

    def now(self) -> list[torch.Tensor]:
        """The tensors that are there now."""
        tensors: list[torch.Tensor] = list(map(operator.getitem, self.holders, self.keys))
        tensors += itertools.chain.from_iterable(self.lists)
        return tensors


def _modules(links: Sequence[Link]) -> dict[str, torch.nn.Module]:
    return {link.name: link.held for link in links if isinstance(link.held, torch.nn.Module)}


def _plain(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value).removeprefix("torch.")


def _walk(roots: dict[str, Any]) -> Iterator[Link]:
    """Every tensor under `roots` and every container between, parents first.

    A container that is found twice is entered once.
    """
    entered: set[int] = set()
    pending = [Link(name, roots, name, held) for name, held in reversed(roots.items())]
    while pending:
        link = pending.pop()
        children = _children(link.name, link.held)
        if children is None:
            continue
        yield link
        if id(link.held) not in entered:
            entered.add(id(link.held))
            pending += reversed(children)


def _children(name: str, held: Any) -> list[Link] | None:
    """Links out of an object; None: it can hold no tensor that we look for."""
    if isinstance(held, torch.Tensor):
        return []
    if isinstance(held, torch.nn.Module):
        return _parts(name, held)
    if isinstance(held, Mapping):
        return [
            Link(f"{name}[{key if isinstance(key, str | int) else index}]", held, key, value)
            for index, (key, value) in enumerate(held.items())
        ]
    if isinstance(held, list | tuple):
        return [Link(f"{name}[{index}]", held, index, value) for index, value in enumerate(held)]
    if isinstance(held, type) or not hasattr(held, "__dict__"):
        return None
    if dataclasses.is_dataclass(held) or type(held).__module__.partition(".")[0] == "attn_ops":
        attributes = vars(held)
        return [Link(f"{name}.{key}", attributes, key, attributes[key]) for key in attributes]
    return None


def _parts(name: str, module: torch.nn.Module) -> list[Link]:
    return [
        Link(".".join(filter(None, (name, key))), held, key, part)
        for held in (module._parameters, module._buffers, module._modules)
        for key, part in held.items()
        if part is not None
    ]
