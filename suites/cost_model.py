"""From measured shapes to a batch table: cost models fitted to step times, their errors, and the limits they give.

Answers B6: step time follows a + b * B * S^p, and nothing on the way to a batch size is set by hand. The fit gives p,
the measured peaks give M_mem, the longest bucket gives M_comp (`repro.balance.limits`).

Columns: model, adaln (as in block_time), form (power: the paper's; quadratic: linear and quadratic in S with a term for
each sample's text; table: the measurements, interpolated).
Metrics: mape and held_out_mape (%; whole lengths held out); a, b, c, d (ms a block, lengths in units of 10^4 tokens),
p; memory_mape (%), m_mem (tokens: what fits on this device beside the model's state, full sharding over RANKS ranks),
m_mem_used (the same, at most what was measured), m_comp (tokens^p), target (s at full depth), and batch_at_S for each
bucket of wan-uniform: the paper's rule for `power`, the largest batch within the target for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from repro.balance import limits, whole
from repro.balance.cost import PowerCost
from repro.balance.fit import FORMS, Fit, Form, Observations, fit, observations, parameter_intervals
from repro.balance.memory import MARGIN, fit_memory, memory_limit
from repro.balance.models import MODELS
from repro.balance.policies import DualConstraint, EqualTime
from repro.suite import Case, CaseSkipped, Evidence, Figure, Kind, Measurement, Profile
from suites import block_time

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "cost_model"
CLAIMS = ("B6",)
NEEDS = whole.SUITES
PARAMETERS = ("model", "adaln", "form")
SIMULATED = True

RANKS = 8
"""Ranks that share parameters and optimizer state where M_mem is stated: the smaller of the paper's two settings."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Every model, AdaLN and form for which `block_time` measures this profile here."""
    measured = block_time.cases(profile, machine)
    pairs = dict.fromkeys((str(c.key["model"]), str(c.key["adaln"])) for c in measured)
    return [
        Case({"model": m, "adaln": a, "form": f}, seconds=0.3 if f == "table" else 2) for m, a in pairs for f in FORMS
    ]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Fit one form to a model's step times, hold lengths out, derive limits and batch sizes."""
    model, adaln, form = str(case.key["model"]), str(case.key["adaln"]), cast(Form, case.key["form"])
    try:
        data = observations(inputs, model, adaln)
        fitted = fit(form, data)
    except ValueError as e:
        raise CaseSkipped(f"there are too few rows yet: {e}") from e
    return [
        *_errors(fitted),
        *_parameters(form, data),
        *_limits(fitted, model, adaln, form, machine, inputs),
    ]


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """B6 from the power law of the 14B model with eager AdaLN; other fits stand in the note."""
    table = rows[(rows["suite"] == NAME) & (rows["adaln"] == "eager")]
    found = {(str(r.model), str(r.form), str(r.metric)): r for r in table.itertuples()}
    row = found.get(("wan-14b", "power", "held_out_mape"))
    if row is None:
        return []

    def text(model: str, form: Form, metric: str) -> str:
        at = found.get((model, form, metric))
        return "unknown" if at is None else f"{cast(float, at.value):.4g}"

    def told(model: str) -> str:
        at = found.get((model, "power", "p"))
        if at is None:
            return f"{model} width unknown"
        swept = whole.behind(rows, model, str(at.source))
        stands = (
            "plain blocks on one GPU, no communication"
            if swept is None
            else f"the whole model's sweep on {swept.gpus} with {swept.adaln} AdaLN, eager's added"
        )
        return (
            f"{model} width: p = {text(model, 'power', 'p')}, {text(model, 'power', 'held_out_mape')}%, with "
            f"b B S + c B S^2 + d B {text(model, 'quadratic', 'held_out_mape')}% ({at.kind}: {stands})"
        )

    note = (
        f"mean absolute error with whole lengths held out. {'; '.join(map(told, block_time.SHOWN))}. M_mem of 14B: "
        f"{text('wan-14b', 'power', 'm_mem')} tokens, from measured peaks ({RANKS} ranks, full sharding, "
        f"{MARGIN:.0%} of the device left alone); M_comp from the longest bucket"
    )
    value, low, high = (float(cast(float, x)) for x in (row.value, row.ci_low, row.ci_high))
    return [Evidence("B6", value, low, high, cast(Kind, row.kind), note=note)]


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device measured step time with the fitted lines and the errors of held-out lengths; then all devices."""
    figures = [
        figure
        for device, own in rows[rows["suite"] == block_time.NAME].groupby("device", sort=True)
        for figure in _draw_device(str(device), own)
    ]
    return figures + _draw_devices(rows[rows["suite"] == NAME])


def _errors(fitted: Fit) -> list[Measurement]:
    data = fitted.observations
    rows = []
    for metric, relative in (("mape", fitted.residuals), ("held_out_mape", fitted.held_out)):
        value, low, high = fitted.error(relative)
        n = int(data.measured.sum()) or data.batch.size
        rows.append(Measurement(metric, "%", value, low, high, n, _kind(data), data.source))
    return rows


def _parameters(form: Form, data: Observations) -> list[Measurement]:
    rows = []
    for name, ends in parameter_intervals(form, data).items():
        # a and the slopes are times of the blocks measured; stated a block, they do not depend on how many those were
        unit, factor = ("", 1.0) if name == "p" else ("ms", 1e3 / data.layers)
        value, low, high = (factor * x for x in ends)
        rows.append(Measurement(name, unit, value, low, high, data.batch.size, _kind(data), data.source))
    return rows


def _kind(data: Observations) -> Kind:
    """Computed from measured times alone, or also from times put together from another AdaLN's."""
    return "measured" if data.measured.all() else "simulated"


def _limits(
    fitted: Fit, model: str, adaln: str, form: Form, machine: Machine, inputs: pd.DataFrame
) -> list[Measurement]:
    """Limits and batch sizes at full depth: simulated, since the sweep has fewer blocks."""
    source = fitted.observations.source

    def row(metric: str, unit: str, value: float) -> Measurement:
        return Measurement(metric, unit, value, value, value, 1, "simulated", source)

    size = MODELS[model]
    cost = fitted.cost.scaled(size.layers)
    buckets = np.unique(fitted.observations.tokens if model == "tiny" else block_time.BUCKETS)
    rows = []
    m_mem = cost.range.micro_batch_tokens
    if machine.has_gpu and machine.memory_bytes:
        try:
            memory = fit_memory(inputs, model, adaln)
        except ValueError:
            pass  # a sweep cut short before its second depth still gives its times; no m_mem is stated
        else:
            fits = memory_limit(memory, size, machine.memory_bytes, RANKS, "micro_batch", int(buckets.min()))
            rows += [row("memory_mape", "%", memory.mape), row("m_mem", "tokens", fits)]
            m_mem = min(m_mem, fits)
    rows.append(row("m_mem_used", "tokens", m_mem))
    if isinstance(cost, PowerCost):
        chosen = limits.choose(cost, buckets, m_mem)
        rows += [row("m_comp", "tokens^p", chosen.m_comp), row("target", "s", chosen.target_seconds)]
        batches = DualConstraint(m_mem, chosen.m_comp, chosen.p).batch_sizes(buckets)
    else:
        # m_mem_used bounds the tokens together; at some lengths a table was measured at fewer, and goes on as its form
        anywhere = cost.extrapolating()
        target = limits.target_seconds(anywhere, buckets, m_mem)
        rows.append(row("target", "s", target))
        batches = EqualTime(m_mem, anywhere, target).batch_sizes(buckets)
    return rows + [row(f"batch_at_{s}", "samples", b) for s, b in zip(buckets, batches, strict=True)]


def _draw_device(device: str, rows: pd.DataFrame) -> list[Figure]:
    from repro.report import style

    fits: dict[str, dict[Form, Fit]] = {}
    for model in block_time.SHOWN:
        try:
            data = observations(rows, model, "eager")
            fits[model] = {form: fit(form, data) for form in ("power", "quadratic")}
        except ValueError:
            continue
    if not fits:
        return []
    looks: dict[Form, tuple[str, str, str]] = {
        "power": (style.ORANGE, "s", "a + b B S^p (the paper's form)"),
        "quadratic": (style.BLUE, "o", "a + b B S + c B S² + d B"),
    }
    figure, axes = style.subplots(2, len(fits), 2.3)
    for column, (model, forms) in enumerate(fits.items()):
        top, bottom = axes[:, column]
        data = forms["power"].observations
        lengths = np.geomspace(data.tokens.min(), data.tokens.max(), 200)
        single = data.batch == 1
        full = ~single & (data.batch == np.maximum(1, block_time.BUDGETS[0] // data.tokens))
        scale = 1e3 / data.layers
        for k, (form, fitted) in enumerate(forms.items()):
            color, marker, label = looks[form]
            top.plot(lengths, scale * fitted.cost.seconds(1, lengths), color=color)
            for s in np.unique(data.tokens[full]):
                top.plot(s, scale * fitted.cost.seconds(block_time.BUDGETS[0] // s, s), "_", color=color, markersize=10)
            bottom.plot(data.tokens, 100 * fitted.held_out, marker, color=color, label=label, alpha=0.7)
            told = f"mean {fitted.held_out_mape:.1f}%"
            bottom.text(0.97, 0.97 - 0.11 * k, told, color=color, weight="bold", transform=bottom.transAxes, ha="right",
                        va="top", fontsize=style.SMALLEST)  # fmt: skip
        top.plot(data.tokens[single], scale * data.seconds[single], "o", color=style.BLACK, label="measured, B = 1")
        tokens = f"measured, {block_time.BUDGETS[0]:,} tokens"
        top.plot(data.tokens[full], scale * data.seconds[full], "D", color=style.GREY, label=tokens)
        top.set(yscale="log", title=f"{model} width")
        style.log_ticks(top.yaxis)
        bottom.axhline(0, color=style.BLACK, linewidth=0.8)
        low, high = bottom.get_ylim()
        bottom.set_ylim(low, high + 0.25 * (high - low))  # room for the means
        for ax in (top, bottom):
            style.token_axis(ax, data.tokens, "tokens of one sample, S" if ax is bottom else "")
    axes[0, 0].set_ylabel("ms a block")
    axes[1, 0].set_ylabel("error with length held out, %")
    style.legend(figure, [])
    caption = (
        f"Cost models fitted to block_time on {device} (eager AdaLN, forward and backward). Above: measured step time; "
        "lines (B = 1) and dashes (48,000 tokens) are the fits. Below: relative error of each shape when all shapes of "
        "its length are left out of the fit, and the mean absolute error. Rows and notes of a model that was swept "
        "whole stand on that sweep instead."
    )
    return [Figure(f"cost_model-{device}", figure, caption, CLAIMS)]


def _draw_devices(rows: pd.DataFrame) -> list[Figure]:
    """Held-out errors and fitted exponents on all devices."""
    from repro.report import devices

    rows = rows[(rows["adaln"] == "eager") & rows["model"].isin(block_time.SHOWN)]
    errors = rows[rows["metric"] == "held_out_mape"]
    if not devices.several(errors):
        return []
    exponents = rows[rows["metric"] == "p"]
    error = "error with length held out, %"
    panels = {
        error: errors.assign(row=errors["model"] + ", " + errors["form"]),
        "exponent p of the power law": exponents.assign(row=exponents["model"]),
    }
    figure = devices.dots(panels, {error: ("B6 wants at most 20%", 20.0)})
    caption = "Cost models fitted to each device's own step times: mean absolute error of lengths held out, and p."
    return [Figure("cost_model-devices", figure, caption, CLAIMS)]
