"""The command on two machines, played by two processes here: one measures and writes, the other lends its rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.records import Store
from tests.wan.test_nodes import free_port

ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, rank: int, rendezvous: str, *arguments: str) -> subprocess.Popen[str]:
    common = ["--gpus", "0", "--nnodes", "2", "--rendezvous", rendezvous, "--node-rank", str(rank)]
    command = [sys.executable, "-m", "repro.all", *common, "--results", str(folder / str(rank) / "results"), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=-1, stderr=subprocess.STDOUT
    )


def test_two_nodes_measure_and_one_writes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rendezvous = f"127.0.0.1:{free_port()}"
    nodes = [start(tmp_path, rank, rendezvous, "--only", "links") for rank in (1, 0)]
    told = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert "Node 1 of 2: lends its ranks to node 0" in told[0]
    assert not (tmp_path / "1").exists()
    store = Store(tmp_path / "0" / "results")
    (device,) = store.devices()
    rows = store.rows("links", device, "smoke")
    assert set(rows["ranks"].astype(int)) == {2} and {"bandwidth_0_1", "bandwidth_1_0"} <= set(rows["metric"])
    (run,) = store.runs(device)
    first, second = run["machine"]["nodes"]
    assert first == second and len(first["source"]) == 64
    assert f"NODE0:{rendezvous.rpartition(':')[2]}" in run["command"] and "127.0.0.1" not in str(run["command"])
