"""What the kernel suites time: forms of LayerNorm-modulate with their traffic, random inputs and float64 references.

Legend: B samples, N rows (tokens) of a sample, D features. Tensors with one vector for each row are [B, N, D], those
with one for each sample [B, 1, D]; both have the dtype of x unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.adaln import reference
from repro.measure.stream import Mix

Direction = Literal["forward", "backward"]
FormName = Literal["per_sample", "per_token", "gated"]

EPS = 1e-6

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error of a row that passes as right. The textbook chain, which rounds at each step, shows up to 6e-3
in bfloat16 and 2e-7 in float32; one element of typical size missing from a row of 5,120 is 1.4e-2."""

_REFERENCE_CHUNK = 1 << 25
"""Elements of x that are differentiated in float64 at a time."""


@dataclass(frozen=True)
class Form:
    """One form of the op.

    inputs, outputs: names, in the order of the formula's arguments and results. by_row: those of them that are
    [B, N, D]; the rest are [B, 1, D]. wanted: inputs whose gradients are computed. narrow: inputs and outputs in the
    dtype of y where that differs from x's. read, written: what has to move by direction, tensors of [B, N, D] only.
    formula: the reference, (inputs) -> outputs in float64.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wanted: tuple[str, ...]
    by_row: frozenset[str]
    narrow: frozenset[str]
    read: dict[Direction, tuple[str, ...]]
    written: dict[Direction, tuple[str, ...]]
    formula: Callable[..., tuple[Tensor, ...]]

    def results(self, direction: Direction) -> tuple[str, ...]:
        """Names of what a call computes: the outputs, or the gradients of the wanted inputs."""
        return self.outputs if direction == "forward" else tuple(f"d{name}" for name in self.wanted)

    def mix(self, direction: Direction) -> Mix:
        """How many tensors of x's size are read and written."""
        return Mix(len(self.read[direction]), len(self.written[direction]))


def _norm(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (reference.reference64(x, shift, scale, EPS),)


def _gated(x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return reference.gated_reference64(x, branch, gate, shift, scale, EPS)


FORMS: dict[FormName, Form] = {
    "per_sample": Form(
        inputs=("x", "shift", "scale"),
        outputs=("y",),
        wanted=("x", "shift", "scale"),
        by_row=frozenset({"x", "y"}),
        narrow=frozenset({"y"}),
        read={"forward": ("x",), "backward": ("dy", "x")},
        written={"forward": ("y",), "backward": ("dx",)},
        formula=_norm,
    ),
    "per_token": Form(
        inputs=("x", "shift", "scale"),
        outputs=("y",),
        wanted=("x", "scale"),  # that of shift is dy itself: nothing to move
        by_row=frozenset({"x", "shift", "scale", "y"}),
        narrow=frozenset({"y"}),
        read={"forward": ("x", "shift", "scale"), "backward": ("dy", "x", "scale")},
        written={"forward": ("y",), "backward": ("dx", "dscale")},
        formula=_norm,
    ),
    "gated": Form(
        inputs=("x", "branch", "gate", "shift", "scale"),
        outputs=("h", "y"),
        wanted=("x", "branch", "gate", "shift", "scale"),
        by_row=frozenset({"x", "branch", "h", "y"}),
        narrow=frozenset({"branch", "y"}),
        read={"forward": ("x", "branch"), "backward": ("dh", "dy", "h", "branch")},
        written={"forward": ("h", "y"), "backward": ("dx", "dbranch")},
        formula=_gated,
    ),
}


@dataclass(frozen=True)
class Problem:
    """Shape of x [batch, tokens, dim], its dtype, the form, and y's dtype (`out`) where it is not x's."""

    batch: int
    tokens: int
    dim: int
    dtype: torch.dtype
    form: FormName = "per_sample"
    out: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of x."""
        return self.batch, self.tokens, self.dim

    @property
    def tolerance(self) -> float:
        """Largest relative error of a row: that of the coarsest dtype."""
        return max(TOLERANCE[self.dtype], TOLERANCE[self.out or self.dtype])

    def shape_of(self, name: str) -> tuple[int, int, int]:
        """Shape of an input or output."""
        return self.shape if name in FORMS[self.form].by_row else (self.batch, 1, self.dim)

    def dtype_of(self, name: str) -> torch.dtype:
        """dtype of an input or output; a gradient has that of what it is the gradient of."""
        return self.out if self.out is not None and name in FORMS[self.form].narrow else self.dtype

    def traffic(self, direction: Direction) -> int:
        """Bytes that have to move: each tensor of x's size read or written once; the rest is negligible."""
        form = FORMS[self.form]
        names = (*form.read[direction], *form.written[direction])
        elements = self.batch * self.tokens * self.dim
        # Gradients are called d<name>; no input or output of a form begins with d.
        return elements * sum(self.dtype_of(name.removeprefix("d")).itemsize for name in names)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a form by name, leaves that require gradients, and gradients of its outputs by the outputs' names."""

    problem: Problem
    tensors: dict[str, Tensor]
    gradients: dict[str, Tensor]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The formula's arguments."""
        return tuple(self.tensors.values())

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """The inputs whose gradients are computed."""
        return tuple(self.tensors[name] for name in FORMS[self.problem.form].wanted)

    def refill(self, seed: int) -> None:
        """New random values for the inputs, in place."""
        generator = _generator(self.arguments[0].device, seed)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.normal_(0, _spread(name), generator=generator)

    def refill_gradients(self, seed: int) -> None:
        """New random values for the gradients of the outputs, in place."""
        generator = _generator(self.arguments[0].device, seed)
        for tensor in self.gradients.values():
            tensor.normal_(generator=generator)

    def reference(self) -> tuple[Tensor, ...]:
        """The outputs in float64."""
        form, device = FORMS[self.problem.form], self.arguments[0].device
        found = [torch.empty(self.problem.shape, dtype=torch.float64, device=device) for _ in form.outputs]
        with torch.no_grad():
            for rows in self._chunks():
                outputs = form.formula(*(self._part(name, rows) for name in form.inputs))
                for whole, part in zip(found, outputs, strict=True):
                    whole[:, rows] = part
        return tuple(found)

    def reference_gradients(self) -> tuple[Tensor, ...]:
        """Gradients of the wanted inputs in float64, by autograd through the reference."""
        form = FORMS[self.problem.form]
        found = [torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in self.wanted]
        for rows in self._chunks():
            parts = {name: self._part(name, rows).requires_grad_() for name in form.inputs}
            dys = [self.gradients[name][:, rows].double() for name in form.outputs]
            gradients = torch.autograd.grad(form.formula(*parts.values()), [parts[n] for n in form.wanted], dys)
            for name, whole, part in zip(form.wanted, found, gradients, strict=True):
                if name in form.by_row:
                    whole[:, rows] = part
                else:
                    whole += part
        return tuple(found)

    def _part(self, name: str, rows: slice) -> Tensor:
        tensor = self.tensors[name].detach()
        return (tensor[:, rows] if name in FORMS[self.problem.form].by_row else tensor).double()

    def _chunks(self) -> Iterator[slice]:
        batch, tokens, dim = self.problem.shape
        step = max(1, _REFERENCE_CHUNK // (batch * dim))
        return (slice(n, n + step) for n in range(0, tokens, step))


def random_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Unit-scale normal x, branch and gradients; modulation of spread 0.5.

    What a sample has one vector of arrives as in Wan's blocks: as strided views of a [B, 6, D] table.
    """
    form = FORMS[problem.form]
    tables: dict[torch.dtype, Iterator[Tensor]] = {}

    def empty(name: str) -> Tensor:
        dtype = problem.dtype_of(name)
        if name in form.by_row:
            return torch.empty(problem.shape, dtype=dtype, device=device)
        if dtype not in tables:
            tables[dtype] = iter(torch.empty(problem.batch, 6, problem.dim, dtype=dtype, device=device).chunk(6, dim=1))
        return next(tables[dtype])

    inputs = Inputs(
        problem,
        {name: empty(name).detach() for name in form.inputs},
        {name: torch.empty(problem.shape, dtype=problem.dtype_of(name), device=device) for name in form.outputs},
    )
    inputs.refill(seed)
    inputs.refill_gradients(seed + 1_000_000)
    for tensor in inputs.tensors.values():
        tensor.requires_grad_()
    return inputs


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What an implementation returned, as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _spread(name: str) -> float:
    return 1.0 if name in ("x", "branch") else 0.5


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
