"""The patch of how Inductor orders strides: here any version is taken for a new one."""

import pytest
from torch._dynamo.source import ConstantSource
from torch._inductor import ir
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from attn_ops.compat import stride_order_until_2_16
from attn_ops.compat.stride_order_until_2_16 import strides_ordered_without_guards


@pytest.fixture
def new(monkeypatch):
    monkeypatch.setattr(stride_order_until_2_16, "TORCH_VERSION", (2, 15))


def test_strides_are_ordered_by_their_hints(new):
    env = ShapeEnv()
    symbol = env.create_symbol(
        17,
        source=ConstantSource("R"),
        dynamic_dim=DimDynamic.DYNAMIC,
        do_not_specialize_zero_one=True,
    )
    strides = [64 * env.create_symintnode(symbol, hint=17), 64, 1]
    with strides_ordered_without_guards():
        assert ir.get_fill_order(strides, env) == [2, 1, 0]
        assert not env.guards
    assert ir.get_fill_order(strides, env) == [2, 1, 0]
    assert env.guards, "unpatched it leaves one"


def test_what_was_there_comes_back(new):
    """Nested, and after an error."""
    before = ir.argsort_sym
    with strides_ordered_without_guards():
        once = ir.argsort_sym
        assert once is not before
        with pytest.raises(KeyError), strides_ordered_without_guards():
            raise KeyError
        assert ir.argsort_sym is once
    assert ir.argsort_sym is before


def test_older_versions_are_left_alone(monkeypatch):
    monkeypatch.setattr(stride_order_until_2_16, "TORCH_VERSION", (2, 13))
    before = ir.argsort_sym
    with strides_ordered_without_guards():
        assert ir.argsort_sym is before
