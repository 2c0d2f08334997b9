"""A streaming kernel in Triton, which needs no extension to be built: the plainest way there is to move bytes.

A program handles one contiguous block of each tensor with vector loads and stores. The arithmetic is that of
`repro.measure.stream`. Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

CONFIGS = ((4_096, 4), (8_192, 4), (16_384, 8), (16_384, 16), (32_768, 8), (32_768, 16))
"""(bytes of a tensor that a program handles, warps of a program)."""


@triton.jit
def _combine(a, b, c, offsets, mask, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.load(a + offsets, mask=mask).to(tl.float32)
    if GROUP == 1:
        value = 2.0 * first
    elif GROUP == 2:
        value = first + tl.load(b + offsets, mask=mask).to(tl.float32)
    else:
        second = tl.load(b + offsets, mask=mask).to(tl.float32)
        value = first + second * tl.load(c + offsets, mask=mask).to(tl.float32)
    return value


@triton.jit
def _stream(  # type: ignore[no-untyped-def]
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    out_a,
    out_b,
    size,
    GROUP_A: tl.constexpr,
    GROUP_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64-bit offsets: tensors may hold more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    a = _combine(a0, a1, a2, offsets, mask, GROUP_A)
    if GROUP_B > 0:
        b = _combine(b0, b1, b2, offsets, mask, GROUP_B)
        tl.store(out_b + offsets, b.to(out_b.dtype.element_ty), mask=mask)
    tl.store(out_a + offsets, a.to(out_a.dtype.element_ty), mask=mask)


def run(groups: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor], block_bytes: int, warps: int) -> None:
    """Fill one or two outputs, each from its group of one to three inputs; all contiguous, of one shape and dtype."""
    out, size = outputs[0], outputs[0].numel()
    block = block_bytes // out.dtype.itemsize
    # The kernel takes three inputs for each of two outputs; those that it never touches are stand-ins.
    second = groups[1] if len(groups) > 1 else ()
    slots = [*groups[0], *[out] * (3 - len(groups[0])), *second, *[out] * (3 - len(second))]
    _stream[(triton.cdiv(size, block),)](
        *slots, out, outputs[-1], size, GROUP_A=len(groups[0]), GROUP_B=len(second), BLOCK=block, num_warps=warps
    )
