"""What `throughput_measured` says in the documents: the simulator against reality, and balanced against the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from repro.balance.campaign import Setting
from repro.measure.stats import Interval
from repro.report.documents import NOTHING, kept, table
from suites._campaign import lookup
from suites._epoch_claims import REPLAY_BARS, epoch_gain, of_different_runs
from suites._epochs import POLICIES, depth

if TYPE_CHECKING:
    import pandas as pd

SHARE_BAR = 95.0
"""% of perfect balance that `balanced` is asked for where samples a step are matched."""
SYNC = {"micro_batch": "each micro-batch", "step": "once a step"}


def tell(rows: pd.DataFrame) -> dict[str, str]:
    """Sections `replay`, `balanced`, `fused-epochs` of all devices, `balanced-measured` of that with most ranks."""
    own = rows[(rows["metric"] == "replay_error") & (rows["ranks"].astype(int) > 1)] if len(rows) else rows
    if own.empty:
        return dict.fromkeys(("replay", "balanced", "fused-epochs", "balanced-measured"), NOTHING)
    tables = {str(d): rows[rows["device"] == d] for d in sorted(own["device"].unique())}
    settings = {
        d: [Setting.of(r) for r in t[t["metric"] == "replay_error"].to_dict("records")] for d, t in tables.items()
    }
    most = max(tables, key=lambda d: settings[d][0].ranks)
    found = {"replay": _replay, "balanced": _balanced, "fused-epochs": _fused}
    told = {name: "\n\n".join(say(d, t, settings[d]) for d, t in tables.items()) for name, say in found.items()}
    return told | {"balanced-measured": _sentence(most, tables[most], settings[most])}


def _replay(device: str, rows: pd.DataFrame, settings: list[Setting]) -> str:
    errors = {s: [abs(_row(rows, s, metric).value) for metric in REPLAY_BARS] for s in settings}
    counts = []
    for i, (bar, what) in enumerate(zip(REPLAY_BARS.values(), ("a step", "an epoch"), strict=True)):
        each = [e[i] for e in errors.values()]
        counts.append(
            f"{sum(e <= bar for e in each)} of {len(each)} cells within {bar:g}% {what} (worst {max(each):.1f}%)"
        )
    cells = [[*_cell(s), *(f"{e:.1f}%" for e in errors[s])] for s in settings]
    return f"{device}: {', '.join(counts)}.\n\n" + table([*_HEAD, "a step", "an epoch"], cells)


def _balanced(device: str, rows: pd.DataFrame, settings: list[Setting]) -> str:
    cells = []
    for s in settings:
        if s.policy != "balanced":
            continue
        share = _row(rows, s, "share_of_perfect").map(lambda x: 100 * x)
        gains = [_gained(rows, replace(s, policy=p), s) for p in POLICIES if p != "balanced"]
        verdict = "not asked"
        if s.protocol == "matched":
            verdict = kept(share.low >= SHARE_BAR and _sound(share), share.high < SHARE_BAR)
        cells.append([*_cell(s)[1:], _told(share), verdict, *gains])
    others = [f"over {p}" for p in POLICIES if p != "balanced"]
    return f"{device}, `balanced`:\n\n" + table([*_HEAD[1:], "of perfect", f"at least {SHARE_BAR:g}%", *others], cells)


def _fused(device: str, rows: pd.DataFrame, settings: list[Setting]) -> str:
    cells = []
    for s in settings:
        gain = epoch_gain(rows, replace(s, adaln="eager"), s) if s.adaln == "fused" else None
        if gain is not None:
            told = _cell(s)
            gained = _gained(rows, replace(s, adaln="eager"), s)
            cells.append([*told[:3], told[4], gained, kept(gain.low > 0, gain.high < 0, "faster", "slower")])
    head = [*_HEAD[:3], _HEAD[4], "fused over eager, tokens/s", "fused is"]
    return f"{device}, the same schedule on both sides:\n\n" + table(head, cells)


def _sentence(device: str, rows: pd.DataFrame, settings: list[Setting]) -> str:
    wanted = [
        s
        for s in settings
        if (s.policy, s.adaln, s.sync, s.protocol) == ("balanced", "fused", "micro_batch", "matched")
    ]
    if not wanted:
        return NOTHING
    (s,), layers = wanted, int(rows["layers"].max())
    share = _row(rows, s, "share_of_perfect").map(lambda x: 100 * x)
    gains = [f"{_gained(rows, replace(s, policy=p), s)} over `{p}`" for p in POLICIES if p != "balanced"]
    doubt = "" if _sound(share) else " (more than all: the solo times that it is worked out from were too slow)"
    return (
        f"Measured on {s.ranks} GPUs ({device}, {depth(s.model, layers)}), samples a step matched: {_told(share)} of "
        f"perfect balance{doubt}, and tokens/s {' and '.join(gains)}."
    )


def _sound(share: Interval) -> bool:
    """Whether a share of perfect balance, in %, can be one: above 100 its yardstick is wrong and decides nothing."""
    return share.low <= 100


_HEAD = ["policy", "samples a step", "mix", "AdaLN", "ranks meet"]


def _cell(s: Setting) -> list[str]:
    protocol = "as published" if s.protocol == "as_published" else s.protocol
    return [s.policy, protocol, s.corpus, s.adaln, SYNC[s.sync]]


def _row(rows: pd.DataFrame, s: Setting, metric: str) -> Interval:
    row = lookup(rows, s, metric)
    assert row is not None, f"{s} has no {metric}"
    return Interval(float(row["value"]), float(row["ci_low"]), float(row["ci_high"]), int(row["n"]))


def _told(i: Interval) -> str:
    return f"{i.value:.1f}% [{i.low:.1f}, {i.high:.1f}]"


def _gained(rows: pd.DataFrame, before: Setting, after: Setting) -> str:
    """The gain in tokens/s, and whether its sides are of two runs, which differ in more than the settings."""
    return _percent(epoch_gain(rows, before, after)) + " (two runs)" * of_different_runs(rows, before, after)


def _percent(i: Interval | None) -> str:
    return "not measured" if i is None else f"{'+' * (i.value > 0)}{_told(i)}"
