"""Whatever bytes a file holds, its reader gives an answer or its own error; never another exception, never a write."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from repro import compare_read, plan_file
from repro.corpus import manifest
from repro.corpus.readers import ManifestError
from repro.plan_setup import PlanError
from repro.records import Store
from repro.wan import checkpoint_index, sweep
from repro.wan.config import WanConfig
from repro.wan.convert import diffusers_config, load_diffusers, read_config, to_diffusers
from repro.wan.model import WanModel
from repro.wan.samples import DataError
from repro.wan.shards import ShardedSamples
from tests.faults import doors_functions, doors_plan, doors_results, doors_start, doors_train, recorded_rows

TINY = WanConfig.preset("tiny", 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SETTINGS = settings(
    derandomize=True, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def mangled(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with a few of its bytes cut out, repeated, replaced or put in, or no file of that kind at all."""
    content = draw(st.just(good) | st.binary(max_size=200)) if draw(st.integers(0, 9)) == 0 else good
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 40)))
        put = draw(
            st.binary(max_size=6) | st.sampled_from([b"", b"\n", b",", b'"', b"-1", b"NaN", b"1e999", b"\xff", b"\0"])
        )
        content = content[:start] + put * draw(st.integers(0, 3)) + content[end:]
    return content


def answers(read: Callable[[], object], *errors: type[Exception]) -> None:
    """Call it; one of its own errors, in one short line of text, is an answer too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except errors as error:
            assert 0 < len(str(error)) < 1000


MANIFESTS: dict[str, bytes] = {
    "clips.csv": doors_plan.GOOD.encode() * 3,
    "clips.jsonl": doors_plan.line(frames=81, height=480, width=832).encode() * 3,
    "clips.parquet": doors_plan.WHOLE,
    "clips.tar": doors_plan.tar(a_json=b'{"frames": 81, "height": 480, "width": 832}', a_mp4=b"x" * 600),
}


@pytest.mark.parametrize("name", MANIFESTS)
@given(data=st.data())
@SETTINGS
def test_a_manifest(name: str, data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content := data.draw(mangled(MANIFESTS[name])))
    answers(lambda: manifest.load(path), ManifestError)
    assert path.read_bytes() == content and [p.name for p in tmp_path.iterdir()] == [name]


@given(content=mangled(doors_plan.PLAN.encode()))
@SETTINGS
def test_a_plan_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(content)
    answers(lambda: plan_file.read(tmp_path / "plan.yaml"), PlanError)


@given(
    rows=mangled((recorded_rows.HEADER + recorded_rows.ROW + recorded_rows.OTHER).encode()),
    runs=mangled(recorded_rows.RECORD.encode() * 2),
)
@SETTINGS
def test_a_folder_of_results(rows: bytes, runs: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("results")
    folder = recorded_rows.write(root / "acme-1")
    (folder / "speed.csv").write_bytes(rows)
    (folder / "runs.jsonl").write_bytes(runs)
    store = Store(root)
    answers(lambda: (store.rows("speed"), store.runs("acme-1"), store.done("speed", "acme-1", "full")))
    assert (folder / "speed.csv").read_bytes() == rows and (folder / "runs.jsonl").read_bytes() == runs
    answers(lambda: compare_read.read(str(folder), root), compare_read.SourceError)


@given(content=JSON.map(json.dumps).map(str.encode) | mangled(json.dumps(doors_results.GOOD).encode()))
@SETTINGS
def test_a_file_of_pytest_benchmark(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_bytes(content)
    answers(lambda: compare_read.read(str(tmp_path / "runs.json"), tmp_path), compare_read.SourceError)


@given(
    changed=st.dictionaries(
        st.sampled_from(["version", "name", "source", "shapes", "shardlist", "shard_url", "shard_nsamples"])
        | st.sampled_from(["shard_buckets", "shard_filesize", "shard_sha256"]),
        JSON,
        min_size=1,
        max_size=2,
    )
)
@SETTINGS
def test_an_index_of_shards(changed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    data = doors_train.written(tmp_path_factory.mktemp("shards"))
    shard_entries_first = dict(sorted(changed.items(), key=lambda item: not item[0].startswith("shard_")))
    doors_train.index(**shard_entries_first)(data)
    answers(lambda: ShardedSamples(data), DataError, FileNotFoundError)


def tensor_index() -> dict[str, Any]:
    """Of a checkpoint with a sharded tensor and a setting."""
    chunks = [[[0, 0], [2, 3], "__0_0.distcp", 0, 900], [[2, 0], [2, 3], "__1_0.distcp", 0, 900]]
    one = {"dtype": "float32", "size": [4, 3], "chunks": chunks}
    return {"tensors": {"model.w": one}, "others": {"optimizer.lr": ["__0_0.distcp", 900, 40]}}


@given(content=JSON.map(json.dumps).map(str.encode) | mangled(json.dumps(tensor_index()).encode()))
@SETTINGS
def test_the_index_of_a_checkpoint(content: bytes, tmp_path: Path) -> None:
    (tmp_path / checkpoint_index.NAME).write_bytes(content)
    answers(lambda: checkpoint_index.read(tmp_path), ValueError)


@given(content=JSON.map(json.dumps).map(str.encode) | mangled(json.dumps(diffusers_config(TINY)).encode()))
@SETTINGS
def test_config_json_of_weights(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    answers(lambda: read_config(tmp_path), ValueError)


@given(data=st.data())
@SETTINGS
def test_a_file_of_weights(data: st.DataObject, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = WanModel(TINY)
    whole = save({name: torch.zeros(p.shape[:1]) for name, p in to_diffusers(model.state_dict()).items()})
    (tmp_path / doors_start.TENSOR_FILE).write_bytes(data.draw(mangled(whole)))
    answers(lambda: load_diffusers(model, tmp_path), ValueError)


SWEPT = "\n".join([doors_start.SWEPT, "x,1x32x32,2,4,nan,100,1", "x,1x32x32,2,4,0.5,-1,1", "x,end,0,256,0.0,-1,1", ""])


@given(content=mangled(SWEPT.encode()))
@SETTINGS
def test_a_record_of_measured_shapes(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "calibration.csv").write_bytes(content)
    answers(lambda: sweep._read(tmp_path / "calibration.csv"), ValueError)


@given(
    state=st.dictionaries(st.sampled_from(["seed", "epoch", "steps", "schedule"]), JSON | st.integers(0, 3), max_size=4)
)
@SETTINGS
def test_the_state_of_a_sampler(state: dict[str, Any]) -> None:
    sampler = doors_functions.sampler()
    before = sampler.state_dict()
    good = dict(before)
    answers(lambda: sampler.load_state_dict({**good, **state}), ValueError)
    if {**good, **state} != good:
        assert sampler.state_dict()["schedule"] == before["schedule"]
