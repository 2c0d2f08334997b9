"""The operators of library `repro_adaln`, as PyTorch sees them: schemas, shapes, kernels per device, autograd.

    layer_norm_modulate(x, shift, scale, eps, out_dtype, impl) -> (y, statistics)
    layer_norm_modulate_backward(dy, x, scale, statistics, shift_dtype, impl) -> (dx, dshift, dscale)
    gated_residual_layer_norm_modulate(x, branch, gate, shift, scale, eps, out_dtype) -> (h, y, statistics)
    gated_residual_layer_norm_modulate_backward(dy, dh, h, branch, gate, scale, statistics, shift_dtype)
        -> (dx, dbranch, dgate, dshift, dscale)

Shapes are those that `repro.adaln.form` lists, taken as they come so that one call adds one autograd node. h, y and
gradients are contiguous; statistics [2, rows] holds mean, then rstd, in float32 (float64 for float64 x). dbranch comes
in branch's dtype, dgate in gate's, dscale in scale's. An operator must not return one tensor twice, or one that it was
given, so a gradient that another tensor already holds is left out, as an empty [0]: dshift per token, which is dy, and
without a gate dbranch, which is dx (and dgate); autograd puts them back. branch is needed with a gate only.
`impl` picks the CUDA backward, `fused` or `dtile`. Arguments are not checked here: `repro.adaln.validation` does that.

Kernels: the composite is registered for every device; the compiled extension registers CUDA's own, and CUDA's
autograd, when it loads. The first CUDA tensor to arrive loads it, from then on CUDA calls never pass through Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd as _below_autograd
from torch.autograd import forward_ad

from repro.adaln import build, composite
from repro.adaln.form import form_of

NAMESPACE = build.NAME
_FORWARD, _BACKWARD, _GATED_FORWARD, _GATED_BACKWARD = build.OPERATORS

# flexible_layout: any strides are taken as they are, so Inductor has no reason to copy an argument beforehand.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library = torch.library.Library(NAMESPACE, "DEF")
for _schema in (
    f"{_FORWARD}(Tensor x, Tensor shift, Tensor scale, float eps, ScalarType? out_dtype, str impl)"
    " -> (Tensor y, Tensor statistics)",
    f"{_BACKWARD}(Tensor dy, Tensor x, Tensor scale, Tensor statistics, ScalarType shift_dtype, str impl)"
    " -> (Tensor dx, Tensor dshift, Tensor dscale)",
    f"{_GATED_FORWARD}(Tensor x, Tensor branch, Tensor? gate, Tensor shift, Tensor scale, float eps,"
    " ScalarType? out_dtype) -> (Tensor h, Tensor y, Tensor statistics)",
    f"{_GATED_BACKWARD}(Tensor dy, Tensor? dh, Tensor h, Tensor? branch, Tensor? gate, Tensor scale,"
    " Tensor statistics, ScalarType shift_dtype)"
    " -> (Tensor dx, Tensor dbranch, Tensor dgate, Tensor dshift, Tensor dscale)",
):
    _library.define(_schema, tags=_TAGS)

forward_op = torch.ops.repro_adaln.layer_norm_modulate.default
backward_op = torch.ops.repro_adaln.layer_norm_modulate_backward.default
gated_forward_op = torch.ops.repro_adaln.gated_residual_layer_norm_modulate.default
gated_backward_op = torch.ops.repro_adaln.gated_residual_layer_norm_modulate_backward.default


@torch.library.register_fake(f"{NAMESPACE}::{_FORWARD}", lib=_library)
def _forward_fake(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype | None, impl: str
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0]
    statistics = x.new_empty(2, rows, dtype=composite.statistics_dtype(x))
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), statistics


@torch.library.register_fake(f"{NAMESPACE}::{_BACKWARD}", lib=_library)
def _backward_fake(
    dy: Tensor, x: Tensor, scale: Tensor, statistics: Tensor, shift_dtype: torch.dtype, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    form = form_of(x, scale)
    dshift_shape = (0,) if form is None or form.per_token else scale.shape
    return x.new_empty(x.shape), scale.new_empty(dshift_shape, dtype=shift_dtype), scale.new_empty(scale.shape)


@torch.library.register_fake(f"{NAMESPACE}::{_GATED_FORWARD}", lib=_library)
def _gated_forward_fake(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_forward_fake(x, shift, scale, eps, out_dtype, "fused")


@torch.library.register_fake(f"{NAMESPACE}::{_GATED_BACKWARD}", lib=_library)
def _gated_backward_fake(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    statistics: Tensor,
    shift_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dshift, dscale = _backward_fake(dy, h, scale, statistics, shift_dtype, "fused")
    dbranch = h.new_empty(0) if branch is None else branch.new_empty(h.shape)
    dgate = h.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return dx, dbranch, dgate, dshift, dscale


def _kernel(op: torch._ops.OpOverload, formula: str, options: int) -> Callable[..., Any]:
    """The composite's `formula`, which does without the last `options` arguments, or on CUDA whatever was loaded."""

    def kernel(*args: Any) -> Any:
        x = args[0]
        if x.is_cuda and build.ensure_loaded():
            return op(*args)
        return composite.run(getattr(composite, formula), *args[: len(args) - options])

    return kernel


_forward_kernel = _kernel(forward_op, "forward", 1)
_backward_kernel = _kernel(backward_op, "backward", 1)
_library.impl(_FORWARD, _forward_kernel, "CompositeExplicitAutograd")
_library.impl(_BACKWARD, _backward_kernel, "CompositeExplicitAutograd")
_library.impl(_GATED_FORWARD, _kernel(gated_forward_op, "gated_forward", 0), "CompositeExplicitAutograd")
_library.impl(_GATED_BACKWARD, _kernel(gated_backward_op, "gated_backward", 0), "CompositeExplicitAutograd")


class LayerNormModulate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype | None, impl: str
    ) -> tuple[Tensor, Tensor]:
        with _below_autograd():
            y, statistics = forward_op(x, shift, scale, eps, out_dtype, impl)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # else every backward fills zeros for the statistics
        ctx.save_for_backward(x, scale, statistics)
        ctx.shift_dtype, ctx.impl = shift.dtype, impl
        return y, statistics

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        x, scale, statistics = ctx.saved_tensors
        dx, dshift, dscale = backward_op(dy, x, scale, statistics, ctx.shift_dtype, ctx.impl)
        return dx, _restored(dshift, dscale, dy), dscale, None, None, None


class GatedResidualLayerNormModulate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        gate: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        eps: float,
        out_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _below_autograd():
            h, y, statistics = gated_forward_op(x, branch, gate, shift, scale, eps, out_dtype)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, None if gate is None else branch, gate, scale, statistics)
        ctx.shift_dtype = shift.dtype
        return h, y, statistics

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dh is None and dy is None:
            return (None,) * 7
        h, branch, gate, scale, statistics = ctx.saved_tensors
        dy = torch.zeros_like(h) if dy is None else dy
        dx, dbranch, dgate, dshift, dscale = gated_backward_op(
            dy, dh, h, branch, gate, scale, statistics, ctx.shift_dtype
        )
        if gate is None:
            dbranch, dgate = dx, None
        return dx, dbranch, dgate, _restored(dshift, dscale, dy), dscale, None, None


def _restored(dshift: Tensor, dscale: Tensor, dy: Tensor) -> Tensor:
    """dshift, or dy where dshift was left out for it; autograd casts to shift's dtype."""
    return dshift if dshift.dim() == dscale.dim() else dy


class OnceDifferentiable(torch.autograd.Function):
    """Gives gradients a node of their own, so that asking for a gradient of them fails instead of finding nothing."""

    @staticmethod
    def forward(ctx: Any, op: torch._ops.OpOverload, *args: Any) -> tuple[Tensor, ...]:
        with _below_autograd():
            return op(*args)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise RuntimeError(
            "layer_norm_modulate does not support double backward (a gradient of its gradient was asked for): "
            "use repro.adaln.get_impl('eager'), whose formula PyTorch differentiates any number of times"
        )


def _autograd_kernel(op: torch._ops.OpOverload, apply: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        differentiated = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        # Under forward-mode differentiation autograd refuses a function without jvp; passed by, tangents would be lost.
        if differentiated or forward_ad._current_level >= 0:
            return apply(*args)
        with _below_autograd():
            return op(*args)

    return kernel


def _once(op: torch._ops.OpOverload) -> Callable[..., Any]:
    return _autograd_kernel(op, lambda *args: OnceDifferentiable.apply(op, *args))


# Not torch.library.register_autograd: going through the schema, it takes two to three times as long a call.
_library.impl(_FORWARD, _autograd_kernel(forward_op, LayerNormModulate.apply), "Autograd")
_library.impl(_BACKWARD, _once(backward_op), "Autograd")
_library.impl(_GATED_FORWARD, _autograd_kernel(gated_forward_op, GatedResidualLayerNormModulate.apply), "Autograd")
_library.impl(_GATED_BACKWARD, _once(gated_backward_op), "Autograd")
