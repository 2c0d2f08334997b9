"""More ranks than were measured: epochs simulated from what the trainer's shapes took on the ranks that there are.

`throughput_measured` keeps what every shape took when all ranks ran it at once, exchange of parameters and gradients
included. From that table epochs of any number of ranks follow, under the same rule for batch sizes: a step takes what
its slowest rank takes wherever ranks meet, and an update. Assumed: a shape takes on more ranks what it took on the
measured ones, on whatever connects them. How far the same reckoning was off on the measured ranks stands in the notes.

Columns: `repro.balance.campaign.PARAMETERS`, layers, table_ranks (that the table was measured on). Metrics:
tokens_per_s, samples_per_step, step_cv, load_cv, rank_cv (`repro.balance.metrics`); gain, step_cv_fall, load_cv_fall
(%, over equal_token with eager AdaLN in the same setting, seeds paired). Intervals are over seeds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from repro.balance import assumptions, metrics, replay
from repro.balance.campaign import Setting
from repro.corpus import mixes
from repro.corpus.shapes import Corpus
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile
from suites import _campaign, _epoch_claims, _epochs, throughput_measured
from suites._epochs import CALIBRATION, POLICIES, SOLO, depth

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

Floats = npt.NDArray[np.float64]

NAME = "throughput_scaled"
CLAIMS = ("T2", "B4")
NEEDS = ("throughput_measured",)
PARAMETERS = (*throughput_measured.PARAMETERS, "table_ranks")
SIMULATED = True

CLAIMED = 16
"""Ranks that T2 and B4 are about."""
ADALNS = ("eager", "fused")
SEEDS, STEPS = 10, 200
SMOKE_SEEDS, SMOKE_STEPS = 2, 10
FALLING = ("step_cv", "load_cv")
UNITS = {name: metrics.UNITS.get(name, "fraction") for name in
         ("tokens_per_s", "samples_per_step", "step_cv", "load_cv", "rank_cv")}  # fmt: skip


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """As many ranks as the claims are about first, then fewer, down to the measured ones, to hold against these."""
    if profile == "smoke":
        (first, *_) = throughput_measured.cases(profile, machine)
        start = Setting.of(first.key)
        measured = start.ranks
        start = replace(start, ranks=2 * measured)
        settings = [replace(start, policy=p, adaln="fused") for p in POLICIES]
        return [_case(s, int(first.key["layers"]), measured) for s in settings]
    if machine.gpu_count < 2:
        return []
    model, layers = _epochs.scaled_model(machine.gpu_count)
    ranks = [*(r for r in (CLAIMED, _epochs.CLAIMED_RANKS) if r > machine.gpu_count), machine.gpu_count]
    settings = [Setting(p, a, r, model=model) for r in ranks for a in ADALNS for p in POLICIES]
    return [_case(s, layers, machine.gpu_count) for s in settings]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Simulate one setting, and the baseline on the same seeds. Raises CaseSkipped where a table is missing."""
    setting, smoke = Setting.of(case.key), bool((inputs["profile"] == "smoke").all())
    known = _Tables(inputs, setting.model, int(case.key["layers"]), int(case.key["table_ranks"]))
    found, source = known.epochs(setting, smoke)
    rows = [_campaign.row(name, UNITS[name], found[name], source) for name in UNITS]
    baseline = replace(setting.baseline(), adaln="fused" if smoke else assumptions.BASELINE[1])
    if setting != baseline:
        before, sources = known.epochs(baseline, smoke)
        source = " ".join(sorted({*source.split(), *sources.split()}))
        percent = 100 * (found["tokens_per_s"] / before["tokens_per_s"] - 1)
        rows.append(_campaign.row("gain", "%", percent, source, keep=True))
        rows += [
            _campaign.row(f"{cv}_fall", "%", 100 * (1 - found[cv] / before[cv]), source, keep=True)
            for cv in FALLING
            if before[cv].all()
        ]
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """T2 and B4 on 16 ranks; from the table of fewer than eight they decide nothing."""
    own = rows[(rows["suite"] == NAME) & (rows["ranks"] == CLAIMED)] if len(rows) else rows
    if own.empty:
        return []
    table_ranks, layers, model = int(own["table_ranks"].max()), int(own["layers"].iloc[-1]), str(own["model"].iloc[-1])
    whole = Setting(*assumptions.ADAPTIVELOAD, CLAIMED, model=model)
    measured = rows[rows["suite"] == throughput_measured.NAME]
    at = [replace(s, ranks=table_ranks) for s in (whole.baseline(), whole)]
    result = []
    for claim, treated, metric, compared in (
        ("T2", whole, "gain", "tokens_per_s"),
        ("B4", replace(whole, adaln=assumptions.BASELINE[1]), "step_cv_fall", "step_cv"),
    ):
        effect = _campaign.lookup(own, treated, metric)
        if effect is None:
            continue
        ours = _campaign.percent(_campaign.value(own, replace(treated, policy="balanced"), metric))
        note = (
            f"{CLAIMED} ranks simulated from what shapes took on {table_ranks} measured ones: "
            f"{depth(model, layers)}, {treated.corpus}, M_mem (a) {treated.m_mem:,} tokens, one "
            f"micro-batch a step and rank; balanced {ours}; {_epoch_claims.simulator_error(measured, at)}"
        )
        pair = _campaign.compare(own, treated, compared, 100 if claim == "B4" else 1)
        found = _campaign.evidence(claim, effect, pair, note)
        result.append(replace(found, decides=table_ranks >= _epochs.CLAIMED_RANKS))
    return result


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device gains by policy and AdaLN on the measured ranks and beyond, with what was measured; then all."""
    own = rows[(rows["suite"] == NAME) & (rows["model"] != "tiny") & (rows["metric"] == "gain")]
    figures = [_draw_device(str(device), table) for device, table in own.groupby("device", sort=True)]
    return figures + _draw_devices(own)


class _Tables:
    """Solo times of one device and depth, as costs by AdaLN, and epochs from them."""

    def __init__(self, inputs: pd.DataFrame, model: str, layers: int, ranks: int) -> None:
        own = inputs[(inputs["suite"] == throughput_measured.NAME) & (inputs["model"] == model)]
        self._rows = own[(own["layers"].astype(int) == layers) & (own["ranks"].astype(int) == ranks)]
        self._layers = layers

    def epochs(self, setting: Setting, smoke: bool) -> tuple[dict[str, Floats], str]:
        """Metrics of UNITS, float64 [seeds] each, and the run_ids behind them."""
        rule, _ = self._costs("fused", self._rows["policy"] == CALIBRATION)
        cost, source = self._costs(setting.adaln, self._rows["sync"] == setting.sync)
        corpus = _corpus(setting, SMOKE_STEPS if smoke else STEPS)
        policy, update = _epochs.policy(setting, corpus, rule), self._update(setting)
        found: dict[str, list[float]] = {name: [] for name in UNITS}
        for seed in range(SMOKE_SEEDS if smoke else SEEDS):
            s = policy.schedule(corpus, setting.layout, seed)
            seconds = replay.predict(s, cost.table, update, setting.sync)
            tokens = corpus.tokens[s.bucket]
            values = {
                "tokens_per_s": float((s.batch * tokens).sum() / seconds.sum()),
                "samples_per_step": corpus.samples / s.steps,
                "step_cv": metrics.variation(seconds),
                "load_cv": _over_ranks(s.batch * tokens.astype(np.float64) ** 2, setting),
                "rank_cv": _over_ranks(metrics.compute_seconds(s, cost.table), setting),
            }
            for name, value in values.items():
                found[name].append(value)
        return {name: np.array(values) for name, values in found.items()}, source

    def _costs(self, adaln: str, at: pd.Series) -> tuple[_epochs.Costs, str]:
        own = self._rows[at & (self._rows["adaln"] == adaln)]
        own = own[own["metric"].str.startswith(SOLO)]
        source = " ".join(sorted(set(own["run_id"].astype(str))))
        median = own.groupby("metric")["value"].median()
        shapes = [_epochs.solo_shape(str(m)) for m in median.index]
        times = tuple(sorted((b, s, float(ms) / 1e3) for (b, s), ms in zip(shapes, median, strict=True)))
        try:
            return _epochs.costs(times, self._layers, source), source
        except ValueError as error:
            raise CaseSkipped(f"throughput_measured has too few solo times under {adaln} AdaLN yet: {error}") from error

    def _update(self, setting: Setting) -> float:
        own = self._rows[(self._rows["metric"] == "update_time") & (self._rows["adaln"] == setting.adaln)]
        own = own[own["sync"] == setting.sync]
        if own.empty:
            raise CaseSkipped(f"throughput_measured has no epoch under {setting.adaln} AdaLN yet")
        return float(own["value"].median()) / 1e3


def _case(setting: Setting, layers: int, table_ranks: int) -> Case:
    key = {**setting.key, "layers": layers, "table_ranks": table_ranks}
    return Case(key, 0.1 if setting.model == "tiny" else 1.0)


def _corpus(setting: Setting, steps: int) -> Corpus:
    """Of as many samples as the baseline takes in about so many steps."""
    if setting.model == "tiny":
        from repro.wan.batching import tiny_corpus

        return tiny_corpus(steps * setting.ranks * 2)
    weights = np.array(mixes.mix(setting.corpus).weights)
    batch = np.maximum(1, setting.token_budget // mixes.named(setting.corpus, 1).tokens)
    return mixes.named(setting.corpus, round(steps * setting.ranks * weights.sum() / (weights / batch).sum()))


def _over_ranks(values_TMR: Floats, setting: Setting) -> float:
    return float(metrics.rank_cv(metrics.meetings(values_TMR, setting.sync)).mean())


def _draw_device(device: str, table: pd.DataFrame) -> Figure:
    from repro.report import style

    ranks = sorted({int(r) for r in table["ranks"]})
    names = style.ordered(list(table["policy"]))
    figure, (axes,) = style.subplots(1, len(ranks), 0.3 * len(names) + 1.3, sharex=True, sharey=True)
    for ax, count in zip(axes, ranks, strict=True):
        for k, adaln in enumerate(ADALNS):
            own = table[(table["ranks"].astype(int) == count) & (table["adaln"] == adaln)]
            place = np.array([names.index(p) for p in own["policy"]]) + 0.24 * (k - 0.5)
            value, low, high = (own[c].to_numpy(float) for c in ("value", "ci_low", "ci_high"))
            look: Any = {"color": style.color(adaln), "marker": style.marker(adaln), "mfc": "white", "ls": "none"}
            ends = np.stack([value - low, high - value]).clip(0)
            ax.errorbar(value, place, xerr=ends, elinewidth=1.2, label=f"{style.label(adaln)} AdaLN", **look)
        ax.axvline(0, color=style.BLACK, linewidth=0.8)
        ax.set_yticks(range(len(names)), [style.label(n) for n in names])
        ax.set(title=f"{count} ranks", xlabel="gain in tokens/s, %")
        ax.grid(axis="y", visible=False)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    style.legend(figure, ["simulated"])
    measured, layers = int(table["table_ranks"].max()), int(table["layers"].max())
    caption = (
        f"Tokens/s over equal-token batches with eager AdaLN, simulated from what shapes took on {measured} ranks of "
        f"{device}: {depth(str(table['model'].iloc[0]), layers)}, {assumptions.CORPUS}, one "
        "micro-batch a step. Bars are 95% intervals over seeds."
    )
    return Figure(f"throughput_scaled-{device}", figure, caption, CLAIMS)


def _draw_devices(table: pd.DataFrame) -> list[Figure]:
    """Gains on 16 ranks, on all devices."""
    from repro.report import devices, style

    own = table[table["ranks"].astype(int) == CLAIMED]
    if not devices.several(own):
        return []
    own = own.assign(row=own["policy"].map(style.label) + ", " + own["adaln"])
    caption = f"Gains on {CLAIMED} ranks, simulated from what shapes took on the measured ranks of each device."
    return [Figure("throughput_scaled-devices", devices.dots({"gain in tokens/s, %": own}), caption, CLAIMS)]
