"""Marks mean the same everywhere, and no state leaks in or out."""

from __future__ import annotations

import itertools

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex

from repro.report import style


@pytest.fixture
def axes():
    with style.context():
        _, grid = style.subplots()
        yield grid[0, 0]


def test_every_name_has_its_own_look():
    looks = {(style.color(n), style.marker(n)) for n in style.ORDER[:9]}
    assert len(looks) == 9
    assert len({(style.color(n), style.marker(n)) for n in style.ORDER[9:]}) == len(style.ORDER) - 9


def test_an_unknown_name_gets_the_same_look_every_time():
    assert style.color("new_policy") == style.color("new_policy")
    assert style.label("new_policy") == "new policy"
    assert style.ordered(["zeta", "fused", "eager", "alpha", "fused"]) == ["eager", "fused", "alpha", "zeta"]


@pytest.mark.parametrize(("kind", "face"), [("measured", style.RED), ("simulated", "white")])
def test_measured_is_filled_and_simulated_is_hollow(axes, kind, face):
    style.series(axes, [1, 2], [3, 4], "fused", kind=kind)
    line = axes.lines[0]
    assert to_hex(line.get_markerfacecolor()) == to_hex(face)
    assert to_hex(line.get_color()) == to_hex(style.RED)


def test_a_series_is_sorted_with_its_intervals(axes):
    style.series(axes, [4, 1, 2], [40.0, 10.0, 20.0], "fused", low=[39, 8, 19], high=[41, 11, 23])
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 4]
    segments = axes.containers[0].lines[2][0].get_segments()
    assert [s[:, 1].tolist() for s in segments] == [[8, 11], [19, 23], [39, 41]]


def test_an_unknown_interval_is_no_interval(axes):
    style.series(axes, [1], [2.0], "fused", low=[np.nan], high=[np.nan])
    assert axes.containers[0].lines[2][0].get_segments()[0][:, 1].tolist() == [2, 2]


def test_the_papers_value_is_marked_and_told_beside_the_axes(axes):
    axes.set_ylim(0, 5)
    style.paper_value(axes, 3.21, "paper: 3.21x")
    assert axes.lines[0].get_ydata()[0] == 3.21
    (text,) = axes.texts
    assert text.get_text() == "paper\n3.21x"
    axes.figure.draw_without_rendering()
    assert text.get_window_extent().x0 >= axes.bbox.x1


def test_a_legend_names_each_series_once_and_explains_the_marks(axes):
    for x in (1, 2):
        style.series(axes, [x], [1.0], "fused", kind="simulated")
    style.legend(axes.figure, ["measured", "simulated"], paper="paper: 3.21x")
    (legend,) = axes.figure.legends
    told = [t.get_text() for t in legend.get_texts()]
    assert told == ["fused (ours)", "measured", "simulated", "paper: 3.21x"]
    faces = {h.get_label(): to_hex(h.get_markerfacecolor()) for h in style.kind_handles(["measured", "simulated"])}
    assert faces == {"measured": to_hex(style.GREY), "simulated": "#ffffff"}


@pytest.mark.parametrize("count", [1, 4, 9, 13])
def test_a_legend_fits_into_the_figure(count):
    with style.context():
        figure, grid = style.subplots()
        for i in range(count):
            grid[0, 0].plot([0, 1], [i, i], label=f"{i} dual constraint, same bucket"[: 9 + 3 * i])
        style.legend(figure, ["measured"])
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_labels_at_line_ends_stay_apart():
    with style.context():
        _, grid = style.subplots()
        ax = grid[0, 0]
        ax.set_ylim(0, 10)
        style.end_labels(ax, [(1, 5.0, "a", "k"), (1, 5.1, "b", "k"), (1, 4.9, "c", "k")])
        ax.figure.draw_without_rendering()
        boxes = sorted((t.get_window_extent().y0, t.get_window_extent().y1) for t in ax.texts)
    assert all(top <= bottom + 1 for (_, top), (bottom, _) in itertools.pairwise(boxes))


def test_devices_differ_in_colour_and_marker():
    looks = style.device_looks(["b", "a", "b"])
    assert list(looks) == ["a", "b"] and looks["a"] != looks["b"]
    assert len(set(style.device_looks(map(str, range(8))).values())) == 8


def test_ticks_are_thinned_where_they_would_overlap(axes):
    style.token_axis(axes, [1024, 2048, 64_000, 65_536])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1,024", "2,048", "64,000"]


def test_the_users_settings_neither_count_nor_change():
    with mpl.rc_context({"font.size": 33, "axes.grid": False}):
        with style.context():
            assert mpl.rcParams["font.size"] == 8
        assert mpl.rcParams["font.size"] == 33
