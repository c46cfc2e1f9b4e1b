"""Which sizes a saved compilation serves: bounds and pairs from what the compilation asked."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext

from graphs.saved.plan import NotSavedError, _symbols
from tests.kit.models import build_model
from tests.kit.sessions import PROMPTS, make_session, tokens_of


def symbols_of(condition: str, sizes: tuple[int, int]):
    """Those of the first sizes of x and y, from a function that asks the condition."""
    found = []

    def backend(gm, inputs):
        env = TracingContext.get().fake_mode.shape_env
        values = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        shapes = [[str(env.simplify(t.shape[0].node.expr)), t.shape[1]] for t in tensors]
        found.append(shapes)
        try:
            found.append(_symbols(shapes, env))
        except NotSavedError as error:
            found.append(error)
        return gm

    names: dict = {}
    exec(f"def f(x, y): return x.sum() + y.sum() if {condition} else x.sin()", names)
    tensors = [torch.zeros(size, 4) for size in sizes]
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    torch._dynamo.reset()
    torch.compile(names["f"], backend=backend)(*tensors)
    return found


@pytest.mark.parametrize(
    ("condition", "bounds"),
    [
        ("x.shape[0] * 32768 <= 2147483647", (2, 65535)),
        ("x.shape[0] * 3 < 999", (2, 332)),
        ("x.shape[0] * 2 > 9", (5, None)),
        ("x.shape[0] >= 7", (7, None)),
    ],
)
def test_bounds(condition, bounds):
    shapes, (symbols, unequal) = symbols_of(condition, (17, 33))
    assert symbols == {shapes[0][0]: bounds, shapes[1][0]: (2, None)}
    assert unequal == []


def test_pairs():
    shapes, (symbols, unequal) = symbols_of("x.shape[0] != y.shape[0]", (17, 33))
    assert len(symbols) == 2
    assert [sorted(pair) for pair in unequal] == [sorted([shapes[0][0], shapes[1][0]])]
    shapes, (symbols, unequal) = symbols_of("x.shape[0] == y.shape[0]", (17, 17))
    assert len(symbols) == 1
    assert unequal == []


@pytest.mark.parametrize(
    "condition",
    ["x.shape[0] % 2 == 1", "x.shape[0] < y.shape[0]", "x.shape[0] * 7 <= y.shape[0] * 9"],
)
def test_what_a_plan_has_no_words_for(condition):
    _, error = symbols_of(condition, (17, 33))
    assert isinstance(error, NotSavedError)
    assert "only" in str(error)


def started(family, folder, **changes):
    torch._dynamo.reset()
    counters.clear()
    model = torch.compile(build_model(family), backend="attn_ops", fullgraph=True)
    session = make_session(model, compile_cache=folder, **changes)
    return tokens_of(session.generate(PROMPTS, 8)), session


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_caches_of_another_size(family, tmp_path):
    """Also where layers with a window have their own number of blocks."""
    tmp_path.chmod(0o700)
    windows = {"max_tokens": 128, "max_tokens_per_step": 16} if family == "gemma2" else {}
    tokens, session = started(family, tmp_path, cache_tokens=512, **windows)
    assert "; saved in" in session.report().compile_cache
    assert (session.cache.window_pool is not None) == (family == "gemma2")
    for number in (1024, 384):
        again, session = started(family, tmp_path, cache_tokens=number, **windows)
        assert again == tokens
        assert session.report().compile_cache == f"loaded from {tmp_path}"
        assert counters["stats"]["unique_graphs"] == 0
