"""Raw samples of a run, one gzipped CSV file a suite and run: parameters, metric, unit, index, value.

Each case is a gzip member of its own (a gzip file may be a sequence of them), so that a case is added by appending.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from repro.records import files
from repro.records.schema import cell
from repro.suite import Case, Measurement

_COLUMNS = ("metric", "unit", "index", "value")


def append(path: Path, case: Case, measurements: Sequence[Measurement]) -> None:
    """Add a case's samples, if it has any. The caller holds the lock."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    if not path.exists() or path.stat().st_size == 0:  # empty: what a failed first write leaves
        writer.writerow((*case.key, *_COLUMNS))
    key = [cell(v) for v in case.key.values()]
    for m in measurements:
        writer.writerows([*key, m.metric, m.unit, i, repr(float(v))] for i, v in enumerate(m.samples))
    if any(m.samples for m in measurements):
        files.append(path, gzip.compress(buffer.getvalue().encode(), mtime=0))


def read(path: Path) -> pd.DataFrame:
    """All samples of a file, none where it is missing. Warns where the last member was cut off."""
    lines = list(csv.reader(io.StringIO(_text(path) if path.exists() else "")))
    if not lines:
        return pd.DataFrame(columns=list(_COLUMNS))
    frame = pd.DataFrame(lines[1:], columns=lines[0])
    for column in frame.columns.drop(["metric", "unit"]):
        frame[column] = numeric(frame[column])
    return frame


def numeric(texts: pd.Series) -> pd.Series:
    """Numbers where every non-empty cell is one (NaN for the empty ones), else the texts."""
    try:
        return pd.to_numeric(texts.replace("", np.nan))
    except ValueError:
        return texts


def _text(path: Path) -> str:
    """Text of the whole members, and the whole lines of what can be read of a cut-off last one."""
    data, out = path.read_bytes(), b""
    while data:
        member = zlib.decompressobj(wbits=31)  # gzip
        with contextlib.suppress(zlib.error):
            out += member.decompress(data) + member.flush()
        if not member.eof:
            warnings.warn(f"{path}: cut off; its last samples are left out", stacklevel=3)
            break
        data = member.unused_data
    return out[: out.rfind(b"\n") + 1].decode()
