"""Judging the records of a manifest: which column is which, what is nonsense, how many frames remain for training."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from repro.corpus.readers import RawChunk
from repro.corpus.report import Recorder

FIELDS: dict[str, tuple[str, ...]] = {
    "frames": ("frames", "num_frames", "n_frames", "nframes", "nb_frames", "frame_count", "frames_count"),
    "duration": ("duration", "duration_s", "duration_sec", "duration_seconds", "seconds", "video_duration"),
    "fps": ("fps", "frame_rate", "framerate", "frames_per_second", "video_fps"),
    "height": ("height", "h", "video_height", "original_height"),
    "width": ("width", "w", "video_width", "original_width"),
    "source": ("source", "dataset", "dataset_name", "data_source", "subset"),
}
"""What is read, and the column names that it goes by (Open-Sora, Panda-70M, Koala-36M, img2dataset, ffprobe)."""

_NUMERIC = tuple(f for f in FIELDS if f != "source")
_WHOLE = ("frames", "height", "width")
_LIMIT = {"frames": 1e8, "duration": 1e6, "fps": 1e3, "height": 65_536, "width": 65_536}
"""Above these a value is a mistake: eleven days of video, or a picture larger than any codec allows."""
_BLANK = ("", "nan", "none", "null", "na", "n/a")

# What can be wrong with a value; 0 is nothing.
_MISSING, _TEXT, _SIGN, _SIZE, _FRACTION = range(1, 6)
_WORDS = ("", "missing or NaN", "not a number", "not positive", "implausibly large", "not a whole number")


@dataclass(frozen=True)
class Clips:
    """The n usable clips of a chunk, at the training frame rate.

    row: their index in the chunk. frames, height, width: int64 [n].
    """

    row: npt.NDArray[np.intp]
    frames: npt.NDArray[np.int64]
    height: npt.NDArray[np.int64]
    width: npt.NDArray[np.int64]


def _floats(raw: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """float64 [n], NaN for what is no number."""
    if raw.dtype == object:
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError):  # all text, all numbers: seven times faster
            text = pa.array(raw, type=pa.string(), from_pandas=True)
            return text.cast(pa.float64()).to_numpy(zero_copy_only=False, writable=True)
    try:
        numbers = np.array(pd.to_numeric(raw, errors="coerce"), dtype=np.float64)
    except OverflowError:  # a whole number of hundreds of digits, which JSON may hold
        numbers = np.array([_float(v) for v in raw])
    if raw.dtype == object or raw.dtype == bool:  # true of JSON and Parquet would count as 1
        numbers[[isinstance(v, bool | np.bool_) for v in raw]] = np.nan
    return numbers


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return np.inf if value > 0 else -np.inf
    except (TypeError, ValueError):
        return np.nan


def _numbers(field: str, raw: npt.NDArray[Any] | None, n: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint8]]:
    """float64 [n] of a column, and what is wrong with each value."""
    if raw is None:
        return np.full(n, np.nan), np.full(n, _MISSING, dtype=np.uint8)
    value = _floats(raw)
    wrong = np.zeros(n, dtype=np.uint8)
    unread = np.flatnonzero(np.isnan(value))
    blank = [raw[i] is None or str(raw[i]).strip().lower() in _BLANK for i in unread]
    wrong[unread] = np.where(blank, _MISSING, _TEXT)
    wrong[value > _LIMIT[field]] = _SIZE
    wrong[value <= 0] = _SIGN
    if field in _WHOLE:
        wrong[(wrong == 0) & (value != np.floor(value))] = _FRACTION
    return value, wrong


def resample(
    frames: npt.NDArray[np.float64], fps: npt.NDArray[np.float64], training_fps: float
) -> npt.NDArray[np.int64]:
    """Frames left, int64 [n], of clips of `frames` [n] at `fps` [n] (NaN: already at the training rate).

    Frame k is shown at k / fps, so floor((frames - 1) * training_fps / fps) + 1 remain. Slower clips keep their frames
    (none are invented), an image stays one frame, and a video never becomes an image.
    """
    faster = np.where(fps > training_fps, fps, training_fps)
    left = np.floor((frames - 1) * (training_fps / faster) + 1e-6) + 1  # 1e-6: quotients such as 30000/1001
    return np.where(frames > 1, np.maximum(left, 2), 1).astype(np.int64)


def check(chunk: RawChunk, training_fps: float, note: Recorder, tally: Counter[str]) -> Clips:
    """Judge the records of a chunk: nonsense goes to `note`; `tally` counts clips whose fps is unknown or low.

    Frames count before duration, if a record has both. Image records carry any fps (0, 120, blank), so an image's is
    not looked at; a video's blank fps means that its frames are at the training rate.
    """
    n = len(chunk.places)
    columns = {f: _numbers(f, chunk.values.get(f), n) for f in _NUMERIC}
    value = {f: v for f, (v, _) in columns.items()}
    wrong = {f: w for f, (_, w) in columns.items()}

    image = (wrong["frames"] == 0) & (value["frames"] == 1)
    timed = (wrong["frames"] == _MISSING) & (("frames" not in chunk.values) | (wrong["duration"] != _MISSING))
    known_rate = ~image & (wrong["fps"] != _MISSING)
    blame = np.full(n, -1, dtype=np.int8)  # index into _NUMERIC of the first field that is wrong
    for field, counts in (
        ("height", np.True_),
        ("width", np.True_),
        ("frames", ~timed),
        ("duration", timed),
        ("fps", known_rate),
    ):
        blame[(blame < 0) & counts & (wrong[field] > 0)] = _NUMERIC.index(field)

    good = blame < 0
    row = np.flatnonzero(good)
    fps = np.where(known_rate, value["fps"], np.nan)[row]
    tally["no_fps"] += int((good & ~image & ~timed & ~known_rate).sum())
    tally["slower"] += int((fps < training_fps).sum())
    seconds = np.where(timed, value["duration"], 0.0)[row]
    counted = np.where(np.isnan(fps), np.floor(seconds * training_fps + 1e-6), np.round(seconds * fps))
    frames = np.where(timed[row], np.maximum(counted, 2), value["frames"][row])  # what has a duration is a video
    clips = Clips(
        row=row,
        frames=resample(frames, fps, training_fps),
        height=value["height"][row].astype(np.int64),
        width=value["width"][row].astype(np.int64),
    )
    if len(row) < n:
        _note_nonsense(chunk, blame, wrong, note)
    return clips


def _note_nonsense(
    chunk: RawChunk, blame: npt.NDArray[np.int8], wrong: dict[str, npt.NDArray[np.uint8]], note: Recorder
) -> None:
    for i, field in enumerate(_NUMERIC):
        raw = chunk.values.get(field)
        for problem in range(1, len(_WORDS)):
            where = np.flatnonzero((blame == i) & (wrong[field] == problem))

            def describe(k: int, field: str = field, raw: npt.NDArray[Any] | None = raw) -> tuple[str, str]:
                return chunk.places[k], f"{field} is {raw[k]!r}" if raw is not None else f"no {field}"

            note.note("dropped", f"{field} {_WORDS[problem]}", where, describe)
