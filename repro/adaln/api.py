"""What `repro.adaln` offers: the op, alone and behind a gated residual, and every implementation that results name."""

from __future__ import annotations

import functools
import types
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from repro.adaln import build, ops, reference, validation

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
    """LayerNorm without affine parameters, then modulation: y = LN(x) * (1 + scale) + shift.

    Args:
        x: [B, N, D], or [N, D] for one sample; any strides. bfloat16, float16 or float32 (on CPU also float64).
        shift, scale: of one shape, which tells the form: per sample [B, D] or [B, 1, D]; per token [B, N, D]; per
            frame [B, F, 1, D] with F dividing N; without B for one sample. Any strides, such as those of a chunk of a
            larger table; any of x's dtypes, each its own.
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
    if not torch.compiler.is_compiling() and build.native is not None:
        y = build.native.layer_norm_modulate(x, shift, scale, eps, out_dtype, impl)
        if y is not None:
            return y
    validation.check(x, shift, scale, eps, out_dtype, impl)
    return ops.forward_op(x, shift, scale, eps, out_dtype, impl)[0]


def gated_residual_layer_norm_modulate(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated residual, then `layer_norm_modulate` of it: h = x + gate * branch, y = LN(h) * (1 + scale) + shift.

    Args:
        x: as in `layer_norm_modulate`.
        branch: x's shape; any strides, any of x's dtypes.
        gate: shift's and scale's shape, any of x's dtypes; None for a plain residual, h = x + branch.
        shift, scale, eps, out_dtype: as in `layer_norm_modulate`.

    Returns h in x's dtype and y, both contiguous, with x's shape. h is computed in float32 (float64 for float64 x) and
    rounded once; it is the rounded h that is normalized. Autograd sees one node, which saves h, scale, 8 bytes a row
    and, with a gate, branch and gate; gradients of h and y are combined in one backward. On CUDA both directions are
    one pass over the rows where y is no wider than x, branch has y's dtype, D is a multiple of 8 and rows are aligned
    to 16 bytes; otherwise residual and norm run one after the other.

    Raises as `layer_norm_modulate`.
    """
    if not torch.compiler.is_compiling() and build.native is not None:
        out = build.native.gated_residual_layer_norm_modulate(x, branch, gate, shift, scale, eps, out_dtype)
        if out is not None:
            return out
    validation.check_gated(x, branch, gate, shift, scale, eps, out_dtype)
    h, y, _ = ops.gated_forward_op(x, branch, gate, shift, scale, eps, out_dtype)
    return h, y


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
        if x.dim() == shift.dim() == scale.dim() == 3 and shift.shape[1] == 1:
            # PyTorch 2.11's Inductor returns the gradient of a [1, 1, D] modulation as [D], which autograd refuses;
            # that of [1, D] is right (and the faster: one kernel reduces rows and columns).
            shift, scale = shift.squeeze(1), scale.squeeze(1)
        return compiled(x, shift, scale, eps, out_dtype)

    return call
