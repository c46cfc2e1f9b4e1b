"""Decoding with the product by W_UV in the merging kernel."""

import pytest
import torch

from attn_ops.backends.triton import BACKEND
from tests.attn_ops.backends.mla.triton.reference import TOLERANCE, assert_near, make_case
from tests.kit.marks import slow

pytestmark = pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET")

DECODE = ([1, 1, 0, 1], [1, 70, 9, 0])


def wanted(case) -> tuple[torch.Tensor, torch.Tensor]:
    latent, lse = case.wanted()
    return torch.einsum("dnl,nvl->dnv", latent, case.w_uv.double().cpu()), lse


def check(case, tolerance: float, num_splits: int) -> None:
    from attn_ops.backends.mla.triton.project import mla_decode_project

    out, lse = wanted(case)
    found_lse = torch.empty(lse.shape, device=case.q_pe.device)
    found = mla_decode_project(
        *case.inputs, case.w_uv, **case.options, lse=found_lse, num_splits=num_splits
    )
    assert found.dtype == case.q_pe.dtype
    assert found.is_contiguous()
    assert_near(found, out, tolerance)
    torch.testing.assert_close(found_lse.double().cpu(), lse, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_splits", [1, 3, 20])
def test_project(dtype, num_splits):
    check(make_case(*DECODE, dtype=dtype, value=24), 2 * TOLERANCE[dtype], num_splits)


@pytest.mark.parametrize("num_rows", [1, 3, 17, *slow(70)])
@pytest.mark.parametrize(("latent", "value"), [(32, 16), (24, 40)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows(num_rows, latent, value, num_splits):
    """One row, a few, and more than a tile."""
    from attn_ops.backends.mla.triton.project import mla_decode_project

    lengths = ([1] * num_rows, [(17 * n) % 90 for n in range(num_rows)])
    case = make_case(*lengths, num_heads=2, latent=latent, value=value, num_padding_rows=0)
    found = mla_decode_project(*case.inputs, case.w_uv, **case.options, num_splits=num_splits)
    assert_near(found, wanted(case)[0], 4e-3)


def test_many_ranges_are_merged_before_the_product(monkeypatch):
    from attn_ops.backends.mla.triton import project

    merged, before = [], project.combine
    monkeypatch.setattr(project, "MAX_PASSES", 0)
    monkeypatch.setattr(project, "combine", lambda *a: (merged.append(1), before(*a))[1])
    check(make_case(*DECODE), 4e-3, 3)
    assert merged


@pytest.mark.parametrize(
    ("rows", "heads", "values"), [(1, 16, 32), (1, 128, 32), (32, 16, 16), (256, 16, 64),
                                  (64, 128, 128), (256, 128, 128)]
)  # fmt: skip
def test_few_heads_are_cut_into_more_programs(rows, heads, values):
    from attn_ops.backends.mla.triton.project import project_launch

    assert project_launch(rows, heads, 512, 128, torch.bfloat16).values == values
