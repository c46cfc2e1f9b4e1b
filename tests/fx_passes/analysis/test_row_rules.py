"""row_rules: a verdict "row by row" is right in numbers; what mixes rows gets none.

T rows of the batch. In the cases T is 7, and nothing else is.
"""

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fx_passes.analysis.row_rules import RULES, Call, why_not
from fx_passes.analysis.sizes import expression, row_dim

T = 7


class Noted(TorchDispatchMode):
    """Notes the ATen calls inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class Verdict:
    """What the rules say of a function of tensors in which the size 7 is the number of rows."""

    def __init__(self, function: Callable, *tensors: torch.Tensor) -> None:
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        fakes = []
        for x in tensors:
            sizes = [DimDynamic.DUCK if n == T else DimDynamic.STATIC for n in x.shape]
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
            fakes.append(mode.from_tensor(x, symbolic_context=context))
        self.symbol = next(
            s for x in fakes for n in x.shape if isinstance(s := expression(n), sympy.Symbol)
        )
        self.in_dims = [row_dim(x, self.symbol) for x in fakes]
        python = enable_python_dispatcher()
        with mode, env.suppress_guards(), python, torch.no_grad(), Noted() as noted:
            self.outs = [x for x in tree_leaves(function(*fakes)) if isinstance(x, torch.Tensor)]
        self.calls = [Call(*call, symbol=self.symbol) for call in noted.calls]

    @property
    def reasons(self) -> list[str]:
        return [reason for call in self.calls if (reason := why_not(call))]


def rows_of(x: torch.Tensor, dim: int | None, rows: torch.Tensor) -> torch.Tensor:
    return x.clone() if dim is None else x.index_select(dim, rows)


def resized(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Random numbers of x's dtype in x's shape, with other rows."""
    shape = [num_rows if n == T else n for n in x.shape]
    if x.dtype == torch.int64:
        return torch.randint(0, 3, shape)
    return torch.randn(shape, dtype=torch.float64).to(x.dtype)


def is_row_wise(function: Callable, verdict: Verdict, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the function of gathered rows is the gathered function, for several sizes."""
    for num_rows, rows in ((7, [6, 1]), (9, [4]), (2, [1, 1, 0]), (5, [0, 1, 2, 3, 4]), (6, [5])):
        rows = torch.tensor(rows)
        full = [resized(x, num_rows) if T in x.shape else x.clone() for x in tensors]
        few = [rows_of(x, d, rows) for x, d in zip(full, verdict.in_dims, strict=True)]
        wanted = [x for x in tree_leaves(function(*full)) if isinstance(x, torch.Tensor)]
        got = [x for x in tree_leaves(function(*few)) if isinstance(x, torch.Tensor)]
        for a, b, fake in zip(wanted, got, verdict.outs, strict=True):
            a = rows_of(a, row_dim(fake, verdict.symbol), rows)
            if a.shape != b.shape or not torch.allclose(
                a.double(), b.double(), atol=1e-5, equal_nan=True
            ):
                return False
    return True


X = torch.randn(7, 4)
XB = torch.randn(1, 7, 4)
XH = torch.randn(1, 7, 2, 4)
W = torch.randn(4, 6)
TABLE = torch.randn(12, 4)
ONE = torch.randint(0, 3, (7,))
IDS = torch.randint(0, 3, (1, 7))
KEYS = torch.randint(0, 3, (7, 2))


def in_place(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = x.clone()
    change(x)
    return x


# By category of the table: what stays apart, and what looks like it and does not, where `ALONG`
# below has not the same operator along the rows.
ROW_WISE: dict[str, tuple] = {
    "constant": (lambda x: x + torch.full((x.shape[0], 4), 2.0), X),
    "new zeros": (lambda x: x + x.new_zeros(x.shape[0], 1), X),
    "pointwise": (lambda x: (x * 2 + x.sin()).relu(), XB),
    "broadcast of a weight": (lambda x: x * torch.ones(4), XB),
    "broadcast over heads": (lambda x, y: x * y.unsqueeze(2), XH, XB),
    "broadcast of another rank": (lambda x, y: x + y, XB, X),
    "where": (lambda x: torch.where(x > 0, x, 0.0), X),
    "copy": (lambda x: x.to(torch.float64).clone(), X),
    "expand": (lambda x: x[:, :1].expand(-1, 4), X),
    "expand in front": (lambda x: x.expand(3, -1, -1), X),
    "expand a weight to the rows": (lambda x: x + torch.ones(4).expand(x.shape[0], 4), X),
    "repeat columns": (lambda x: x.repeat(1, 3), X),
    "sum of columns": (lambda x: x.sum(-1), XB),
    "mean, kept": (lambda x: x.mean(-1, keepdim=True), XB),
    "amax of two": (lambda x: x.amax((0, 2)), XB),
    "max along": (lambda x: x.max(-1).values, X),
    "softmax": (lambda x: torch.softmax(x, -1), XB),
    "cumsum": (lambda x: x.cumsum(1), X),
    "topk": (lambda x: torch.topk(x, 2, dim=-1), X),
    "sort": (lambda x: torch.sort(x, dim=-1), X),
    "gather": (lambda x, k: x.gather(1, k), X, KEYS),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (4,)), XB),
    "rms norm": (lambda x: torch.nn.functional.rms_norm(x, (4,)), XB),
    "heads": (lambda x: x.view(1, x.shape[1], 2, 2).transpose(1, 2), XB),
    "flattened heads": (lambda x: x.reshape(*x.shape[:2], -1), XH),
    "flattened batch": (lambda x: x.view(-1, 4), XB),
    "squeeze": (lambda x: x.squeeze(0), XB),
    "unsqueeze": (lambda x: x.unsqueeze(0).unsqueeze(-1), X),
    "slice of columns": (lambda x: x[..., 1:3], XB),
    "slice of nothing": (lambda x: x[:, :], XB),
    "split": (lambda x: x.split([1, 3], dim=-1), X),
    "chunk": (lambda x: x.chunk(2, dim=-1), X),
    "select a column": (lambda x: x[:, 1], X),
    "unbind": (lambda x: x.unbind(2), XH),
    "cat of columns": (lambda x, y: torch.cat((x, y), -1), X, X),
    "stack": (lambda x, y: torch.stack((x, y), 0), XB, XB),
    "product": (lambda x: x @ W, X),
    "product of three dims": (lambda x: x @ W, XB),
    "linear": (lambda x: torch.nn.functional.linear(x, W.t(), torch.ones(6)), XB),
    "addmm": (lambda x, b: torch.addmm(b, x, W), X, torch.randn(7, 6)),
    "bmm, rows the batch": (lambda x, y: torch.bmm(x, y), torch.randn(7, 2, 3),
                            torch.randn(7, 3, 4)),
    "bmm, rows of the left": (lambda x: torch.bmm(x, torch.ones(2, 4, 3)), torch.randn(2, 7, 4)),
    "baddbmm": (lambda b, x: torch.baddbmm(b, x, torch.ones(2, 4, 3)),
                torch.randn(2, 7, 3), torch.randn(2, 7, 4)),
    "embedding": (lambda i: torch.nn.functional.embedding(i, TABLE), IDS),
    "index": (lambda i: TABLE[i], ONE),
    "index select": (lambda i: TABLE.index_select(0, i), ONE),
    "in place": (lambda x, y: in_place(x, lambda z: z.add_(y).mul_(2)), X, X),
    "in place on columns": (lambda x, y: in_place(x, lambda z: z[:, 1:].copy_(y)), X,
                            torch.randn(7, 3)),
}  # fmt: skip

MIXING: dict[str, tuple] = {
    "arange is not constant": (lambda x: x + torch.arange(x.shape[0])[:, None], X),
    "other rows of a broadcast": (lambda x, y: x.unsqueeze(0) + y.unsqueeze(1), X, X),
    "as many columns as rows": (lambda x: x.view(-1, 1) * torch.ones(x.shape[0]), ONE.float()),
    "repeat interleaved": (lambda x: x.repeat_interleave(2, 0), X),
    "mean of all": (lambda x: x + x.mean(), X),
    "maximum of all": (lambda x: x - x.max(), X),
    "topk, the default dimension": (lambda x: torch.topk(x.t(), 2).indices, X),
    "gather from a table": (lambda k: TABLE[:, :3].gather(1, k), KEYS),
    "rows and heads merged": (lambda x: x.view(1, -1, 4), XH),
    "rows and columns swapped": (lambda x: x.reshape(4, x.shape[0]), X),
    "transposed and merged": (lambda x: x.transpose(1, 2).reshape(1, -1, 4), XH),
    "squeeze of rows": (lambda x: x.squeeze(0), X),
    "one row": (lambda x: x + x[0], X),
    "last row": (lambda x: x[:, -1:], XB),
    "first rows of a table": (lambda x: x + TABLE[: x.shape[0]], X),
    "narrowed table": (lambda x: x + TABLE.narrow(0, 2, x.shape[0]), X),
    "cat with a row": (lambda x: torch.cat((x[:, :1], x), 1), XB),
    "rows contracted": (lambda x, y: x + (x.t() @ y)[0], X, X),
    "Gram matrix": (lambda x: x @ x.t(), X),
    "bmm, rows contracted": (lambda x, y: torch.bmm(x, y), torch.randn(2, 3, 7),
                             torch.randn(2, 7, 4)),
    "attention of rows": (lambda x: torch.softmax(x @ x.mT, -1) @ x, XB),
    "table of rows": (lambda x, i: x[i], X, ONE),
    "indices of another kind": (lambda x: x[torch.tensor([0, 1])], X),
    "scatter": (lambda x, i: torch.zeros(4, 4).index_add(0, i, x), X, ONE),
    "index_add": (lambda x, i: x.index_add(0, i, x), X, ONE),
    "index_put": (lambda x, i: x.index_put((i,), x), X, ONE),
    "conv over rows": (
        lambda x: torch.nn.functional.conv1d(x.t()[None], torch.ones(4, 1, 3), padding=1, groups=4),
        X),
    "batch norm": (lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), X),
    "times the number of rows": (lambda x: x * x.shape[0], X),
    "filled with the number of rows": (lambda x: torch.full_like(x, x.shape[0]), X),
    "clamped to the number of rows": (lambda x: x.clamp(max=x.shape[0]), X),
    "random": (lambda x: x + torch.rand_like(x), X),
    "in place on a row": (lambda x: in_place(x, lambda z: z[0].fill_(1)), X),
    "in place on some rows": (lambda x: in_place(x, lambda z: z[2:].mul_(2)), X),
}  # fmt: skip


@pytest.mark.parametrize("case", ROW_WISE)
def test_what_stays_apart(case):
    function, *tensors = ROW_WISE[case]
    verdict = Verdict(function, *tensors)
    assert verdict.reasons == []
    assert is_row_wise(function, verdict, tuple(tensors))


@pytest.mark.parametrize("case", MIXING)
def test_what_mixes(case):
    function, *tensors = MIXING[case]
    assert Verdict(function, *tensors).reasons


# -- by exhaustion: any row dimension with any other argument --------------------------------------

ALONG: dict[str, Callable] = {
    "sum": lambda x, y, d: x.sum(d),
    "mean kept": lambda x, y, d: x.mean(d, keepdim=True),
    "amax": lambda x, y, d: x.amax(d),
    "amin of the others": lambda x, y, d: x.amin([i for i in range(3) if i != d]),
    "var": lambda x, y, d: x.var(d, unbiased=False),
    "std": lambda x, y, d: x.std(d, unbiased=False),
    "prod": lambda x, y, d: x.prod(d),
    "norm": lambda x, y, d: x.norm(dim=d),
    "vector norm": lambda x, y, d: torch.linalg.vector_norm(x, dim=d),
    "logsumexp": lambda x, y, d: x.logsumexp(d),
    "any": lambda x, y, d: (x > 1).any(d),
    "all": lambda x, y, d: (x > -1).all(d),
    "argmax": lambda x, y, d: x.argmax(d),
    "argmin": lambda x, y, d: x.argmin(d),
    "max": lambda x, y, d: x.max(d),
    "min": lambda x, y, d: x.min(d),
    "softmax": lambda x, y, d: x.softmax(d),
    "log_softmax": lambda x, y, d: x.log_softmax(d),
    "cumsum": lambda x, y, d: x.cumsum(d),
    "cumprod": lambda x, y, d: x.cumprod(d),
    "cumsum in place": lambda x, y, d: in_place(x, lambda z: z.cumsum_(d)),
    "sort": lambda x, y, d: x.sort(d).values,
    "topk": lambda x, y, d: x.topk(1, d).values,
    "gather": lambda x, y, d: x.gather(d, (y > 0).long()),
    "slice": lambda x, y, d: x.narrow(d, 0, 1),
    "sliced by half": lambda x, y, d: x[(slice(None),) * d + (slice(None, None, 2),)],
    "select": lambda x, y, d: x.select(d, 0),
    "split": lambda x, y, d: x.split(1, d)[0],
    "chunk": lambda x, y, d: x.chunk(2, d)[0],
    "cat": lambda x, y, d: torch.cat((x, y), d),
    "stack": lambda x, y, d: torch.stack((x, y), d),
    "unsqueeze": lambda x, y, d: x.unsqueeze(d),
    "squeeze": lambda x, y, d: x.narrow(d, 0, 1).squeeze(d),
    "squeeze of all": lambda x, y, d: x.unsqueeze(d).squeeze(),
    "transpose": lambda x, y, d: x.transpose(d, 0) * 2,
    "permute": lambda x, y, d: x.permute(d, (d + 1) % 3, (d + 2) % 3),
    "movedim": lambda x, y, d: x.movedim(d, 0),
    "flatten": lambda x, y, d: x.flatten(max(d - 1, 0), d),
    "view as": lambda x, y, d: x.reshape([-1 if i == d else n for i, n in enumerate(x.shape)]),
    "merged": lambda x, y, d: x.movedim(d, 0).reshape(x.shape[d], -1),
    "pad": lambda x, y, d: torch.nn.functional.pad(x, (0, 0) * (2 - d) + (1, 1)),
    "broadcast": lambda x, y, d: x + y.amax(d, keepdim=True),
    "broadcast lower": lambda x, y, d: x + y.select(d, 0).sum(),
    "outer": lambda x, y, d: x.unsqueeze(d) * y.unsqueeze(0),
    "expand": lambda x, y, d: x.unsqueeze(d).expand([3 if i == d else -1 for i in range(4)]),
    "repeat": lambda x, y, d: x.repeat([2 if i == d else 1 for i in range(3)]),
    "bmm": lambda x, y, d: torch.bmm(x, torch.ones(x.shape[0], x.shape[2], 5)),
    "bmm of two": lambda x, y, d: torch.bmm(x, y.mT),
    "bmm turned": lambda x, y, d: torch.bmm(x.mT, y),
    "matmul": lambda x, y, d: x @ torch.ones(x.shape[2], 5),
    "linear": lambda x, y, d: torch.nn.functional.linear(
        x.movedim(d, -1), torch.ones(5, x.shape[d]), torch.ones(5)
    ),
    "addmm": lambda x, y, d: torch.addmm(torch.ones(5), x.select(d, 0), torch.ones(5, 5)[:1]),
    "layer norm": lambda x, y, d: torch.nn.functional.layer_norm(x, tuple(x.shape[d:])),
    "rms norm": lambda x, y, d: torch.nn.functional.rms_norm(x, tuple(x.shape[d:])),
    "glu": lambda x, y, d: torch.nn.functional.glu(torch.cat((x, y), d), d),
    "table": lambda x, y, d: TABLE[(x > 0).long()].select(d, 0),
    "indexed": lambda x, y, d: x.index_select(d, torch.tensor([0, 0])),
    "copied": lambda x, y, d: in_place(x, lambda z: z.narrow(d, 0, 1).copy_(y.narrow(d, 0, 1))),
    "masked": lambda x, y, d: in_place(x, lambda z: z.masked_fill_(y.amax(d, True) > 0, 1.0)),
    "roll": lambda x, y, d: x.roll(1, d),
    "flip": lambda x, y, d: x.flip(d),
    "diff": lambda x, y, d: x.diff(dim=d),
    "renorm": lambda x, y, d: x.renorm(2, d, 1.0),
}  # fmt: skip


def shapes(place: int) -> tuple[int, ...]:
    """[2, 4, 6] with the rows in one place."""
    return tuple(T if i == place else n for i, n in enumerate((2, 4, 6)))


def cases(name: str) -> Iterator[tuple[Callable, Verdict, tuple[torch.Tensor, torch.Tensor]]]:
    for place in range(3):
        x, y = torch.randn(shapes(place)), torch.randn(shapes(place))
        for d in range(3):

            def function(x, y, d=d):
                return ALONG[name](x, y, d)

            try:
                function(x, y)
            except RuntimeError:
                continue  # shapes of this place do not fit
            yield function, Verdict(function, x, y), (x, y)


@pytest.mark.parametrize("name", ALONG)
def test_no_verdict_is_wrong(name):
    """Whatever the rules call row by row is so in numbers, for rows and arguments anywhere."""
    wrong = []
    for function, verdict, tensors in cases(name):
        if not verdict.reasons and not is_row_wise(function, verdict, tensors):
            wrong.append((function.__defaults__, verdict.in_dims))
    assert not wrong, "(dimension of the argument), row dimensions"


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60)
def test_no_verdict_of_a_chain_is_wrong(data):
    """Three operators in a row, the rows anywhere."""
    names = data.draw(st.lists(st.sampled_from(sorted(CHAIN)), min_size=2, max_size=4))
    dims = data.draw(st.lists(st.integers(0, 2), min_size=len(names), max_size=len(names)))
    place = data.draw(st.integers(0, 2))

    def function(x, y):
        for name, d in zip(names, dims, strict=True):
            x = ALONG[name](x, y, d)
        return x

    x, y = torch.randn(shapes(place)), torch.randn(shapes(place))
    try:
        function(x, y)
    except (RuntimeError, IndexError):
        hypothesis.assume(False)
    verdict = Verdict(function, x, y)
    assert verdict.reasons or is_row_wise(function, verdict, (x, y))


CHAIN = [
    "mean kept", "softmax", "cumsum", "cumsum in place", "slice", "cat", "transpose", "permute",
    "view as", "broadcast", "outer", "bmm of two", "matmul", "linear", "copied", "masked", "merged",
    "repeat",
]  # fmt: skip


# -- the table -------------------------------------------------------------------------------------


def test_the_table_lists_operators_of_torch():
    assert len(RULES) > 80
    assert all(isinstance(op, torch._ops.OpOverloadPacket) for op in RULES)


def test_random_operators_mix():
    """torch calls some pointwise; fewer rows would get other numbers."""
    verdict = Verdict(lambda x: torch.rrelu(x, training=True), X)
    assert verdict.reasons == ["the table of row-wise operators does not have it"]


def test_ambiguous_rows_are_named():
    verdict = Verdict(lambda x: x @ x.t(), X)
    assert any("token dimension is ambiguous" in reason for reason in verdict.reasons)
    with pytest.raises(ValueError, match="token dimension is ambiguous, of shape"):
        row_dim(verdict.outs[0], verdict.symbol)


def test_mutated_arguments_are_known():
    verdict = Verdict(lambda x, y: in_place(x, lambda z: z.add_(y)), X, X)
    assert [len(call.mutated) for call in verdict.calls] == [0, 1]
