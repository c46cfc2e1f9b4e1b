"""Operators of layers with a state, in float64, against their formulas row by row."""

import pytest
import torch
from torch.nn import functional as F

from attn_ops.ops import states as ops
from attn_ops.states import StatePool, StateSpec
from tests.kit.operators import opcheck

C, L, H, G, K, V, N = 6, 4, 4, 2, 3, 5, 7
LENGTHS = [3, 0, 1, 6, 2]
"""Rows of requests; one has none in this step."""


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Conv:
    shape = (C, L - 1)

    def __init__(self, rows: int) -> None:
        self.by_row, self.others = [numbers(rows, C)], [numbers(C, L), numbers(C), "silu"]
        self.operator = ops.causal_conv1d_update

    @staticmethod
    def row(state, x, weight, bias, activation):
        inputs = torch.cat([state, x[:, None]], dim=1)
        return F.silu((inputs * weight).sum(1) + bias), inputs[:, 1:]


class Delta:
    shape = (H, K, V)
    operator = staticmethod(ops.gated_delta_rule)

    def __init__(self, rows: int) -> None:
        decay = -numbers(*self.decay(rows)).abs()
        beta = numbers(rows, H).sigmoid()
        self.by_row = [numbers(rows, G, K), numbers(rows, G, K), numbers(rows, H, V), decay, beta]
        self.others = [True]

    def decay(self, rows: int) -> tuple[int, ...]:
        return (rows, H)

    @staticmethod
    def row(state, q, k, v, g, beta, normalized):
        out, new = torch.empty_like(v), torch.empty_like(state)
        for h in range(H):
            qh, kh = (x[h // (H // G)] for x in (q, k))
            qh, kh = (x / (x @ x + 1e-6).sqrt() for x in (qh, kh))
            s = g[h].exp().reshape(-1, 1) * state[h]
            new[h] = s + torch.outer(kh, beta[h] * (v[h] - kh @ s))
            out[h] = qh @ new[h] / K**0.5
        return out, new


class Kda(Delta):
    operator = staticmethod(ops.kda)

    def decay(self, rows: int) -> tuple[int, ...]:
        return (rows, H, K)


class Ssd:
    shape = (H, V, N)
    operator = staticmethod(ops.ssd_state_update)

    def __init__(self, rows: int) -> None:
        self.by_row = [numbers(rows, H, V), numbers(rows, H)]
        self.between = [-numbers(H).abs()]
        self.by_row_too = [numbers(rows, G, N), numbers(rows, G, N)]
        self.others = [numbers(H), numbers(H), True, None, None, None]

    @staticmethod
    def row(state, x, dt, A, B, C, D, bias, *rest):
        step = F.softplus(dt + bias)
        B, C = (y.repeat_interleave(H // G, 0) for y in (B, C))
        new = (step * A).exp()[:, None, None] * state
        new = new + torch.einsum("h,hv,hn->hvn", step, x, B)
        return torch.einsum("hvn,hn->hv", new, C) + D[:, None] * x, new


class Selective:
    shape = (C, N)
    operator = staticmethod(ops.selective_state_update)

    def __init__(self, rows: int) -> None:
        self.by_row = [numbers(rows, C), numbers(rows, C)]
        self.between = [-numbers(C, N).abs()]
        self.by_row_too = [numbers(rows, N), numbers(rows, N)]
        self.gate, self.others = numbers(rows, C), [numbers(C), True]
        self.D = numbers(C)

    @staticmethod
    def row(state, x, dt, A, B, C, D, z, bias, softplus):
        step = F.softplus(dt + bias)
        new = (step[:, None] * A).exp() * state + torch.einsum("c,c,n->cn", step, x, B)
        return (new @ C + D * x) * F.silu(z), new


RULES = [Conv, Delta, Kda, Ssd, Selective]


def arguments(case, rows=slice(None)) -> list:
    """Those before the states; `rows` of what has rows."""
    found = [x[rows] for x in case.by_row] + getattr(case, "between", [])
    found += [x[rows] for x in getattr(case, "by_row_too", [])]
    if hasattr(case, "gate"):
        found += [case.D, case.gate[rows]]
    return found + case.others


def by_formula(case, state, rows) -> tuple[torch.Tensor, torch.Tensor]:
    outs = []
    for row in rows:
        out, state = case.row(state, *arguments(case, row))
        outs.append(out)
    return torch.stack(outs), state


def batch(lengths, computed, slots, padding=0):
    """slots, starts and seq_lens; with a padding request of so many rows behind the others."""
    lens = torch.tensor([*lengths, padding])
    starts = F.pad(lens.cumsum(0), (1, 0)).int()
    return torch.tensor([*slots, 0]).int(), starts, (lens + torch.tensor([*computed, 0])).int()


def call(case, states, *requests, rows=slice(None)):
    return case.operator(*arguments(case, rows), states, *requests)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_ragged_rows(rule, compiled):
    """Some requests begin, others go on, one has no rows; slots are in no order, others are NaN."""
    rows, padding = sum(LENGTHS), 2
    case = rule(rows + padding)
    states = torch.full((9, *case.shape), float("nan"), dtype=torch.float64)
    slots, computed = [7, 2, 5, 1, 8], [0, 4, 3, 9, 0]
    for slot, number in zip(slots, computed, strict=True):
        states[slot] = numbers(*case.shape) if number else float("nan")
    before = states.clone()
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    out = run(case, states, *batch(LENGTHS, computed, slots, padding))
    assert not out[rows:].any()
    begin = 0
    for slot, number, length in zip(slots, computed, LENGTHS, strict=True):
        if not length:
            torch.testing.assert_close(states[slot], before[slot])
            continue
        old = before[slot] if number else torch.zeros(case.shape, dtype=torch.float64)
        want, state = by_formula(case, old, range(begin, begin + length))
        torch.testing.assert_close(out[begin : begin + length], want, atol=1e-9, rtol=1e-6)
        torch.testing.assert_close(states[slot], state, atol=1e-9, rtol=1e-6)
        begin += length
    unowned = [slot for slot in range(9) if slot not in slots]
    assert states[unowned].isnan().all()


@pytest.mark.parametrize("rule", RULES)
def test_states_behind_single_rows_are_kept(rule):
    """As if the request had ended there; what is named for rows of padding stays as it was."""
    case = rule(7)
    begin = torch.zeros((9, *case.shape), dtype=torch.float64)
    begin[2] = numbers(*case.shape)
    states, plain = begin.clone(), begin.clone()
    requests = batch([4, 1], [5, 0], [2, 3], padding=2)
    kept = torch.tensor([4, 0, 7, 5, 6, 8, 0]).int()
    out = call(case, states, *requests, kept)
    torch.testing.assert_close(out, call(case, plain, *requests))
    torch.testing.assert_close(states[[2, 3]], plain[[2, 3]])
    assert not states[[0, 1, 8]].any()
    for rows, slot in ((1, 4), (3, 7), (4, 5)):
        alone = begin.clone()
        call(case, alone, *batch([rows], [5], [2]), rows=slice(rows))
        torch.testing.assert_close(states[slot], alone[2])
    torch.testing.assert_close(states[6], states[3])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_what_they_say(rule, dtype):
    """Mutation, fakes and strides; results have the dtype of the rows."""
    case = rule(4)
    states = torch.zeros((4, *case.shape))
    given = [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in arguments(case)]
    name = getattr(torch.ops.attn_ops, case.operator.__name__).default
    requests = batch([1, 3], [0, 5], [3, 1])
    opcheck(name, (*given, states, *requests))
    opcheck(name, (*given, states, *requests, torch.tensor([0, 2, 0, 0])))
    assert name(*given, states, *requests).dtype == dtype


@pytest.mark.parametrize("lengths", [[4], [1]])
def test_step_sizes_are_clamped_in_prompts_alone(lengths):
    """Of tokens at positions 2 and later; the prompt has 4."""
    case = Ssd(lengths[0])
    x, dt, A, B, C, D, bias = arguments(case)[:7]
    more = (D, bias, True, 0.5, 0.6)
    for computed in (2, 3, 4):
        states = torch.zeros((2, *case.shape), dtype=torch.float64)
        requests = batch(lengths, [computed], [1])
        out = ops.ssd_state_update(x, dt, A, B, C, *more, torch.tensor([4, 0]), states, *requests)
        inside = computed + torch.arange(lengths[0]) < 4
        step = F.softplus(dt + bias)
        step = torch.where(inside[:, None], step.clamp(0.5, 0.6), step)
        states.zero_()
        rest = (D, None, False, None, None, None, states, *requests)
        want = ops.ssd_state_update(x, step, A, B, C, *rest)
        torch.testing.assert_close(out, want)


def test_an_unknown_activation_is_refused():
    case = Conv(1)
    case.others[-1] = "gelu"
    states = torch.zeros((2, *case.shape), dtype=torch.float64)
    with pytest.raises(ValueError, match="activation must be known, got 'gelu'"):
        call(case, states, *batch([1], [0], [1]))


def test_slots_of_a_pool():
    specs = [StateSpec(("conv", 0, 0), (C, 3), torch.bfloat16)]
    specs.append(StateSpec(("recurrent", 2, 0), (H, K, V), torch.float32))
    pool = StatePool(specs, 2)
    assert pool.tensors["recurrent", 2, 0].shape == (3, H, K, V)
    assert pool.bytes_per_request == 2 * C * 3 + 4 * H * K * V
    assert pool.num_bytes == 3 * pool.bytes_per_request
    slots = {pool.take("a"), pool.take("b")}
    assert slots == {1, 2}
    assert pool.num_free == 0
    for request in ("a", "c"):
        with pytest.raises(ValueError, match="request must have no slot while one is free"):
            pool.take(request)
    pool.give("a")
    pool.give("a")
    assert (pool.slot("a"), pool.num_free) == (0, 1)
    assert pool.take("c") in slots
