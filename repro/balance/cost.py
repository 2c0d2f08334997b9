"""What a micro-batch costs: step time of one rank, forward and backward, as a function of batch size and length.

Three forms with one face (`repro.balance.types.Cost`): AdaptiveLoad's power law, a quadratic that counts the text, and
the measured table itself. Each knows the shapes that it was measured on and refuses others unless told otherwise.

Legend: B samples, S tokens of a sample, L blocks; seconds throughout; lengths inside formulas in units of 10^4 tokens,
which keeps coefficients near one another in size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

UNIT = 1e4
"""Tokens that lengths are divided by inside the formulas."""


class ExtrapolationError(ValueError):
    """A cost was asked for a shape outside what it was measured on."""


@dataclass(frozen=True)
class Range:
    """Shapes that a cost was measured on.

    tokens: shortest and longest sample. micro_batch_tokens: most tokens B * S together.
    """

    tokens: tuple[int, int]
    micro_batch_tokens: int

    def __post_init__(self) -> None:
        shortest, longest = self.tokens
        if not 0 < shortest <= longest <= self.micro_batch_tokens:
            raise ValueError(f"range needs 0 < shortest <= longest <= B * S, got {self}")

    @classmethod
    def of(cls, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> Self:
        """The range that these measured shapes span."""
        b, s = np.asarray(batch, np.int64), np.asarray(tokens, np.int64)
        return cls((int(s.min()), int(s.max())), int((b * s).max()))

    def outside(self, batch: Floats, tokens: Floats) -> npt.NDArray[np.bool_]:
        """Which shapes are not covered."""
        return (tokens < self.tokens[0]) | (tokens > self.tokens[1]) | (batch * tokens > self.micro_batch_tokens)

    def __str__(self) -> str:
        return f"{self.tokens[0]:,} to {self.tokens[1]:,} tokens a sample, up to {self.micro_batch_tokens:,} together"


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """What all forms share.

    layers: blocks that the cost is for. measured_layers: blocks that were measured. range: shapes that were measured.
    source: where the numbers come from. extrapolate: answer outside the range too.
    """

    layers: int
    measured_layers: int
    range: Range
    source: str
    extrapolate: bool = False

    def __post_init__(self) -> None:
        if self.layers < 1 or self.measured_layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers} (measured: {self.measured_layers})")

    @property
    def kind(self) -> Literal["measured", "simulated"]:
        """`simulated` once it speaks of another depth than was measured, or of shapes that were not."""
        return "measured" if self.layers == self.measured_layers and not self.extrapolate else "simulated"

    def scaled(self, layers: int) -> Self:
        """The same for a model of `layers` blocks, time being proportional to depth."""
        return replace(self, layers=layers)

    def extrapolating(self) -> Self:
        """The same, answering outside the measured range too."""
        return replace(self, extrapolate=True)

    def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> Floats:
        """Seconds of micro-batches of `batch` samples of `tokens` tokens each (broadcast together).

        Raises ValueError for sizes below 1, ExtrapolationError outside the measured range unless `extrapolate`.
        """
        b, s = np.broadcast_arrays(np.asarray(batch, np.float64), np.asarray(tokens, np.float64))
        if b.size and not (b.min() >= 1 and s.min() >= 1):  # also catches NaN
            raise ValueError(f"batch and tokens must be at least 1, got {b.min()} and {s.min()}")
        if not self.extrapolate:
            self._refuse(b, s, self.range.outside(b, s))
        return self._seconds(b, s) * (self.layers / self.measured_layers)

    def _seconds(self, batch: Floats, tokens: Floats) -> Floats:
        """Seconds at the measured depth."""
        raise NotImplementedError

    def _refuse(self, batch: Floats, tokens: Floats, outside: npt.NDArray[np.bool_]) -> None:
        if outside.any():
            at = tuple(np.argwhere(outside)[0])
            raise ExtrapolationError(
                f"{batch[at]:g} x {tokens[at]:,.0f} tokens is outside what was measured ({self.range}; {self.source}): "
                "measure it, or ask for extrapolating()"
            )


@dataclass(frozen=True, kw_only=True)
class PowerCost(MeasuredCost):
    """a + b * B * (S / 10^4)^p: the form of AdaptiveLoad (arXiv 2605.17923).

    a, b in seconds at the measured depth; p has no unit and does not depend on the unit of S.
    """

    a: float
    b: float
    p: float

    def __str__(self) -> str:
        a, b = (value * self.layers / self.measured_layers for value in (self.a, self.b))
        return f"{a:.3g} + {b:.3g} B (S / 10^4)^{self.p:.3g}"

    def _seconds(self, batch: Floats, tokens: Floats) -> Floats:
        return self.a + self.b * batch * (tokens / UNIT) ** self.p


@dataclass(frozen=True, kw_only=True)
class QuadraticCost(MeasuredCost):
    """a + B * (b * S / 10^4 + c * (S / 10^4)^2 + d).

    Launches, linears, attention, and what every sample adds however short (its text): seconds at the measured depth.
    """

    a: float
    b: float
    c: float
    d: float = 0.0

    def __str__(self) -> str:
        a, b, c, d = (value * self.layers / self.measured_layers for value in (self.a, self.b, self.c, self.d))
        return f"{a:.3g} + B ({b:.3g} s + {c:.3g} s^2 + {d:.3g}), s = S / 10^4"

    def _seconds(self, batch: Floats, tokens: Floats) -> Floats:
        s = tokens / UNIT
        return self.a + batch * (self.b * s + self.c * s * s + self.d)


@dataclass(frozen=True, kw_only=True)
class TableCost(MeasuredCost):
    """Measured times, interpolated by correcting a fitted form.

    The ratio of measured to fitted time is interpolated linearly over (log S, log B) on a Delaunay triangulation of the
    measured shapes: at a measured shape the measured time comes out, between shapes the form's curvature is kept.
    Outside the triangulation the ratio of the nearest measured shape holds, if asked for.

    base: the form. batch, tokens, measured_seconds: the M measured shapes, at the measured depth.

    Raises ValueError for fewer than three shapes, repeated ones, or shapes on one line.
    """

    base: PowerCost | QuadraticCost
    batch: tuple[int, ...]
    tokens: tuple[int, ...]
    measured_seconds: tuple[float, ...] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = list(zip(self.batch, self.tokens, strict=True))
        if len(shapes) != len(self.measured_seconds) or len(set(shapes)) != len(shapes):
            raise ValueError(
                f"table needs one time for each shape, got {len(shapes)} shapes, {len(set(shapes))} distinct"
            )
        if np.linalg.matrix_rank(self._points[1:] - self._points[0]) < 2:
            raise ValueError(f"table needs shapes that span batch and tokens, got {shapes}")

    @cached_property
    def _points(self) -> Floats:
        return _coordinates(np.array(self.batch, np.float64), np.array(self.tokens, np.float64))

    @cached_property
    def _log_ratio(self) -> Floats:
        fitted = self.base._seconds(np.array(self.batch, np.float64), np.array(self.tokens, np.float64))
        return np.log(np.array(self.measured_seconds) / fitted)

    @cached_property
    def _linear(self) -> Callable[[Floats], Floats]:
        from scipy.interpolate import LinearNDInterpolator

        return LinearNDInterpolator(self._points, self._log_ratio)

    @cached_property
    def _nearest(self) -> Callable[[Floats], Floats]:
        from scipy.interpolate import NearestNDInterpolator

        return NearestNDInterpolator(self._points, self._log_ratio)

    def _seconds(self, batch: Floats, tokens: Floats) -> Floats:
        at = _coordinates(batch, tokens).reshape(-1, 2)
        log_ratio = self._linear(at)
        outside = np.isnan(log_ratio)
        if not self.extrapolate:
            self._refuse(batch, tokens, outside.reshape(batch.shape))
        log_ratio[outside] = self._nearest(at[outside])
        return self.base._seconds(batch, tokens) * np.exp(log_ratio.reshape(batch.shape))


def _coordinates(batch: Floats, tokens: Floats) -> Floats:
    return np.stack([np.log(tokens), np.log(batch)], axis=-1)


def reference_wan14b(*, extrapolate: bool = False) -> QuadraticCost:
    """Wan 2.1 14B on one NVIDIA H200: 3 blocks measured (bf16, full activation checkpointing), scaled to 40.

    t[ms] = (40 / 3) (5.7 + 127.6 B S / 10^4 + 47.75 B S^2 / 10^8), fitted over S = 256 to 65,536 and B * S up to
    70,000; no communication. A fixed reference, so that results can be compared whatever is measured anew.
    """
    return QuadraticCost(
        a=5.7e-3,
        b=127.6e-3,
        c=47.75e-3,
        layers=40,
        measured_layers=3,
        range=Range((256, 65_536), 70_000),
        source="measured on one H200, 3 blocks scaled to 40",
        extrapolate=extrapolate,
    )
