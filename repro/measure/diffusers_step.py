"""Time and memory of a training step of a Diffusers Wan model, as it comes and with the fused op in it.

The step is forward and backward of the whole `WanTransformer3DModel`, embeddings and head included, with fewer blocks
than the released ones. Weights are bf16 but for those that Diffusers keeps in float32 (`_keep_in_fp32_modules`).
Clock and gradients as in `repro.measure.stack_time`: idle device to last gradient, gradients written anew.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repro.adaln import accelerate
from repro.balance.models import LATENT_CHANNELS, TEXT_TOKENS, TEXT_WIDTH, TIME_FREQUENCIES, ModelSize
from repro.measure.stack_time import SHORT_MS, Clock, warm_clocks
from repro.measure.verify import WrongResultError

TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""Relative difference that the op may make to the output and to the first layer's gradient: roundings of all layers."""


@dataclass(frozen=True)
class StepSample:
    """One case, measured.

    milliseconds: forward + backward, one value a step. Bytes as the CUDA allocator counts them, None on a CPU:
    static_bytes (weights and inputs), held_bytes (alive between forward and backward, beside those), peak_bytes (most
    that was allocated at once, everything included).
    """

    milliseconds: tuple[float, ...]
    static_bytes: int | None
    held_bytes: int | None
    peak_bytes: int | None


def measure_step(
    size: ModelSize,
    layers: int,
    latent: tuple[int, int, int],
    fused: bool,
    checkpointing: bool,
    device: torch.device,
    seconds: float = 3.0,
    repeats: tuple[int, int] = (10, 30),
) -> StepSample:
    """Train on one sample of latents [channels, *latent] (frames, height, width); dtype bf16, on a CPU float32.

    fused: accelerate the model first, and compare it with itself unaccelerated. The first step does not count; as many
    are timed as fit into `seconds`, within the bounds `repeats`.

    Raises WrongResultError where the op changes results by more than rounding, torch.OutOfMemoryError, ImportError
    without Diffusers, RuntimeError where `accelerate` does not know its version.
    """
    model = _model(size, layers, device)
    if checkpointing:
        model.enable_gradient_checkpointing()
    else:
        model.disable_gradient_checkpointing()
    step = _Step(model, latent, device)
    static = _allocated(device)
    wanted = step.results() if fused else {}
    with accelerate(model) if fused else contextlib.nullcontext():
        _compare(step.results(), wanted, TOLERANCE[model.dtype])
        milliseconds, held = step.run()
        if milliseconds < SHORT_MS:
            milliseconds, held = step.run()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        count = min(max(math.ceil(1e3 * seconds / milliseconds), repeats[0]), repeats[1])
        times = tuple(step.run()[0] for _ in range(count))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    model.zero_grad(set_to_none=True)
    return StepSample(times, static, None if held is None or static is None else held - static, peak)


def free() -> None:
    """Drop the cached model and the allocator's free blocks, e.g. after running out of memory."""
    _model.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Step:
    """Random inputs of a model, and the training step over them."""

    def __init__(self, model: Any, latent: tuple[int, int, int], device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=model.dtype, generator=generator)

        self.model, self.device = model, device
        self.latents = normal(1, LATENT_CHANNELS, *latent)
        self.dout = normal(1, LATENT_CHANNELS, *latent)
        self.text = normal(1, TEXT_TOKENS, TEXT_WIDTH)
        self.timestep = torch.full((1,), 500, device=device)

    def forward(self) -> Tensor:
        (out,) = self.model(self.latents, self.timestep, self.text, return_dict=False)
        return out

    def run(self) -> tuple[float, int | None]:
        """Milliseconds of one step, and the bytes allocated between its forward and its backward."""
        self.model.zero_grad(set_to_none=True)
        clock = Clock(self.device)
        out = self.forward()
        held = _allocated(self.device)
        out.backward(self.dout)
        return clock.stop(), held

    def results(self) -> dict[str, Tensor]:
        """The output, and the gradient that has come through all layers."""
        self.model.zero_grad(set_to_none=True)
        out = self.forward()
        out.backward(self.dout)
        return {"output": out.detach(), "gradient of patch_embedding": self.model.patch_embedding.weight.grad}


def _compare(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    for name, tensor in wanted.items():
        norm = torch.linalg.vector_norm
        error = float(norm(found[name].double() - tensor.double()) / norm(tensor.double()))
        if not error <= tolerance:  # written so that NaN fails
            raise WrongResultError(f"accelerate changes the {name} by {error:.3g}, allowed {tolerance:.3g}")


@functools.lru_cache(maxsize=1)
def _model(size: ModelSize, layers: int, device: torch.device) -> Any:
    """The model is kept while cases of the same size follow each other."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = WanTransformer3DModel(
            num_attention_heads=size.heads,
            attention_head_dim=size.dim // size.heads,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=TIME_FREQUENCIES,
            ffn_dim=size.ffn,
            num_layers=layers,
        )
    model.train()
    if device.type == "cuda":
        _to_bf16(model)
        warm_clocks(device)
    return model


def _to_bf16(model: Any) -> None:
    """As `from_pretrained(..., torch_dtype=torch.bfloat16)` leaves it: modules that have to stay in float32 do."""
    wide = set(model._keep_in_fp32_modules)
    tensors: list[tuple[str, nn.Parameter]] = list(model.named_parameters())
    for name, parameter in tensors:
        if not wide & set(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None
