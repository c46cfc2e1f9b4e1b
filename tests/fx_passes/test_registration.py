"""What `register_pass` refuses, and passes of installed packages."""

import warnings

import pytest

from fx_passes import Pass, broken_passes, installed, pass_names, pipeline, register_pass
from fx_passes.pipeline import passes

pytestmark = pytest.mark.usefixtures("own_pipeline")


class Mine(Pass):
    """Changes nothing."""

    name, stage = "mine", "aten"

    def apply(self, graph):
        return 0


def changed(**attributes) -> type[Pass]:
    return type("Changed", (Mine,), attributes)


class NoStage(Pass):
    name = "no_stage"

    def apply(self, graph):
        return 0


class NoName(NoStage):
    name = None
    stage = "aten"


class NoApply(Pass):
    name, stage = "no_apply", "aten"


class Bare:
    name, stage = "bare", "aten"


STAGE = r"stage of the pass '\w+' must be known, got {}; supported: dynamo, aten"
NAME = r"name of a pass must be an identifier, as my_pass, got {}"
PLACE = r"before and after must name a pass, got '{}'; supported: device_constants"
RANGE = r"token_range of the pass 'mine' must be range\(least, most \+ 1\), got {}"
TWO = {"runs_after": "share_products", "runs_before": "collapse_views"}
REFUSED = {
    "no class": (Mine(), r"pass must be a subclass of fx_passes.Pass, got <"),
    "no pass": (Bare, r"pass must be a subclass of fx_passes.Pass, got <class"),
    "no apply": (NoApply, r"pass must define apply, got <class .*NoApply'> without"),
    "no stage": (NoStage, STAGE.format("None")),
    "another stage": (changed(stage="post_grad"), STAGE.format("'post_grad'")),
    "no name": (NoName, NAME.format("None")),
    "a path": (changed(name="../mine"), NAME.format("'../mine'")),
    "no place": (changed(runs_after="nowhere"), PLACE.format("nowhere")),
    "beside itself": (changed(runs_before="mine"), PLACE.format("mine")),
    "no range": (changed(token_range=(1, 64)), RANGE.format(r"\(1, 64\)")),
    "an empty range": (changed(token_range=range(64, 1)), RANGE.format(r"range\(64, 1\)")),
    "steps": (changed(token_range=range(1, 64, 2)), RANGE.format(r"range\(1, 64, 2\)")),
    "two places": (changed(**TWO), "at most one of before and after must be given, got 'collapse"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    new, message = REFUSED[case]
    names = pass_names()
    with pytest.raises((TypeError, ValueError), match=message):
        register_pass(new)
    assert pass_names() == names


def test_a_pass_declares_its_place():
    register_pass(changed(runs_before="share_products"))
    assert pass_names().index("mine") == pass_names().index("share_products") - 1
    register_pass(changed(name="other", runs_before="mine"), after="share_products")
    assert pass_names().index("other") == pass_names().index("share_products") + 1


# -- installed passes ------------------------------------------------------------------------------


class EntryPoint:
    def __init__(self, name: str, load) -> None:
        self.name, self.load = name, load


@pytest.fixture
def install(monkeypatch):
    def install(*points: EntryPoint) -> None:
        def entry_points(group: str):
            assert group == "attn_ops.passes"
            return list(points)

        monkeypatch.setattr(installed, "entry_points", entry_points)
        installed.installed_passes.cache_clear()

    yield install
    monkeypatch.undo()
    installed.installed_passes.cache_clear()


def test_an_installed_pass_runs(install):
    place = changed(name="placed", runs_after="share_products")
    install(EntryPoint("placed", lambda: place), EntryPoint("mine", lambda: Mine))
    assert pass_names()[-1] == "mine"
    assert pass_names().index("placed") == pass_names().index("share_products") + 1
    assert {"mine", "placed"} < {one.name for one in passes(pipeline.PassConfig(), "aten")}
    assert broken_passes() == {}
    pipeline.unregister_pass("mine")
    assert "mine" not in pass_names()
    with pytest.raises(ValueError, match="pass name must be new, got 'placed'"):
        register_pass(place)


def test_an_installed_pass_may_stand_beside_another_that_is_loaded_later(install):
    places = {"early": "later", "later": "last", "last": None}
    made = [changed(name=name, runs_after=after) for name, after in places.items()]
    install(*(EntryPoint(one.name, lambda one=one: one) for one in made))
    assert pass_names()[-3:] == ["last", "later", "early"]
    assert broken_passes() == {}


def test_installed_passes_beside_each_other_are_left_out(install):
    places = {"first": {"runs_after": "second"}, "second": {"runs_before": "third"},
              "third": {"runs_after": "second"}, "mine": {}}  # fmt: skip
    made = [changed(name=name, **place) for name, place in places.items()]
    install(*(EntryPoint(one.name, lambda one=one: one) for one in made))
    with pytest.warns(RuntimeWarning, match="is left out"):
        names = pass_names()
    assert names[-1] == "mine"
    places = {"first": "second", "second": "third", "third": "second"}
    for name, place in places.items():
        assert f"must name a pass, got '{place}'" in broken_passes()[name]


def test_packages_are_loaded_once_and_when_they_are_needed(install):
    loads = []
    install(EntryPoint("mine", lambda: loads.append("mine") or Mine))
    assert loads == []
    for _ in range(3):
        pass_names()
    assert loads == ["mine"]


def broken():
    raise ImportError("libbroken.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("name", "load", "message"),
    [
        ("broken", broken, "ImportError: libbroken.so: cannot open shared object file"),
        ("odd", lambda: object(), "TypeError: pass must be a subclass of fx_passes.Pass"),
        ("still", lambda: changed(name="still", stage="x"), "ValueError: stage of the pass"),
        ("alias", lambda: changed(name="real"), "must have its pass's name 'real', got 'alias'"),
        ("collapse_views", lambda: changed(name="collapse_views"), "pass name must be new"),
        ("lost", lambda: changed(name="lost", runs_after="z"), "must name a pass, got 'z'"),
    ],
)
def test_a_broken_package_is_reported_once_and_stops_nobody_else(install, name, load, message):
    install(EntryPoint(name, load), EntryPoint("mine", lambda: Mine))
    with pytest.warns(RuntimeWarning, match=f"the installed pass '{name}' is left out: ") as seen:
        assert pass_names()[-1] == "mine"
    assert len(seen) == 1
    assert message in broken_passes()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pass_names().count(name) == (name in pipeline.PassConfig.__dataclass_fields__)
