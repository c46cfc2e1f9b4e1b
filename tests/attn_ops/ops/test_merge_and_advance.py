"""merge_attn_states against the softmax over all keys, advance_step against the function it wraps.

T tokens, N query heads, H head size, C keys, S requests, M blocks a request may own, B block size.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops import advance_step, merge_attn_states
from attn_ops.compat.torch_version import TORCH_VERSION
from attn_ops.metadata import advance_step as advance_in_place
from attn_ops.ops.merge import reference_merge_attn_states
from attn_ops.ops.triton.merge import launch_merge_attn_states
from tests.kit.marks import slow
from tests.kit.operators import opcheck

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 3e-5, torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
INF = float("inf")
ops = torch.ops.attn_ops


# -- merge_attn_states -----------------------------------------------------------------------------


def attend(scores_TNC, values_CNH):
    """Softmax over the keys in float64, and its log-sum-exp; 0 and -inf where there is no key."""
    weights_TNC = scores_TNC.softmax(-1).nan_to_num(0)
    return torch.einsum("tnc,cnh->tnh", weights_TNC, values_CNH), scores_TNC.logsumexp(-1)


def make_state(shape, dtype, generator, scale=1.0, hidden=0.3):
    """Two parts of 2 and 3 keys of which some rows see none, and the whole in float64."""
    scores_TNC = scale * torch.randn(*shape[:2], 5, generator=generator, dtype=torch.float64)
    unseen_TNC = torch.rand(scores_TNC.shape, generator=generator) < hidden
    scores_TNC = scores_TNC.masked_fill(unseen_TNC, -INF)
    values_CNH = torch.randn(5, *shape[1:], generator=generator, dtype=torch.float64)
    parts = []
    for keys in (slice(0, 2), slice(2, 5)):
        out, lse = attend(scores_TNC[..., keys], values_CNH[keys])
        out = out.masked_fill((lse == -INF).unsqueeze(-1), float("nan"))
        parts += [out.to(dtype), lse.float()]
    return parts, attend(scores_TNC, values_CNH)


@given(
    st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 5)),
    st.sampled_from(FLOATS),
    st.sampled_from([0.0, 1.0, 30.0, 100.0]),
    st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    st.integers(0, 2**31),
)
@settings(max_examples=200)
def test_merge_is_attention_over_the_union(shape, dtype, scale, hidden, seed):
    parts, (out, lse) = make_state(shape, dtype, torch.Generator().manual_seed(seed), scale, hidden)
    for one, other in ((parts[:2], parts[2:]), (parts[2:], parts[:2])):
        got_out, got_lse = merge_attn_states(*one, *other)
        assert (got_out.dtype, got_lse.dtype) == (dtype, torch.float32)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got_out.double(), out, atol=2 * tolerance, rtol=tolerance)
        torch.testing.assert_close(got_lse.double(), lse, atol=1e-5, rtol=1e-6)


def test_float64_states_are_merged_in_float64():
    scores_TNC, values_CNH = torch.randn(3, 2, 5).double(), torch.randn(5, 2, 4).double()
    parts = [attend(scores_TNC[..., k], values_CNH[k]) for k in (slice(0, 2), slice(2, 5))]
    merged = merge_attn_states(*parts[0], *parts[1])
    for got, want in zip(merged, attend(scores_TNC, values_CNH), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


def test_nan_that_was_seen_stays():
    """It tells of a bug elsewhere; only rows that saw nothing are ignored."""
    one, zero = torch.ones(2, 1, 4), torch.zeros(2, 1)
    for merge in (merge_attn_states, on_device(launch_merge_attn_states)):
        out, lse = merge(one * torch.tensor([float("nan"), 1]).view(2, 1, 1), zero, one, zero)
        assert out.isnan().flatten(1).all(1).tolist() == [True, False]
        out, lse = merge(one, zero, one, torch.tensor([[float("nan")], [0.0]]))
        assert out.isnan().flatten(1).all(1).tolist() == lse.isnan().flatten().tolist()
        assert lse.isnan().flatten().tolist() == [True, False]


def on_device(launch):
    def run(*tensors):
        return tuple(x.cpu() for x in launch(*(x.to(DEVICE) for x in tensors)))

    return run


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (0, 2, 4), (2, 0, 4), (3, 5, 80), (70, 3, 16), (5, 3, 128), (2, 2, 1030)]
)
def test_kernel_equals_the_reference(shape, dtype):
    parts, _ = make_state(shape, dtype, torch.Generator().manual_seed(1), scale=100.0)
    wanted = reference_merge_attn_states(*parts)
    got = on_device(launch_merge_attn_states)(*parts)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
    for x, want in zip(got, wanted, strict=True):
        assert (x.dtype, x.shape, x.is_contiguous()) == (want.dtype, want.shape, True)
        torch.testing.assert_close(x, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("launch", [merge_attn_states, launch_merge_attn_states])
def test_strided_states(launch):
    """lse as [N, T] transposed, out as a slice of more heads and as [T, H, N] transposed."""
    parts, _ = make_state((6, 3, 8), torch.float32, torch.Generator().manual_seed(2))
    wanted = reference_merge_attn_states(*parts)
    out1, lse1, out2, lse2 = (x.to(DEVICE) for x in parts)
    lse1 = lse1.t().contiguous().t()
    out1 = torch.cat([out1, out1, out1], dim=1)[:, 3:6]
    out2 = out2.transpose(1, 2).contiguous().transpose(1, 2)
    for x, want in zip(launch(out1, lse1, out2, lse2), wanted, strict=True):
        assert x.is_contiguous()
        torch.testing.assert_close(x.cpu(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 8), (1, 1, 1), (0, 2, 4)], ids=str)
def test_opcheck_merge(shape, dtype):
    parts, _ = make_state(shape, dtype, torch.Generator().manual_seed(3), hidden=0.0)
    opcheck(ops.merge_attn_states.default, tuple(parts))
    out1, lse1, *rest = parts
    strided = out1.transpose(0, 1).contiguous().transpose(0, 1), lse1.t().contiguous().t()
    opcheck(ops.merge_attn_states.default, (*strided, *rest))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_merge_compiled_equals_eager(backend, as_dynamic, num_graphs):
    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def merge(out1, lse1, out2, lse2):
        out, lse = merge_attn_states(out1 * 2, lse1, out2, lse2)
        return out + 1, lse

    before = num_graphs()
    for tokens in (5, 1, 9):
        generator = torch.Generator().manual_seed(tokens)
        (out1, *rest), _ = make_state((tokens, 3, 8), torch.float32, generator)
        with as_dynamic():
            out, lse = merge(out1, *rest)
        wanted_out, wanted_lse = merge_attn_states(out1 * 2, *rest)
        assert torch.equal(out, wanted_out + 1)
        assert torch.equal(lse, wanted_lse)
    assert num_graphs() - before == 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("out1", lambda x: x[0], r"^out1 must have shape \[num_tokens, num_heads, head_size\]"),
        ("out1", torch.Tensor.int, "^out1 must have a floating point type, got torch.int32"),
        ("lse1", lambda x: x.t(), r"^lse1 must be torch.float32 of shape \[3, 2\]"),
        ("lse2", torch.Tensor.double, "^lse2 must be torch.float32 .*got torch.float64"),
        ("out2", torch.Tensor.half, "^out2 must be torch.float32 .*got torch.float16"),
        ("out2", lambda x: x[:1], r"^out2 must be .* of shape \[3, 2, 8\] on cpu"),
    ],
)
def test_wrong_states_are_refused(name, change, message):
    parts, _ = make_state((3, 2, 8), torch.float32, torch.Generator().manual_seed(4))
    given = dict(zip(("out1", "lse1", "out2", "lse2"), parts, strict=True))
    with pytest.raises(ValueError, match=message):
        merge_attn_states(**{**given, name: change(given[name])})


# -- advance_step ----------------------------------------------------------------------------------

PAGES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


def step(tokens=torch.int64) -> dict:
    """Blocks of 4. A request goes on in its block, one opens a block, one is full, one padding."""
    return {
        "sampled_token_ids": torch.tensor([21, 22, 23, 24], dtype=tokens),
        "input_tokens": torch.tensor([11, 12, 13, 14], dtype=tokens),
        "positions": torch.tensor([1, 3, 7, 0]),
        "seq_lens": torch.tensor([2, 4, 8, 0], dtype=torch.int32),
        "slot_mapping": torch.tensor([5, 15, 27, -1]),
        "block_table": torch.tensor([[1, 2], [3, 4], [5, 6], [0, 0]], dtype=torch.int32),
    }


def pages() -> dict:
    sizes = zip(PAGES, (5, 9, 4), strict=True)
    return {name: torch.full((size,), 77, dtype=torch.int32) for name, size in sizes}


ACTIVE = torch.tensor([True, False, True, True])
OPTIONAL = [
    {**kept, **active}
    for active in ({}, {"active": ACTIVE})
    for kept in ({}, pages(), {PAGES[0]: pages()[PAGES[0]]}, {n: pages()[n] for n in PAGES[::2]})
]


def same(got: dict, wanted: dict) -> None:
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


def copies(tensors: dict) -> dict:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("optional", OPTIONAL, ids=lambda kept: ",".join(kept) or "none")
@pytest.mark.parametrize("tokens", [torch.int64, torch.int32], ids=str)
def test_advance_step_schema_and_results(optional, tokens):
    opcheck(ops.advance_step.default, (*step(tokens).values(), 4), copies(optional))
    given, wanted = (step(tokens) | copies(optional) for _ in range(2))
    advance_step(**given, block_size=4)
    advance_in_place(**wanted, block_size=4)
    same(given, wanted)


def test_advance_step_of_no_requests():
    given = {name: tensor[:0] for name, tensor in step().items()}
    opcheck(ops.advance_step.default, (*given.values(), 4))
    indptr = torch.full((1,), 77, dtype=torch.int32)
    advance_step(**given, block_size=4, paged_kv_indptr=indptr)
    assert indptr.tolist() == [0]


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
def test_advance_step_compiled_equals_eager(backend):
    """Two steps in one graph: the second reads what the first wrote."""

    def steps(sampled_token_ids, **state):
        advance_step(sampled_token_ids + 1, **state, block_size=4)
        first = state["slot_mapping"] * 2
        advance_step(state["input_tokens"] + 1, **state, block_size=4)
        return first, state["positions"] + state["seq_lens"]

    compiled = torch.compile(steps, fullgraph=True, dynamic=True, backend=backend)
    for optional, rows in itertools.product(({}, {"active": ACTIVE, **pages()}), (4, 3)):
        cut = {"active": rows, PAGES[0]: rows + 1, PAGES[2]: rows, PAGES[1]: 9}
        optional = {name: x[: cut[name]] for name, x in optional.items()}
        given, wanted = (
            {n: x[:rows].clone() for n, x in step().items()} | copies(optional) for _ in range(2)
        )
        for x, want in zip(compiled(**given), steps(**wanted), strict=True):
            assert torch.equal(x, want)
        same(given, wanted)


@pytest.mark.parametrize(
    ("copied", "wrong"),
    [(torch.clone, True), (lambda x: x * 1, TORCH_VERSION >= (2, 14))],
    ids=["clone", "times one"],
)
def test_a_copy_that_is_returned_from_between_two_steps(request, copied, wrong):
    """Inductor leaves the copy out and returns what the second step wrote (2.11 to 2.15)."""
    if wrong:
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError))

    def steps(sampled_token_ids, **state):
        advance_step(sampled_token_ids, **state, block_size=4)
        first = copied(state["slot_mapping"])
        advance_step(sampled_token_ids, **state, block_size=4)
        return first

    given, wanted = step(), step()
    torch.testing.assert_close(torch.compile(steps, fullgraph=True)(**given), steps(**wanted))


@pytest.mark.parametrize("cloned", ["slot_mapping", "positions", "input_tokens"])
def test_advance_step_samples_from_a_clone_of_what_it_writes(cloned):
    """Inductor hands in the tensor itself where the caller cloned it (pytorch#198031)."""

    def clone_and_step(sampled_token_ids, **state):
        advance_step(state[cloned].clone(), **state, block_size=4)

    given, wanted = step(), step()
    torch.compile(clone_and_step, fullgraph=True)(**given)
    clone_and_step(**wanted)
    same(given, wanted)


def test_blocks_of_no_tokens_are_refused():
    with pytest.raises(ValueError, match=r"^block_size must be at least 1"):
        advance_step(**step(), block_size=0)
