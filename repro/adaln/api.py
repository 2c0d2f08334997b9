"""What `repro.adaln` offers: the op, and every implementation under its name in the results."""

from __future__ import annotations

import functools
import types
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from repro.adaln import ops, reference, validation

Impl = Literal["eager", "wan", "compile", "dtile", "fused"]
IMPLS: tuple[Impl, ...] = get_args(Impl)


class LayerNormModulate(Protocol):
    """Call signature shared by all implementations; shapes and dtypes as in `layer_norm_modulate`."""

    def __call__(
        self, x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...


def layer_norm_modulate(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    *,
    impl: Literal["fused", "dtile"] = "fused",
) -> Tensor:
    """LayerNorm without affine parameters, then per-sample modulation: y = LN(x) * (1 + scale) + shift.

    Args:
        x: [B, N, D], or [N, D] for one sample; any strides. bfloat16, float16 or float32 (on CPU also float64).
        shift, scale: both [B, D] or both [B, 1, D] ([D] or [1, D] for one sample); any strides, such as those of a
            chunk of a larger table; any of x's dtypes, each its own.
        eps: added to the variance; positive.
        out_dtype: dtype of y; x's by default.
        impl: the CUDA backward. `fused` reads x and dy once; `dtile` reduces dshift and dscale in a kernel of its
            own over a (d_tile, n_tile) grid (arXiv 2605.17923). Same results up to rounding, same forward.

    Returns y, contiguous, with x's shape. Arithmetic is float32 (float64 for float64 x), rounded once; autocast does
    not change it. Autograd sees one node, which saves x, scale and 8 bytes a row; each gradient comes in its input's
    dtype and is bitwise repeatable. On CUDA the kernels are built at the first call (see `repro.adaln.build`); where
    they cannot be, and on every other device, plain tensor operations compute the same.

    Raises TypeError or ValueError for arguments that do not fit, RuntimeError when differentiated twice.
    """
    validation.check(x, shift, scale, eps, out_dtype, impl)
    return ops.forward_op(x, shift, scale, eps, out_dtype, impl)[0]


def get_impl(name: str) -> LayerNormModulate:
    """The implementation that results call `name`.

    `eager`, `wan`: `repro.adaln.reference`. `compile`: `eager` through Inductor, a kernel for each shape; every call
    of `get_impl` starts with an empty cache of its own. `dtile`, `fused`: `layer_norm_modulate`.
    Raises ValueError for an unknown name.
    """
    match name:
        case "eager":
            return reference.eager
        case "wan":
            return reference.wan
        case "compile":
            return _compiled_eager()
        case "dtile" | "fused":
            return functools.partial(layer_norm_modulate, impl=name)
    raise ValueError(f"name must be one of {', '.join(IMPLS)}, got {name!r}")


def _compiled_eager() -> LayerNormModulate:
    # Dynamo counts recompilations by code object and quietly falls back to eager when there are too many: a code
    # object of its own for each caller, and fullgraph, which turns that fallback into an error.
    eager = reference.eager
    own = types.FunctionType(eager.__code__.replace(), eager.__globals__, "eager", eager.__defaults__)
    compiled = torch.compile(own, fullgraph=True, dynamic=False)

    def call(
        x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if x.dim() == shift.dim() == scale.dim() == 3:
            # PyTorch 2.11's Inductor returns the gradient of a [1, 1, D] modulation as [D], which autograd refuses;
            # that of [1, D] is right (and the faster: one kernel reduces rows and columns).
            shift, scale = shift.squeeze(1), scale.squeeze(1)
        return compiled(x, shift, scale, eps, out_dtype)

    return call
