"""Figures redraw to the same bytes; tables say what claims.csv says; the README is what it claims to be."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from repro import verdicts
from repro.claims import BY_ID, CLAIMS, judge
from repro.measure.machine import Machine
from repro.records import Store
from repro.report import draw, kernel_words, overview, style, tables
from repro.suite import Case, Evidence, Measurement
from repro.verdicts import Verdict

ROOT = Path(__file__).resolve().parents[2]


def row(claim, value=None, low=None, high=None, kind="measured", note=""):
    c = BY_ID[claim]
    if value is None:
        return Verdict(c, "not run", note or "no suite measures this yet").row()
    e = Evidence(claim, value, low if low is not None else value, high if high is not None else value, kind, 6, 1)
    return Verdict(c, judge(c, e)[0], note, e, "some-gpu").row()


@pytest.fixture
def rows():
    values = {
        "K1": (5.5, 5.4, 5.6),
        "K2": (0.3, 0.2, 0.4),
        "K5": (6.0,),
        "B1": (0.4, 0.3, 0.45),
        "T4": (30.0, 29.0, 31.0),
    }
    return [row(c.id, *values.get(c.id, ()), kind="simulated" if c.id == "K2" else "measured") for c in CLAIMS]


def test_the_same_rows_give_the_same_bytes_in_another_process_and_with_other_settings(rows, tmp_path):
    draw.draw_claims(rows, tmp_path / "here")
    (tmp_path / "matplotlibrc").write_text(
        "font.size: 30\nsvg.hashsalt: other\nfigure.facecolor: black\nxtick.direction: in\n"
    )
    program = f"from pathlib import Path\nfrom repro.report import draw\ndraw.draw_claims({rows!r}, Path('there'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MATPLOTLIBRC": str(tmp_path), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=120)
    for name in ("claims.svg", "claims.png", "claims.md"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes(), name


def test_files_that_would_not_change_are_left_alone(rows, tmp_path):
    draw.draw_claims(rows, tmp_path)
    before = (tmp_path / "claims.svg").stat().st_mtime_ns
    draw.draw_claims(rows, tmp_path)
    assert (tmp_path / "claims.svg").stat().st_mtime_ns == before


def test_the_overview_shows_every_claim_and_fits(rows):
    with style.context():
        figure = overview.draw(rows)
        figure.canvas.draw()
    texts = [t.get_text() for t in figure.axes[0].texts]
    for c in CLAIMS:
        assert c.id in texts
        assert all(part in texts for part in c.title.split(": "))
    judged = [r for r in rows if overview.scale(r) is None and r["value"]]
    assert judged and all(f"[{tables.number(r['ci_low'])}, {tables.number(r['ci_high'])}]" in " ".join(texts)
                          for r in judged)  # fmt: skip
    width = figure.bbox.width
    for t in figure.axes[0].texts:
        box = t.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= width, f"{t.get_text()!r} leaves the figure"


def test_drawing_prefers_full_rows_of_each_device(tmp_path):
    store = Store(tmp_path)
    for device, profile, value in (("a", "smoke", 1.0), ("a", "full", 2.0), ("b", "smoke", 3.0)):
        run = store.start(Machine(device, device, 0, None, None, None, 1, {}), ["x"], None, profile)
        store.append(run, "speed", Case({"impl": "x"}), [Measurement("time", "us", value, value, value, 3)])
    rows = draw.rows_to_draw(store, ["speed", "absent"])
    assert rows[["device", "profile", "value"]].to_numpy().tolist() == [["a", "full", 2.0], ["b", "smoke", 3.0]]


@pytest.mark.parametrize(
    ("text", "unit", "told"),
    [
        ("3.21", "x", "3.21x"),
        ("61.9123", "%", "61.9%"),
        ("4.8", "GB", "4.8 GB"),
        ("0.35", "R", "0.35"),
        ("14383", "tokens/s", "14,383 tokens/s"),
        ("", "x", ""),
    ],
)
def test_numbers_read_as_people_write_them(text, unit, told):
    assert tables.number(text, unit) == told


def test_cells_of_the_table():
    assert tables.ours(row("K1", 3.3, 3.2, 3.4)) == "3.3x [3.2, 3.4]"
    assert tables.ours(row("K5", 6.0)) == "6x"
    assert tables.ours(row("K1")) == ""
    assert [tables.paper(row(c)) for c in ("K1", "B6", "T3", "B1")] == ["3.21x", "<= 20%", "> 1x", "0.35"]


@pytest.mark.parametrize("width", [80, 120, 180])
def test_the_terminal_table_tells_verdicts_and_reasons(rows, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(tables.terminal(rows, width))
    text = console.export_text()
    assert "not reproduced" in text
    assert "measured: 2 exceeded, 2 reproduced" in " ".join(text.split())
    assert "K3, K4, B2, B3, B4, B5, B6, B7, T1, T2, T3, T5, T6 not run: no suite measures this yet" in " ".join(
        text.split()
    )
    assert "5.5x" in text


def test_markdown_has_a_row_a_claim_and_no_broken_cells(rows):
    lines = tables.markdown([*rows, row("K1", note="a | b")], notes=True).splitlines()
    assert len(lines) == 2 + 18 + 1
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {9}


def test_a_readme_without_markers_is_left_alone(rows, tmp_path):
    readme = tmp_path / "README.md"
    section = tables.readme_section(rows)
    assert not tables.update_readme(readme, section)
    readme.write_text("mine")
    assert not tables.update_readme(readme, section)
    assert readme.read_text() == "mine"


def test_this_readme_says_what_claims_csv_says():
    section = tables.readme_section(verdicts.read(ROOT / "results"))
    assert section in (ROOT / "README.md").read_text(), "run python -m repro.all --no-measure"


def test_this_readme_links_to_files_that_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_what_other_devices_say_is_below_what_decides(rows, tmp_path):
    other = {**row("K5", 5.0), "device": "another-gpu"}
    names = [f.name for f in draw.draw_claims(rows, tmp_path, [other])]
    text = (tmp_path / "claims.md").read_text()
    assert names == ["claims", "claims-devices"] and (tmp_path / "claims-devices.png").exists()
    assert text.index("## On other devices") < text.index("another-gpu")
    assert [f.name for f in draw.draw_claims(rows, tmp_path / "alone")] == ["claims"]
    assert "another" not in (tmp_path / "alone" / "claims.md").read_text()


def kernel_times(suite, form, direction, times, run="2026"):
    """Rows of one cell for each dict of times by implementation."""
    return pd.DataFrame([
        {"suite": suite, "run_id": run, "form": form, "pass": direction, "dtype": "bf16", "batch": 1, "tokens": n,
         "dim": 64, "impl": impl, "metric": "time", "value": us}
        for n, cell in enumerate(times, start=1) for impl, us in cell.items()
    ])  # fmt: skip


class Recorded:
    """Stands in for a store."""

    def __init__(self, **tables):
        self.tables = tables

    def rows(self, suite, device, profile):
        assert profile == "full"
        return self.tables.get(suite, pd.DataFrame())

    def runs(self, device):
        return [{"run_id": "2025", "extension_hash": "old"}, {"run_id": "2026", "extension_hash": "new"}]


def test_where_the_fused_op_is_fastest_is_counted_over_suites():
    ours, tied = {"stream": 1.0, "fused": 2.0, "eager": 9.0}, {"fused": 2.0, "quack": 1.9, "compile": 3.0}
    store = Recorded(
        kernel_speed=kernel_times("kernel_speed", "per_sample", "forward", [ours, ours, {**ours, "compile": 1.5}]),
        peers=pd.concat(
            [
                kernel_times("peers", "per_sample", "forward", [tied, ours, tied]),
                kernel_times("peers", "per_token", "backward", [ours]),
            ]
        ),
    )
    text = kernel_words.section(store, "nvidia-h200")
    told = "with modulation per sample at 1 of 3 forward (elsewhere `quack`, `compile`), beside "
    assert told + "`eager` at 3, `compile` at 2, `quack` at 2; with modulation" in text
    assert text.endswith(f"with modulation per token at 1 of 1 backward, beside `eager` at 1.\n{kernel_words.END}")
    before = kernel_times("kernel_speed", "per_sample", "forward", [ours] * 5, run="2025")
    store.tables["kernel_speed"] = pd.concat([before[before["tokens"] > 3], store.tables["kernel_speed"]])
    other = kernel_times("kernel_speed", "per_sample", "forward", [{"eager": 1.0, "wan": 1.0}] * 3, run="2025")
    store.tables["kernel_speed"] = pd.concat([other, store.tables["kernel_speed"]])
    assert kernel_words.section(store, "nvidia-h200") == text.replace(
        f"\n{kernel_words.END}", f" Measured beside older kernels only: `wan`.\n{kernel_words.END}"
    ), "rows of older kernels, and what others took beside them, say nothing of today's"
    older = kernel_times("peers", "per_sample", "forward", [{**tied, "liger": 2.5}] * 2, run="2025")
    store.tables["peers"] = older
    told = kernel_words.section(store, "nvidia-h200")
    assert "at 2 of 3 forward (elsewhere `compile`), beside `eager` at 3, `compile` at 1. Measured" in told
    assert told.endswith(f"Measured beside older kernels only: `liger`, `quack`, `wan`.\n{kernel_words.END}")
    assert "nothing is recorded yet" in kernel_words.section(Recorded(), "nvidia-h200")
    assert "nothing is recorded yet" in kernel_words.section(store, "")
