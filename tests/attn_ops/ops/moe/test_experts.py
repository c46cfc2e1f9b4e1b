"""experts against a loop in float64: by kernels, by PyTorch, and what it refuses.

T rows, K inputs and outputs, F columns of a gate, E experts.
"""

import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional

from attn_ops import experts
from attn_ops.ops.moe.constants import ExpertsConstants, experts_constants, most_blocks
from attn_ops.ops.triton.experts import launch_blocks, launch_experts
from tests.kit.fp8 import KINDS, in_fp8, scaled
from tests.kit.operators import bits, opcheck

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # of the interpreter's products
SMALL = ExpertsConstants(16, 32, 32, 4, 2)
NAN = float("nan")


@dataclasses.dataclass
class Case:
    """Random rows and weights; experts that nobody chose are NaN."""

    rows: int = 3
    k: int = 64
    f: int = 24
    num_experts: int = 5
    top_k: int = 2
    dtype: torch.dtype = HALF
    bias: bool = False
    turned: bool = False  # stored as [E, inputs, outputs]
    ids: torch.Tensor | None = None
    gate: dict = dataclasses.field(default_factory=dict)
    scale: str | None = None  # of FP8 weights: one of `tests.kit.fp8.KINDS`

    def __post_init__(self):
        def randn(*shape, scale=1.0):
            return (torch.randn(shape, generator=generator) * scale).to(DEVICE, self.dtype)

        generator = torch.Generator().manual_seed(self.rows + self.k)
        e, k, f = self.num_experts, self.k, self.f
        self.x = randn(self.rows, k)
        self.w_gate_up = randn(e, 2 * f, k, scale=k**-0.5)
        self.w_down = randn(e, k, f, scale=f**-0.5)
        order = torch.rand(self.rows, e, generator=generator).argsort(1)[:, : self.top_k]
        self.ids = (order if self.ids is None else self.ids).to(DEVICE)
        self.weights = torch.rand(self.ids.shape, generator=generator).to(DEVICE)
        self.weights[(self.ids < 0) | (self.ids >= e)] = NAN
        self.biases = (randn(e, 2 * f), randn(e, k)) if self.bias else (None, None)
        unused = [i for i in range(e) if not (self.ids == i).any()]
        for tensor in (self.w_gate_up, self.w_down, *self.biases):
            if tensor is not None:
                tensor[unused] = NAN
        if self.turned:
            self.w_gate_up = self.w_gate_up.mT.contiguous().mT
            self.w_down = self.w_down.mT.contiguous().mT
        self.scales = {}
        for name in ("gate_up", "down") if self.scale is not None else ():
            w, scale = in_fp8(getattr(self, f"w_{name}"), self.scale, generator)
            setattr(self, f"w_{name}", w)
            self.scales[f"{name}_scale"] = scale

    @property
    def args(self):
        return self.x, self.w_gate_up, self.w_down, self.ids, self.weights, *self.biases

    def rows_of(self, chosen):
        given = self.x[chosen], self.w_gate_up, self.w_down, self.ids[chosen]
        return *given, self.weights[chosen], *self.biases

    def wanted(self):
        """Pair by pair."""
        x, w_gate_up, w_down, weights = (t.double() for t in (*self.args[:3], self.weights))
        if self.scales:
            w_gate_up = scaled(w_gate_up, self.scales["gate_up_scale"], self.scale)
            w_down = scaled(w_down, self.scales["down_scale"], self.scale)
        more = [None if bias is None else bias.double() for bias in self.biases]
        out = torch.zeros_like(x)
        for row, ids in enumerate(self.ids.tolist()):
            for place, expert in enumerate(ids):
                if 0 <= expert < self.num_experts:
                    both = w_gate_up[expert] @ x[row]
                    both = both if more[0] is None else both + more[0][expert]
                    y = w_down[expert] @ gated(both, **self.gate)
                    y = y if more[1] is None else y + more[1][expert]
                    out[row] += weights[row, place] * y
        return out


def gated(both, activation="silu", alpha=1.0, limit=None, interleaved=False):
    gate, up = (both[::2], both[1::2]) if interleaved else both.chunk(2)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return gate * torch.sigmoid(alpha * gate) * (up + 1 if activation == "gpt_oss" else up)


GPT_OSS = {"activation": "gpt_oss", "alpha": 1.702, "limit": 0.7, "interleaved": True}
CASES = {
    "one row": Case(rows=1),
    "one expert a row": Case(top_k=1),
    "experts without rows": Case(rows=2, num_experts=9),
    "all rows to one expert": Case(rows=37, ids=torch.full((37, 1), 3)),
    "one expert twice in a row": Case(ids=torch.tensor([[1, 1], [4, 0], [1, 1]])),
    "one expert twice in one row": Case(rows=1, ids=torch.tensor([[2, 2]])),
    "all experts": Case(rows=20, num_experts=8, top_k=8, f=16),
    "one expert in all": Case(num_experts=1, top_k=1),
    "ids that are no expert": Case(ids=torch.tensor([[5, 1], [-1, 99], [2, 5]])),
    "one row of ids that are none": Case(rows=1, ids=torch.tensor([[5, -1]])),
    "ids of int32": Case(ids=torch.tensor([[0, 1], [1, 2], [4, 0]], dtype=torch.int32)),
    "sizes that tiles do not divide": Case(rows=5, k=72, f=40),
    "gelu": Case(rows=4, gate={"activation": "gelu_tanh"}),
    "biases": Case(rows=4, bias=True),
    "a limit": Case(rows=4, gate={"limit": 0.5}),
    "as GPT-OSS": Case(rows=4, top_k=4, bias=True, turned=True, gate=GPT_OSS),
    "as MiniMax-M3": Case(rows=9, k=40, bias=True, gate=GPT_OSS | {"interleaved": False}),
}


FP8_CASES = {
    f"{kind}, {name}": dataclasses.replace(case, scale=kind)
    for kind in KINDS
    for name, case in {
        "several blocks": Case(rows=6, k=272, f=136),
        "one row": Case(rows=1, k=144, f=144, bias=True),
        "in turns": Case(rows=9, k=256, f=192, turned=True, gate=GPT_OSS),
    }.items()
}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


def launch(case, *args, constants=SMALL, **more):
    return launch_experts(*(args or case.args), **case.gate, constants=constants, **more)


def close(out, wanted, tolerance=1e-2):
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


def test_by_kernels(case):
    close(launch(case), case.wanted())


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 8e-2)],
)
def test_operator(case, dtype, tolerance):
    ours = dataclasses.replace(case, dtype=dtype)
    close(experts(*ours.args, **ours.gate), ours.wanted(), tolerance)


@pytest.mark.parametrize("way", [launch, lambda case, **more: experts(*case.args, **more)])
def test_a_residual_is_added_to_the_rounded_sum(way):
    case = Case(rows=5)
    residual = torch.randn(5, 2 * case.k, generator=torch.manual_seed(3))[:, ::2]
    residual = residual.to(case.x)
    want = way(case).float() + residual.float()
    assert torch.equal(way(case, residual=residual), want.to(case.x.dtype))


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_weights(name):
    """By kernels and by PyTorch; what nobody chose is NaN, its scales too."""
    case = FP8_CASES[name]
    for form in (ExpertsConstants(16, 32, 128, 4, 2), None):
        close(launch(case, constants=form, **case.scales), case.wanted())
    close(experts(*case.args, **case.gate, **case.scales), case.wanted())
    wide = dataclasses.replace(case, dtype=torch.float32)
    close(experts(*wide.args, **wide.gate, **wide.scales), wide.wanted(), 1e-4)


def test_fp8_weights_in_another_strided_scale():
    case = FP8_CASES["block, several blocks"]
    turned = {name: s.mT.contiguous().mT for name, s in case.scales.items()}
    given, wanted = (launch(case, constants=None, **s) for s in (turned, case.scales))
    assert torch.equal(given, wanted)


def test_blocks_of_inputs_are_summed_apart_whatever_the_rows():
    """Sums of other lengths, times their scales, would have other bits."""
    for num_pairs in (8, 100, 1000, 9000, 90000):
        for rows_along in (False, True):
            form = experts_constants(2048, num_pairs, 128, rows_along, 128)
            assert form.block_k == 128
    case = FP8_CASES["block, several blocks"]
    with pytest.raises(AssertionError, match="bits would depend on the constants"):
        launch(case, **case.scales)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up_scale": None}, "w_gate_up must be torch.float16"),
        ({"down_scale": None}, "down_scale must be torch.float32"),
        ({"down_scale": torch.ones(5, 3, 3)}, "down_scale: a scale of weights"),
        ({"down_scale": torch.ones(5, 7, 1)}, "down_scale: a scale of weights"),
        ({"gate_up_scale": torch.ones(4, 1, 1)}, "gate_up_scale must be torch.float32 of shape"),
        ({"gate_up_scale": torch.ones(5, 1)}, "gate_up_scale must be torch.float32 of shape"),
        ({"down_scale": torch.ones(5, 1, 1).half()}, "down_scale must be torch.float32 of shape"),
        ({"down_scale": torch.ones(5, 0, 1)}, r"got \[0, 1\]; supported: one a row \[272, 2\]"),
    ],
)
def test_scales_that_do_not_fit(change, message):
    case = Case(k=272, f=136, scale="block", dtype=torch.float16)
    change = {name: s if s is None else s.to(DEVICE) for name, s in change.items()}
    with pytest.raises(ValueError, match=message):
        experts(*case.args, **case.scales | change)
    plain = Case(k=272, f=136, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"w_gate_up must be torch\.float8"):
        experts(*plain.args, **case.scales)


def test_scales_of_two_meanings():
    """Two of 192 rows and one block of inputs: of 128 and 64 rows, or of 96 each?"""
    case = Case(k=64, f=96, scale="half")
    with pytest.raises(ValueError, match=r"gate_up_scale: .* one meaning, got \[2, 1\]"):
        experts(*case.args, **case.scales)
    for kind in ("expert", "row"):
        case = Case(k=64, f=96, scale=kind)
        close(experts(*case.args, **case.scales), case.wanted())


def test_no_rows():
    case = Case(rows=0)
    assert experts(*case.args).shape == (0, case.k)


def test_by_the_constants_in_use():
    """Blocks of 16, 32, 64 and 128 pairs; products as in the interpreter's float32."""
    for rows in (1, 2, 20, 40, 90):
        case = Case(rows=rows, num_experts=2, top_k=2, dtype=torch.bfloat16)
        close(launch(case, constants=None, widen=DEVICE.type == "cpu"), case.wanted(), 8e-2)


def test_a_row_does_not_depend_on_the_others():
    """Nor on how many there are; a NaN stays in its row."""
    case = Case(rows=40, num_experts=4, bias=True)
    whole = launch(case)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(39, 40)):
        assert torch.equal(launch(case, *case.rows_of(rows)), whole[rows])
    case.x[3] = NAN
    torn = launch(case)
    assert torn[3].isnan().all()
    assert torch.equal(bits(torn[4:]), bits(whole[4:]))


@pytest.mark.parametrize("num_experts", [1, 3, 8])
@pytest.mark.parametrize("num_pairs", [1, 16, 130, 4500])
def test_blocks(num_experts, num_pairs):
    """Every pair is in one block of its expert, in order; the rest is empty."""
    generator = torch.Generator().manual_seed(num_pairs)
    drawn = torch.randint(-1, num_experts + 1, (num_pairs,), generator=generator)
    for ids in (drawn, torch.full_like(drawn, num_experts - 1)):
        blocks = launch_blocks(ids.to(DEVICE), num_experts, 16)
        found, listed = blocks.expert.tolist(), []
        used = sum(expert >= 0 for expert in found)
        assert found == sorted(found[:used]) + [-1] * (len(found) - used)
        for expert, pairs in zip(found[:used], blocks.pairs[:used].tolist(), strict=True):
            inside = [pair for pair in pairs if pair >= 0]
            assert pairs == inside + [-1] * (16 - len(inside)) != [-1] * 16
            assert all(ids[pair] == expert for pair in inside)
            listed += inside
        there = (ids >= 0) & (ids < num_experts)
        order = torch.sort(ids, stable=True).indices
        assert listed == order[there[order]].tolist()


def test_most_blocks():
    """No spread of pairs fills more."""
    for num_pairs, num_experts in itertools.product(range(1, 9), range(1, 4)):
        counts = itertools.product(range(num_pairs + 1), repeat=num_experts)
        most = max(sum(-(-n // 2) for n in each) for each in counts if sum(each) == num_pairs)
        assert most_blocks(num_pairs, num_experts, 2) == most


def test_constants():
    assert experts_constants(2048, 8, 128).block_t == 16
    assert experts_constants(2048, 8192 * 8, 128).block_t == 128
    assert experts_constants(2880, 4, 32).block_k == 64


@pytest.mark.parametrize("case", [Case(dtype=torch.float32), Case(bias=True, gate=GPT_OSS)])
def test_opcheck(case):
    case = dataclasses.replace(case, num_experts=2)  # all of them are chosen
    opcheck(torch.ops.attn_ops.experts.default, case.args, case.gate)


def test_opcheck_of_fp8():
    """The fake function alone: other checks add up numbers, which PyTorch cannot in FP8."""
    case = Case(k=272, f=136, num_experts=2, scale="block")
    torch.library.opcheck(
        torch.ops.attn_ops.experts.default, case.args, case.scales, test_utils="test_faketensor"
    )


def changed(**what):
    names = ("x", "w_gate_up", "w_down", "expert_ids", "weights", "gate_up_bias", "down_bias")
    return dict(zip(names, Case(dtype=torch.float32).args, strict=True)) | what


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"x": torch.ones(3, 64, dtype=torch.int64)}, "x must be floating-point of shape"),
        ({"w_gate_up": torch.ones(5, 47, 64)}, r"w_gate_up must be .*, got torch.float32 \[5, 47"),
        ({"w_gate_up": torch.ones(5, 48, 64).half()}, "w_gate_up must be torch.float32"),
        ({"w_down": torch.ones(5, 24, 64)}, r"w_down must be .* = \[5, 64, 24\], got"),
        ({"expert_ids": torch.zeros(2, 2).long()}, r"expert_ids must have shape \[3, top_k\], got"),
        ({"expert_ids": torch.zeros(3, 2)}, "expert_ids must be integers, got torch.float32"),
        ({"weights": torch.ones(3, 1)}, r"weights must be .* \[3, 2\], got torch.float32 \[3, 1\]"),
        ({"gate_up_bias": torch.ones(5, 24)}, r"gate_up_bias must have shape \[5, 48\], got"),
        ({"down_bias": torch.ones(64)}, r"down_bias must have shape \[5, 64\], got \[64\]"),
        ({"weights": torch.ones(3, 2).to("meta")}, "weights must be on x's device .*, got meta"),
        ({"activation": "relu"}, "activation must be known, got 'relu'; supported: silu"),
        ({"alpha": NAN}, "alpha must be finite, and 1 for gelu_tanh, got nan"),
        ({"activation": "gelu_tanh", "alpha": 1.7}, "alpha must be finite, and 1 for gelu_tanh"),
        ({"limit": -1.0}, "limit must be None or over 0, got -1.0"),
        ({"ordered": True}, "for ordered=True, got torch.float32"),
        ({"residual": torch.ones(3, 8)}, r"residual must be torch.float32 of x's shape \[3, 64\]"),
    ],
)
def test_refused(what, message):
    given = {
        name: one.to(DEVICE) if isinstance(one, torch.Tensor) and one.device.type != "meta" else one
        for name, one in changed(**what).items()
    }
    with pytest.raises(ValueError, match=message):
        experts(**given)
