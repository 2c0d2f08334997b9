"""Where rows come from: what a run record says of the code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from repro.measure.machine import Machine
from repro.records import Store, provenance


def test_without_a_commit_nothing_is_called_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path / "new")], check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "new")
    store = Store(tmp_path / "results")
    store.start(Machine("gpu", "GPU", 1, (9, 0), 132, 10**11, 4, {"unavailable": {}}), ["x"], None, "smoke")
    (record,) = store.runs("gpu")
    assert record["commit"] is None and record["clean"] is None
    assert {"commit", "clean"} <= set(record["unavailable"])


def test_the_source_hash_follows_the_sources_alone(tmp_path: Path) -> None:
    (tmp_path / "repro").mkdir()
    (tmp_path / "repro" / "a.py").write_text("x = 1\n")
    first = provenance.source_hash(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "rows.csv").write_text("1\n")
    assert provenance.source_hash(tmp_path) == first
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "kernel.cu").write_text("")
    second = provenance.source_hash(tmp_path)
    (tmp_path / "repro" / "a.py").rename(tmp_path / "repro" / "b.py")
    assert len({first, second, provenance.source_hash(tmp_path)}) == 3
