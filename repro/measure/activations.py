"""Chains around LayerNorm-modulate whose activations are counted: what autograd keeps, and the peak while it runs.

    op        the op alone, x in `dtype`
    qkv       the op and the three linears of self-attention behind it, all in `dtype` (huggingface/diffusers)
    official  the same as Wan-Video/Wan2.1 runs it: the residual stream in float32, linears under bfloat16 autocast.
              Autocast rounds the linears' common input once for each of them, unless the op's output is bfloat16
              already, which is what the fused op is asked for
    block     a whole Wan block, two modulated norms in it (`repro.wan.block`)

Legend: B samples, N rows (tokens) of a sample, D features. Modulation is float32, strided [B, 1, D], as in Wan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from repro.adaln import get_impl
from repro.balance.models import MODELS, TEXT_TOKENS, ModelSize
from repro.measure.memory import Saved, peak_allocated, saved_by_autograd
from repro.wan.block import Block
from repro.wan.rope import rope_table

CHAINS = ("op", "qkv", "official", "block")


@dataclass(frozen=True)
class Chain:
    """A forward with its inputs. leaves: what is differentiated. constant: tensors that are no activations (weights,
    modulation): they are not counted.
    """

    forward: Callable[[], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]
    constant: tuple[Tensor, ...]

    def saved(self) -> Saved:
        """What autograd keeps from the forward."""
        return saved_by_autograd(self.forward, self.constant)

    def peak(self, device: torch.device) -> int:
        """Peak bytes of forward and backward, above inputs and weights; gradients of all leaves included.

        Measured on the second run: the first makes workspaces that stay. Raises ValueError without a CUDA device.
        """
        with torch.no_grad():
            incoming = [torch.randn_like(out) for out in self.forward()]

        def step() -> None:
            torch.autograd.grad(self.forward(), self.leaves, incoming)

        step()
        return peak_allocated(step, device)


def make_chain(
    name: str, impl: str, batch: int, tokens: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Chain:
    """Chain `name` of CHAINS around implementation `impl` of `repro.adaln`, x [batch, tokens, dim] random.

    Raises ValueError for an unknown chain, and for a block of a width that no model has.
    """
    f = get_impl(impl)
    table_B6D = torch.randn(batch, 6, dim, device=device)
    if name == "block":
        return _block(f, _model(dim), table_B6D, tokens, dtype, device)
    stream = torch.float32 if name == "official" else dtype
    x_BND = torch.randn(batch, tokens, dim, dtype=stream, device=device).requires_grad_()
    shift_B1D, scale_B1D = (t.detach().requires_grad_() for t in table_B6D.chunk(6, dim=1)[:2])
    leaves, constant = (x_BND, shift_B1D, scale_B1D), (shift_B1D, scale_B1D)
    if name == "op":
        return Chain(lambda: (f(x_BND, shift_B1D, scale_B1D),), leaves, constant)
    weights = tuple((torch.randn(dim, dim, dtype=dtype, device=device) / dim**0.5).requires_grad_() for _ in range(3))
    if name == "qkv":

        def forward() -> tuple[Tensor, ...]:
            y_BND = f(x_BND, shift_B1D, scale_B1D)
            return tuple(F.linear(y_BND, w) for w in weights)
    elif name == "official":
        out_dtype = dtype if impl in ("fused", "dtile") else None

        def forward() -> tuple[Tensor, ...]:
            with torch.autocast(device.type, dtype):
                y_BND = f(x_BND, shift_B1D, scale_B1D, out_dtype=out_dtype)
                return tuple(F.linear(y_BND, w) for w in weights)
    else:
        raise ValueError(f"chain must be one of {CHAINS}, got {name!r}")
    return Chain(forward, (*leaves, *weights), (*constant, *weights))


def _block(
    f: Callable[..., Tensor],
    size: ModelSize,
    time_B6D: Tensor,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Chain:
    block = Block(size, f, device, dtype)
    batch = time_B6D.shape[0]
    x_BND = torch.randn(batch, tokens, size.dim, dtype=dtype, device=device).requires_grad_()
    text_BTD = torch.randn(batch, TEXT_TOKENS, size.dim, dtype=dtype, device=device)
    # Angles do not change the memory, so one axis may carry the whole sequence.
    rope = rope_table((tokens, 1, 1), size.dim // size.heads, device)
    parameters: Sequence[Tensor] = tuple(block.parameters())
    run = functools.partial(block, x_BND, time_B6D, text_BTD, rope)
    return Chain(lambda: (run(),), (x_BND, *parameters), (time_B6D, text_BTD, rope, *parameters))


def _model(dim: int) -> ModelSize:
    for size in MODELS.values():
        if size.dim == dim:
            return size
    raise ValueError(f"dim must be one of {sorted(m.dim for m in MODELS.values())} for a block, got {dim}")
