"""Kernels of layers with a state against plain PyTorch, in float64 and in the dtypes of models.

They run on a GPU, and interpreted on a machine without one.
"""

import pytest
import torch

from attn_ops.ops import states as ops
from tests.attn_ops.ops.test_states import (
    LENGTHS,
    RULES,
    Conv,
    Delta,
    Kda,
    Ssd,
    arguments,
    batch,
    numbers,
)
from tests.kit.state_kernels import launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOUNDS = {F64: 1e-9, F32: 1e-4, F16: 1e-2, BF16: 4e-2}
SLOTS, COMPUTED = [7, 2, 5, 1, 8], [0, 4, 3, 9, 0]
"""Of `LENGTHS`: the first and the last begin, the second has no rows."""


def on_device(operator, given, states, requests):
    """The kernel's result on `DEVICE`; what it leaves in `states` is copied there."""
    moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in given]
    pool = states.to(DEVICE)
    out = launched(operator, *moved, pool, *(x.to(DEVICE) for x in requests))
    states.copy_(pool)
    return out.cpu()


def compare(operator, given, states, requests, bound=1e-9):
    """Results and states of the kernel, and of the operator in plain PyTorch."""
    mine, theirs = states.clone(), states.clone()
    out = on_device(operator, given, mine, requests)
    want = operator(*given, theirs, *requests)
    assert out.dtype == want.dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out, want, atol=bound, rtol=bound)
    torch.testing.assert_close(mine, theirs, atol=bound, rtol=bound, equal_nan=True)
    return out, mine


def poisoned(case, dtype=F64, slots=SLOTS, computed=COMPUTED, number=9):
    """States that are NaN but for those of requests that go on."""
    states = torch.full((number, *case.shape), float("nan"), dtype=dtype)
    for slot, seen in zip(slots, computed, strict=True):
        if seen:
            states[slot] = numbers(*case.shape).to(dtype)
    return states


def cast(given, dtype):
    return [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in given]


BATCHES = {  # rows of requests, their computed tokens and slots, rows of padding behind them
    "ragged": (LENGTHS, COMPUTED, SLOTS, 2),  # chunks of prompts beside a decode
    "decodes": ([1, 1, 1, 1], [5, 0, 0, 1], [3, 0, 1, 2], 0),  # padding between the others
    "padding": ([1, 1, 1], [0, 0, 0], [0, 0, 0], 0),  # as in warm-up and captures
    "no rows": ([0], [3], [1], 0),
    "no requests": ([], [], [], 0),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("places", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name, places, rule):
    """Rows of padding and of nobody are zero, and no other state is read or written."""
    lengths, computed, slots, padding = BATCHES[name]
    case = rule(sum(lengths) + padding + 1)
    states = poisoned(case, slots=slots, computed=computed)
    requests = [x.to(places) for x in batch(lengths, computed, slots, padding)]
    out, after = compare(case.operator, arguments(case), states, requests)
    owners = torch.tensor(slots).repeat_interleave(torch.tensor(lengths).int()).long()
    assert not out[: len(owners)][owners == 0].any()
    assert not out[len(owners) :].any()
    assert not out.isnan().any()
    own = {slot for slot, length in zip(slots, lengths, strict=True) if slot and length}
    unowned = [slot for slot in range(9) if slot not in own]
    torch.testing.assert_close(after[unowned], states[unowned], equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_dtypes_of_models(rule, dtype):
    """Rows in the model's dtype; sums of recurrences are kept in float32, inputs as they came."""
    case = rule(sum(LENGTHS))
    states = poisoned(case, dtype if rule is Conv else F32)
    requests = batch(LENGTHS, COMPUTED, SLOTS)
    compare(case.operator, cast(arguments(case), dtype), states, requests, BOUNDS[dtype])


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule is not Conv])
def test_parameters_in_float32(rule):
    """Decays, biases and step sizes are often wider than rows."""
    case = rule(sum(LENGTHS))
    narrow = [x.to(BF16) for x in case.by_row]
    given = [*narrow, *cast(arguments(case)[len(narrow) :], F32)]
    states, requests = poisoned(case, F32), batch(LENGTHS, COMPUTED, SLOTS)
    compare(case.operator, given, states, requests, BOUNDS[BF16])


@pytest.mark.parametrize("rule", RULES)
def test_states_behind_single_rows_are_kept(rule):
    case = rule(sum(LENGTHS) + 1)
    states, requests = poisoned(case, number=30), batch(LENGTHS, COMPUTED, SLOTS, 1)
    kept = torch.arange(10, 10 + sum(LENGTHS) + 1)
    compare(case.operator, arguments(case), states, (*requests, kept.where(kept % 3 > 0, 0)))


def spread(x):
    """The same numbers, in every other place of a larger tensor, the last dimension first."""
    if not isinstance(x, torch.Tensor):
        return x
    large = torch.full((*x.shape[1:], 2 * x.shape[0]), float("nan"), dtype=x.dtype)
    view = large[..., ::2].movedim(-1, 0)
    return view.copy_(x)


@pytest.mark.parametrize("rule", RULES)
def test_strides_of_any_kind(rule):
    case = rule(sum(LENGTHS))
    given = [spread(x) for x in arguments(case)]
    states, requests = poisoned(case), batch(LENGTHS, COMPUTED, SLOTS)
    out, _ = compare(case.operator, given, states, requests)
    mine = spread(states)
    torch.testing.assert_close(on_device(case.operator, given, mine, requests), out)
    want = states.clone()
    case.operator(*arguments(case), want, *requests)
    torch.testing.assert_close(mine, want, equal_nan=True)


@pytest.mark.parametrize("places", [[0.5, 0.6], [0.5, None], [None, 0.6]])
def test_step_sizes_are_clamped_in_prompts_alone(places):
    case = Ssd(5)
    given = arguments(case)
    given[8:11] = [*places, torch.tensor([4, 9, 0])]
    states = poisoned(case, slots=[1, 2], computed=[2, 9])
    compare(case.operator, given, states, batch([4, 1], [2, 9], [1, 2]))


@pytest.mark.parametrize("softplus", [True, False])
def test_step_sizes_of_every_size(softplus):
    """Far from 0 on both sides, where softplus is tiny or its argument; inputs make up for it."""
    case = Ssd(6)
    given = arguments(case)
    steps = torch.tensor([-30.0, -60, -8, 1e-3, 15, 25]).double()
    given[0] = given[0] * 1e3 ** torch.tensor([4.0, 8, 1, 0, 0, 0]).double()[:, None, None]
    given[1], given[6] = steps[:, None].expand(6, 4), None
    given[2], given[7] = given[2] * 1e-3, softplus
    requests = (torch.arange(1, 7), torch.arange(7), torch.ones(6).int())  # one row each
    states = poisoned(case, slots=[], computed=[])
    out, _ = compare(case.operator, given, states, requests)
    assert (out.abs().amax((1, 2)) > 1e-4).all()


def test_step_sizes_are_rounded_where_pytorch_rounds():
    """Models compute them in their dtype, and multiply them in float32."""
    case = Ssd(sum(LENGTHS))
    given = cast(arguments(case), F32)
    given[1] = given[1].to(F16)
    states, requests = poisoned(case, F32), batch(LENGTHS, COMPUTED, SLOTS)
    compare(case.operator, given, states, requests, 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_what_may_be_left_out(rule):
    """Biases, gates, D, activations, normalization."""
    case = rule(3)
    optional = {"Conv": [2, 3], "Ssd": [5, 6], "Selective": [5, 6, 7]}.get(rule.__name__, [])
    given = arguments(case)
    for place in optional:
        given[place] = None
    if not optional:
        given[-1] = False
    states = poisoned(case, slots=[2], computed=[2])
    compare(case.operator, given, states, batch([1, 2], [2, 0], [2, 1]))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_convolutions_of_every_length(length):
    """A state of no input at all; one that is longer or shorter than the rows."""
    x, weight = numbers(7, 300), numbers(300, length)
    states = numbers(5, 300, length - 1)
    requests = batch([1, 4, 2], [3, 1, 0], [4, 1, 2])
    compare(ops.causal_conv1d_update, [x, weight, None, "swish"], states, requests)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 1, 40, 33), (2, 2, 128, 70)])
def test_sizes_that_are_no_powers_of_two(sizes):
    """Heads, key heads, and both sides of a state; a state of several programs."""
    heads, groups, k, v = sizes
    requests, rows = batch([1, 2], [4, 0], [1, 2]), 3
    q, key, value = numbers(rows, groups, k), numbers(rows, groups, k), numbers(rows, heads, v)
    for shape, operator in (((), ops.gated_delta_rule), ((k,), ops.kda)):
        g, beta = -numbers(rows, heads, *shape).abs(), numbers(rows, heads).sigmoid()
        states = numbers(3, heads, k, v)
        compare(operator, [q, key, value, g, beta, True], states, requests)
    dt, A = numbers(rows, heads), -numbers(heads).abs()
    given = [value, dt, A, q, key, None, None, True, None, None, None]
    compare(ops.ssd_state_update, given, numbers(3, heads, v, k), requests)
    dt, A = numbers(rows, v), -numbers(v, k).abs()
    given = [value[:, 0], dt, A, q[:, 0], key[:, 0], None, None, None, True]
    compare(ops.selective_state_update, given, numbers(3, v, k), requests)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("keeps", [False, True])
def test_parts_of_a_prompt_have_programs(monkeypatch, rows, keeps):
    """Of a convolution; the first of them alone reads and writes the state."""
    monkeypatch.setattr(pytest.importorskip("attn_ops.ops.triton.states"), "ROWS", rows)
    lengths = [37, 1, 0, 4, 2, 13]
    slots, computed = [7, 2, 5, 1, 8, 3], [0, 4, 3, 9, 0, 2]
    case = Conv(sum(lengths) + 2)
    states = poisoned(case, slots=slots, computed=computed, number=80)
    requests = batch(lengths, computed, slots, padding=2)
    if keeps:
        kept = torch.arange(10, 10 + sum(lengths) + 2)
        requests = (*requests, kept.where(kept % 5 == 0, 0))
    compare(case.operator, arguments(case), states, requests)


BY_BLOCKS = [Delta, Kda, Ssd]
LONG, SLOTS_OF_LONG, SEEN = [1, 70, 0, 1, 33, 5], [7, 2, 5, 1, 8, 3], [5, 0, 2, 9, 64, 0]
"""Two prompts of several blocks of rows: one begins, one goes on."""


@pytest.fixture
def by_blocks(monkeypatch):
    """Kernels that go by blocks, for rows of any dtype; interpreted, products are not rounded."""
    chunks = pytest.importorskip("attn_ops.ops.triton.chunks")
    monkeypatch.setattr(chunks, "may_have_long", lambda rows, batch: True)


MANY = ([1] * 140 + [40], [3] * 140 + [0], range(1, 142))  # more than are looked at in one turn
BETWEEN = ([0, 32, 0, 0, 40, 0, 0, 0], [3, 5, 1, 2, 0, 4, 6, 1], range(1, 9))


@pytest.mark.parametrize(
    ("rule", "requests"),
    [*((rule, one) for one in ((LONG, SEEN, SLOTS_OF_LONG), BETWEEN) for rule in BY_BLOCKS),
     (Delta, MANY)],
)  # fmt: skip
def test_prompts_by_blocks(by_blocks, rule, requests):
    lengths, computed, slots = requests
    case, bound = rule(sum(lengths) + 4), 1e-4 if DEVICE == "cpu" else 1e-2
    given = cast(arguments(case), F32)
    if rule is Ssd:
        lens = [n + seen for n, seen in zip(lengths, computed, strict=True)]
        given[8:11] = [0.5, 0.6, torch.tensor([*(n // 2 + 9 for n in lens), 0])]
    number = len(lengths) + 3
    states = poisoned(case, F32, slots, computed, number)
    places = batch(lengths, computed, slots, padding=3)
    out, after = compare(case.operator, given, states, places, bound)
    assert not out[sum(lengths) :].any()
    unowned = [slot for slot in range(number) if slot not in slots]
    assert after[unowned].isnan().all()


@pytest.mark.parametrize("rule", BY_BLOCKS)
def test_prompts_by_blocks_keep_states_behind_rows(by_blocks, rule):
    """Several of a block, its last row, a prompt's last row, and some that forget all."""
    case, bound = rule(sum(LONG) + 3), 1e-4 if DEVICE == "cpu" else 1e-2
    given = cast(arguments(case), F32)
    if rule is not Ssd:
        given[3][10] = given[3][75] = -float("inf")
    states = poisoned(case, F32, SLOTS_OF_LONG, SEEN, number=24)
    kept = torch.zeros(sum(LONG) + 3).int()
    for slot, row in enumerate([0, 3, 9, 10, 32, 33, 48, 64, 70, 76, 104, 105, 108, 112], 9):
        kept[row] = slot
    requests = (*batch(LONG, SEEN, SLOTS_OF_LONG, padding=3), kept)
    _, after = compare(case.operator, given, states, requests, bound)
    assert after[9:20].isfinite().all()
    assert after[22:].isnan().all(), "rows of padding keep nothing"


@pytest.mark.parametrize("rule", BY_BLOCKS)
def test_a_request_that_is_nan_stays_alone(by_blocks, rule):
    case = rule(sum(LONG))
    for x in case.by_row:
        x[71:73] = float("nan")  # of the fourth request, and the next one's first row
    states = poisoned(case, F32, SLOTS_OF_LONG, SEEN)
    requests = batch(LONG, SEEN, SLOTS_OF_LONG)
    out = on_device(case.operator, cast(arguments(case), F32), states, requests)
    assert out[71].isnan().all()
    assert not out[:71].isnan().any()
    assert not out[-5:].isnan().any()


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("operator", [ops.gated_delta_rule, ops.kda])
def test_keys_that_are_alike(by_blocks, operator, beta):
    """Nothing is forgotten, each row corrects what the one before wrote: sums that cancel.

    OLMo hybrid has a beta up to 2.
    """
    rows = 64
    key = numbers(1, 1, 16).expand(rows, 1, 16).float()
    g = torch.zeros(rows, 1, *([16] if operator is ops.kda else []))
    given = [key, key, numbers(rows, 1, 16).float(), g, torch.full((rows, 1), beta), True]
    requests = batch([rows], [0], [1])
    bound = 1e-3 if DEVICE == "cpu" else 5e-2
    compare(operator, given, torch.zeros(2, 1, 16, 16), requests, bound)


@pytest.mark.parametrize("decay", [-1e6, -float("inf")])
@pytest.mark.parametrize("rule", [Delta, Kda])
def test_a_row_that_forgets_all(by_blocks, rule, decay):
    case = rule(64)
    given = cast(arguments(case), F32)
    given[3][20] = given[3][40] = decay
    states, requests = poisoned(case, F32, [1], [3]), batch([64], [3], [1])
    compare(case.operator, given, states, requests, 1e-3 if DEVICE == "cpu" else 1e-2)


def test_a_step_that_forgets_all(by_blocks):
    """It would add much, so there is nothing to add."""
    case = Ssd(64)
    given = cast(arguments(case), F32)
    given[2] = given[2] - 1.0
    for row in (20, 40):
        given[0][row], given[1][row] = 0, 1e6
    states, requests = poisoned(case, F32, [1], [3]), batch([64], [3], [1])
    compare(case.operator, given, states, requests, 1e-3 if DEVICE == "cpu" else 1e-2)


def test_inputs_of_several_dtypes(by_blocks):
    case = Ssd(64)
    given = cast(arguments(case), F32)
    given[0] = given[0].half()
    states, requests = poisoned(case, F32, [1], [3]), batch([64], [3], [1])
    compare(case.operator, given, states, requests, BOUNDS[BF16])


@pytest.mark.parametrize("rule", BY_BLOCKS)
def test_one_kernel_takes_what_the_other_leaves(by_blocks, monkeypatch, rule):
    chunks = pytest.importorskip("attn_ops.ops.triton.chunks")
    case, launch = rule(65), f"launch_{'ssd' if rule is Ssd else 'delta_rule'}"
    states, requests = poisoned(case, F32, [1, 2], [3, 0]), batch([1, 64], [3, 0], [1, 2])
    given = cast(arguments(case), F32)
    out = case.operator(*given, states.clone(), *requests)
    monkeypatch.setattr(chunks, launch, lambda *args: None)
    short = on_device(case.operator, given, states, requests)
    torch.testing.assert_close(short[:1], out[:1], atol=1e-4, rtol=1e-4)
    assert states[2].isnan().all(), "nothing has computed the long prompt"


def test_batches_that_go_by_blocks():
    chunks = pytest.importorskip("attn_ops.ops.triton.chunks")
    long, decodes = batch([1, 64], [3, 0], [1, 2]), batch([1] * 64, [3] * 64, range(64))
    rows = torch.empty(65, dtype=BF16)
    assert chunks.may_have_long(rows, (*long, None))
    assert not chunks.may_have_long(rows, (*decodes, None))
    kept = torch.zeros(65).int()
    assert chunks.may_have_long(rows, (*long, kept))
    five = batch([1] * 4, [3] * 4, range(4))  # and padding
    for each, is_long in ((8, False), (9, True)):  # rows of a decode with a draft, or of prompts
        assert chunks.may_have_long(rows[: 5 * each], (*five, kept)) is is_long
    assert not chunks.may_have_long(rows[:31], (*long, None))
    for dtype in (F16, F32):
        assert not chunks.may_have_long(rows.to(dtype), (*long, None))
    no_request = (torch.empty(0).int(), torch.zeros(1).int(), torch.empty(0).int(), None)
    assert not chunks.may_have_long(rows, no_request)
