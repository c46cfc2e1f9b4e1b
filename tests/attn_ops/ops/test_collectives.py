"""What ranks exchange, in a group of one; tests/scenarios/test_ranks.py has two."""

import pytest
import torch
import torch.distributed as dist

from attn_ops.ops.collectives import all_gather, all_reduce


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", [all_reduce, all_gather])
def test_a_rank_alone_gets_its_own_rows(group, operator, dtype):
    for x in (torch.randn(1, 3, 8), torch.randn(5, 16)[:, ::2], torch.randn(0, 8)):
        x = x.to(dtype)
        out = operator(x, group)
        assert torch.equal(out, x)
        assert out.data_ptr() != x.data_ptr() or not x.numel()
        assert out.is_contiguous()
        defined = getattr(torch.ops.attn_ops, operator.__name__).default
        torch.library.opcheck(defined, (x, group))


@pytest.mark.parametrize("operator", [all_reduce, all_gather])
def test_compiled(group, operator):
    compiled = torch.compile(
        lambda x: operator(x * 2, group) + 1, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for rows in (3, 7):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x), x * 2 + 1)


def test_backward_is_refused(group):
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="attn_ops::all_reduce"):
        all_reduce(x, group).sum().backward()
