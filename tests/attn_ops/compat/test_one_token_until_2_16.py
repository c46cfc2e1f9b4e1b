"""Products in FP8 with a scale a row are traced for any number of rows."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import _meta_registrations as metas
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from attn_ops.compat.one_token_until_2_16 import traced_for_any_size

K, M = 64, 32


def product(columns: int = 1):
    """x @ weight as on a GPU, of a symbolic number of rows; its shape and the guards."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(7, K), symbolic_context=context)
    with mode, mock.patch.object(metas, "device_hint", return_value="cuda"):
        x = x.to(torch.float8_e4m3fn)
        weight = torch.empty(M, K, dtype=torch.float8_e4m3fn).t()
        scale_x, scale = torch.empty(x.shape[0], columns), torch.empty(1, M)
        out = torch._scaled_mm(x, weight, scale_x, scale, out_dtype=torch.bfloat16)
    assert out.shape[0] == x.shape[0]
    assert (out.shape[1], out.dtype) == (M, torch.bfloat16)
    return env.guards


def test_a_scale_a_row_leaves_no_guard():
    with symbolic_shapes_config.patch(backed_size_oblivious=True), traced_for_any_size():
        guards = product()
    assert not guards


def test_wrong_scales_are_still_refused():
    oblivious = symbolic_shapes_config.patch(backed_size_oblivious=True)
    with oblivious, traced_for_any_size(), pytest.raises(RuntimeError, match="scal"):
        product(columns=3)


@pytest.mark.parametrize("mended", [True, False])
def test_views_of_any_number_of_rows_overlap(mended):
    """Inductor asks so before it writes in place, as every third column of Qwen3.5's RoPE."""
    from torch._inductor.fx_passes import reinplace

    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DYNAMIC])
    mode, known = FakeTensorMode(shape_env=env), torch.empty(4, K)
    oblivious = symbolic_shapes_config.patch(backed_size_oblivious=True)
    with oblivious, traced_for_any_size() if mended else contextlib.nullcontext():
        x = mode.from_tensor(torch.empty(4, 7), symbolic_context=context)
        with mode:
            views = [x.t()[:, 1::3], x.t()]
        assert reinplace.compute_overlapping_tensors(views) == {0, 1}
        assert reinplace.compute_overlapping_tensors([known[:, :3], known[:, 3:]]) == set()
    assert bool(env.guards) is not mended
