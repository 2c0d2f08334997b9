"""Speed of planning: a manifest of a million clips in at most 10 s on two cores.

Under `pytest --benchmark-only` the manifest has a million clips; a plain test run plans 20,000, to see that it works.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from repro.corpus.buckets import BucketGrid
from repro.corpus.manifest import load
from repro.plan_setup import Setup, known_model, read_costs, token_limit
from repro.planner import Plan, make
from repro.records import Store
from tests.plan.recorded import MEMORY_BYTES, write

LIMIT_SECONDS = 10.0


@pytest.fixture
def clips(request: pytest.FixtureRequest) -> int:
    return 1_000_000 if request.config.getoption("benchmark_only") else 20_000


@pytest.fixture
def manifest(tmp_path: Path, clips: int) -> Path:
    rng = np.random.default_rng(0)
    height = rng.choice([360, 720, 1080, 2160], clips)
    frame = pd.DataFrame(
        {
            "path": "videos/clip.mp4",
            "num_frames": rng.integers(20, 900, clips),
            "fps": rng.choice([24, 25, 29.97, 60], clips),
            "height": height,
            "width": height * 16 // 9,
        }
    )
    frame.to_csv(tmp_path / "clips.csv", index=False)
    return tmp_path / "clips.csv"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(write(tmp_path / "results"))


def test_planning_a_manifest(
    benchmark: BenchmarkFixture,
    require_within: Callable[[BenchmarkFixture, float], None],
    manifest: Path,
    store: Store,
    clips: int,
) -> None:
    setup = Setup(known_model("wan-14b"), "nvidia-h200", float(MEMORY_BYTES), ranks=16)

    def plan() -> Plan:
        costs, memory = read_costs(store, setup)
        limit, _ = token_limit(setup, costs, memory)
        return make(setup, costs, load(manifest, BucketGrid(max_tokens=limit)).corpus, limit)

    made = benchmark.pedantic(plan, rounds=3, warmup_rounds=0)
    benchmark.extra_info["clips"] = clips
    assert made.corpus.samples > 0.9 * clips
    require_within(benchmark, LIMIT_SECONDS)
