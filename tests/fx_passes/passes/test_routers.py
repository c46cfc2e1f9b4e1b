"""router: which choices of experts become one operator, and which are left."""

import pytest
import torch

from fx_passes.passes.routers import Router

T, K, E, F = 5, 16, 6, 8
RANDOM = torch.Generator().manual_seed(0)  # no scores nearly tie in bfloat16
X = torch.randn(T, K, generator=RANDOM)
WEIGHTS = [
    torch.randn(K, E, generator=RANDOM),
    torch.randn(E, 2 * F, K, generator=RANDOM) / 4,
    torch.randn(E, K, F, generator=RANDOM) / 3,
]


def softmax(x):
    """As the compiler takes it apart."""
    wide = x.float()
    exp = (wide - wide.amax(-1, keepdim=True)).exp()
    return exp / exp.sum(-1, keepdim=True)


def softmax_first(logits):
    chosen, ids = torch.topk(softmax(logits), 2)
    return chosen / chosen.sum(-1, keepdim=True), ids


def not_normalized(logits):
    return torch.topk(softmax(logits), 2)


def softmax_behind(logits):
    chosen, ids = torch.topk(logits, 2)
    return softmax(chosen), ids


def by_sigmoid(logits):
    scores = logits.sigmoid()
    ids = torch.topk(scores + 0.5, 2, sorted=False)[1]
    return scores.gather(1, ids) * 2.5, ids


def used_twice(logits):
    chosen, ids = torch.topk(softmax(logits), 2)
    return chosen / chosen.sum(-1, keepdim=True) + chosen, ids


def run(contract, aten_graph, choose, *, dtype=torch.float32, matches=1, one=None):
    def function(x, router, w, d):
        weights, ids = choose(x @ router)
        return torch.ops.attn_ops.experts(x, w, d, ids, weights.to(dtype))

    args = [one.to(dtype) for one in (X, *WEIGHTS)]
    one = one or Router("always")
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    graph = aten_graph(function, *args)
    return contract(one, graph, *args, matches=matches, tolerance=tolerance)[1], one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("choose", "keywords", "left"),
    [
        (softmax_first, "softmax = True, weights = 'sum'", ("exp", "sum", "div")),
        (not_normalized, "softmax = True", ("exp", "sum", "div")),
        (softmax_behind, "weights = 'softmax'", ("exp", "sum", "div")),
        (by_sigmoid, "", ()),
        (used_twice, "softmax = True", ("exp",)),
    ],
)
def test_choices(aten_graph, contract, choose, keywords, left, dtype):
    after, _ = run(contract, aten_graph, choose, dtype=dtype)
    (line,) = (line for line in after.splitlines() if "attn_ops.top_experts" in line)
    assert keywords in line
    assert ("weights" in line) == ("weights" in keywords)
    assert "aten.topk" not in after
    assert not any(f"aten.{name}" in after for name in left), after


def test_weights_have_the_dtype_of_the_rows(aten_graph, contract):
    """Their conversion is the kernel's."""
    after, _ = run(contract, aten_graph, softmax_first, dtype=torch.bfloat16)
    assert "dtype=torch.bfloat16" in after.replace(" ", "")
    assert "convert_element_type" not in after


@pytest.mark.skipped_when(Router, "scores are not those of rows")
@pytest.mark.parametrize(
    "choose",
    [
        lambda logits: torch.topk(logits, 2, largest=False),
        lambda logits: tuple(t[:, 0] for t in torch.topk(logits.view(-1, 2, 3), 2)),
        lambda logits: torch.topk(logits.double(), 2),
    ],
    ids=["lowest", "groups", "float64"],
)
def test_other_choices_stay(aten_graph, contract, choose):
    _, one = run(contract, aten_graph, choose, matches=0)
    assert "scores are not those of rows" in one.skipped[0]


@pytest.mark.skipped_when(Router, "no kernel runs on the device")
def test_no_kernel(aten_graph, contract):
    _, one = run(contract, aten_graph, softmax_first, matches=0, one=Router())
    assert "no kernel runs on the device" in one.skipped[0]


def test_choices_for_something_else_stay(aten_graph, contract):
    graph = aten_graph(lambda x: torch.topk(softmax(x), 2)[0], X)
    contract(Router("always"), graph, X, matches=0)
