"""What a key holds of a model and its code: the same in every process, another after a change."""

import enum
import functools
import importlib.util
import os
import sys
import threading
import types

import pytest
import torch
from torch import nn

from graphs.saved.described import changed_module, classes_of, text_of, traced_modules
from graphs.saved.folder import NotSavedError
from graphs.saved.loaded import LoadedModel
from graphs.saved.plan import Plan
from tests.kit.models import CONFIGS, build_model

SOURCE = """
import torch
import consts
SCALE, TABLE = 1.0, {"a": [1, 2]}
def scaled(x):
    return x * SCALE
class Model(torch.nn.Module):
    factor = 2
    def forward(self, x):
        return scaled(x) * self.factor * consts.SCALE
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module of a user's, dated before this process, and imports it."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, text: str, old: bool = True) -> types.ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        if old:
            os.utime(path, (1e9, 1e9))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    make("consts", "SCALE = 1.0")
    return make


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_has_a_key(family) -> None:
    models = [build_model(family) for _ in range(2)]
    assert len({text_of(model) + classes_of(model) for model in models}) == 1
    assert " at 0x" not in text_of(models[0])


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        ("of_a_user", "SCALE", 9.0),
        ("of_a_user", "TABLE", {"a": [1, 3]}),
        ("of_a_user", "scaled", lambda x: x * 9),
        ("of_a_user.Model", "factor", 9),
        ("of_a_user.Model", "forward", lambda self, x: x * 9),
        ("consts", "SCALE", 9.0),
    ],
)
def test_a_replaced_function_or_number_shows(user_module, monkeypatch, holder, name, value) -> None:
    module = user_module("of_a_user", SOURCE)
    code, model = [module.Model.forward.__code__], module.Model()
    known, key = traced_modules(code), classes_of(model)
    assert changed_module(known) is None
    first, _, attribute = holder.partition(".")
    target = sys.modules[first]
    monkeypatch.setattr(getattr(target, attribute) if attribute else target, name, value)
    assert changed_module(known) == first
    assert classes_of(model) != key


class Kind(enum.Enum):
    A = 1
    B = 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": torch.float32, "b": 1}, {"a": torch.float32, "b": 2}),
        ([1.0, torch.float32], [2.0, torch.float32]),
        ({1}, {1, 7}),
        (torch.sin, torch.tanh),
        (functools.partial(max, 2), functools.partial(max, 3)),
        (Kind.A, Kind.B),
    ],
)
def test_a_changed_value_shows_though_json_cannot_write_it(user_module, before, after) -> None:
    module = user_module("of_a_user", SOURCE)
    keys = []
    for module.TABLE in (before, before, after):
        keys.append(classes_of(module.Model()))
    assert keys[0] == keys[1] != keys[2]


def test_an_edited_file_shows(user_module) -> None:
    module = user_module("of_a_user", SOURCE)
    known, key = traced_modules([module.Model.forward.__code__]), classes_of(module.Model())
    module = user_module("of_a_user", SOURCE.replace("scaled(x) *", "scaled(x) +"))
    assert changed_module(known) == "of_a_user"
    assert classes_of(module.Model()) != key


def test_code_that_may_differ_from_its_file_has_no_key(user_module) -> None:
    module = user_module("of_a_user", SOURCE, old=False)
    with pytest.raises(NotSavedError, match=r"of_a_user.py has changed since this process started"):
        classes_of(module.Model())
    with pytest.raises(NotSavedError, match="no module was made from a prompt"):
        traced_modules([compile("1", "a prompt", "eval")])


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


class Silent(torch.Tensor):
    pass


def test_what_a_model_holds_is_part_of_its_key() -> None:
    inner, tied = torch.zeros(4, 2), torch.zeros(4, 2)
    holder, namespace = nn.Identity(), types.SimpleNamespace(scale=1.0)
    texts = []
    for value in (
        *(inner, inner.half(), torch.zeros(2, 4).t(), [inner, tied], [tied, tied]),
        *(Scaled(inner, {"a": 1}), Scaled(inner, {"a": 2}), Scaled(inner.half(), {"a": 1})),
        *(namespace, types.SimpleNamespace(scale=2.0), torch.float16, torch.nn.functional.silu),
        *(lambda x: inner, lambda x: [inner, namespace]),
    ):
        holder.held = value
        texts.append(text_of(holder))
        assert text_of(holder) == texts[-1]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"),
        (torch.zeros(2).as_subclass(Silent), "Silent"),
        (threading.Lock(), "lock"),
        ({(1, 2): 3}, "key"),
    ],
)
def test_what_shows_nothing_has_no_key(value, name) -> None:
    with pytest.raises(NotSavedError, match=name):
        text_of([lambda: value])


def test_sizes_that_a_plan_serves() -> None:
    """Sizes by torch's own expression; strides, dtypes and constants as Dynamo guards on them."""
    plan = Plan(["L['x']", "L['kwargs']['y']"], [[None, 4], [None]], [[4, 1], [1]],
                "L['t0'].size()[0] == L['t1'].size()[0] and L['t0'].size()[0] <= 3",
                [(0, [0, 1], 1)], 2)  # fmt: skip
    x, y = torch.ones(2, 4), torch.ones(2)

    def loaded():
        return LoadedModel(plan, [lambda x, y: [x.sum(1) + y]], None, lambda **kw: None,
                           {"x": x, "y": y, "n": 3})  # fmt: skip

    assert loaded()(x=x[:1], y=y[:1], n=3).logits.tolist() == [5.0]
    for x_, y_, n in ((x, y[:1], 3), (torch.ones(4, 4), torch.ones(4), 3), (x.double(), y, 3),
                      (torch.ones(4, 2).t(), y, 3), (x, y, 4), (x, y, 3.0)):  # fmt: skip
        model = loaded()
        assert model(x=x_, y=y_, n=n) is None
        assert model.refused
