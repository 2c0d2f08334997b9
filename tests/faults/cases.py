"""What a case of bad input is, and the doors that it is fed to.

A door is where something from outside comes in: a command, a file that is read, or a function that users call. Every
case says what is given and what the answer must tell; `test_bad_input` holds each to the same standard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = (
    "missing",
    "empty",
    "malformed",
    "truncated",
    "not UTF-8",
    "wrong type",
    "duplicated",
    "NaN",
    "negative",
    "overflow",
    "huge",
    "adversarial",
)
"""What is wrong with the input; the columns of the table in RELIABILITY.md."""

Arguments = Sequence[object]


@dataclass(frozen=True)
class Case:
    """One bad input at one door.

    given: makes the input in an empty folder; returns a command's arguments, or for a function the call. told: regular
    expression that the answer's line must match: file, line or argument, and what would be right.
    """

    door: str
    kind: str
    name: str
    given: Callable[[Path], Arguments | Callable[[], object]]
    told: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")

    @property
    def id(self) -> str:
        """Name of the test."""
        return f"{self.door}: {self.name}"


def options(door: str, kind: str, told: str, *arguments: object) -> Case:
    """A case of a command that is given nothing but these arguments."""
    return Case(door, kind, " ".join(map(str, arguments)) or "no arguments", lambda _: arguments, told)
