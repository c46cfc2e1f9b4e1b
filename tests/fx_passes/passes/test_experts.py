"""experts: which mixtures of Transformers become one operator, and which are left."""

import functools
import inspect

import pytest
import torch
from torch.nn import functional

from fx_passes import PassConfig, attn_ops, recording
from fx_passes.failures import RefusedError
from fx_passes.ordered import check_ordered
from fx_passes.passes.experts import Experts
from tests.kit.marks import long, slow
from tests.kit.models import build_model

moe = pytest.importorskip("transformers.integrations.moe")

E, K, F, TOP_K = 4, 16, 8, 2
X = torch.randn(5, K)


def of_halves(gated):
    return functools.wraps(gated)(lambda both: gated(*both.chunk(2, dim=-1)))


@of_halves
def silu(gate, up):
    return functional.silu(gate) * up


@of_halves
def gelu(gate, up):
    return functional.gelu(gate, approximate="tanh") * up


@of_halves
def in_float32(gate, up):
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


@of_halves
def limited(gate, up):
    return functional.silu(gate.clamp(max=0.5)) * up.clamp(min=-0.5, max=0.5)


def gpt_oss(both):
    gate, up = both[..., ::2], both[..., 1::2]
    gate, up = gate.clamp(min=None, max=0.7), up.clamp(min=-0.7, max=0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


UNKNOWN = {
    "relu": lambda gate, up: functional.relu(gate) * up,
    "swapped": lambda up, gate: functional.silu(gate) * up,
    "limited behind": lambda gate, up: (
        functional.silu(gate).clamp(max=0.5) * up.clamp(min=-0.5, max=0.5)
    ),
    "limited on one side": lambda gate, up: (
        functional.silu(gate.clamp(max=0.5)) * up.clamp(max=0.5)
    ),
    "other alpha": lambda gate, up: gate * torch.sigmoid(up * 2.0) * up,
}


class Layer:
    """What Transformers' functions read of a module."""

    num_experts, has_gate, has_post_expert_norm = E, True, False

    def __init__(self, form, weights):
        self.gate_up_proj, self.down_proj, *biases = weights
        self.gate_up_proj_bias, self.down_proj_bias = biases or (None, None)
        self.gate, self.has_bias, self.is_transposed, self._is_expert_parallel = form

    def _apply_gate(self, both):
        return self.gate(both)


def mixture(
    gate=silu, *, biases=False, turned=False, parallel=False, dtype=torch.float32,
    forward=moe.grouped_mm_experts_forward, after=None, added=None,
):  # fmt: skip
    """A function of rows and weights, and its arguments; the first columns are the router's."""
    torch.manual_seed(0)
    weights = [torch.randn(E, 2 * F, K) / 4, torch.randn(E, K, F) / 3]
    weights = [w.mT.contiguous() if turned else w for w in weights]
    weights += [torch.randn(E, 2 * F), torch.randn(E, K)] if biases else []

    def function(x, *weights):
        given = Layer((gate, biases, turned, parallel), weights)
        chosen, ids = torch.topk(x[:, :E].softmax(-1), TOP_K)
        rows = x.sin().unsqueeze(0).view(-1, K) if added else x.sin()
        result = forward(given, rows, ids, chosen)
        result = result.cos() if added is None else added(x, result)
        return result if after is None else (result, after())

    return function, [one.to(dtype) for one in (X, *weights)]


def run(contract, aten_graph, *gate, matches=1, one=None, **form):
    function, args = mixture(*gate, **form)
    tolerance = 1e-5 if args[0].dtype == torch.float32 else 0.05
    one = one or Experts("always")
    graph = aten_graph(function, *args)
    return contract(one, graph, *args, matches=matches, tolerance=tolerance)[1], one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "form", [{}, {"biases": True}, {"turned": True}, {"parallel": True, "biases": True}], ids=str
)
def test_forms(aten_graph, contract, form, dtype):
    """`parallel` has the masks that Transformers up to 5.17 puts into every model."""
    after, _ = run(contract, aten_graph, **form, dtype=dtype)
    assert after.count("attn_ops.experts") == 1
    assert "grouped_mm" not in after
    assert "aten.sort" not in after


@pytest.mark.parametrize("form", [{}, {"biases": True}, {"turned": True, "biases": True}], ids=str)
def test_products_by_pair(aten_graph, contract, form):
    after, _ = run(contract, aten_graph, forward=moe.batched_mm_experts_forward, **form)
    assert after.count("attn_ops.experts") == 1
    assert "aten.bmm" not in after


@pytest.mark.parametrize(
    "added",
    [
        lambda x, y: x + y,
        lambda x, y: y.view(1, -1, K) + x.cos().unsqueeze(0),
        lambda x, y: (x * 2).view(1, -1, K) + y.view(1, -1, K),
    ],
    ids=["rows", "a batch", "the other way round"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_behind_is_computed_inside(aten_graph, contract, added, dtype):
    after, _ = run(contract, aten_graph, added=added, dtype=dtype)
    assert after.count("attn_ops.experts") == 1
    assert "residual = " in after
    assert "aten.add" not in after


@pytest.mark.parametrize(
    "added",
    [
        lambda x, y: x + y + y.sin(),
        lambda x, y: x[:1] + y,
        lambda x, y: x.double() + y,
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x.mT.contiguous().mT + y,
    ],
    ids=["read twice", "broadcast", "wider", "scaled", "not in rows"],
)
def test_other_sums_behind_are_left(aten_graph, contract, added):
    after, _ = run(contract, aten_graph, added=added)
    assert after.count("attn_ops.experts") == 1
    assert "residual = " not in after


@pytest.mark.parametrize(
    ("gate", "keywords"),
    [
        (silu, {}),
        (gelu, {"activation": "gelu_tanh"}),
        (in_float32, {}),
        (limited, {"limit": 0.5}),
        (gpt_oss, {"activation": "gpt_oss", "alpha": 1.702, "limit": 0.7, "interleaved": True}),
    ],
)
def test_gates(aten_graph, contract, gate, keywords):
    function, args = mixture(gate)
    graph = aten_graph(function, *args)
    contract(Experts("always"), graph, *args, matches=1, tolerance=1e-5)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.attn_ops.experts.default)
    assert node.kwargs == keywords


@pytest.mark.skipped_when(Experts, "the activation of the gate is not known")
@pytest.mark.parametrize("gate", UNKNOWN)
def test_skipped_when_a_gate_is_not_known(aten_graph, contract, gate):
    _, one = run(contract, aten_graph, of_halves(UNKNOWN[gate]), matches=0)
    assert one.reasons == ["the activation of the gate is not known"] * 2, "of two products"


@pytest.mark.skipped_when(Experts, "something else reads a value between")
def test_skipped_when_a_value_between_is_read(aten_graph, contract):
    seen = []

    def kept(both):
        seen.append(both)
        return silu(both)

    _, one = run(contract, aten_graph, kept, after=lambda: seen.pop().sum(), matches=0)
    reason = "something else reads a value between the first product and the sum"
    assert set(one.reasons) == {reason}


@pytest.mark.skipped_when(Experts, "the rows of a grouped product are not routed")
@pytest.mark.parametrize(
    ("text", "instead"),
    [
        (".sum(dim=1)", ".amax(dim=1)"),
        ("weighted_out[inv_perm]", "weighted_out[perm]"),
        ("[perm // num_top_k]", "[perm % num_tokens]"),
        ("dim=0, dtype=torch.int32)", "dim=0, dtype=torch.int32).clamp(max=9)"),
        ("* sample_weights_g.unsqueeze(-1)", "* sample_weights.unsqueeze(-1)"),
        ("_grouped_linear(\n        proj_out", "_grouped_linear(\n        proj_out.flip(0)"),
    ],
    ids=["the largest", "another order", "other rows", "other ends", "other weights", "flipped"],
)
def test_skipped_when_rows_are_routed_otherwise(aten_graph, contract, text, instead):
    source = inspect.getsource(moe.grouped_mm_experts_forward)
    assert text in source
    found = {}
    exec(source.replace(text, instead), {**vars(moe), "torch": torch}, found)
    forward = found["grouped_mm_experts_forward"]
    _, one = run(contract, aten_graph, forward=forward, matches=0)
    assert len(one.reasons) == 2


@pytest.mark.skipped_when(Experts, "no kernel takes the weights")
@pytest.mark.parametrize("one", [Experts(), Experts("always", ordered=True)])
def test_skipped_when_no_kernel_takes_the_weights(aten_graph, contract, one):
    run(contract, aten_graph, matches=0, one=one)
    assert set(one.reasons) == {"no kernel takes the weights"}


def test_what_is_left_is_refused_in_order(aten_graph, monkeypatch):
    monkeypatch.setattr("fx_passes.passes.experts.takes_experts", lambda *_: True)
    function, args = mixture(dtype=torch.bfloat16)
    graph = aten_graph(function, *args).graph
    with pytest.raises(RefusedError, match="_grouped_mm"):
        check_ordered(graph, "layer")
    assert Experts("always", ordered=True).run(graph) == 1
    check_ordered(graph, "layer")
    one = Experts.of(PassConfig().ordered())
    assert (one.mode, one.ordered) == ("always", True)


MODELS = {
    "gpt_oss": (2, {}),
    "qwen2_moe": (2, {"decoder_sparse_step": 1}),
    "deepseek_v3": (2, {"num_layers": 3}),
}


@pytest.mark.parametrize("implementation", [*slow("grouped_mm"), *long("batched_mm")])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, implementation):
    """Each layer has one match, equal layers are compiled once, and no length compiles again."""
    num_layers, more = MODELS[name]
    model = build_model(name, "eager", **more)
    model.set_experts_implementation(implementation)
    compiled = torch.compile(model, backend=attn_ops, options={"experts": "always"})
    with torch.no_grad(), recording() as recorder:
        for length in (5, 9, 3):
            ids = torch.randint(1, 64, (1, length))
            torch._dynamo.mark_dynamic(ids, 1)
            wanted = model(ids, use_cache=False).logits
            with torch._dynamo.config.patch(error_on_recompile=True):
                got = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert recorder.matches_in_words()["experts"] == f"1 x {num_layers} layers"
