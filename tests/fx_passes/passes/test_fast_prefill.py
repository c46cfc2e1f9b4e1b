"""fast_prefill: the numbers of the unrewritten model, what is dropped, refusals, in-place writes.

T rows of the batch, R logits rows.
"""

import copy
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fx_passes
from fx_passes import PassConfig, recording
from fx_passes.passes.fast_prefill import FastPrefill
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


def test_contract():
    """The second run changes nothing."""
    texts = []

    def backend(gm, example_inputs):
        one = FastPrefill("on")
        texts.append(str(gm.graph))
        assert one.run(gm.graph) > 0
        gm.graph.lint()
        gm.recompile()
        texts.append(str(gm.graph))
        assert FastPrefill("on").run(gm.graph) == 0
        assert str(gm.graph) == texts[-1]
        return gm.forward

    model = seeded(Plain())
    fast = compiled(model, backend=backend)
    compare(model, fast, Batches(model).step("mixed"))
    before, after = texts
    assert (before.count("logits_rows: True"), after.count("logits_rows: True")) == (0, 1)
    assert before.count("write_kv") == after.count("write_kv")
    gather = "[target=torch.index_select]"
    assert (before.count(gather), after.count(gather)) == (0, 2), "residual, q's source"


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
def test_gemma4_costs_no_more_than_sliced_by_hand(make_model):
    """Transformers 5.23 drops rows for one sequence and an int `logits_to_keep`; products alone."""
    num_tokens = 16  # of the batch that `compiled` begins with
    theirs = make_model("gemma4", attn_implementation="eager")
    if not hasattr(theirs.model, "_maybe_slice_kv_shared_inputs"):
        pytest.skip("this version of Transformers slices nothing by hand")
    step = Batches(model := make_model("gemma4")).of([num_tokens], [0], [1])
    with FlopCounterMode(display=False) as by_hand:
        theirs(input_ids=step.keywords["input_ids"], logits_to_keep=1)
    counts = {}

    def backend(gm, example_inputs):
        eager_backend()(gm, example_inputs)

        def run(*inputs):
            with FlopCounterMode(display=False) as counter:
                result = gm.forward(*inputs)
            counts["ours"] = products(counter)
            return result

        return run

    call(compiled(model, backend=backend), step)
    assert 0 < counts["ours"] <= products(by_hand)


def products(counter):
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


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


class AllLogits(Plain):
    """Prompt log-probabilities: all rows of the last hidden states are read besides."""

    def finish(self, h, logits_to_keep):
        return self.head(h[:, logits_to_keep]), self.head(h).log_softmax(-1)


class HandsOut(Plain):
    """To a drafter, as EAGLE's."""

    def finish(self, h, logits_to_keep):
        return self.head(h[:, logits_to_keep]), h


class AuxiliaryHead(Plain):
    def finish(self, h, logits_to_keep):
        return self.head(h[:, logits_to_keep]), h.mean(1)


ALL_ROWS = pytest.mark.skipped_when(FastPrefill, "something needs all rows of the last hidden")


@ALL_ROWS
@pytest.mark.parametrize("kind", [AllLogits, HandsOut, AuxiliaryHead])
def test_skipped_when_all_rows_are_read(kind):
    refused(seeded(kind()), "is needed for all rows: all its rows are read")


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


@pytest.mark.parametrize("value", [True, False, "yes", None, 1])
def test_other_values_are_refused(value):
    match = r"options\['fast_prefill'\] must be 'auto', 'on' or 'off', got"
    with pytest.raises(ValueError, match=match):
        PassConfig.split({"fast_prefill": value})


def test_off_runs_no_pass():
    with recording() as recorder:
        compiled(
            seeded(Plain()),
            backend=eager_backend(PassConfig(fast_prefill="off", outline_layers=False)),
        )
    assert "fast_prefill" not in [record.pass_name for record in recorder.passes]
