"""Which form a modulation has, told by its shape.

Legend: B samples, N rows (tokens) of a sample, D features, F frames of a sample, F dividing N.

    form        x [B, N, D]             x [N, D] (one sample)
    per_sample  [B, D] or [B, 1, D]     [D] or [1, D]
    per_token   [B, N, D]               [N, D]
    per_frame   [B, F, 1, D]            [F, 1, D]
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Form(NamedTuple):
    """x and its modulation as rows of samples, where frames with a modulation each are samples of their own.

    x is [batch, rows, D] then, and the modulation [batch, rows or 1, D].
    """

    batch: int
    rows: int
    per_token: bool

    def rows_of(self, x: Tensor) -> Tensor:
        """x, or a tensor of its shape, as [batch, rows, D]: a view, or where frames do not allow one, a copy."""
        return x.reshape(self.batch, self.rows, x.shape[-1])

    def modulation_of(self, modulation: Tensor) -> Tensor:
        """shift, scale or gate as [batch, rows or 1, D]; a view where its strides allow one."""
        return modulation.reshape(self.batch, self.rows if self.per_token else 1, modulation.shape[-1])


def form_of(x: Tensor, modulation: Tensor) -> Form | None:
    """The form of `modulation` for x [B, N, D] or [N, D]; None where it fits none. With N = 1 per_sample goes first."""
    if x.dim() not in (2, 3):
        return None
    *samples, rows, dim = x.shape
    *leading, last = modulation.shape or (0,)
    if last != dim or leading[: len(samples)] != samples:
        return None
    batch = samples[0] if samples else 1
    match leading[len(samples) :]:
        case [] | [1]:
            return Form(batch, rows, per_token=False)
        case [n] if n == rows:
            return Form(batch, rows, per_token=True)
        case [frames, 1] if frames >= 1 and rows % frames == 0:
            return Form(batch * frames, rows // frames, per_token=False)
    return None
