"""Comparisons as text: a table a suite for the terminal, the same in Markdown, and everything as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from repro.compare_cells import Comparison, Shared, Value
from repro.compare_judge import THRESHOLD, WORDS, Judgement, direction
from repro.compare_read import Source
from repro.report.tables import number

COLOURS = {"FASTER": "green", "SLOWER": "red", "AMBIGUOUS": "yellow", "SAME": "dim"}
MARK = "†"
NOTES = f"{MARK} measured while the GPU was throttled. ~ simulated."


def selected(comparison: Comparison, everything: bool, most: int) -> tuple[list[Shared], int]:
    """Cells to show a person, and how many are left out.

    Measured ones where there are any. Where there are verdicts, cells that are not the same, the most urgent first;
    else as many of every suite, times of the fused op first. Together about `most`, in the order of their suites.
    """
    cells = [c for c in comparison.cells if c.kind == "measured"] or list(comparison.cells)
    if everything:
        return cells, len(comparison.cells) - len(cells)
    if comparison.judged:
        changed = [c for c in cells if _changed(c)]
        chosen = sorted(changed, key=lambda c: c.urgency)[:most]
    else:
        suites = [list(own) for _, own in _by_suite(cells)]
        chosen = [c for own in suites for c in sorted(own, key=_interest)[: max(1, most // len(suites))]]
    wanted = set(map(id, chosen))
    shown = [c for c in cells if id(c) in wanted]
    return shown, len(comparison.cells) - len(shown)


def _changed(cell: Shared) -> bool:
    """Not the same by its verdict, or by more than 1% where there is none (bytes, counts)."""
    if cell.judgements:
        return any(j.word != "SAME" for j in cell.judgements.values())
    values = [v.value for v in cell.values.values()]
    return max(values) - min(values) > 0.01 * max(map(abs, values))


def _interest(cell: Shared) -> tuple[bool, bool]:
    return direction(cell.unit) == 0, cell.case.get("impl", "fused") != "fused"


def terminal(comparison: Comparison, everything: bool = False, most: int = 40) -> Group:
    """Sources, one table a suite, what is not shared, and the verdicts counted."""
    cells, hidden = selected(comparison, everything, most)
    parts: list[RenderableType] = [_sources(comparison)]
    for (suite, profile), own in _by_suite(cells):
        header, lines, fixed = _table(comparison, own)
        title = Text(f"{suite}, {profile}" + (f": {fixed}" if fixed else ""), style="italic")
        table = Table(header_style="bold", box=None, pad_edge=False)
        for name, text in header:
            table.add_column(name, justify="left" if text else "right", no_wrap=True)
        for line in lines:
            table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in line))
        parts += [Text(""), title, table]
    parts += [Text(""), *(Text(line, style="dim") for line in notes(comparison, cells))]
    if hidden:
        parts.append(Text(f"{hidden:,} more shared cells: --all, --markdown FILE, --csv FILE", style="dim"))
    parts.append(Text(headline(comparison), style="bold"))
    return Group(*parts)


def markdown(comparison: Comparison) -> str:
    """Everything that is shared and measured (simulated, where nothing is measured) as Markdown."""
    cells, hidden = selected(comparison, True, 0)
    out = ["# Comparison", "", headline(comparison), ""]
    header, lines = _source_lines(comparison)
    out += _markdown([(h, True) for h in header], lines)
    for (suite, profile), own in _by_suite(cells):
        columns, lines, fixed = _table(comparison, own)
        out += [f"## {suite}, {profile}", "", *([fixed, ""] if fixed else []), *_markdown(columns, lines)]
    out += [f"- {line}" for line in notes(comparison, cells)]
    if hidden:
        out.append(f"- {hidden:,} simulated cells are in the CSV file only")
    return "\n".join(out).rstrip() + "\n"


def table_csv(comparison: Comparison) -> str:
    """Every shared cell: its case, each source's row, and the verdict of each source that has one."""
    parameters = list(dict.fromkeys(name for cell in comparison.cells for name in cell.case))
    fields = ("value", "ci_low", "ci_high", "n", "kind", "ceiling", "throttled", "run_id")
    verdict = ("ratio", "ratio_low", "ratio_high", "p", "verdict", "why")
    labels = [s.label for s in comparison.sources]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    head = ["suite", "profile", *parameters, "metric", "unit", *(f"{label}: {f}" for label in labels for f in fields)]
    writer.writerow([*head, *(f"{label}: {f}" for label in comparison.baselines for f in verdict)])
    for cell in comparison.cells:
        line = [cell.suite, cell.profile, *(cell.case.get(p, "") for p in parameters), cell.metric, cell.unit]
        for label in labels:
            line += _value_fields(cell.values.get(label), len(fields))
        for label in comparison.baselines:
            line += _judgement_fields(cell.judgements.get(label), len(verdict))
        writer.writerow(line)
    return buffer.getvalue()


def headline(comparison: Comparison) -> str:
    """Verdicts counted, or why there are none."""
    if comparison.baselines:
        judged = comparison.judged
        pairs = ", ".join(f"{new} against {old}" for new, old in comparison.baselines.items())
        told = ", ".join(f"{judged[w]} {w}" for w in WORDS if judged[w]) or "nothing that both measured"
        return f"{pairs}: {told}"
    if len(comparison.sources) == 1:
        return f"{comparison.sources[0].label} alone: nothing to compare it with"
    return "Different devices: side by side, no verdicts"


def notes(comparison: Comparison, cells: Sequence[Shared]) -> list[str]:
    """What is shared by nobody, what could not be read, what differs between measurements of one device."""
    lines = list(comparison.alone)
    if not comparison.cells:
        lines.append("nothing is shared" if len(comparison.sources) > 1 else "no rows")
    by_label = {s.label: s for s in comparison.sources}
    for new, old in comparison.baselines.items():
        lines += _differences(by_label[old], by_label[new])
    lines += [
        f"{label}: the plain streams of {suite}, {profile}, moved by up to {share:.0%} in {metric}: less is no verdict"
        for (label, suite, profile, metric), share in comparison.drift.items()
        if share > THRESHOLD
        and any((c.suite, c.profile, c.metric) == (suite, profile, metric) for c in comparison.cells)
    ]
    if len(comparison.sources) == 2 and not comparison.baselines and comparison.cells:
        lines.append(f"ratio: {comparison.sources[1].label} over {comparison.sources[0].label}")
    lines += [f"{s.label}: {note}" for s in comparison.sources for note in s.notes]
    values = [v for c in cells for v in c.values.values()]
    if any(v.throttled or v.kind != "measured" for v in values):
        lines.append(NOTES)
    return lines


def _differences(old: Source, new: Source) -> list[str]:
    told = [
        f"{name} {old.about[name]} -> {new.about[name]}"
        for name in ("torch", "CUDA", "driver", "host")
        if old.about.get(name) and new.about.get(name) and old.about[name] != new.about[name]
    ]
    threads = [s.machine.get("omp_num_threads", "unknown") for s in (old, new)]
    if "unknown" not in threads and threads[0] != threads[1]:
        told.append("OpenMP's threads " + " -> ".join("of every core" if t is None else str(t) for t in threads))
    lines = [f"{old.label} and {new.label} differ in {', '.join(told)}"] if told else []
    cores = new.machine.get("cores") or math.inf
    for source in (old, new):
        if not source.machine.get("gpu_count") and (source.about.get("load") or 0) > cores / 2:
            lines.append(f"{source.label}: other processes were running (load {source.about['load']}); times are noisy")
    return lines


def _source_lines(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    known = [
        k
        for k in ("measured", "torch", "CUDA", "driver", "commit", "from")
        if any(s.about.get(k) for s in comparison.sources)
    ]
    lines = []
    for s in comparison.sources:
        name = s.machine.get("gpu_name") or s.machine.get("cpu_name") or "not recorded"
        lines.append([s.label, str(name), *(str(s.about.get(k) or "") for k in known)])
    return ["", "machine", *known], lines


def _sources(comparison: Comparison) -> Table:
    header, lines = _source_lines(comparison)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, no_wrap=name != "machine")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _by_suite(cells: Sequence[Shared]) -> Iterator[tuple[tuple[str, str], list[Shared]]]:
    def suite(cell: Shared) -> tuple[str, str]:
        return cell.suite, cell.profile

    for key, own in groupby(sorted(cells, key=suite), key=suite):
        yield key, list(own)


def _table(comparison: Comparison, cells: Sequence[Shared]) -> tuple[list[tuple[str, bool]], list[list[str]], str]:
    """(header, whether it is text) of each column, the lines, and the parameters that all cells have in common."""
    parameters = list(dict.fromkeys(name for cell in cells for name in cell.case))
    varying = [p for p in parameters if len({cell.case.get(p) for cell in cells}) > 1]
    fixed = ", ".join(f"{p} {cells[0].case[p]}" for p in parameters if p not in varying and p in cells[0].case)
    labels = [s.label for s in comparison.sources if any(s.label in c.values for c in cells)]
    ceilings = {
        label for label in labels if any(c.values[label].ceiling is not None for c in cells if label in c.values)
    }
    header = [(p, not _numeric(cells, p)) for p in varying] + [("metric", True)]
    for label in labels:
        header += [(label, False)] + ([("of ceiling", False)] if label in ceilings else [])
    pairs = [(new, old) for new, old in comparison.baselines.items() if any(new in c.judgements for c in cells)]
    other = len(labels) == 2 and not comparison.baselines
    header += [("ratio", False)] if other else []
    for _ in pairs:
        header += [("ratio [95%]", False), ("verdict", True)]
    lines = []
    for cell in cells:
        line = [_parameter(cell.case.get(p, "")) for p in varying] + [cell.metric]
        for label in labels:
            value = cell.values.get(label)
            line.append("" if value is None else _told(value, cell.unit))
            if label in ceilings:
                line.append("" if value is None or value.ceiling is None else f"{value.ceiling:.0f}%")
        if other:
            values = [cell.values.get(label) for label in labels]
            line.append(_ratio(*values))
        for new, _ in pairs:
            line += _verdict(cell.judgements.get(new))
        lines.append(line)
    return header, lines, fixed


def _told(value: Value, unit: str) -> str:
    half = (value.high - value.low) / 2
    share = 100 * half / abs(value.value) if value.value else 0.0
    spread = "" if share == 0 else f" ±{share:.0f}%" if share >= 1 else f" ±{share:.1g}%"
    marks = (MARK if value.throttled else "") + ("~" if value.kind != "measured" else "")
    return f"{number(str(value.value), unit)}{spread}{marks}"


def _ratio(old: Value | None, new: Value | None) -> str:
    return "" if old is None or new is None or not old.value else f"{new.value / old.value:.3g}"


def _verdict(judgement: Judgement | None) -> list[str]:
    if judgement is None:
        return ["", ""]
    if math.isnan(judgement.ratio):
        return [judgement.why, judgement.word]
    return [f"{judgement.ratio:.3f} [{judgement.low:.3f}, {judgement.high:.3f}]", judgement.word]


def _numeric(cells: Sequence[Shared], parameter: str) -> bool:
    return all(cell.case.get(parameter, "0").replace(".", "", 1).isdigit() for cell in cells)


def _parameter(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else text


def _value_fields(value: Value | None, count: int) -> list[str]:
    if value is None:
        return [""] * count
    numbers = [repr(value.value), repr(value.low), repr(value.high), str(value.n)]
    ceiling = "" if value.ceiling is None else repr(value.ceiling)
    return [*numbers, value.kind, ceiling, "yes" if value.throttled else "", value.run_id]


def _judgement_fields(judgement: Judgement | None, count: int) -> list[str]:
    if judgement is None:
        return [""] * count
    numbers = [judgement.ratio, judgement.low, judgement.high, judgement.p]
    return [*("" if math.isnan(v) else repr(v) for v in numbers), judgement.word, judgement.why]


def _markdown(header: Sequence[tuple[str, bool]], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if text else "---:" for _, text in header]
    rows = [[name for name, _ in header], rule, *lines]
    return ["| " + " | ".join(c.replace("|", r"\|") for c in row) + " |" for row in rows] + [""]
