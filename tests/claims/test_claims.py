"""The claims are the paper's, and each verdict follows from the interval alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.claims import BY_ID, CLAIMS, VERDICTS, Claim, Tolerance, judge
from repro.suite import Evidence

NAN = float("nan")


def evidence(claim, value, low=None, high=None, kind="measured", baseline=None, treated=None):
    low, high = value if low is None else low, value if high is None else high
    return Evidence(claim, value, low, high, kind, baseline, treated)


def verdict(claim, *args, **kwargs):
    return judge(BY_ID[claim], evidence(claim, *args, **kwargs))[0]


def test_all_eighteen_claims_with_the_papers_values():
    assert {c.id: c.paper for c in CLAIMS} == {
        "K1": 3.21, "K2": 1.42, "K3": 61.9, "K4": 4.8, "K5": 5.0,
        "B1": 0.35, "B2": 0.92, "B3": 51.5, "B4": 44.4, "B5": 22.7, "B6": None, "B7": 50.0,
        "T1": 25.6, "T2": 27.18, "T3": None, "T4": 1.10, "T5": 0.0, "T6": 25.0,
    }  # fmt: skip
    assert len({c.title for c in CLAIMS}) == len({c.statement for c in CLAIMS}) == 18


@pytest.mark.parametrize(
    ("claim", "effect"),
    [
        ("B3", lambda old, new: 100 * (1 - new / old)),
        ("B4", lambda old, new: 100 * (1 - new / old)),
        ("T1", lambda old, new: 100 * (new / old - 1)),
        ("T2", lambda old, new: 100 * (new / old - 1)),
        ("T4", lambda old, new: new / old),
        ("K5", lambda old, new: old / new),
    ],
)
def test_printed_baseline_and_treated_values_give_the_printed_effect(claim, effect):
    c = BY_ID[claim]
    # the paper rounds to three or four digits
    assert effect(c.paper_baseline, c.paper_treated) == pytest.approx(c.paper, rel=2e-3)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (3.54, 4.0, "exceeded"),
        (3.53, 4.0, "reproduced"),  # 3.21 * 1.1 = 3.531 lies inside
        (2.889, 2.9, "reproduced"),  # 3.21 * 0.9 = 2.889
        (2.8, 3.0, "ambiguous"),
        (0.5, 3.0, "ambiguous"),
        (1.01, 2.8, "partly"),
        (0.9, 2.8, "not reproduced"),
        (0.5, 0.9, "not reproduced"),
        (1.0, 1.0, "not reproduced"),
    ],
)
def test_a_tolerance_judges_the_whole_interval(low, high, expected):
    assert verdict("K1", (low + high) / 2, low, high) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(28.2, 30, "exceeded"), (23.1, 24, "reproduced"), (1, 5, "partly"), (-5, -1, "not reproduced")],
)
def test_a_gain_has_no_effect_at_zero(low, high, expected):
    assert verdict("T1", (low + high) / 2, low, high) == expected


def test_no_effect_is_never_reproduced_even_within_the_tolerance():
    # 10% of a ratio of 1.10 reaches below 1
    assert verdict("T4", 1.0) == "not reproduced"
    assert verdict("T4", 1.02, 0.995, 1.05) == "ambiguous"
    assert verdict("T4", 1.02, 1.01, 1.03) == "reproduced"


@given(low=st.floats(-100, 200), width=st.floats(0, 50), shift=st.floats(0, 50))
@settings(derandomize=True, max_examples=200)
def test_a_better_interval_never_gets_a_worse_verdict(low, width, shift):
    order = ["not reproduced", "partly", "ambiguous", "reproduced", "exceeded"]
    worse, better = verdict("B3", low, low, low + width), verdict("B3", low + shift, low + shift, low + shift + width)
    # moving an interval up may take it from "partly" to "ambiguous" and so on, never back
    assert order.index(better) >= order.index(worse)


@pytest.mark.parametrize(
    ("claim", "low", "high", "expected"),
    [
        ("B1", 0.3, 0.5, "reproduced"),
        ("B1", 0.4, 0.6, "ambiguous"),
        ("B1", 0.51, 0.6, "not reproduced"),
        ("B1", -0.9, -0.8, "reproduced"),
        ("B2", 0.83, 0.9, "reproduced"),
        ("B2", 0.8, 0.9, "ambiguous"),
        ("B2", 0.7, 0.8, "not reproduced"),
        ("B6", 12.0, 20.0, "reproduced"),
        ("B6", 19.0, 21.0, "ambiguous"),
        ("B6", 20.1, 30.0, "not reproduced"),
        ("T3", 1.001, 1.2, "reproduced"),
        ("T3", 1.0, 1.2, "ambiguous"),  # the floor must be higher, not equal
        ("T3", 0.9, 1.0, "not reproduced"),
        ("T5", -1.0, 2.0, "reproduced"),
        ("T5", -1.0, 3.0, "ambiguous"),
        ("T5", -30.0, 30.0, "ambiguous"),
        ("T5", 2.1, 3.0, "not reproduced"),
        ("T5", -9.0, -3.0, "not reproduced"),
    ],
)
def test_thresholds_and_equivalences(claim, low, high, expected):
    assert verdict(claim, (low + high) / 2, low, high) == expected


@pytest.mark.parametrize(
    ("chain", "fused", "expected"),
    [
        (5, 1, "reproduced"),
        (9, 1, "reproduced"),
        (4, 1, "partly"),
        (8, 2, "partly"),
        (1, 1, "not reproduced"),
        (None, 1, "not run"),
    ],
)
def test_graph_nodes_are_counted(chain, fused, expected):
    assert verdict("K5", 5.0, baseline=chain, treated=fused) == expected


@pytest.mark.parametrize(
    "numbers", [(NAN, 1, 2), (1.5, NAN, 2), (1.5, 1, NAN), (math.inf, 1, 2), (1.5, 1, math.inf), (None, 1, 2)]
)
def test_what_is_no_number_decides_nothing(numbers):
    told, reason = judge(BY_ID["K1"], Evidence("K1", *numbers, "measured"))
    assert told == "not run"
    assert "of the evidence is" in reason


@pytest.mark.parametrize("kind", ["", None, "paper", "guessed"])
def test_evidence_must_be_measured_or_simulated(kind):
    told, reason = judge(BY_ID["K1"], Evidence("K1", 4, 3.9, 4.1, kind))
    assert told == "not run"
    assert repr(kind) in reason


def test_a_reversed_interval_decides_nothing():
    assert judge(BY_ID["K1"], Evidence("K1", 4, 4.1, 3.9, "measured"))[0] == "not run"


@pytest.mark.parametrize("value", [9.0, 3.41, 3.19, -3.3])
def test_a_value_outside_its_own_interval_decides_nothing(value):
    told, reason = judge(BY_ID["K1"], Evidence("K1", value, 3.2, 3.4, "measured"))
    assert told == "not run"
    assert reason == f"value {value} lies outside its own interval [3.2, 3.4]"


def test_rounding_does_not_put_an_exact_value_outside_its_interval():
    assert 0.1 + 0.2 > 0.3
    assert verdict("B1", 0.1 + 0.2, 0.3, 0.3) == verdict("B1", -(0.1 + 0.2), -0.3, -0.3) == "reproduced"
    assert verdict("B1", 0.3, 0.3, 0.3) == verdict("B1", 0.3, 0.2, 0.3) == "reproduced"


def test_evidence_cannot_decide_another_claim():
    with pytest.raises(ValueError, match="'K2' cannot decide 'K1'"):
        judge(BY_ID["K1"], evidence("K2", 2.0))


@pytest.mark.parametrize("paper", [None, 1.0, -2.0])
def test_a_tolerance_needs_an_effect_of_the_paper(paper):
    claim = Claim("X1", "t", "s", "e", "x", paper, Tolerance(1.0))
    with pytest.raises(ValueError, match=f"X1: a tolerance needs the paper's value, above 1, got {paper}"):
        judge(claim, evidence("X1", 2.0))


@given(claim=st.sampled_from(CLAIMS), low=st.floats(-200, 200), width=st.floats(0, 100), counts=st.integers(1, 9))
@settings(derandomize=True, max_examples=200)
def test_every_finite_interval_gets_one_of_the_verdicts(claim, low, width, counts):
    e = Evidence(claim.id, low, low, low + width, "simulated", baseline=counts, treated=1)
    assert judge(claim, e)[0] in VERDICTS[:-1]
