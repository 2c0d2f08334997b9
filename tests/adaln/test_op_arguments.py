"""Arguments that do not fit: the error names the argument, what it got and what it needs."""

from __future__ import annotations

import math

import pytest
import torch

from repro.adaln import gated_residual_layer_norm_modulate, layer_norm_modulate

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def _t(*shape, dtype=F32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("x", "shift", "scale", "message"),
    [
        (_t(8), _t(8), _t(8), r"x must have shape \[B, N, D\] or \[N, D\], got \[8\]"),
        (_t(1, 2, 3, 4), _t(1, 4), _t(1, 4), r"x must have shape .*, got \[1, 2, 3, 4\]"),
        (_t(2, 3, 0), _t(2, 0), _t(2, 0), r"x must have at least one feature \(D >= 1\), got shape \[2, 3, 0\]"),
        (
            _t(2, 3, 8),
            _t(2, 8),
            _t(2, 9),
            r"scale must have shape \[2, 8\] or \[2, 1, 8\] \(per sample\), \[2, 3, 8\] \(per token\) or "
            r"\[2, F, 1, 8\] with F dividing 3 \(per frame\) for x \[2, 3, 8\], got \[2, 9\]",
        ),
        (_t(2, 3, 8), _t(1, 8), _t(1, 8), r"scale must have shape \[2, 8\] or \[2, 1, 8\] .*, got \[1, 8\]"),
        (_t(2, 3, 8), _t(8), _t(8), r"scale must have shape \[2, 8\] or \[2, 1, 8\] .*, got \[8\]"),
        (_t(2, 3, 8), _t(2, 2, 8), _t(2, 2, 8), r"scale must have shape .*, got \[2, 2, 8\]"),
        (_t(2, 6, 8), _t(2, 3, 8), _t(2, 3, 8), r"\[2, F, 1, 8\] with F dividing 6 .*, got \[2, 3, 8\]"),
        (_t(2, 6, 8), _t(2, 4, 1, 8), _t(2, 4, 1, 8), r"F dividing 6 .*, got \[2, 4, 1, 8\]"),
        (_t(2, 6, 8), _t(2, 0, 1, 8), _t(2, 0, 1, 8), r"F dividing 6 .*, got \[2, 0, 1, 8\]"),
        (_t(2, 6, 8), _t(2, 3, 2, 8), _t(2, 3, 2, 8), r"F dividing 6 .*, got \[2, 3, 2, 8\]"),
        (_t(2, 6, 8), _t(1, 3, 1, 8), _t(1, 3, 1, 8), r"scale must have shape .*, got \[1, 3, 1, 8\]"),
        (_t(3, 8), _t(2, 8), _t(2, 8), r"scale must have shape \[8\] or \[1, 8\] .* for x \[3, 8\], got \[2, 8\]"),
        (_t(3, 8), _t(1, 3, 8), _t(1, 3, 8), r"\[F, 1, 8\] with F dividing 3 .*, got \[1, 3, 8\]"),
        (_t(3, 8), _t(), _t(), r"scale must have shape .* for x \[3, 8\], got \[\]"),
        (_t(2, 3, 8), _t(2, 9), _t(2, 8), r"shift must have the same shape as scale \[2, 8\], got \[2, 9\]"),
        (_t(2, 3, 8), _t(2, 1, 8), _t(2, 8), r"shift must have the same shape as scale \[2, 8\], got \[2, 1, 8\]"),
        (_t(2, 3, 8), _t(2, 8, device="meta"), _t(2, 8), r"shift must be on x's device cpu, got meta"),
        (_t(2, 3, 8), _t(2, 8), _t(2, 8, device="meta"), r"scale must be on x's device cpu, got meta"),
    ],
)
def test_shapes_and_devices(x, shift, scale, message):
    with pytest.raises(ValueError, match=message):
        layer_norm_modulate(x, shift, scale)


@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "message"),
    [
        ((torch.int64, F32, F32), None, "x must be bfloat16, float16 or float32, got int64"),
        ((torch.complex64, F32, F32), None, "x must be .*, got complex64"),
        ((torch.float8_e4m3fn, F32, F32), None, "x must be .*, got float8_e4m3fn"),
        (
            (BF16, torch.int32, BF16),
            None,
            "shift must be one of bfloat16, float16, float32 for x of dtype bfloat16, got int32",
        ),
        ((BF16, BF16, F64), None, "scale must be one of bfloat16, float16, float32 .*, got float64"),
        ((F32, F32, F32), torch.int8, "out_dtype must be one of bfloat16, float16, float32 .*, got int8"),
        ((F32, F32, F32), F64, "out_dtype must be one of .*, got float64"),
        ((F64, F64, F64), torch.bool, "out_dtype must be one of bfloat16, float16, float32, float64 .*, got bool"),
        ((F32, F32, F32), "float32", "out_dtype must be a torch.dtype or None, got str"),
    ],
)
def test_dtypes(dtypes, out_dtype, message):
    x, shift, scale = (_t(*shape).to(d) for shape, d in zip(((2, 3, 8), (2, 8), (2, 8)), dtypes, strict=True))
    with pytest.raises(TypeError, match=message):
        layer_norm_modulate(x, shift, scale, out_dtype=out_dtype)


@pytest.mark.parametrize("position", range(3))
def test_not_a_tensor(position):
    arguments = [_t(2, 3, 8), _t(2, 8), _t(2, 8)]
    arguments[position] = [[0.0]]
    with pytest.raises(TypeError, match=rf"{('x', 'shift', 'scale')[position]} must be a torch.Tensor, got list"):
        layer_norm_modulate(*arguments)


@pytest.mark.parametrize("eps", [0, -1e-6, math.nan, math.inf])
def test_eps_values(eps):
    with pytest.raises(ValueError, match=f"eps must be positive and finite, got {eps}"):
        layer_norm_modulate(_t(2, 3, 8), _t(2, 8), _t(2, 8), eps)


def test_eps_type():
    with pytest.raises(TypeError, match="eps must be a float, got str"):
        layer_norm_modulate(_t(2, 3, 8), _t(2, 8), _t(2, 8), "1e-6")


def test_impl():
    with pytest.raises(ValueError, match="impl must be one of 'fused', 'dtile', got 'eager'"):
        layer_norm_modulate(_t(2, 3, 8), _t(2, 8), _t(2, 8), impl="eager")


@pytest.mark.gpu
def test_float64_is_for_the_cpu(cuda):
    x, shift, scale = (_t(*s, dtype=F64, device=cuda) for s in ((2, 3, 8), (2, 8), (2, 8)))
    with pytest.raises(TypeError, match=r"got float64 on a CUDA device \(float64 is for the CPU\)"):
        layer_norm_modulate(x, shift, scale)


@pytest.mark.gpu
def test_modulation_left_on_the_cpu(cuda):
    with pytest.raises(ValueError, match="shift must be on x's device cuda:0, got cpu"):
        layer_norm_modulate(_t(2, 3, 8, device=cuda), _t(2, 8), _t(2, 8, device=cuda))


def _gated(**changed):
    arguments = {name: _t(2, 3, 8) for name in ("x", "branch")} | {n: _t(2, 8) for n in ("gate", "shift", "scale")}
    return arguments | changed


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"branch": _t(2, 1, 8)}, ValueError, r"branch must have x's shape \[2, 3, 8\], got \[2, 1, 8\]"),
        ({"gate": _t(2, 1, 8)}, ValueError, r"gate must have the same shape as scale \[2, 8\], got \[2, 1, 8\]"),
        ({"shift": _t(8)}, ValueError, r"shift must have the same shape as scale \[2, 8\], got \[8\]"),
        ({"scale": _t(8)}, ValueError, r"scale must have shape \[2, 8\] or .*, got \[8\]"),
        ({"branch": None}, TypeError, "branch must be a torch.Tensor, got NoneType"),
        ({"branch": _t(2, 3, 8, dtype=F64)}, TypeError, "branch must be one of bfloat16, .*, got float64"),
        ({"gate": _t(2, 8, dtype=torch.int8)}, TypeError, "gate must be one of bfloat16, .*, got int8"),
        ({"gate": _t(2, 8, device="meta")}, ValueError, "gate must be on x's device cpu, got meta"),
        ({"branch": _t(2, 3, 8, device="meta")}, ValueError, "branch must be on x's device cpu, got meta"),
        ({"eps": 0.0}, ValueError, "eps must be positive and finite, got 0.0"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype must be one of .*, got int8"),
    ],
)
def test_gated_residual(changed, kind, message):
    with pytest.raises(kind, match=message):
        gated_residual_layer_norm_modulate(**_gated(**changed))


@pytest.mark.gpu
@pytest.mark.parametrize(("eps", "out_dtype"), [(1, None), (1e-6, torch.float16)])
def test_whatever_the_extension_does_not_take_itself_is_accepted(cuda, eps, out_dtype):
    """An integer eps, and tensors of a subclass, go the longer way."""
    x, shift, scale = (_t(*s, device=cuda) for s in ((2, 3, 8), (2, 8), (2, 8)))
    want = layer_norm_modulate(x, shift, scale, float(eps), out_dtype)
    assert torch.equal(layer_norm_modulate(x.as_subclass(_Tensor), shift, scale, eps, out_dtype), want)


class _Tensor(torch.Tensor):
    pass
