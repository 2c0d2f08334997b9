"""Whole models beside blocks: which of them simulations stand on, other AdaLNs, memory."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from repro.balance import whole
from repro.balance.campaign import SMOKE, Campaign, Setting, campaign
from repro.balance.fit import measured_cost, observations
from repro.balance.memory import fit_memory
from repro.balance.models import WAN_1_3B

LENGTHS = (1_560, 3_600, 7_800, 14_040, 20_280, 46_800)
SHAPES = sorted({(max(1, n // s), s) for s in LENGTHS for n in (48_000, 58_896)} | {(1, s) for s in LENGTHS})
ADDED = {"eager": (4e-4, 2e-3), "fused": (0.0, 0.0), "wan": (6e-4, 5e-3)}
"""Seconds a block beside the fused op's time: launches, and per 10^4 tokens."""


def block(batch, tokens, adaln="fused"):
    launches, per_token = ADDED[adaln]
    s = tokens / 1e4
    return 2e-3 + batch * (8e-3 * s + 4e-3 * s * s) + launches + per_token * batch * s


def rows(path=1.05, embeddings=3e-3, ranks=1, layers=WAN_1_3B.layers, adalns=("eager", "fused", "wan")):
    """Four plain blocks under every AdaLN, and the sweep under the fused one: slower by `path`, with embeddings."""
    table = []
    for adaln in adalns:
        for depth in (4, 12):
            for b, s in SHAPES if depth == 4 else SHAPES[:2]:
                at = {"suite": "block_time", "run_id": "blocks", "model": "wan-1.3b", "layers": depth, "adaln": adaln}
                held, peak = (
                    depth * 3_072 * b * s,
                    depth * 3_072 * b * s + (60 if adaln == "eager" else 40) * 1e3 * b * s,
                )
                for metric, value in (("forward_backward", 1e3 * depth * block(b, s, adaln)), ("static_memory", 0.5),
                                      ("held_memory", held / 1e9), ("peak_memory", 0.5 + peak / 1e9)):  # fmt: skip
                    table.append({**at, "batch": b, "tokens": s, "metric": metric, "value": value})
    for b, s in SHAPES:
        ms = 1e3 * (path * layers * block(b, s) + embeddings * b * s / 1e4)
        static = (4 * WAN_1_3B.parameters / ranks + 4 * WAN_1_3B.block_parameters) / 1e9
        peak = max(static + b * s * (layers * 3_072 + 50e3) / 1e9, static + 4 * WAN_1_3B.parameters / ranks / 1e9)
        at = {"suite": "shape_sweep", "run_id": "sweep", "model": "wan-1.3b", "layers": layers, "adaln": "fused"}
        for metric, value in (("fits", 1.0), ("forward_backward", ms), ("peak_memory", peak)):
            table.append({**at, "ranks": ranks, "batch": b, "tokens": s, "metric": metric, "value": value})
    return pd.DataFrame(table)


def test_the_whole_model_goes_before_blocks():
    data = observations(rows(), "wan-1.3b", "fused")
    assert (data.layers, data.source, data.measured.all()) == (30, "sweep", True)
    expected = 1.05 * 30 * block(data.batch, data.tokens) + 3e-3 * data.batch * data.tokens / 1e4
    np.testing.assert_allclose(data.seconds, expected)
    assert measured_cost(rows(), "wan-1.3b", "fused").kind == "measured", "nothing is scaled"
    blocks = observations(rows()[rows()["suite"] == "block_time"], "wan-1.3b", "fused")
    assert (blocks.layers, blocks.source) == (4, "blocks")
    assert observations(rows(), "wan-1.3b", "eager", layers=4).source == "blocks", "a depth is asked for"


@pytest.mark.parametrize("adaln", ["eager", "wan"])
def test_other_adalns_cost_what_they_add_to_blocks(adaln):
    fused, other = (observations(rows(), "wan-1.3b", a) for a in ("fused", adaln))
    launches, per_token = ADDED[adaln]
    added = 30 * (launches + per_token * fused.batch * fused.tokens / 1e4)
    np.testing.assert_allclose(other.seconds - fused.seconds, added, rtol=1e-9)
    assert not other.measured.any() and other.source == "blocks sweep"


@pytest.mark.parametrize(
    "table",
    [
        rows(layers=6),
        rows(adalns=("eager",)),
        rows()[lambda t: (t["suite"] == "block_time") | (t["tokens"] < 10_000)],
        rows()[lambda t: (t["suite"] == "block_time") | (t["batch"] == 1)],
    ],
    ids=["another depth", "no differences of AdaLNs", "few lengths", "single samples only"],
)
def test_where_the_sweep_does_not_suffice_blocks_do(table):
    assert whole.find(table, "wan-1.3b") is None
    assert observations(table, "wan-1.3b", "eager").source == "blocks"
    assert "blocks, scaled to 30" in whole.told(table, "wan-1.3b", "blocks sweep")


def test_most_ranks_and_the_newest_row_of_a_shape_count():
    two = rows(ranks=2, path=1.2)
    table = pd.concat([rows(), two[two["suite"] == "shape_sweep"]], ignore_index=True)
    found = whole.find(table, "wan-1.3b")
    assert found is not None and found.ranks == 2 and len(found.cells) == len(SHAPES)
    again = rows(path=2.0).assign(run_id="sweep2")
    table = pd.concat([rows(), again[again["suite"] == "shape_sweep"]], ignore_index=True)
    assert set(whole.find(table, "wan-1.3b").cells["run_id"]) == {"sweep2"}


def test_a_note_tells_what_a_row_stands_on():
    assert whole.told(rows(), "wan-1.3b", "blocks sweep") == (
        "step times of all 30 blocks, measured under the trainer on 1 GPU with fused AdaLN"
    )
    assert "scaled to 30" in whole.told(rows(), "wan-1.3b", "blocks"), "a row from before the sweep"
    assert "scaled to 40" in whole.told(rows(), "wan-14b", "blocks sweep")


def test_memory_is_that_of_the_whole_model_s_peaks():
    """Long micro-batches tell it; the sweep's short ones have the gradients' peak. One depth of blocks is enough."""
    table = rows()
    table = table[(table["suite"] == "shape_sweep") | (table["layers"] == 4)]
    fused, eager, wan = (fit_memory(table, "wan-1.3b", a) for a in ("fused", "eager", "wan"))
    assert fused.model.bytes(6, 7_800, 30) == pytest.approx(6 * 7_800 * (30 * 3_072 + 50e3), rel=1e-6)
    assert fused.model.checkpoint == 3_072 and fused.mape < 1e-6 and fused.source == "sweep"
    assert eager.model.token - fused.model.token == pytest.approx(20e3, rel=1e-6), "what it is in blocks"
    assert wan.model == fused.model and wan.source == "blocks sweep"
    with pytest.raises(ValueError, match="two depths"):
        fit_memory(table[table["suite"] == "block_time"], "wan-1.3b", "fused")
    bare = table[
        (table["suite"] == "shape_sweep") | ~table["metric"].str.endswith("_memory") | (table["tokens"] > 20_000)
    ]
    bare = bare[(bare["suite"] == "shape_sweep") | (bare["adaln"] != "eager") | (bare["tokens"] < 20_000)]
    with pytest.raises(ValueError, match="measured with fused and with eager"):
        fit_memory(bare, "wan-1.3b", "eager")
    short = table[(table["suite"] == "block_time") | (table["batch"] * table["tokens"] < 40_000)]
    with pytest.raises(ValueError, match="two depths"):
        fit_memory(short, "wan-1.3b", "fused")


def test_campaigns_stand_on_it_and_are_made_anew_when_it_comes():
    table = rows()
    setting = Setting("equal_token", "fused", 4, model="wan-1.3b")
    before = campaign(table[table["suite"] == "block_time"], SMOKE)
    after = campaign(table, SMOKE)
    assert after is not before and isinstance(after, Campaign)
    slower = [c.run(setting).values["tokens_per_s"].mean() for c in (before, after)]
    assert slower[0] / slower[1] == pytest.approx(1.05 + 3e-3 / 30 / 12e-3, rel=0.02)
    assert [c.run(setting).source for c in (before, after)] == ["blocks", "sweep"]
