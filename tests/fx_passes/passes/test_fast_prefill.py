"""fast_prefill: the numbers of the unrewritten model, what is dropped, refusals, in-place writes.

T rows of the batch, R logits rows.
"""

import copy
from typing import Any

import pytest
import torch

import fx_passes
from fx_passes import PassConfig, recording
from fx_passes.passes.fast_prefill import FastPrefill, _inferred
from tests.fx_passes.passes.fast_prefill_models import (
    KINDS,
    Batches,
    D,
    Plain,
    TwoStage,
    Yoco,
    call,
    compare,
    compiled,
    eager_backend,
    record_of,
    seeded,
)
from tests.kit.marks import long, slow

OWN = {"plain": Plain, "yoco": Yoco, "two stages": TwoStage}
FAMILIES = ["llama", "qwen3", "gemma3n", "gemma4"]


def build(make_model, name):
    if name in OWN:
        return seeded(OWN[name]())
    return make_model(name, num_layers=6 if name.startswith("gemma") else 2)


# -- numbers: 54 batches; marked slow, 240 others and 168 by Inductor ------------------------------

ROUNDS = {
    "llama": 6, "qwen3": 6, "gemma3n": 2, "gemma4": 2, "plain": 8, "yoco": 8, "two stages": 8
}  # fmt: skip
QUICK = ["llama", "plain", "two stages"]
OTHERS = [name for name in (*FAMILIES, *OWN) if name not in QUICK]


@pytest.mark.parametrize(
    ("name", "rounds", "seed"),
    [
        *((name, 3, 0) for name in QUICK),
        *long(*((name, n, 2) for name, n in ROUNDS.items())),
    ],
)
def test_random_batches(make_model, num_graphs, name, rounds, seed):
    model = build(make_model, name)
    before = num_graphs()
    fast, batches = compiled(model), Batches(model, seed)
    for _ in range(rounds):
        for kind in KINDS:
            compare(model, fast, batches.step(kind))
    assert num_graphs() - before == 1


@pytest.mark.parametrize("name", [*slow(*QUICK[:1]), *long(*QUICK[1:], *OTHERS)])
def test_random_batches_by_inductor(make_model, num_graphs, name):
    """Beside the unrewritten model by Inductor. With a layer or two, nothing would be compiled like
    the layers of the other: what is compiled as one piece is fused, and rounds, in its own way.
    """
    model = (
        make_model(name, num_layers=4) if name in ("llama", "qwen3") else build(make_model, name)
    )
    before = num_graphs()
    fast = compiled(model, backend=fx_passes.attn_ops, options={"fast_prefill": "on"})
    plain = compiled(copy.deepcopy(model), backend=fx_passes.attn_ops)
    batches = Batches(model, seed=1)
    for kind in KINDS * 4:
        compare(plain, fast, batches.step(kind))
    assert num_graphs() - before == 2


def test_extreme_batches(make_model):
    """One row of one request, one request among many, all rows wanted, a request with no logits."""
    model = seeded(Yoco())
    fast, batches = compiled(model), Batches(model)
    for case in (
        ([1], [0], [1]),
        ([1], [7], [1]),
        ([5], [0], [5]),
        ([5, 1], [2, 2], [0, 1]),
        ([3, 2, 4], [0, 0, 0], [3, 2, 4]),
        ([1, 1, 1, 1, 6], [4, 4, 4, 4, 0], [1, 1, 1, 1, 6]),
        ([7, 7, 7, 7, 7], [9, 9, 9, 9, 9], [0, 0, 1, 0, 0]),
        ([1, 1, 1], [3, 2, 1], [1, 1, 1], 3),
    ):
        compare(model, fast, batches.of(*case))  # pyright: ignore[reportArgumentType]


# -- what is dropped -------------------------------------------------------------------------------


def test_llama_loses_its_last_layers_dead_rows(make_model):
    model = build(make_model, "llama")
    with recording() as recorder:
        compiled(model)
    facts = record_of(recorder).facts
    hidden, middle = 64, 96
    assert (facts["num_products"], facts["of_products"]) == (5, 14)
    assert (facts["num_attentions"], facts["of_attentions"]) == (1, 2)
    assert facts["flops_per_row"] == 2 * (2 * hidden * hidden + 3 * hidden * middle)
    k_and_v = 2 * 2 * hidden * 32
    assert facts["of_flops_per_row"] == 2 * (facts["flops_per_row"] + k_and_v)


@pytest.mark.parametrize(
    ("name", "attentions", "products"),
    [("yoco", (3, 5), (12, 23)), ("two stages", (3, 3), (12, 15)), ("plain", (1, 2), (4, 10))],
)
def test_models_lose_all_layers_behind_the_last_write(name, attentions, products):
    with recording() as recorder:
        compiled(seeded(OWN[name]()))
    facts = record_of(recorder).facts
    assert (facts["num_attentions"], facts["of_attentions"]) == attentions
    assert (facts["num_products"], facts["of_products"]) == products


@pytest.mark.parametrize("name", [*long("gemma3n"), *slow("gemma4")])
def test_gemma_loses_its_sharing_layers(make_model, name):
    """All of them, and of the last that writes all but k and v."""
    model: Any = build(make_model, name)
    with recording() as recorder:
        compiled(model)
    record, config = record_of(recorder), model.config
    num_shared, num_layers = config.num_kv_shared_layers, config.num_hidden_layers
    assert num_shared >= 2
    assert record.facts["num_attentions"] == num_shared + 1
    assert record.facts["of_attentions"] == num_layers
    a_layer = {"gemma3n": 9, "gemma4": 7}[name]  # Gemma 3n's streams are mixed by products besides
    assert record.facts["num_products"] >= (num_shared + 1) * a_layer
    assert record.skipped == []
    if name == "gemma4":
        assert record.facts["num_products"] == 3 * a_layer


@pytest.mark.slow
def test_own_result_of_an_outlined_graph(make_model):
    """Equal layers behind the pass are still outlined, those that share a cache too."""
    for model in (seeded(Yoco(num_readers=3)), make_model("llama", num_layers=4)):
        config = PassConfig(fast_prefill="on", outline_layers=True)
        with recording() as recorder:
            compiled(model, backend=eager_backend(config))
        found = {p.pass_name: p for p in recorder.passes}
        assert found["fast_prefill"].matches > 0
        assert found["outline_layers"].matches >= 2, found["outline_layers"].skipped


# -- skipped when ----------------------------------------------------------------------------------


def refused(model, match, mode="auto"):
    """The model is left as it is, and the report says why; mode "on" raises the same."""
    with recording() as recorder:
        fast = compiled(
            model, backend=eager_backend(PassConfig(fast_prefill=mode, outline_layers=False))
        )
    record = record_of(recorder)
    assert record.matches == 0
    assert any(match in reason for reason in record.skipped), record.skipped
    compare(model, fast, Batches(model).step("mixed"))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"fast_prefill must be 'auto' or 'off' .* got 'on'"):
        compiled(model)


class Finishes(Plain):
    def __init__(self, finish):
        super().__init__()
        self.also = finish

    def finish(self, h, logits_to_keep):
        return self.head(h[:, logits_to_keep]), self.also(self, h)


READS_ALL = {
    "prompt log-probabilities": lambda model, h: model.head(h).log_softmax(-1),
    "for a drafter": lambda model, h: h,  # as EAGLE's
    "an auxiliary head": lambda model, h: h.mean(1),
}
ALL_ROWS = pytest.mark.skipped_when(FastPrefill, "something needs all rows of the last hidden")


@ALL_ROWS
@pytest.mark.parametrize("name", READS_ALL)
def test_skipped_when_all_rows_are_read(name):
    model = seeded(Finishes(READS_ALL[name]))
    refused(model, "is needed for all rows: all its rows are read")


class Mixes(Plain):
    """An operator that mixes rows ahead of the selection."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def finish(self, h, logits_to_keep):
        return super().finish(self.mix(h), logits_to_keep)


@pytest.mark.parametrize(
    ("mix", "named"),
    [
        (lambda h: h.cumsum(1), "cumsum"),
        (lambda h: h.flip(1), "flip"),
        (lambda h: h.roll(1, 1), "roll"),
        (lambda h: h.index_add(1, torch.zeros_like(h[0, :, 0]).long(), h), "index_add"),
        (lambda h: h * h.shape[1], "it computes with the number of rows"),
        (lambda h: torch.softmax(h @ h.mT, -1) @ h, "ambiguous"),
    ],
    ids=["cumsum", "flip", "roll", "experts", "count", "two T dims"],
)
@ALL_ROWS
def test_skipped_when_an_operator_mixes_rows(mix, named):
    refused(seeded(Mixes(mix)), named)


def conv(h):
    return torch.nn.functional.conv1d(h.mT, torch.ones(D, 1, 3), padding=1, groups=D).mT


class MixesLast(Mixes):
    """In parallel with an MLP: that is reduced all the same, and the report names the operator."""

    def run(self, h, kv_caches, batch):
        h = super().run(h, kv_caches, batch)
        return self.mix(h) + self.layers[1].mlp(h)  # pyright: ignore[reportCallIssue]

    def finish(self, h, logits_to_keep):
        return Plain.finish(self, h, logits_to_keep)


@pytest.mark.parametrize(
    ("mix", "named"),
    [
        (lambda h: h.cumsum(1), "cumsum"),
        (conv, "conv"),
        (lambda h: h[0].index_add(0, torch.zeros_like(h[0, :, 0]).long(), h[0]), "index_add"),
    ],
    ids=["cumsum", "conv", "experts"],
)
def test_the_region_ends_at_an_operator_that_mixes(mix, named):
    model = seeded(MixesLast(mix))
    with recording() as recorder:
        fast = compiled(model)
    record = record_of(recorder)
    assert (record.facts["num_products"], record.facts["num_attentions"]) == (2, 0)
    assert any(named in reason for reason in record.skipped), record.skipped
    compare(model, fast, Batches(model).step("mixed"))


class SlicedByInt(Plain):
    def finish(self, h, logits_to_keep):
        return self.head(h[:, -1:]) + 0 * logits_to_keep.sum()


class TwoTensors(Plain):
    """Drafts' rows and the others'."""

    def forward(self, input_ids, position_ids, kv_caches, logits_to_keep, other_rows, **batch):
        h = self.run(self.embed(input_ids), kv_caches, batch)
        return self.head(h[:, logits_to_keep]), self.head(h[:, other_rows])


NOT_SELECTED = pytest.mark.skipped_when(FastPrefill, "no rows are selected by a tensor of indices")


@NOT_SELECTED
def test_skipped_when_no_tensor_selects():
    refused(seeded(SlicedByInt()), "no rows are selected by a tensor of indices")


def refused_at(model, match, **changes):
    step = Batches(model).of([2, 3, 4], [0, 1, 0], [1, 1, 1])
    step.keywords |= changes
    backend = eager_backend(PassConfig(fast_prefill="auto", outline_layers=False))
    with recording() as recorder:
        call(torch.compile(model, backend=backend, fullgraph=True, dynamic=True), step)
    record = record_of(recorder)
    assert record.matches == 0
    assert any(match in reason for reason in record.skipped), record.skipped


@NOT_SELECTED
def test_skipped_when_several_tensors_select():
    rows = torch.tensor([0, 4])
    match = "rows are selected by several tensors: l_logits_to_keep_, l_other_rows_"
    refused_at(seeded(TwoTensors()), match, other_rows=rows)


@pytest.mark.skipped_when(FastPrefill, "rows cannot be told apart")
def test_skipped_when_as_many_rows_are_selected_as_there_are():
    """Of the first batch: the two sizes are then one to the compiler."""
    refused_at(seeded(Plain()), "cannot be told apart", logits_to_keep=torch.arange(9))


@pytest.mark.skipped_when(FastPrefill, "training: an input requires grad")
def test_skipped_when_training():
    model = seeded(Plain())
    model.head.requires_grad_(True)
    refused_at(model, "training: an input requires grad")


# -- what is left to torch: views of no rows with their sizes written, no symbols ------------------

SHAPES = {
    "sizes": ("view", (1, 5, -1, 4), {}, (1, 5, 3, 4)),
    "tuple": ("reshape", ((1, 5, -1, 4),), {}, ((1, 5, 3, 4),)),
    "function": (torch.reshape, ((1, 5, -1, 4),), {}, ((1, 5, 3, 4),)),
    "keyword": ("view", (), {"size": (1, 5, -1, 4)}, {"size": (1, 5, 3, 4)}),
    "function's keyword": (torch.reshape, (), {"shape": [1, 5, -1, 4]}, {"shape": (1, 5, 3, 4)}),
    "no -1": ("view", (1, 5, 3, 4), {}, (1, 5, 3, 4)),
    "a dtype": ("view", (torch.int32,), {}, (torch.int32,)),
    "expand": ("expand", (1, 5, -1, 4), {}, (1, 5, -1, 4)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_sizes_that_no_rows_would_leave_open_are_written_out(case):
    """-1 of `view` and `reshape` only; of `expand` it means another thing."""
    target, arguments, keywords, wanted = SHAPES[case]
    graph = torch.fx.Graph()
    x, call = graph.placeholder("x"), graph.call_method if isinstance(target, str) else None
    node = (call or graph.call_function)(target, (x, *arguments), keywords)
    node.meta["example_value"] = torch.empty(1, 5, 3, 4)
    got, named = _inferred(node)
    assert got[0] is x
    assert (named if keywords else got[1:]) == wanted


def test_sizes_by_a_node_are_left_alone():
    graph = torch.fx.Graph()
    x, shape = graph.placeholder("x"), graph.placeholder("shape")
    node = graph.call_method("view", (x,), {"size": shape})
    node.meta["example_value"] = torch.empty(1, 5, 3, 4)
    assert _inferred(node) == ((x,), {"size": shape})


@pytest.mark.slow
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_numbers_read_from_tensors():
    """`item()` in a forward is a symbol that torch looks for afterwards; the analysis, which runs
    the node again, leaves none of its own behind.
    """

    class Scaled(Plain):
        def run(self, h, kv_caches, batch):
            return super().run(h * self.place.weight.abs().amax().item(), kv_caches, batch)

    model = seeded(Scaled())
    for backend in (eager_backend(), fx_passes.attn_ops):
        torch._dynamo.reset()
        options = {} if backend is not fx_passes.attn_ops else {"options": {"fast_prefill": "on"}}
        fast = compiled(model, backend=backend, **options)
        compare(model, fast, Batches(model).step("mixed"), exact=False)
