"""Address books: tensors a graph may read are found by name, and every move of one is seen."""

import dataclasses

import pytest
import torch

from attn_ops import AttentionMetadata, AttentionSpec, CommonAttentionMetadata, get_backend
from attn_ops.metadata import Views
from graphs.capture.addresses import AddressBook, Place


def zeros(*shape):
    return torch.zeros(*shape)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("none", None)


@dataclasses.dataclass(eq=False)
class Inputs:
    caches: list
    tables: dict
    pair: tuple
    number: int = 3
    more: object = None


def inputs():
    return Inputs([zeros(4), zeros(4)], {"a": zeros(2), "b": zeros(3)}, (zeros(1), zeros(1)))


def test_names():
    held = inputs()
    book = AddressBook.of(inputs=held, model=torch.nn.ModuleList([Layer()]), x=zeros(1), none=None)
    assert list(book.places) == [
        "inputs.caches[0]",
        "inputs.caches[1]",
        "inputs.tables[a]",
        "inputs.tables[b]",
        "inputs.pair[0]",
        "inputs.pair[1]",
        "model.0.scale",
        "model.0.linear.weight",
        "model.0.linear.bias",
        "x",
    ]
    assert len(book) == 10
    assert book.moved() == []
    assert book.changes() == {}
    assert book.places["inputs.tables[b]"] == Place.of(held.tables["b"])


CACHE, TABLE = ["inputs.caches[1]"], ["inputs.tables[b]"]
ELSEWHERE = "at another address"


def replaces(name, key, make):
    """Put `make(old)` into a container of `inputs`."""

    def move(held):
        container = getattr(held, name)
        container[key] = make(container[key])

    return move


def sets(name, make):
    return lambda held: setattr(held, name, make(getattr(held, name)))


MOVES = {
    "replaces an entry": (replaces("caches", 1, lambda t: zeros(4)), CACHE, ELSEWHERE),
    "replaces a list": (sets("caches", lambda old: [old[0], zeros(4)]), CACHE, ELSEWHERE),
    "replaces a value": (replaces("tables", "b", lambda t: zeros(3)), TABLE, ELSEWHERE),
    "replaces a dict": (sets("tables", lambda old: old | {"b": zeros(3)}), TABLE, ELSEWHERE),
    "replaces a tuple": (sets("pair", lambda p: (p[0], zeros(1))), ["inputs.pair[1]"], ELSEWHERE),
    "points elsewhere": (lambda h: setattr(h.caches[1], "data", zeros(4)), CACHE, ELSEWHERE),
    "grows": (lambda h: h.caches[1].resize_(1000), CACHE, "of shape [1000], not [4]"),
    "shrinks": (lambda h: h.caches[1].resize_(3), CACHE, "of shape [3], not [4]"),
    "shows less": (replaces("caches", 1, lambda t: t[:3]), CACHE, "of shape [3], not [4]"),
    "shows another shape": (
        replaces("caches", 1, lambda t: t.view(2, 2)),
        CACHE,
        "of shape [2, 2], not [4]",
    ),
    "other strides": (
        replaces("caches", 1, lambda t: t.as_strided((4,), (0,))),
        CACHE,
        "of stride [0], not [1]",
    ),
    "other dtype": (
        replaces("caches", 1, lambda t: t.view(torch.int32)),
        CACHE,
        "of dtype int32, not float32",
    ),
    "drops an entry": (lambda h: h.caches.pop(), CACHE, "gone"),
    "drops a key": (lambda h: h.tables.pop("b"), TABLE, "gone"),
    "drops an attribute": (
        lambda h: delattr(h, "caches"),
        ["inputs.caches[0]", *CACHE],
        "gone",
    ),
    "empties an entry": (replaces("caches", 1, lambda t: None), CACHE, "gone"),
    "empties an attribute": (
        sets("tables", lambda old: None),
        ["inputs.tables[a]", *TABLE],
        "gone",
    ),
}
"""Ways to move what `inputs` holds, with the names that are then moved."""


@pytest.mark.parametrize("case", MOVES)
def test_moves(case):
    move, names, how = MOVES[case]
    held = inputs()
    kept = list(held.caches), dict(held.tables), held.pair  # nothing takes their addresses
    book = AddressBook.of(inputs=held)
    move(held)
    assert book.moved() == names
    assert book.changes() == dict.fromkeys(names, how)
    assert book.moved() == names, "asking must not make it right"
    del kept


def test_other_objects_over_the_same_memory_are_the_same():
    held = inputs()
    book = AddressBook.of(inputs=held)
    held.caches = [t.view(4) for t in held.caches]
    held.tables = {"a": held.tables["a"].detach(), "b": held.tables["b"][:], "c": zeros(3)}
    held.pair = list(held.pair)
    held.number = 4
    assert book.moved() == []
    assert book.moved() == []
    held.caches[0] = zeros(4)
    assert book.moved() == ["inputs.caches[0]"]
    held.caches[0] = held.caches[1]
    assert book.moved() == ["inputs.caches[0]"]


def test_what_went_and_came_back_is_well():
    held = inputs()
    cache = held.caches[0]
    book = AddressBook.of(inputs=held)
    held.caches[0] = zeros(4)
    assert book.moved() == ["inputs.caches[0]"]
    held.caches[0] = cache
    assert book.moved() == []


def test_weights():
    first, second = Layer(), Layer()
    model = torch.nn.ModuleList([first, second])
    book = AddressBook.of(model=model, weights=list(model.parameters()))
    kept = [p.data for p in model.parameters()]
    assert book.moved() == []
    with torch.no_grad():
        first.linear.weight.copy_(torch.ones(2, 2))  # as loading weights does
    assert book.moved() == []
    first.linear.weight.data = torch.ones(2, 2)
    assert book.moved() == ["model.0.linear.weight", "weights[0]"]
    second.linear.bias = torch.nn.Parameter(torch.ones(2))
    second.scale = torch.ones(1)
    assert sorted(book.moved()) == [
        "model.0.linear.weight",
        "model.1.linear.bias",
        "model.1.scale",
        "weights[0]",
    ]
    del kept


@pytest.mark.parametrize("new", [Layer, torch.nn.Identity])
def test_replaced_submodules(new):
    """Also where nothing in them is read by address."""
    model = torch.nn.Sequential(Layer(), torch.nn.ReLU())
    book = AddressBook.of(model=model)
    old, model[1] = model[1], new()
    assert book.moved() == ["model.1"]
    model[1] = old
    assert book.moved() == []
    model[0] = Layer()
    wanted = ["model.0.scale", "model.0.linear.weight", "model.0.linear.bias"]
    assert book.moved() == [*wanted, "model.0", "model.0.linear"]


def metadata(**changes):
    common = CommonAttentionMetadata.from_lengths([1, 1], [3, 5], [[1, 2], [3, 4]], 4)
    common = dataclasses.replace(common, **changes)
    backend = get_backend("TORCH")
    spec = AttentionSpec(2, 2, 8, torch.float32)
    return AttentionMetadata(common, backend, {spec: inputs()}, 4)


def test_metadata_is_walked_whole():
    cascade = metadata(), metadata()
    meta = metadata().replace(views=Views(chunked={8: metadata()}, cascade=cascade))
    book = AddressBook.of(metadata=meta)
    for name in (
        "metadata.common.seq_lens",
        "metadata.common.block_table_tensor",
        "metadata.plans[0].caches[1]",
        "metadata.views.chunked[8].common.slot_mapping",
        "metadata.views.cascade[0].common.seq_lens",
        "metadata.views.cascade[1].plans[0].tables[a]",
    ):
        assert name in book.places, name
    assert book.moved() == []
    cascade[1].common.seq_lens = cascade[1].common.seq_lens.clone()
    meta.plans[next(iter(meta.plans))].caches[0] = zeros(4)
    moved = ["metadata.plans[0].caches[0]", "metadata.views.cascade[1].common.seq_lens"]
    assert sorted(book.moved()) == sorted(moved)
    meta.common = metadata().common
    assert "metadata.common.seq_lens" in book.moved()


def test_one_container_in_two_places_and_in_itself():
    caches = [zeros(2)]
    cyclic: dict = {"caches": caches}
    cyclic["self"] = cyclic
    book = AddressBook.of(first=cyclic, second=caches)
    assert list(book.places) == ["first[caches][0]"]
    caches[0] = zeros(2)
    assert book.moved() == ["first[caches][0]"]


def test_tensors_live_as_long_as_the_book():
    """A cache that was dropped is gone by name, and its memory is still nobody else's."""
    caches = [zeros(1000)]
    address = caches[0].data_ptr()
    book = AddressBook.of(caches=caches)
    caches.clear()
    taken = [zeros(1000) for _ in range(8)]
    assert all(t.data_ptr() != address for t in taken)
    assert book.moved() == ["caches[0]"]


def test_foreign_objects_are_not_entered():
    class Foreign:
        def __init__(self):
            self.tensor = zeros(1)

    assert AddressBook.of(x=Foreign(), y=[Foreign()], z=Foreign, n=3).places == {}
