"""`SamplingParams`: what is refused, what a step must compute, and the tensors of a step."""

import math

import pytest

from graphs.sampling import FIELDS, SamplingParams
from graphs.sampling.params import Sampling


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", -0.1, r"from 0 to 3.40282e\+38"),
        ("temperature", math.nan, "from 0"),
        ("temperature", math.inf, "from 0"),
        ("temperature", "1", "from 0"),
        ("temperature", True, "from 0"),
        ("top_k", -1, "0 for off"),
        ("top_k", 2.0, "0 for off"),
        ("top_k", 2**31, "0 for off"),
        ("top_p", 0.0, "above 0 to 1"),
        ("top_p", 1e-60, "above 0 to 1"),
        ("top_p", 1.0001, "above 0 to 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", math.nan, "above 0"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", None, "from -2 to 2"),
        ("seed", 1.0, "None for any"),
        ("seed", 2**63, "None for any"),
        ("seed", -(2**63) - 1, "None for any"),
    ],
)
def test_values_out_of_range_are_refused(name, value, said):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got .*; supported: .*{said}") as e:
        SamplingParams(**{name: value})
    assert f"got {value!r};" in str(e.value)


@pytest.mark.parametrize(
    ("keywords", "kind"),
    [
        ({}, Sampling.GREEDY),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, Sampling.GREEDY),
        ({"temperature": 0.7}, Sampling.RANDOM),
        ({"temperature": 0.7, "seed": 3}, Sampling.RANDOM),
        ({"temperature": 0.7, "top_k": 1}, Sampling.FILTERED),
        ({"temperature": 0.7, "top_p": 0.9}, Sampling.FILTERED),
        ({"temperature": 0.7, "min_p": 0.9}, Sampling.FILTERED),
        ({"repetition_penalty": 1.1}, Sampling.PENALIZED),
        ({"presence_penalty": -0.5}, Sampling.PENALIZED),
        ({"temperature": 1, "top_k": 2, "frequency_penalty": 0.5}, Sampling.PENALIZED),
    ],
)
def test_kind(keywords, kind):
    assert SamplingParams(**keywords).kind is kind


def test_defaults_are_the_neutral_values():
    assert SamplingParams().values() == tuple(neutral for _, neutral in FIELDS.values())


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"temperature", "seed"}))
def test_every_field_asks_for_a_step_that_computes_it(name):
    """A field that `kind` does not know would be accepted and do nothing."""
    asked = SamplingParams(temperature=1.0, **{name: 3 if name == "top_k" else 0.5})
    assert asked.kind.value > Sampling.RANDOM.value
