"""Every figure of every suite: readable in a column 89 mm wide, marked, and of several devices together."""

from __future__ import annotations

import warnings
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.text import Text

from repro import suite as registry
from repro.measure.machine import Machine
from repro.records import Store, files
from repro.report import devices, draw, style

ROOT = Path(__file__).resolve().parents[2]
COLUMN_MM, POINTS = 89, 5
"""A printed column, and the smallest type that is readable there."""
GPU = Machine("nvidia-h200", "NVIDIA H200", 1, (9, 0), 132, 150 << 30, 16, {})
EIGHT = Machine("nvidia-h200", "NVIDIA H200", 8, (9, 0), 132, 150 << 30, 128, {})
MADE_UP = {
    "links": {"bus_bandwidth": "GB/s", "bandwidth_0_1": "GB/s", "bandwidth_1_0": "GB/s"},
    "peers": {"time": "us", "ceiling": "%", "over_best_peer": "x"},
    "shape_sweep": {"forward_backward": "ms", "peak_memory": "GB"},
    "trainer_mfu": {"hfu": "%", "share_of_block_stack": "%"},
    "accelerate": {"forward_backward": "ms", "peak_memory": "GB"},
    "max_sequence": {"longest": "tokens", "static_memory": "GB", "held_memory": "GB", "working_memory": "GB"},
    "loss_parity": {"loss_after": "", "loss_before": "", "curve_at_0": "", "curve_at_1": ""},
    "kernel_share": {"step_time": "ms", "norm_modulate_share": "%"},
    "throughput_scaled": {"gain": "%"},
    "throughput_measured": {
        "tokens_per_s": "1/s",
        "share_of_perfect": "fraction",
        "replay_error": "%",
        "replay_total_error": "%",
        "step_at_0": "ms",
        "replay_at_0": "ms",
    },
}
"""Suites that may have no rows here yet, and metrics to make up."""


def recorded(name: str) -> pd.DataFrame:
    """Rows of a suite as they are recorded for a GPU, and once more as those of another one."""
    suite = registry.load(name)
    rows = draw.rows_to_draw(Store(ROOT / "results"), [name, *registry.other_needs(suite)])
    rows = rows[rows["device"] == "nvidia-h200"]
    return pd.concat([rows, rows.assign(device="nvidia-next")], ignore_index=True)


def made_up(name: str) -> pd.DataFrame:
    """Every case of the full profile with values that differ by device."""
    rows = []
    for k, device in enumerate(("nvidia-h200", "nvidia-next"), start=1):
        suite = registry.load(name)
        for i, case in enumerate(suite.cases("full", GPU) or suite.cases("full", EIGHT)):
            for metric, unit in MADE_UP[name].items():
                value = 10.0 * k + i % 7
                ends = {"value": value, "ci_low": 0.9 * value, "ci_high": 1.1 * value, "n": 30}
                head = {"device": device, "run_id": "r", "suite": name, "profile": "full", **case.key}
                rows.append({**head, "metric": metric, "unit": unit, "kind": "measured", **ends})
    return pd.DataFrame(rows)


def check(figure: registry.Figure) -> None:
    """Readable, inside its edges, and told how its values came about."""
    drawn = figure.figure
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layout that did not work out warns
        draw.picture(drawn, "png")
    texts = [t for t in drawn.findobj(Text) if t.get_visible() and t.get_text().strip()]
    shrunk = COLUMN_MM / 25.4 / drawn.get_figwidth()
    assert min(t.get_fontsize() for t in texts) * shrunk >= POINTS, figure.name
    for ax in drawn.axes:
        shown = ax.get_visible() and ax.axison
        names = [ax.xaxis.label, ax.yaxis.label, ax.title, ax._left_title, ax._right_title, *ax.texts] if shown else []
        for text in (t for t in names if t.get_text().strip()):
            box = text.get_window_extent()
            edges = drawn.bbox
            assert box.x0 >= edges.x0 - 1 and box.x1 <= edges.x1 + 1, (figure.name, text.get_text())
            assert box.y0 >= edges.y0 - 1 and box.y1 <= edges.y1 + 1, (figure.name, text.get_text())
    legend = " ".join(t.get_text() for made in drawn.legends for t in made.get_texts())
    assert "measured" in legend or "simulated" in legend, figure.name
    assert figure.caption


@pytest.mark.parametrize("name", registry.names())
def test_figures_of_a_suite(name: str) -> None:
    rows = recorded(name)
    if not (rows["suite"] == name).any():
        if name not in MADE_UP:
            pytest.skip(f"no rows of {name} are recorded for a GPU, and none are made up here")
        rows = made_up(name)
    with style.context():
        figures = registry.load(name).draw(rows)
        assert figures
        for figure in figures:
            if not figure.name.endswith("-nvidia-next"):
                check(figure)
    names = [f.name for f in figures]
    assert len(set(names)) == len(names)
    own = [n for n in names if n.endswith("-nvidia-h200")]
    assert own and {n.replace("h200", "next") for n in own} <= set(names)
    assert any(n.endswith("-devices") for n in names), "want a figure of all devices"
    assert all(n.endswith(("-nvidia-h200", "-nvidia-next", "-devices")) for n in names)


def test_dots_hold_what_they_are_given() -> None:
    table = pd.DataFrame(
        {"row": ["a", "b", "a"], "device": ["x", "x", "y"], "kind": ["measured", "simulated", "measured"],
         "value": [1.0, 2.0, 3.0], "ci_low": [0.5, 2.0, 2.0], "ci_high": [1.5, 2.0, 4.0]}
    )  # fmt: skip
    with style.context():
        figure = devices.dots({"speed, us": table}, {"speed, us": ("paper: 9", 9.0)})
        (ax,) = figure.axes
        assert ax.get_xlim()[0] == 0 and ax.get_xlim()[1] > 9, "the paper's value is on the axis"
        values = sorted(x for c in ax.containers for x in c.lines[0].get_xdata())
        faces = {c.lines[0].get_markerfacecolor() for c in ax.containers}
    assert values == [1.0, 2.0, 3.0] and "white" in faces and len(faces) == 3
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]


def test_several_processes_draw_the_same_bytes_in_the_same_order(tmp_path, monkeypatch) -> None:
    suites = {name: registry.load(name) for name in ("graph_nodes", "activation_memory")}
    store = Store(ROOT / "results")
    here, errors = draw.draw_all(store, suites, tmp_path / "here")
    monkeypatch.setattr(draw, "_MANY", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    there, more = draw.draw_all(store, suites, tmp_path / "there")
    assert here == there and not errors and not more and len(here) >= 2
    for path in (tmp_path / "here").iterdir():
        assert (tmp_path / "there" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_suite_that_fails_elsewhere_is_one_line_and_a_folder_that_cannot_be_written_ends_it(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(draw, "_MANY", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    suites = {name: registry.load(name) for name in ("graph_nodes", "activation_memory")}
    device = tmp_path / "results" / "nvidia-h200"
    device.mkdir(parents=True)
    for name in suites:
        text = (ROOT / "results" / "nvidia-h200" / f"{name}.csv").read_text()
        (device / f"{name}.csv").write_text(text.replace(",impl,", ",was_impl,", 1))
    drawn, errors = draw.draw_all(Store(tmp_path / "results"), suites, tmp_path / "figures")
    assert drawn == [] and [e.split(":")[0] for e in errors] == ["graph_nodes", "activation_memory"]
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(files.WriteError, match="could not be written"):
        draw.draw_all(Store(ROOT / "results"), suites, tmp_path / "file")


def test_every_recorded_device_has_figures_and_a_place_in_the_comparison() -> None:
    from repro.compare_read import read

    recorded_devices = Store(ROOT / "results").devices()
    assert len(recorded_devices) >= 2
    for device in recorded_devices:
        assert list((ROOT / "figures").glob(f"*-{device}.svg")), (
            f"no figure of {device}: python -m repro.all --no-measure"
        )
    assert {s.device for s in read(str(ROOT), ROOT / "results")} == set(recorded_devices)
