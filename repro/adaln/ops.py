"""The two operators of library `repro_adaln`, as PyTorch sees them: schema, shapes, kernels per device, autograd.

    layer_norm_modulate(x, shift, scale, eps, out_dtype, impl) -> (y, mean, rstd)
    layer_norm_modulate_backward(dy, x, scale, mean, rstd, shift_dtype, impl) -> (dx, dshift, dscale)

x [B, N, D] with shift and scale [B, D] or [B, 1, D], or x [N, D] with [D] or [1, D], taken as they come so that one
call adds one autograd node. y and dx are contiguous; mean and rstd are flat, [B*N], float32 (float64 for float64 x);
dshift and dscale have the shape of scale, dscale its dtype. `impl` picks the CUDA backward, `fused` or `dtile`.
Arguments are not checked here: `repro.adaln.validation` does that for the public function.

Kernels: the composite is registered for every device; the compiled extension registers CUDA's own when it loads. The
first CUDA tensor to arrive loads it, from then on CUDA calls reach C++ without passing through Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd as _below_autograd
from torch.autograd import forward_ad

from repro.adaln import build, composite

NAMESPACE = "repro_adaln"
_FORWARD = "layer_norm_modulate"
_BACKWARD = "layer_norm_modulate_backward"

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    f"{_FORWARD}(Tensor x, Tensor shift, Tensor scale, float eps, ScalarType? out_dtype, str impl)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"{_BACKWARD}(Tensor dy, Tensor x, Tensor scale, Tensor mean, Tensor rstd, ScalarType shift_dtype, str impl)"
    " -> (Tensor dx, Tensor dshift, Tensor dscale)",
    tags=torch.Tag.pt2_compliant_tag,
)
forward_op = torch.ops.repro_adaln.layer_norm_modulate.default
backward_op = torch.ops.repro_adaln.layer_norm_modulate_backward.default


@torch.library.register_fake(f"{NAMESPACE}::{_FORWARD}", lib=_library)
def _forward_fake(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype | None, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0]
    mean = x.new_empty(rows, dtype=composite.statistics_dtype(x))
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), mean, torch.empty_like(mean)


@torch.library.register_fake(f"{NAMESPACE}::{_BACKWARD}", lib=_library)
def _backward_fake(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, shift_dtype: torch.dtype, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), scale.new_empty(scale.shape, dtype=shift_dtype), scale.new_empty(scale.shape)


def _forward_kernel(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype | None, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda and build.ensure_loaded():
        return forward_op(x, shift, scale, eps, out_dtype, impl)
    return composite.run(composite.forward, x, shift, scale, eps, out_dtype)


def _backward_kernel(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, shift_dtype: torch.dtype, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda and build.ensure_loaded():
        return backward_op(dy, x, scale, mean, rstd, shift_dtype, impl)
    return composite.run(composite.backward, dy, x, scale, mean, rstd, shift_dtype)


_library.impl(_FORWARD, _forward_kernel, "CompositeExplicitAutograd")
_library.impl(_BACKWARD, _backward_kernel, "CompositeExplicitAutograd")


class LayerNormModulate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype | None, impl: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _below_autograd():
            y, mean, rstd = forward_op(x, shift, scale, eps, out_dtype, impl)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)  # else every backward fills zeros for mean and rstd
        ctx.save_for_backward(x, scale, mean, rstd)
        ctx.shift_dtype, ctx.impl = shift.dtype, impl
        return y, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        x, scale, mean, rstd = ctx.saved_tensors
        return (*backward_op(dy, x, scale, mean, rstd, ctx.shift_dtype, ctx.impl), None, None, None)


class LayerNormModulateGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, shift_dtype: torch.dtype, impl: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _below_autograd():
            return backward_op(dy, x, scale, mean, rstd, shift_dtype, impl)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise RuntimeError(
            "layer_norm_modulate does not support double backward (a gradient of its gradient was asked for): "
            "use repro.adaln.get_impl('eager'), whose formula PyTorch differentiates any number of times"
        )


def _autograd_kernel(op: torch._ops.OpOverload, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        differentiated = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        # Under forward-mode differentiation autograd refuses a function without jvp; passed by, tangents would be lost.
        if differentiated or forward_ad._current_level >= 0:
            return function.apply(*args)
        with _below_autograd():
            return op(*args)

    return kernel


# Not torch.library.register_autograd: going through the schema, it takes two to three times as long a call.
_library.impl(_FORWARD, _autograd_kernel(forward_op, LayerNormModulate), "Autograd")
_library.impl(_BACKWARD, _autograd_kernel(backward_op, LayerNormModulateGradient), "Autograd")
