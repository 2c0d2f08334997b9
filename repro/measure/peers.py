"""Adapters of other people's norm kernels (extra `peers`), so that they are timed on the inputs of `norm_modulate`.

    cudnn   cuDNN's adaptive LayerNorm through the graph API of nvidia-cudnn-frontend; scale and bias by sample
    liger   LayerNorm of liger-kernel (Triton)
    quack   LayerNorm of quack-kernels (CuTe DSL), made for Hopper and newer

Each computes y = LN(x) * weight + bias with weight = 1 + scale and bias = shift, both float32 and made beforehand,
outside of what is timed. A LayerNorm knows one weight for all rows, so `liger` and `quack` take one sample only.
Their own reductions over partial sums belong to their backward and are timed with it.

Legend: B samples, N rows of a sample, D features.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from repro.measure.norm_problem import EPS, Problem

NAMES = ("cudnn", "liger", "quack")


class PeerUnavailable(Exception):
    """A peer is not installed, does not load here, or does not cover the problem; the message says which."""


class Peer(Protocol):
    """Kernels on contiguous x [B, N, D] with weight and bias [B, 1, D] in float32."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y like x, and what the backward needs: mean and rstd of the rows in float32, in the peer's own shape."""
        ...

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dx like x; dbias and dweight [B, 1, D] in float32."""
        ...


def load(name: str, problem: Problem) -> Peer:
    """The peer of that name, ready for the problem, on the current CUDA device.

    Raises PeerUnavailable with the reason, ValueError for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    if problem.form != "per_sample" or problem.out is not None:
        raise PeerUnavailable(f"{name} has no {problem.form} form")
    if name != "cudnn" and problem.batch != 1:
        raise PeerUnavailable(f"{name} has one weight for all samples, so B = 1 only")
    if not torch.cuda.is_available():
        raise PeerUnavailable(f"{name} needs a CUDA device")
    makers: dict[str, Callable[[], Peer]] = {
        "cudnn": lambda: _Cudnn(problem),
        "liger": _Liger,
        "quack": _Quack,
    }
    try:
        return makers[name]()
    except Exception as e:  # a missing package, a missing library of its own, a graph that it does not support
        raise PeerUnavailable(f"{name} cannot be used: {' '.join(f'{type(e).__name__}: {e}'.split())[:200]}") from e


def affine(shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """weight = 1 + scale and bias = shift, contiguous float32 [B, 1, D]."""
    return 1 + scale.detach().float(), shift.detach().float().contiguous()


class PeerNorm(torch.autograd.Function):
    """A peer as a user of it would call it from Python: (x, weight, bias, peer) -> y, differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, peer: Peer) -> Tensor:
        y, mean, rstd = peer.forward(x.detach(), weight.detach(), bias.detach())
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.peer = peer
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = (t.detach() for t in ctx.saved_tensors)
        dx, dbias, dweight = ctx.peer.backward(dy, x, weight, bias, mean, rstd)
        return dx, dweight, dbias, None


class _Liger:
    """liger_kernel.ops.layer_norm: forward and backward as its autograd function calls them."""

    def __init__(self) -> None:
        self._module = importlib.import_module("liger_kernel.ops.layer_norm")

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, _, mean, rstd, *_ = self._module.layer_norm_forward(x, weight.view(-1), bias.view(-1), EPS)
        return y, mean, rstd

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.view(-1, x.shape[-1])
        dx, dweight, dbias = self._module.layer_norm_backward(dy, rows, weight.view(-1), bias.view(-1), mean, rstd)
        return dx, dbias.view_as(bias), dweight.view_as(weight)


class _Quack:
    """quack.rmsnorm: its LayerNorm is a mode of its RMSNorm kernels."""

    def __init__(self) -> None:
        # The package exports a function of the module's name, so the module is asked for by its full name.
        module = importlib.import_module("quack.rmsnorm")
        self._forward, self._backward = module.layernorm_fwd, module.layernorm_bwd

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.view(-1, x.shape[-1])
        y, rstd, mean = self._forward(rows, weight.view(-1), bias.view(-1), EPS, return_rstd=True, return_mean=True)
        return y.view_as(x), mean, rstd

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, drows = x.view(-1, x.shape[-1]), dy.view(-1, x.shape[-1])
        dx, dweight, dbias = self._backward(rows, weight.view(-1), drows, rstd, mean, has_bias=True)
        return dx.view_as(x), dbias.view_as(bias), dweight.view_as(weight)


class _Cudnn:
    """One cuDNN graph a pass, planned for the problem's shape and dtype (cuDNN 9.9 or newer)."""

    def __init__(self, problem: Problem) -> None:
        self._cudnn = importlib.import_module("cudnn")
        self._problem = problem
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._handle = _cudnn_handle(self._device)
        self._epsilon = torch.full((1, 1, 1), EPS)  # read on the host at every call
        self._plan_forward()
        self._plan_backward()

    def _plan_forward(self) -> None:
        graph, types = self._graph(), self._cudnn.data_type
        inputs = [
            self._rows(graph, "x"),
            self._samples(graph, "scale"),
            self._samples(graph, "bias"),
            graph.tensor(name="epsilon", dim=[1, 1, 1], stride=[1, 1, 1], data_type=types.FLOAT, is_pass_by_value=True),
        ]
        x, scale, bias, epsilon = inputs
        phase = self._cudnn.norm_forward_phase.TRAINING
        y, mean, rstd = graph.adalayernorm(
            name="forward", norm_forward_phase=phase, input=x, scale=scale, bias=bias, epsilon=epsilon
        )
        y.set_output(True).set_data_type(self._type())
        for statistic in (mean, rstd):
            statistic.set_output(True).set_data_type(types.FLOAT)
        self._forward = self._plan(graph, [*inputs, y, mean, rstd])

    def _plan_backward(self) -> None:
        graph, types = self._graph(), self._cudnn.data_type
        inputs = [
            self._rows(graph, "dy"),
            self._rows(graph, "x"),
            self._samples(graph, "scale"),
            self._statistic(graph, "mean"),
            self._statistic(graph, "rstd"),
        ]
        dy, x, scale, mean, rstd = inputs
        dx, dscale, dbias = graph.adalayernorm_backward(
            name="backward", grad=dy, input=x, scale=scale, mean=mean, inv_variance=rstd
        )
        dx.set_output(True).set_data_type(self._type())
        for gradient in (dscale, dbias):
            gradient.set_output(True).set_data_type(types.FLOAT)
        self._backward = self._plan(graph, [*inputs, dx, dscale, dbias])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.empty_like(x)
        mean = torch.empty((*x.shape[:2], 1), dtype=torch.float32, device=x.device)
        rstd = torch.empty_like(mean)
        self._forward(x, weight, bias, self._epsilon, y, mean, rstd)
        return y, mean, rstd

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        self._backward(dy, x, weight, mean, rstd, dx, dweight, dbias)
        return dx, dbias, dweight

    def _graph(self) -> Any:
        types = self._cudnn.data_type
        return self._cudnn.pygraph(
            io_data_type=self._type(),
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle,
        )

    def _plan(self, graph: Any, tensors: list[Any]) -> Callable[..., None]:
        """Plan the graph; returns a call that takes the tensors' buffers in their order."""
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = max(graph.get_workspace_size(), 1)

        def execute(*buffers: Tensor) -> None:
            # From PyTorch's allocator at every call, so that a captured graph owns its workspace.
            workspace = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._cudnn.set_stream(self._handle, torch.cuda.current_stream(self._device).cuda_stream)
            graph.execute(dict(zip(tensors, buffers, strict=True)), workspace, handle=self._handle)

        return execute

    def _rows(self, graph: Any, name: str) -> Any:
        batch, tokens, dim = self._problem.shape
        return graph.tensor(name=name, dim=[batch, tokens, dim], stride=[tokens * dim, dim, 1], data_type=self._type())

    def _samples(self, graph: Any, name: str) -> Any:
        batch, _, dim = self._problem.shape
        return graph.tensor(name=name, dim=[batch, 1, dim], stride=[dim, dim, 1], data_type=self._cudnn.data_type.FLOAT)

    def _statistic(self, graph: Any, name: str) -> Any:
        batch, tokens, _ = self._problem.shape
        return graph.tensor(
            name=name, dim=[batch, tokens, 1], stride=[tokens, 1, 1], data_type=self._cudnn.data_type.FLOAT
        )

    def _type(self) -> Any:
        types = self._cudnn.data_type
        return {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF, torch.float32: types.FLOAT}[
            self._problem.dtype
        ]


@functools.cache
def _cudnn_handle(device: torch.device) -> Any:
    return importlib.import_module("cudnn").create_handle()
