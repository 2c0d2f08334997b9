"""Manifests: every format gives the same corpus, nonsense is reported where it stands, useless files are refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.corpus.buckets import BucketGrid
from repro.corpus.cleaning import resample
from repro.corpus.manifest import Manifest, ManifestError, load, shards
from repro.corpus.shapes import Shape

ROWS: list[dict[str, Any]] = [
    {"path": "a.mp4", "num_frames": 150, "fps": 30, "height": 720, "width": 1280, "source": "koala"},
    {"path": "b.mp4", "num_frames": 40, "fps": 16, "height": 480, "width": 832, "source": "panda"},
    {"path": "c.jpg", "num_frames": 1, "fps": 0, "height": 720, "width": 1280, "source": "photos"},
    {"path": "d.mp4", "num_frames": 400, "fps": 25, "height": 1920, "width": 1080, "source": "koala"},
]
# 150 frames at 30 fps last until 149/30 s: 80 frames at 16 fps, so 65. 399/25 s: 256, trimmed to 81.
WANT = {Shape(65, 720, 1280): 1, Shape(33, 480, 832): 1, Shape(1, 720, 1280): 1, Shape(81, 1280, 720): 1}


def counts(manifest: Manifest) -> dict[Shape, int]:
    return dict(zip(manifest.corpus.shapes, manifest.corpus.counts.tolist(), strict=True))


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"clips.{kind}"
    frame = pd.DataFrame(rows)
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "csv.gz":
        path.write_bytes(gzip.compress(frame.to_csv(index=False).encode()))
    elif kind == "tsv":
        frame.to_csv(path, index=False, sep="\t")
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif kind == "parquet":
        frame.to_parquet(path, row_group_size=2)
    else:
        members = {}
        for i, r in enumerate(rows):
            members |= {f"{i:06}.mp4": b"video" * 300, f"{i:06}.json": json.dumps(r).encode()}
        write_tar(path, members)
    return path


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "jsonl", "parquet", "tar"])
@pytest.mark.parametrize("chunk_rows", [1, 3, 1_000])
def test_every_format_gives_the_same_corpus(tmp_path: Path, kind: str, chunk_rows: int) -> None:
    got = load(write(tmp_path, kind, ROWS), chunk_rows=chunk_rows)
    assert counts(got) == WANT
    assert [got.corpus.shapes[b].frames for b in got.corpus.bucket_of] == [65, 33, 1, 81]
    assert got.record_of.tolist() == [0, 1, 2, 3]
    assert got.corpus.name == "clips"
    assert (got.report.records, got.report.clips, got.report.samples) == (4, 4, 4)
    assert dict(got.report.sources) == {"koala": 2, "panda": 1, "photos": 1}
    assert got.corpus.tokens.tolist() == sorted(got.corpus.tokens.tolist())


def test_webdataset_shards_as_folder_glob_and_range(tmp_path: Path) -> None:
    for i in range(12):
        write_tar(tmp_path / f"clips-{i:03}.tar", {"k.json": json.dumps(ROWS[1]).encode()})
    for path in (str(tmp_path), f"{tmp_path}/clips-*.tar", f"{tmp_path}/clips-{{000..011}}.tar"):
        assert len(shards(path)) == 12
        assert load(path).corpus.samples == 12
    assert load(f"{tmp_path}/clips-{{003..004}}.tar").corpus.samples == 2


def test_webdataset_keys_end_at_the_first_dot_and_lone_videos_are_reported(tmp_path: Path) -> None:
    record = json.dumps(ROWS[1]).encode()
    members = {
        "dir.v1/x.left.mp4": b"",
        "dir.v1/x.json": record,
        "dir.v1/y.mp4": b"",
        "dir.v1/z.json": record,
        "dir.v1/z.txt": b"caption",
        "last.mp4": b"",
    }
    report = load(write_tar(tmp_path / "s.tar", members)).report
    assert report.clips == 2
    assert report.dropped == {"no .json member": 2}
    assert report.examples["no .json member"] == [
        "s.tar:dir.v1/y: its shape is unknown",
        "s.tar:last: its shape is unknown",
    ]


def test_truncated_and_missing_shards_cost_themselves_only(tmp_path: Path) -> None:
    good = write(tmp_path, "tar", ROWS)
    whole = good.read_bytes()
    (tmp_path / "part-0.tar").write_bytes(whole)
    (tmp_path / "part-1.tar").write_bytes(whole[:2_000])
    (tmp_path / "part-2.tar").write_bytes(b"not a tar at all")
    got = load(f"{tmp_path}/part-{{0..3}}.tar")
    assert got.report.dropped["unreadable shard"] == 3
    assert counts(got) == WANT
    assert any("part-3.tar" in line for line in got.report.examples["unreadable shard"])


NONSENSE = """path,num_frames,fps,height,width
ok.mp4,81,16,480,832
zero.mp4,0,16,480,832
nan.mp4,NaN,16,480,832
blank.mp4,,16,480,832
negative.mp4,81,16,-480,832
text.mp4,81,16,tall,832
short row,81
half.mp4,81.5,16,480,832
huge.mp4,81,16,480,1e9

infinite.mp4,inf,16,480,832
nofps.mp4,81,-1,480,832
"two
lines",0,16,480,832
float.mp4,81.0,16.0,480.0,832.0
"""


def test_nonsense_is_counted_by_reason_and_shown_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    path.write_text(NONSENSE)
    got = load(path, chunk_rows=4)
    assert counts(got) == {Shape(81, 480, 832): 2}
    assert got.record_of.tolist() == [0, 12]
    assert got.report.records == 13
    assert got.report.dropped == {
        "frames not positive": 2,
        "frames missing or NaN": 2,
        "height not positive": 1,
        "height not a number": 1,
        "wrong number of fields": 1,
        "frames not a whole number": 1,
        "width implausibly large": 1,
        "frames implausibly large": 1,
        "fps not positive": 1,
    }
    examples = got.report.examples
    assert examples["frames not positive"] == ["clips.csv:3: frames is '0'", "clips.csv:15: frames is '0'"]
    assert examples["frames missing or NaN"] == ["clips.csv:4: frames is 'NaN'", "clips.csv:5: frames is ''"]
    assert examples["wrong number of fields"] == ["clips.csv:8: 2, and the header has 5"]
    assert examples["frames implausibly large"] == ["clips.csv:12: frames is 'inf'"]
    assert "dropped 2: frames not positive" in str(got.report)


def test_nonsense_in_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "clips.jsonl"
    path.write_text(
        '{"frames": 81, "height": 480, "width": 832}\n'
        "{broken\n"
        "[1, 2]\n"
        "\n"
        '{"frames": 81, "height": [480, 1], "width": 832}\n'
        '{"frames": [1, 2], "height": [480, 1], "width": [3, 4]}\n'
        '{"frames": null, "height": 480, "width": 832}\n'
        '{"HEIGHT": "480", " Width ": 832, "n_frames": "81"}\n'
        '{"width": 832, "frames": NaN}\n'
    )
    got = load(path)
    assert counts(got) == {Shape(81, 480, 832): 2}
    assert got.report.dropped == {
        "not JSON": 1,
        "not a JSON object": 1,
        "height not a number": 2,
        "height missing or NaN": 1,
        "frames missing or NaN": 1,
    }
    assert got.report.examples["not JSON"][0].startswith("clips.jsonl:2: ")
    assert got.report.examples["height missing or NaN"] == ["clips.jsonl:9: height is None"]


@pytest.mark.parametrize("field", ["height", "width", "frames", "fps"])
def test_a_truth_value_is_no_number(tmp_path: Path, field: str) -> None:
    clip = {"frames": 81, "height": 480, "width": 832, "fps": 16}
    path = tmp_path / "clips.jsonl"
    path.write_text(json.dumps(clip) + "\n" + json.dumps(clip | {field: True}) + "\n")
    got = load(path)
    assert counts(got) == {Shape(81, 480, 832): 1}
    assert got.report.dropped == {f"{field} not a number": 1}
    assert got.report.examples[f"{field} not a number"] == [f"clips.jsonl:2: {field} is True"]

    path = tmp_path / "clips.parquet"  # where a whole column is of one type
    pd.DataFrame([clip | {field: True}]).to_parquet(path)
    with pytest.raises(ManifestError, match=f"1 {field} not a number"):
        load(path)


def test_nulls_in_parquet(tmp_path: Path) -> None:
    frame = pd.DataFrame({"frames": [81, None, 0], "height": [480, 480, 480], "width": ["832", "832", "832"]})
    path = tmp_path / "clips.parquet"
    frame.astype({"frames": "Int64"}).to_parquet(path)
    got = load(path)
    assert counts(got) == {Shape(81, 480, 832): 1}
    assert got.report.examples["frames missing or NaN"][0].startswith("clips.parquet:2: ")


def test_the_log_lists_every_dropped_and_changed_clip(tmp_path: Path) -> None:
    rows = [{"frames": 0, "height": 480, "width": 832}] * 10 + [{"frames": 90, "height": 480, "width": 832}] * 7
    load(write(tmp_path, "csv", rows), log=tmp_path / "log.csv", chunk_rows=4)
    lines = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [line["place"] for line in lines if line["fate"] == "dropped"] == [f"clips.csv:{i}" for i in range(2, 12)]
    assert [line["place"] for line in lines if line["fate"] == "changed"] == [f"clips.csv:{i}" for i in range(12, 19)]
    assert lines[-1]["detail"] == "90x480x832 to 81x480x832, 0.0% of the picture cut"


@pytest.mark.parametrize(
    ("row", "training_fps", "frames"),
    [
        ({"duration": 5.0625}, 16.0, 81),
        ({"duration": 5}, 16.0, 80),
        ({"duration_s": 5, "fps": 30}, 16.0, 80),  # the last of 150 frames is shown at 149/30 s
        ({"frames": 151, "fps": 30}, 16.0, 81),
        ({"frames": 150, "fps": 29.97}, 16.0, 80),
        ({"frames": 81}, 16.0, 81),
        ({"frames": 81, "fps": 8}, 16.0, 81),
        ({"frames": None, "duration": 5.0625}, 16.0, 81),
        ({"frames": 60, "duration": 1, "fps": 16}, 16.0, 60),
        ({"frames": 240, "fps": 24}, 24.0, 240),
    ],
)
def test_frames_at_the_training_rate(tmp_path: Path, row: dict[str, Any], training_fps: float, frames: int) -> None:
    grid = BucketGrid(frames=tuple(range(1, 400, 4)))
    got = load(write(tmp_path, "jsonl", [row | {"height": 480, "width": 832}]), grid, fps=training_fps)
    bucket = got.corpus.shapes[0].frames
    assert bucket == frames - (frames - 1) % 4


def test_a_short_video_resampled_to_one_frame_is_not_an_image(tmp_path: Path) -> None:
    rows = [
        {"frames": 2, "fps": 60, "height": 480, "width": 832},
        {"frames": 1, "fps": 60, "height": 480, "width": 832},
    ]
    got = load(write(tmp_path, "csv", rows))
    assert counts(got) == {Shape(1, 480, 832): 1}
    assert got.report.dropped == {"fewer frames than the shortest video bucket": 1}


@settings(derandomize=True, max_examples=200)
@given(st.integers(1, 100_000), st.floats(1, 240), st.floats(1, 60))
def test_resampling_keeps_the_frames_that_are_shown(frames: int, fps: float, training: float) -> None:
    left = int(resample(np.array([float(frames)]), np.array([fps]), training)[0])
    assert 1 <= left <= frames
    if fps > training and left > 2:
        last = (left - 1) / training
        assert last <= (frames - 1) / fps * (1 + 1e-6) + 1e-6  # shown within the clip
        assert last + 1 / training >= (frames - 1) / fps - 1e-6  # and no later frame would be


def test_notes_say_what_was_assumed_about_rates(tmp_path: Path) -> None:
    rows = [{"frames": 81, "fps": f, "height": 480, "width": 832} for f in ("", "8", "24")]
    notes = load(write(tmp_path, "csv", rows)).report.notes
    assert notes == [
        "1 clips without fps: their frames count as being at 16 fps",
        "1 clips slower than 16 fps keep their own frames",
    ]


@pytest.mark.parametrize("chunk_rows", [1, 7, 1_000])
def test_repeats_by_source(tmp_path: Path, chunk_rows: int) -> None:
    rows = [{"frames": 81, "height": 480, "width": 832, "dataset": "abc"[i % 3]} for i in range(30)]
    got = load(write(tmp_path, "csv", rows), repeats={"a": 3, "b": 0.3, "c": 2.25}, chunk_rows=chunk_rows)
    per_source = np.bincount(got.record_of % 3)
    assert per_source.tolist() == [30, 3, 22]
    assert got.corpus.samples == 55
    assert got.report.clips == 23
    assert got.report.dropped == {"source repeated 0 times": 7}
    assert np.all(np.diff(got.record_of) >= 0)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.floats(0, 5), st.integers(1, 50), st.integers(1, 7))
def test_repeats_sum_to_the_rounded_product_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, times: float, clips: int, chunk_rows: int
) -> None:
    rows = [{"frames": 81, "height": 480, "width": 832, "source": s} for s in ["x"] * clips + ["rest"]]
    path = write(tmp_path_factory.mktemp("m"), "csv", rows)
    got = load(path, repeats={"x": times}, chunk_rows=chunk_rows)
    assert got.corpus.samples == int(np.floor(times * clips + 1e-9)) + 1


def test_a_repeated_source_that_never_appears_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no usable clip of source 'kaola'; its sources: koala, panda, photos"):
        load(write(tmp_path, "csv", ROWS), repeats={"kaola": 2})
    with pytest.raises(ValueError, match="repeats of source 'koala'"):
        load(write(tmp_path, "csv", ROWS), repeats={"koala": -1})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("clips.csv", "", "is empty"),
        ("clips.csv", "frames,height,width\n", "none of 0 records is usable"),
        ("clips.csv", "frames,height,wide\n81,480,832\n", "no column for width; looked for width, w,"),
        ("clips.csv", "height,width\n480,832\n", "no column for frames or duration"),
        ("clips.csv", "only a line\n", "no column for height"),
        ("clips.csv", "frames,height,width\n0,480,832\nx,480,832\n", "none of 2 records is usable"),
        ("clips.csv", 'frames,height,width\n81,480,"' + "x" * 200_000, "is not CSV"),
        ("clips.jsonl", "", "none of 0 records"),
        ("clips.jsonl", '{"frames": 1}\n', "1 height missing or NaN"),
        ("clips.parquet", "PAR1 but not really", "is not a Parquet file"),
        ("clips.csv.gz", "no gzip", "cannot read"),
        ("clips.xlsx", "x", "is no manifest"),
        ("clips", "x", "is no manifest"),
    ],
)
def test_useless_manifests_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ManifestError, match=message):
        load(tmp_path / name)


def test_missing_files_and_folders_without_shards(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such manifest"):
        load(tmp_path / "clips.csv")
    with pytest.raises(ManifestError, match=r"no \.tar shards"):
        load(tmp_path)
    with pytest.raises(ManifestError, match="no such manifest"):
        load(tmp_path / "clips.parquet")


def test_byte_order_mark_and_bad_bytes_in_captions_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    path.write_bytes(b"\xef\xbb\xbfframes,height,width,text\n81,480,832,caf\xe9\x00\n")
    assert load(path).corpus.samples == 1


def test_wrong_fps_argument(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fps must be positive"):
        load(write(tmp_path, "csv", ROWS), fps=0)


def test_memory_grows_by_bytes_a_sample_not_by_records(tmp_path: Path) -> None:
    """60,000 records of 500 bytes are 30 MB of text; chunks of 1,000 leave 10 bytes a sample and one chunk."""
    path = tmp_path / "clips.csv"
    line = "x" * 490 + ",81,480,832\n"
    path.write_text("text,frames,height,width\n" + line * 60_000)
    tracemalloc.start()
    got = load(path, chunk_rows=1_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got.corpus.samples == 60_000
    # 2 + 8 bytes a sample while reading, as much again while concatenating, 4 more for the int32 buckets, and 3 MB
    # for a chunk's Python objects.
    assert peak < 60_000 * 26 + 3e6


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, repro.corpus.manifest, repro.corpus.mixes; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
