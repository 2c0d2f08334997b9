"""Memory fitted to peaks, the state beside it, M_mem."""

import numpy as np
import pandas as pd
import pytest

from repro.balance.memory import MemoryFit, MemoryModel, fit_memory, memory_limit, state_bytes
from repro.balance.models import WAN_1_3B, WAN_14B

TRUTH = MemoryModel(checkpoint=10_240.0, token=220_000.0, sample=30e6, fixed=1.4e9)
INPUTS, TEXT = 20_480.0, 5e6
GB = 1e9


def memory_rows(truth=TRUTH, noise=0.0):
    """Rows of block_time at two depths; `token` and `sample` are split between what is held and the working set."""
    rng = np.random.default_rng(0)
    rows = []
    grid = [("eager", n_layers, b, s) for n_layers in (2, 6) for b, s in ((1, 1_560), (6, 7_800))]
    grid += [("eager", 2, b, s) for b, s in ((1, 256), (187, 256), (30, 1_560), (1, 32_760), (2, 32_760), (1, 75_600))]
    for adaln, n_layers, b, s in grid:
        n = b * s
        static = 0.71 * n_layers
        held = (n * (n_layers * truth.checkpoint + INPUTS) + b * TEXT) / GB
        working = (truth.fixed * n_layers / 2 + n * (truth.token - INPUTS) + b * (truth.sample - TEXT)) / GB
        factor = 1 + noise * rng.standard_normal()
        for metric, value in (("static", static), ("held", held), ("peak", static + held + working * factor)):
            rows.append(dict(suite="block_time", model="wan-14b", adaln=adaln, layers=n_layers, batch=b, tokens=s,
                             run_id="r1", metric=f"{metric}_memory", value=value))  # fmt: skip
    return pd.DataFrame(rows)


def test_recovers_what_made_the_peaks():
    found = fit_memory(memory_rows(), "wan-14b", "eager")
    for name in ("checkpoint", "token", "sample", "fixed"):
        assert getattr(found.model, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6)
    assert found.mape < 1e-6
    assert found.source == "r1"


def test_noise_shows_in_the_error():
    found = fit_memory(memory_rows(noise=0.03), "wan-14b", "eager")
    assert 0.3 < found.mape < 5
    assert found.model.token == pytest.approx(TRUTH.token, rel=0.05)


def test_missing_rows_are_named():
    rows = memory_rows()
    with pytest.raises(ValueError, match="two depths"):
        fit_memory(rows[rows["layers"] == 2], "wan-14b", "eager")
    with pytest.raises(ValueError, match="no memory rows of model 'wan-1"):
        fit_memory(rows, "wan-1.3b", "eager")
    with pytest.raises(ValueError, match="with adaln 'fused', got 0"):
        fit_memory(rows, "wan-14b", "fused")


def test_limit_is_the_last_that_fits():
    limit = TRUTH.token_limit(60 * GB, layers=40, shortest=1_560)
    batch = limit // 1_560
    assert TRUTH.bytes(batch, 1_560, 40) <= 60 * GB
    assert TRUTH.bytes(batch + 1, 1_560, 40) > 60 * GB
    # longer samples bring less text to the same tokens
    assert TRUTH.bytes(limit / 32_760, 32_760, 40) < 60 * GB


def test_shorter_samples_lower_the_limit():
    assert TRUTH.token_limit(60 * GB, 40, 256) < TRUTH.token_limit(60 * GB, 40, 32_760)


def test_state_of_full_sharding_shrinks_with_ranks():
    p, block = WAN_14B.parameters, WAN_14B.block_parameters
    assert state_bytes(WAN_14B, 8, "micro_batch") == pytest.approx(16 * p / 8 + 4 * block)
    assert state_bytes(WAN_14B, 16, "micro_batch") < state_bytes(WAN_14B, 8, "micro_batch")


def test_meeting_once_a_step_costs_gathered_parameters_and_whole_gradients():
    assert state_bytes(WAN_14B, 8, "step") == pytest.approx(12 * WAN_14B.parameters / 8 + 6 * WAN_14B.parameters)


def test_memory_limit_leaves_a_margin_and_says_when_nothing_fits():
    fit = MemoryFit(TRUTH, np.zeros(1), "r1")
    h200 = 150e9
    limit = memory_limit(fit, WAN_14B, h200, ranks=8, sync="micro_batch", shortest=1_560)
    used = TRUTH.bytes(limit / 1_560, 1_560, 40) + state_bytes(WAN_14B, 8, "micro_batch")
    assert used == pytest.approx(0.9 * h200, rel=1e-3)
    assert memory_limit(fit, WAN_14B, h200, 8, "micro_batch", 1_560, margin=0.0) > limit
    with pytest.raises(ValueError, match=r"wan-14b on 1 ranks keeps .* use more ranks"):
        memory_limit(fit, WAN_14B, h200, 1, "micro_batch", 1_560)
    with pytest.raises(ValueError, match=r"less than one sample of 75,600"):
        TRUTH.token_limit(10 * GB, 40, 75_600)
    assert memory_limit(fit, WAN_1_3B, h200, 1, "step", 1_560) > limit
