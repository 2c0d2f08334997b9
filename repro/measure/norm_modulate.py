"""LayerNorm-modulate implementations, and the streams beside them, as subjects to be checked and timed.

Legend: B samples, N rows (tokens) of a sample, D features. Modulation has the dtype of x and arrives as it does in
Wan's blocks: strided [B, 1, D] views of a [B, 6, D] table.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.adaln import get_impl, ops, reference
from repro.measure import stream, timing
from repro.measure.verify import Subject, verified_time

Direction = Literal["forward", "backward"]

EPS = 1e-6
OUTPUTS: dict[Direction, tuple[str, ...]] = {"forward": ("y",), "backward": ("dx", "dshift", "dscale")}
TENSORS: dict[Direction, int] = {"forward": 2, "backward": 3}
"""Tensors of x's size that have to move: x and y; dy, x and dx."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error of a row that passes as right. The textbook chain, which rounds at each step, shows up to 6e-3
in bfloat16 and 2e-7 in float32; one element of typical size missing from a row of 5,120 is 1.4e-2."""

READS: dict[Direction, int] = {"forward": 1, "backward": 2}
"""Reads to one write."""

OWN = ("fused", "dtile")
"""Implementations whose backward is an operator of its own."""

_REFERENCE_CHUNK = 1 << 25
"""Elements of x that are differentiated in float64 at a time."""


@dataclass(frozen=True)
class Problem:
    """Shape and dtype of x [batch, tokens, dim]."""

    batch: int
    tokens: int
    dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of x."""
        return self.batch, self.tokens, self.dim

    @property
    def x_bytes(self) -> int:
        """Bytes of x."""
        return self.batch * self.tokens * self.dim * self.dtype.itemsize

    def traffic(self, direction: Direction) -> int:
        """Bytes that have to move: each tensor of x's size read or written once; the rest is negligible."""
        return TENSORS[direction] * self.x_bytes


@dataclass(frozen=True)
class Inputs:
    """x and dy [B, N, D]; shift and scale [B, 1, D], leaves that require gradients like x."""

    x: Tensor
    shift: Tensor
    scale: Tensor
    dy: Tensor


def random_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Unit-scale normal x and dy, modulation of spread 0.5."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=problem.dtype, device=device, generator=generator)

    shift, scale = (0.5 * normal(problem.batch, 6, problem.dim)).chunk(6, dim=1)[:2]
    return Inputs(
        normal(*problem.shape).requires_grad_(),
        shift.detach().requires_grad_(),
        scale.detach().requires_grad_(),
        normal(*problem.shape),
    )


def subjects(impl: str, direction: Direction, problem: Problem, device: torch.device) -> list[Subject]:
    """One subject an input set, as many sets as a cold cache needs; what is timed is the device's work alone.

    Forward: the call with gradients enabled, as in training. Backward: gradients of x, shift and scale, the forward
    having been run outside; the operator itself for `fused` and `dtile`, autograd's backward for the others.
    `stream` is the plain streaming kernel over tensors of x's size. Call it inside `timing.work_stream(device)`.
    """
    sets = timing.set_count(problem.traffic(direction), device)
    if impl == "stream":
        reads = READS[direction]
        return [stream.subject(problem.shape, problem.dtype, reads, device, seed) for seed in range(sets)]
    make = _forward if direction == "forward" else _backward
    f = implementation(impl, problem)
    return [make(impl, f, random_inputs(problem, device, seed)) for seed in range(sets)]


def called(impl: str, direction: Direction, problem: Problem, device: torch.device) -> list[Callable[[], object]]:
    """What a user calls from Python, one callable an input set: the forward, or autograd's backward of it."""
    if impl == "stream":
        return [s.call for s in subjects(impl, direction, problem, device)]
    sets = timing.set_count(problem.traffic(direction), device)
    f = implementation(impl, problem)
    inputs = [random_inputs(problem, device, seed) for seed in range(sets)]
    if direction == "forward":
        return [functools.partial(f, i.x, i.shift, i.scale, EPS) for i in inputs]
    return [_autograd(f, i) for i in inputs]


@dataclass(frozen=True)
class Times:
    """device: verified device time. called: time from Python, launches included."""

    device: timing.Timing
    called: timing.Timing


def measure(impl: str, direction: Direction, problem: Problem, device: torch.device, seconds: float) -> Times:
    """Check and time one implementation, about `seconds` for each of the two times.

    Raises verify.WrongResultError where its results are wrong.
    """
    with timing.work_stream(device), retained_graphs():
        on_device = verified_time(subjects(impl, direction, problem, device), device, seconds)
        from_python = timing.called_time(called(impl, direction, problem, device), device, seconds)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # cells differ in size: blocks kept for one are of no use to the next
    return Times(on_device, from_python)


def implementation(impl: str, problem: Problem) -> Callable[..., Tensor]:
    """The implementation of that name. `compile` gets a compilation of its own for each problem, kept for the next
    call with the same problem only: static shapes are its best case.
    """
    return _compiled(problem) if impl == "compile" else get_impl(impl)


@functools.lru_cache(maxsize=1)
def _compiled(problem: Problem) -> Callable[..., Tensor]:
    return get_impl("compile")


@contextlib.contextmanager
def retained_graphs() -> Iterator[None]:
    """Let compiled functions be differentiated repeatedly from one forward, which donated buffers rule out."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False):
        yield


def _forward(impl: str, f: Callable[..., Tensor], inputs: Inputs) -> Subject:
    x, shift, scale = inputs.x, inputs.shift, inputs.scale

    def refill(seed: int) -> None:
        generator = torch.Generator(x.device).manual_seed(seed)
        with torch.no_grad():
            x.normal_(generator=generator)
            shift.normal_(0, 0.5, generator=generator)
            scale.normal_(0, 0.5, generator=generator)

    return Subject(
        call=lambda: (f(x, shift, scale, EPS),),
        inputs={"x": x, "shift": shift, "scale": scale},
        outputs=OUTPUTS["forward"],
        reference=lambda: (reference_forward(x, shift, scale),),
        refill=refill,
        tolerance=TOLERANCE[x.dtype],
    )


def _backward(impl: str, f: Callable[..., Tensor], inputs: Inputs) -> Subject:
    x, shift, scale, dy = inputs.x, inputs.shift, inputs.scale, inputs.dy
    read = {"dy": dy, "x": x, "scale": scale}
    if impl in OWN:
        with torch.no_grad():
            _, mean, rstd = ops.forward_op(x, shift, scale, EPS, None, impl)
        read |= {"mean": mean, "rstd": rstd}
        x_data, scale_data = x.detach(), scale.detach()

        def call() -> tuple[Tensor, ...]:
            return ops.backward_op(dy, x_data, scale_data, mean, rstd, shift.dtype, impl)
    else:
        call = _autograd(f, inputs)

    def refill(seed: int) -> None:
        # dy alone: the rest went into what the forward saved.
        dy.normal_(generator=torch.Generator(dy.device).manual_seed(seed))

    return Subject(
        call=call,
        inputs=read,
        outputs=OUTPUTS["backward"],
        reference=lambda: reference_backward(dy, x, shift, scale),
        refill=refill,
        tolerance=TOLERANCE[x.dtype],
    )


def _autograd(f: Callable[..., Tensor], inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    y = f(inputs.x, inputs.shift, inputs.scale, EPS)
    wanted = (inputs.x, inputs.shift, inputs.scale)
    return lambda: torch.autograd.grad(y, wanted, inputs.dy, retain_graph=True)


def reference_forward(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """y in float64, [B, N, D]."""
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    with torch.no_grad():
        for rows in _chunks(x):
            y[:, rows] = reference.reference64(x[:, rows], shift, scale, EPS)
    return y


def reference_backward(dy: Tensor, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx [B, N, D], dshift and dscale (shapes of shift and scale) in float64, by autograd through the reference."""
    dx = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    shift64, scale64 = shift.detach().double().requires_grad_(), scale.detach().double().requires_grad_()
    dshift, dscale = torch.zeros_like(shift64), torch.zeros_like(scale64)
    for rows in _chunks(x):
        x64 = x[:, rows].detach().double().requires_grad_()
        y64 = reference.reference64(x64, shift64, scale64, EPS)
        dx[:, rows], dh, ds = torch.autograd.grad(y64, (x64, shift64, scale64), dy[:, rows].double())
        dshift += dh
        dscale += ds
    return dx, dshift.detach(), dscale.detach()


def _chunks(x: Tensor) -> Iterator[slice]:
    step = max(1, _REFERENCE_CHUNK // (x.shape[0] * x.shape[2]))
    return (slice(n, n + step) for n in range(0, x.shape[1], step))
