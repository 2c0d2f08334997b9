"""What became of every clip of a manifest: counts by reason, examples, and on request a line for each."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.corpus.readers import Broken

EXAMPLES = 3
"""Examples kept of each reason: enough to recognise a pattern, few enough to read."""


@dataclass
class ClipReport:
    """Counts and examples of one manifest; `str` is what a user reads.

    records: rows or members read. clips: those that are used. samples: clips after repeats. dropped, changed: clips
    by reason; a changed clip is used. examples: reason to "place: detail" lines. sources: usable clips by source.
    kept_frames, kept_pixels: mean share of a used clip that its bucket keeps.
    """

    records: int = 0
    clips: int = 0
    samples: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    frames_seen: float = 0.0
    frames_used: float = 0.0
    crop_sum: float = 0.0

    @property
    def kept_frames(self) -> float:
        """Share of the used clips' frames that is trained on, 1 where there are none."""
        return self.frames_used / self.frames_seen if self.frames_seen else 1.0

    @property
    def kept_pixels(self) -> float:
        """Mean share of the picture that survives the centre crop."""
        return 1 - self.crop_sum / self.clips if self.clips else 1.0

    def lines(self) -> list[str]:
        """The report, most frequent reasons first."""
        out = [f"{self.records:,} records: {self.clips:,} clips used as {self.samples:,} samples"]
        for title, counter in (("dropped", self.dropped), ("changed", self.changed)):
            for reason, n in counter.most_common():
                out.append(f"  {title} {n:,}: {reason}")
                if title == "dropped":
                    out += [f"    {line}" for line in self.examples.get(reason, [])]
        if self.clips:
            out.append(f"  kept on average {self.kept_frames:.1%} of frames, {self.kept_pixels:.1%} of the picture")
        return out + [f"  {note}" for note in self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class Recorder(AbstractContextManager["Recorder"]):
    """Fills a `ClipReport`; with `log`, also writes `place,fate,reason,detail` of every dropped or changed clip.

    The log appears at the end, whole, in place of an older one; where reading fails, the older one stays.
    """

    def __init__(self, report: ClipReport, log: Path | None = None) -> None:
        self.report, self._log = report, log
        self._partial = log.with_name(f".{log.name}.partial") if log else None
        self._file = self._partial.open("w", newline="", encoding="utf-8") if self._partial else None
        self._writer: Any = csv.writer(self._file) if self._file else None
        if self._writer:
            self._writer.writerow(("place", "fate", "reason", "detail"))

    def note(
        self, fate: str, reason: str, where: npt.NDArray[np.intp], describe: Callable[[int], tuple[str, str]]
    ) -> None:
        """Count clips as `fate` ("dropped" or "changed") for `reason`.

        where: indices [n] of the clips; `describe` turns one into its place and detail, and is called for a few
        examples only, unless there is a log.
        """
        if not len(where):
            return
        counter = self.report.dropped if fate == "dropped" else self.report.changed
        counter[reason] += len(where)
        examples = self.report.examples.setdefault(reason, [])
        for i in where.tolist() if self._writer else where[: EXAMPLES - len(examples)].tolist():
            place, detail = describe(i)
            if len(examples) < EXAMPLES:
                examples.append(f"{place}: {detail}")
            if self._writer:
                self._writer.writerow((place, fate, reason, detail))

    def broken(self, records: Sequence[Broken]) -> None:
        """Count records that could not be read at all."""
        for reason in dict.fromkeys(r.reason for r in records):
            those = [r for r in records if r.reason == reason]
            self.note("dropped", reason, np.arange(len(those)), lambda i, t=those: (t[i].place, t[i].detail))  # type: ignore[misc]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is None or self._partial is None or self._log is None:
            return
        self._file.close()
        try:
            if kind is None:
                self._partial.replace(self._log)
        finally:
            self._partial.unlink(missing_ok=True)
