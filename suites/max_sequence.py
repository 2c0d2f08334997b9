"""The longest sample that trains under each AdaLN at the same peak memory, and where the memory goes.

The baseline takes a sample of START tokens, the paper's longest, forward and backward through the trainer on one GPU;
its peak is the budget within which the other AdaLNs' longest sample is searched. On CPUs, for trying it out, what
autograd saves stands in for the allocator's peak.

Columns: model, layers, adaln, checkpointing.
Metrics: longest (tokens of one sample, exact to STEP tokens), and of that sample peak_memory, static_memory
(parameters), held_memory (what the forward pass leaves for the backward pass), working_memory (the rest of the peak: of
the block at work), all GB of 10^9 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance.models import MODELS
from repro.measure.stats import exact
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile
from suites import _ranks

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "max_sequence"
CLAIMS = ("T4",)
NEEDS = (NAME,)
PARAMETERS = ("model", "layers", "adaln", "checkpointing")

START, STEP = 48_000, 400
"""Tokens: the baseline's sample (AdaptiveLoad, arXiv 2605.17923), and those of a latent frame of 256 x 400 pixels."""
MOST = 300
"""Latent frames that are not gone beyond."""
BASELINE = "wan"
"""The formula as Wan 2.1 runs it, in fp32: as in the paper's other claims about memory (K3, K4), discrete kernels of
the model that it trains. The plain bf16 chain, `eager`, saves less and stands in the note. Fixed before measuring."""
ADALNS = (BASELINE, "eager", "fused")
DECIDES = ("wan-1.3b", 30, "full")
"""A whole model; the larger one is extrapolated from two blocks, since it does not fit one GPU with its gradients."""
SETTINGS = (DECIDES, ("wan-14b", 2, "full"), ("wan-1.3b", 4, "none"))
TINY = ("tiny", 1, "none")

PARTS = {"static": "parameters", "held": "kept for backward", "working": "block at work"}


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """The baseline of each setting before the others, on one GPU."""
    settings = (TINY,) if profile == "smoke" else SETTINGS if machine.gpu_count == 1 else ()
    found: list[Case] = []
    for model, layers, checkpointing in settings:
        once = 4 * layers * float(MODELS[model].forward_flops(1, START)) / 430e12
        for adaln in ADALNS:
            begins = 4.0 if found else 15.0  # an engine; at first a rank too
            passes = 1.0 if adaln == BASELINE else 3.3
            seconds = round(begins + passes * once, 1) if machine.has_gpu else 3.0
            found.append(Case(dict(zip(PARAMETERS, (model, layers, adaln, checkpointing), strict=True)), seconds))
    return found


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """The baseline's peak, or the longest sample within it."""
    key = case.key
    tiny = key["model"] == "tiny"
    asked: dict[str, Any] = {name: key[name] for name in PARAMETERS} | {"most": 8 if tiny else MOST}
    asked |= {"start": 4, "frame": [32, 32]} if tiny else {"start": START // STEP}
    if key["adaln"] != BASELINE:
        asked["budget"] = _budget(inputs, key)
    what = f"{key['layers']} layers of {key['model']}"
    found = _ranks.ask(1, "repro.wan.probing_memory:longest", asked, case, machine, what)
    static, held, peak = (found[name] / 1e9 for name in ("static", "held", "peak"))
    return [
        exact("longest", "tokens", found["tokens"]),
        exact("peak_memory", "GB", peak),
        exact("static_memory", "GB", static),
        exact("held_memory", "GB", held),
        exact("working_memory", "GB", peak - static - held),
    ]


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """T4 from the whole 1.3B model under full checkpointing; other settings stand in the note."""
    own = rows[rows["suite"] == NAME]
    longest, peak, of_baseline = (
        _value(own, DECIDES, adaln, metric)
        for adaln, metric in (("fused", "longest"), ("fused", "peak_memory"), (BASELINE, "peak_memory"))
    )
    if longest is None or peak is None or of_baseline is None:
        return []
    told = [f"eager {_ratio(own, DECIDES, 'eager')}"]
    told.append(f"no checkpointing, {SETTINGS[2][1]} blocks: fused {_ratio(own, SETTINGS[2], 'fused')}")
    whole = MODELS["wan-14b"].layers
    told.append(f"wan-14b, extrapolated from 2 to {whole} blocks: fused {_percent(extrapolated(own, 'fused', whole))}")
    note = (
        f"longest sample at the peak that {START:,} tokens take under Wan's own fp32 formula: {DECIDES[0]}, all "
        f"{DECIDES[1]} blocks, forward and backward through the trainer on one GPU, full checkpointing, exact to "
        f"{STEP} tokens; AdamW's moments, the same for all, not yet made. {'; '.join(told)}"
    )
    value, high = longest / START, (longest + STEP) / START
    equal = peak <= of_baseline
    if not equal:
        note = (
            f"not at equal peaks: the two were measured apart, and the fused op's peak is above the baseline's; {note}"
        )
    return [Evidence("T4", value, value, high, "measured", float(START), longest, note, decides=equal)]


def extrapolated(own: pd.DataFrame, adaln: str, layers: int) -> float | None:
    """Longest sample over the baseline's in `layers` blocks of 14B: what is held grows with depth, the rest does not.

    All of it is proportional to tokens. None where rows are missing.
    """
    model, measured, checkpointing = SETTINGS[1]
    per_token = []
    for name in (BASELINE, adaln):
        values = [
            _value(own, (model, measured, checkpointing), name, m) for m in ("held_memory", "working_memory", "longest")
        ]
        if any(v is None for v in values):
            return None
        held, working, tokens = np.array(values, np.float64)
        per_token.append((held * layers / measured + working) / tokens)
    return float(per_token[0] / per_token[1])


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device where the same peak goes under every AdaLN; then the ratios on all devices."""
    own = rows[(rows["suite"] == NAME) & (rows["model"] != "tiny")]
    figures = [f for device, table in own.groupby("device", sort=True) for f in _draw_device(str(device), table)]
    return figures + _draw_devices(own)


def _budget(inputs: pd.DataFrame, key: Any) -> int:
    """The baseline's peak in bytes. Raises CaseSkipped where it was not measured."""
    setting = str(key["model"]), int(key["layers"]), str(key["checkpointing"])
    peak = None if inputs.empty else _value(inputs[inputs["suite"] == NAME], setting, BASELINE, "peak_memory")
    if peak is None:
        raise CaseSkipped(f"the baseline's peak of {setting[0]} with {setting[1]} blocks is not recorded here")
    return round(1e9 * peak)


def _value(own: pd.DataFrame, setting: tuple[str, int, str], adaln: str, metric: str) -> float | None:
    model, layers, checkpointing = setting
    at = own[(own["model"] == model) & (own["adaln"] == adaln) & (own["checkpointing"] == checkpointing)]
    at = at[(at["layers"].astype(int) == layers) & (at["metric"] == metric)]
    return None if at.empty else float(at["value"].iloc[-1])


def _ratio(own: pd.DataFrame, setting: tuple[str, int, str], adaln: str) -> str:
    longest = _value(own, setting, adaln, "longest")
    return _percent(None if longest is None else longest / START)


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.3f}x"


def _draw_device(device: str, table: pd.DataFrame) -> list[Figure]:
    from repro.report import style

    shown = [s for s in SETTINGS if _value(table, s, BASELINE, "longest") is not None]
    if not shown:
        return []
    figure, axes = style.subplots(len(shown), 1, 1.25)
    shades = dict(zip(PARTS, ("#BBBBBB", "#56B4E9", "#D55E00"), strict=True))
    for ax, setting in zip(axes[:, 0], shown, strict=True):
        names = [a for a in ADALNS if _value(table, setting, a, "longest") is not None]
        left = np.zeros(len(names))
        for part, label in PARTS.items():
            values = np.array([_value(table, setting, a, f"{part}_memory") or 0.0 for a in names])
            ax.barh(range(len(names)), values, left=left, color=shades[part], label=label, height=0.7)
            left += values
        ax.set_yticks(
            range(len(names)),
            [f"{style.label(a)}: {_value(table, setting, a, 'longest') or 0:,.0f} tokens" for a in names],
        )
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        how = "no" if setting[2] == "none" else setting[2]
        ax.set_title(f"{setting[0]}, {setting[1]} blocks, {how} checkpointing")
    axes[-1, 0].set_xlabel("peak of the longest sample that fits, GB")
    style.legend(figure, ["measured"], bars=True)
    caption = (
        f"The longest sample that trains on {device} within the peak that {START:,} tokens take under Wan's own "
        "formula, and where that memory goes: forward and backward of the trainer."
    )
    return [Figure(f"max_sequence-{device}", figure, caption, CLAIMS)]


def _draw_devices(own: pd.DataFrame) -> list[Figure]:
    """The ratio that T4 is about, on all devices."""
    from repro.report import devices

    table = own[(own["metric"] == "longest") & (own["adaln"] != BASELINE)]
    if not devices.several(table):
        return []
    row = table["model"] + ", " + table["layers"].astype(int).astype(str) + " blocks\n" + table["checkpointing"]
    panel = table.assign(row=row + " checkpointing, " + table["adaln"])
    for column in ("value", "ci_low", "ci_high"):
        panel[column] = panel[column] / START
    name = "longest sample over the baseline's"
    caption = f"Longest sample at equal peak memory, over {START:,} tokens under Wan's own formula, on each device."
    return [Figure("max_sequence-devices", devices.dots({name: panel}, {name: ("paper: 1.10", 1.1)}), caption, CLAIMS)]
