"""Values that traced code reads outside the model, and what weights of their own class hold."""

import sys
import types

import pytest
import torch

from graphs.saved.code import changed_module, names_of, traced_modules
from graphs.saved.key import _tensors
from graphs.saved.plan import NotSavedError

SOURCE = """
    import collections, os, threading, types
    class Plain: pass
    class Slots:
        __slots__ = ("scale",)
    class Layer:
        held = Plain()
        def forward(self, x):
            return x * {read}
    namespace, plain, slots, local = types.SimpleNamespace(), Plain(), Slots(), threading.local()
    nested, pair = Plain(), collections.namedtuple("Pair", "scale")(1.0)
    opaque, unread = object(), object()
    nested.inner = Plain()
    for one in (namespace, plain, slots, local, nested.inner, Layer.held):
        one.scale = 1.0
"""


@pytest.fixture
def module_that_reads(tmp_path, monkeypatch):
    """Makes a user's module whose code reads an expression."""

    def make(read: str) -> types.ModuleType:
        lines = [line.removeprefix("    ") for line in SOURCE.format(read=read).splitlines()]
        (tmp_path / "of_a_user.py").write_text("\n".join(lines))
        module = types.ModuleType("of_a_user")
        module.__file__ = str(tmp_path / "of_a_user.py")
        exec(
            compile((tmp_path / "of_a_user.py").read_text(), module.__file__, "exec"), vars(module)
        )
        monkeypatch.setitem(sys.modules, "of_a_user", module)
        return module

    return make


@pytest.mark.parametrize(
    "read",
    ["namespace.scale", "plain.scale", "slots.scale", "local.scale", "nested.inner.scale",
     "self.held.scale"],
)  # fmt: skip
def test_a_value_in_an_object_is_part_of_what_was_read(module_that_reads, read):
    module = module_that_reads(read)
    code = [module.Layer.forward.__code__]
    known = traced_modules(code)
    assert changed_module(known, names_of(code)) is None
    holder = module.Layer if read.startswith("self") else module
    *path, last = read.removeprefix("self.").split(".")
    for name in path:
        holder = getattr(holder, name)
    setattr(holder, last, 9.0)
    assert changed_module(known, names_of(code)) == "of_a_user"


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        ("hash(opaque)", r"an object of builtins.object, which it may read, has no key"),
        ("float(os.environ['SCALE'])", r"Layer.forward reads the environment"),
    ],
)
def test_what_shows_nothing_is_not_saved(module_that_reads, read, reason):
    code = [module_that_reads(read).Layer.forward.__code__]
    with pytest.raises(NotSavedError, match=reason):
        traced_modules(code)


class Scaled(torch.Tensor):
    """A weight and a number, as a quantized weight is."""

    def __new__(cls, inner, context):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.context = inner, context
        return made

    def __tensor_flatten__(self):
        return ["inner"], self.context

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def test_the_key_holds_what_a_weight_is_made_of():
    inner = torch.zeros(4, 2)
    assert _tensors({"w": Scaled(inner, {"rows": True})}) == _tensors(
        {"w": Scaled(inner, {"rows": True})}
    )
    texts = {
        _tensors({"w": weight})
        for weight in (
            inner,
            Scaled(inner, {"rows": True}),
            Scaled(inner, {"rows": False}),
            Scaled(inner.half(), {"rows": True}),
        )
    }
    assert len(texts) == 4


def test_a_weight_that_does_not_say_is_not_saved():
    class Silent(torch.Tensor):
        pass

    with pytest.raises(NotSavedError, match=r"a tensor of .*Silent has no key"):
        _tensors({"w": torch.zeros(2).as_subclass(Silent)})
