"""The conformance suite finds what is wrong, and says where."""

import dataclasses
import re

import pytest
import torch

from attn_ops import AttentionSpec, attention, get_backend
from attn_ops.backends import registry
from attn_ops.testing import check_backend, conformance_cases, make_case
from attn_ops.testing.features import FEATURES, LENGTHS

TORCH = get_backend("TORCH")
ROW, HEAD = 40, 2
"""Of LENGTHS["mixed"]: request 4's query 31; its queries begin with row 9."""


def wrong_in_one_place(q, kv_cache, meta, options):
    out = TORCH.forward(q, kv_cache, meta, options)
    if out.shape[0] > ROW:
        out[ROW, HEAD, 5] = 9.25
    return out


def nan_in_one_place(q, kv_cache, meta, options):
    out = TORCH.forward(q, kv_cache, meta, options)
    out[min(1, out.shape[0] - 1), 0, 0] = float("nan")
    return out


def no_padding(q, kv_cache, meta, options):
    out = TORCH.forward(q, kv_cache, meta, options)
    out[meta.common.num_actual_tokens :] = 1e-30
    return out


def wrong_lse(q, kv_cache, meta, options):
    out = TORCH.forward(q, kv_cache, meta, options)
    if options.lse is not None:
        options.lse[0, 1] += 1
    return out


def without_window(q, kv_cache, meta, options):
    return TORCH.forward(q, kv_cache, meta, dataclasses.replace(options, sliding_window=None))


def failing(q, kv_cache, meta, options):
    raise RuntimeError("no such kernel")


def nothing(q, kv_cache, meta, options):
    """A forgotten return."""


def changed(forward, monkeypatch):
    """TORCH with another forward and one dtype, known by name."""
    support = dataclasses.replace(TORCH.support, devices=("cpu",), dtypes=(torch.float32,))
    backend = dataclasses.replace(TORCH, name="CHANGED", forward=forward, support=support)
    monkeypatch.setitem(registry._registered, "CHANGED", backend)
    return backend


def cases_of(backend, pattern):
    return [c for c in conformance_cases(backend) if re.fullmatch(f"CHANGED-cpu-{pattern}", c.id)]


@pytest.mark.parametrize(
    ("forward", "cases", "wanted"),
    [
        (
            wrong_in_one_place,
            "features-mixed-plain",
            r"request 4 \(seq_len 61\), row 40 \(query 31 of its 40\), head 2, element 5: "
            r"got 9.25, want -?0\.\d+",
        ),
        (
            nan_in_one_place,
            "features-decode-plain",
            r"error inf .* request 1 \(seq_len 2\), row 1 \(query 0 of its 1\), head 0, element 0: "
            r"got nan, want -?0\.\d+",
        ),
        (no_padding, "features-decode-plain", r"padding rows must be zero, .* \[4, 5\]"),
        (
            wrong_lse,
            "log_sum_exp-decode-plain",
            r"lse: difference 1.*request 0 \(seq_len 1\), row 0 \(query 0 of its 1\), head 1: got",
        ),
        (without_window, "features-mixed-window", r"request \d .*, head \d"),
        (failing, "features-decode-plain", "RuntimeError: no such kernel"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_failure_names_request_row_and_head(monkeypatch, forward, cases, wanted):
    backend = changed(forward, monkeypatch)
    chosen = cases_of(backend, cases)
    with pytest.raises(AssertionError, match="1 of 1 cases of backend CHANGED failed") as error:
        check_backend(backend, chosen)
    assert chosen[0].id in str(error.value)
    assert re.search(wanted, str(error.value)), error.value


def test_the_rest_runs_after_a_failure(monkeypatch):
    backend = changed(without_window, monkeypatch)
    chosen = cases_of(backend, "features-.*")
    with pytest.raises(AssertionError, match=r"^12 of 44 cases") as error:
        check_backend(backend, chosen)
    assert "features-mixed-window: " in str(error.value)
    assert "-plain: " not in str(error.value)


def test_what_is_not_declared_must_be_refused(monkeypatch):
    """By a support that says no and refuses nothing."""

    class Careless(type(TORCH.support)):
        def reasons_against(self, *arguments):
            return []

    none = dict.fromkeys(("sliding_window", "soft_cap", "alibi", "sinks"), False)
    declared = {f.name: getattr(TORCH.support, f.name) for f in dataclasses.fields(TORCH.support)}
    backend = dataclasses.replace(
        changed(TORCH.forward, monkeypatch), support=Careless(**declared | none)
    )
    chosen = cases_of(backend, "features-decode-(plain|window)")
    with pytest.raises(AssertionError, match="1 of 2 cases") as error:
        check_backend(backend, [case for case in chosen if case.device == "cpu"])
    assert "window with torch.float64 must be refused with a ValueError" in str(error.value)


def test_every_case_has_its_own_id():
    ids = [case.id for case in conformance_cases(TORCH, ["cpu", "cuda"])]
    assert len(set(ids)) == len(ids)
    assert len([i for i in ids if "-cuda-" in i]) * 2 == len(ids)


def test_arguments_that_are_none():
    with pytest.raises(TypeError, match="backend must be a Backend, got str"):
        conformance_cases("TORCH")
    with pytest.raises(ValueError, match="devices must be declared, got 'tpu'; supported: cpu"):
        conformance_cases(TORCH, ["tpu"])
    with pytest.raises(ValueError, match="cases must hold at least one of backend TORCH, got none"):
        check_backend(TORCH, [])
    missing = dataclasses.replace(TORCH, unavailable=lambda: "a library must be installed")
    with pytest.raises(ValueError, match="TORCH must run here to be checked, got: a library"):
        check_backend(missing)


def test_an_empty_batch_has_no_difference():
    spec = AttentionSpec(4, 2, 64, torch.float32)
    case = make_case(TORCH, spec, ([], []), FEATURES["plain"], num_padding_rows=0)
    case.check(attention(case.q, case.kv_cache, case.meta, case.scale))
    case = make_case(TORCH, spec, LENGTHS["decode"], FEATURES["plain"])
    with pytest.raises(AssertionError, match=r"out must have dtype torch\.float32, got"):
        case.check(torch.zeros(case.q.shape, dtype=torch.float64))


def test_a_forward_without_a_result_is_named(monkeypatch):
    cases = conformance_cases(changed(nothing, monkeypatch))
    for rule in ("features", "chunked_local_attention"):
        case = next(c for c in cases if c.rule.__name__ == rule)
        with pytest.raises(AssertionError, match="out must be a tensor, got NoneType"):
            case.run()


def test_no_case_names_what_is_not_declared(monkeypatch):
    backend = changed(TORCH.forward, monkeypatch)
    support = dataclasses.replace(backend.support, kv_cache_dtypes=("auto",))
    rules = [
        case.parameters
        for case in conformance_cases(dataclasses.replace(backend, support=support))
        if case.rule.__name__ == "heads_before_tokens"
    ]
    assert rules == [("decode", "auto"), ("mixed", "auto")]
