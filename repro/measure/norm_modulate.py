"""LayerNorm-modulate implementations, and the streams beside them, as subjects to be checked and timed.

`stream` is the plain streaming kernel with the same mix of reads and writes; `eager`, `wan`: formulas of
`repro.adaln.reference`; `compile`: eager through Inductor with static shapes; `fused`, `dtile`: the op of
`repro.adaln`; `cudnn`, `liger`, `quack`: see `repro.measure.peers`; `unfused`, of the gated form only: the gated
residual in a kernel of its own, then the fused norm.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repro import adaln
from repro.adaln import get_impl, reference
from repro.measure import peers, stream, timing
from repro.measure.norm_problem import EPS, FORMS, Direction, FormName, Inputs, Problem, as_tuple, random_inputs
from repro.measure.verify import Subject, verified_time

__all__ = ["EPS", "FORMS", "OWN", "Direction", "FormName", "Problem", "Times", "called", "measure", "subjects"]

OWN = ("fused", "dtile", "unfused")
"""Implementations that need the compiled kernels on a GPU."""

Implementation = Callable[..., Tensor | tuple[Tensor, ...]]
"""(inputs of the form, eps) -> its outputs."""


def subjects(impl: str, direction: Direction, problem: Problem, device: torch.device) -> list[Subject]:
    """One subject an input set, as many sets as a cold cache needs; what is timed is the device's work alone.

    Forward: the call with gradients enabled, as in training. Backward: autograd's, of all inputs, the forward having
    been run outside. Of the peers both are their kernels themselves. Call it inside `timing.work_stream(device)`.

    Raises peers.PeerUnavailable.
    """
    if impl == "stream":
        mix = FORMS[problem.form].mix(direction)
        # Tensors of one dtype that hold as many bytes; of x's shape, unless y's dtype is another than x's.
        dim = problem.traffic(direction) // (mix.tensors * problem.batch * problem.tokens * problem.dtype.itemsize)
        return stream.subjects((problem.batch, problem.tokens, dim), problem.dtype, mix, device)
    sets = [random_inputs(problem, device, seed) for seed in range(_sets(direction, problem, device))]
    if impl in peers.NAMES:
        peer = _peer(impl, problem)
        return [(_peer_forward if direction == "forward" else _peer_backward)(peer, inputs) for inputs in sets]
    f = implementation(impl, problem)
    return [(_forward if direction == "forward" else _backward)(f, inputs) for inputs in sets]


def called(impl: str, direction: Direction, problem: Problem, device: torch.device) -> list[Callable[[], object]]:
    """What a user calls from Python, one callable an input set: the forward, or autograd's backward of it."""
    if impl == "stream":
        return [s.call for s in subjects(impl, direction, problem, device)]
    sets = [random_inputs(problem, device, seed) for seed in range(_sets(direction, problem, device))]
    calls = [_call(impl, inputs) for inputs in sets]
    if direction == "forward":
        return [call for call, _ in calls]
    return [_autograd(as_tuple(call()), wanted, i) for (call, wanted), i in zip(calls, sets, strict=True)]


@dataclass(frozen=True)
class Times:
    """device: verified device time. called: time from Python, launches included."""

    device: timing.Timing
    called: timing.Timing


def measure(impl: str, direction: Direction, problem: Problem, device: torch.device, seconds: float) -> Times:
    """Check and time one implementation, about `seconds` for each of the two times.

    Raises verify.WrongResultError where its results are wrong, peers.PeerUnavailable.
    """
    with timing.work_stream(device), retained_graphs():
        on_device = verified_time(subjects(impl, direction, problem, device), device, seconds)
        from_python = timing.called_time(called(impl, direction, problem, device), device, seconds)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # cells differ in size: blocks kept for one are of no use to the next
    return Times(on_device, from_python)


def implementation(impl: str, problem: Problem) -> Implementation:
    """The implementation of that name. `compile` gets a compilation of its own for each problem, kept for the next
    call with the same problem only: static shapes are its best case.
    """
    f: Implementation
    if impl == "compile":
        f = _compiled(problem)
    elif problem.form != "gated":
        f = get_impl(impl)
    elif impl == "unfused":
        f = _unfused(problem)
    else:
        f = _GATED[impl]()
    return f if problem.out is None else functools.partial(f, out_dtype=problem.out)


_GATED: dict[str, Callable[[], Implementation]] = {
    "eager": lambda: reference.gated_eager,
    "wan": lambda: reference.gated_wan,
    "fused": lambda: adaln.gated_residual_layer_norm_modulate,
}


@contextlib.contextmanager
def retained_graphs() -> Iterator[None]:
    """Let compiled functions be differentiated repeatedly from one forward, which donated buffers rule out."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False):
        yield


@functools.lru_cache(maxsize=1)
def _compiled(problem: Problem) -> Implementation:
    if problem.form != "gated":
        return get_impl("compile")
    compiled = _compile_afresh(reference.gated_eager)

    def call(
        x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, *options: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        # As in `adaln.get_impl`: Inductor's gradient of a [1, 1, D] modulation has the wrong shape.
        return compiled(x, branch, gate.squeeze(1), shift.squeeze(1), scale.squeeze(1), *options, **more)

    return call


@functools.lru_cache(maxsize=1)
def _unfused(problem: Problem) -> Implementation:
    """The gated residual as Inductor makes it (on a CPU as it stands), then the fused norm."""
    gated_residual = _compile_afresh(_gated_residual) if torch.cuda.is_available() else _gated_residual

    def call(
        x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, *options: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        h = gated_residual(x, branch, gate.squeeze(1))
        return h, adaln.layer_norm_modulate(h, shift, scale, *options, **more)

    return call


def _gated_residual(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    return (x.float() + branch.float() * gate.float().unsqueeze(1)).to(x.dtype)


def _compile_afresh(f: Callable[..., Any]) -> Callable[..., Any]:
    """f through Inductor with static shapes, from a code object of its own: Dynamo counts recompilations by those."""
    own = types.FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _sets(direction: Direction, problem: Problem, device: torch.device) -> int:
    return timing.set_count(problem.traffic(direction), device)


def _forward(f: Implementation, inputs: Inputs) -> Subject:
    return Subject(
        call=lambda: as_tuple(f(*inputs.arguments, EPS)),
        inputs=inputs.tensors,
        outputs=FORMS[inputs.problem.form].results("forward"),
        reference=inputs.reference,
        refill=inputs.refill,
        tolerance=inputs.problem.tolerance,
    )


def _backward(f: Implementation, inputs: Inputs) -> Subject:
    return _backward_subject(_autograd(as_tuple(f(*inputs.arguments, EPS)), inputs.wanted, inputs), inputs)


def _backward_subject(call: Callable[[], tuple[Tensor, ...]], inputs: Inputs) -> Subject:
    return Subject(
        call=call,
        inputs=inputs.tensors | {f"d{name}": tensor for name, tensor in inputs.gradients.items()},
        outputs=FORMS[inputs.problem.form].results("backward"),
        reference=inputs.reference_gradients,
        refill=inputs.refill_gradients,  # these alone: the rest went into what the forward saved
        tolerance=inputs.problem.tolerance,
    )


def _autograd(
    outputs: tuple[Tensor, ...], wanted: tuple[Tensor, ...], inputs: Inputs
) -> Callable[[], tuple[Tensor, ...]]:
    gradients = tuple(inputs.gradients.values())
    return lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)


@functools.lru_cache(maxsize=1)
def _peer(impl: str, problem: Problem) -> peers.Peer:
    return peers.load(impl, problem)


def _peer_forward(peer: peers.Peer, inputs: Inputs) -> Subject:
    x, shift, scale = (t.detach() for t in inputs.arguments)
    weight, bias = peers.affine(shift, scale)

    def refill(seed: int) -> None:
        inputs.refill(seed)
        for old, new in zip((weight, bias), peers.affine(shift, scale), strict=True):
            old.copy_(new)

    return Subject(
        call=lambda: peer.forward(x, weight, bias)[:1],
        inputs={"x": x, "weight": weight, "bias": bias},
        outputs=("y",),
        reference=inputs.reference,
        refill=refill,
        tolerance=inputs.problem.tolerance,
    )


def _peer_backward(peer: peers.Peer, inputs: Inputs) -> Subject:
    x, shift, scale = (t.detach() for t in inputs.arguments)
    weight, bias = peers.affine(shift, scale)
    _, mean, rstd = peer.forward(x, weight, bias)
    dy = inputs.gradients["y"]
    return _backward_subject(lambda: peer.backward(dy, x, weight, bias, mean, rstd), inputs)


def _call(impl: str, inputs: Inputs) -> tuple[Callable[[], Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A differentiable call from Python, and the tensors that gradients are wanted of."""
    if impl not in peers.NAMES:
        return functools.partial(implementation(impl, inputs.problem), *inputs.arguments, EPS), inputs.wanted
    x, shift, scale = inputs.arguments
    weight, bias = (t.requires_grad_() for t in peers.affine(shift, scale))
    wanted = (x, weight, bias)
    return functools.partial(peers.PeerNorm.apply, *wanted, _peer(impl, inputs.problem)), wanted
