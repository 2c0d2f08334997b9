"""Marks around AdaLN: they change nothing, and see every call in both directions."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from repro.adaln import build
from repro.wan import probing, probing_parts
from repro.wan.config import WanConfig
from repro.wan.model import WanModel

LAYERS = 2


class Log(probing_parts._Sections):
    """Notes when sections begin and end."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.said = []

    def begin(self):
        self.said.append("begin")
        super().begin()

    def end(self):
        self.said.append("end")
        super().end()


def gradients(model):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 1, 4, 4, generator=generator)
    text = torch.randn(2, 8, 4096, generator=generator)
    model.zero_grad()
    model(latents, torch.tensor([100.0, 700.0]), text).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("adaln", ["eager", "fused", "wan"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_marks_see_every_call_and_change_nothing(adaln, recomputed):
    model = WanModel(WanConfig.preset("tiny", LAYERS), adaln)
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    if recomputed:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, preserve_rng_state=False)
    before = gradients(model)
    clock = Log()
    with probing_parts._marks(model, clock):
        marked = gradients(model)
    for a, b in zip(before, marked, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    blocks, head = 2 * LAYERS * (3 if recomputed else 2), 2
    assert clock.said == ["begin", "end"] * (blocks + head), "forward, again where recomputed, and backward"
    assert clock.seconds() > 0
    clock.clear()
    gradients(model)
    assert clock.seconds() == 0, "marks are gone"


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor>", None),
    ],
)
def test_kernels_are_told_apart_by_name(kernel, what):
    assert next((n for n, pattern in probing_parts.CLASSES if pattern.search(kernel)), None) == what


def test_without_a_profiler_a_step_s_kernels_are_unknown_and_nothing_fails(monkeypatch):
    ran = []

    def profile(**_):
        raise RuntimeError("CUPTI is not there")

    monkeypatch.setattr(torch.profiler, "profile", profile)
    assert probing_parts._kernels(lambda: ran.append(1)) == {}

    def full():
        raise torch.OutOfMemoryError("20 GiB")

    monkeypatch.setattr(torch.profiler, "profile", lambda **_: contextlib.nullcontext())
    with pytest.raises(torch.OutOfMemoryError):
        probing_parts._kernels(full)


def test_a_fallback_is_never_timed_as_the_fused_op(monkeypatch):
    world = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(build, "ensure_loaded", lambda: False)
    monkeypatch.setattr(build, "failure", lambda: "no compiler")
    with pytest.raises(build.BuildError, match="no compiler"):
        probing.require_kernels("fused", world)
    probing.require_kernels("eager", world)
    probing.require_kernels("fused", SimpleNamespace(device=torch.device("cpu")))
