"""Peak arithmetic of GPUs, for the share of it that training reaches (MFU). A GPU that is not listed has none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Dense bf16 matrix products with fp32 accumulation. flops: per second. source: where the maker states it."""

    flops: float
    source: str


_H100_SXM = Peak(989.4e12, "NVIDIA H100 Tensor Core GPU Architecture whitepaper, H100 SXM5")

PEAKS: dict[str, Peak] = {
    "NVIDIA H200": Peak(989.4e12, "NVIDIA H200 datasheet: 1,979 TFLOP/s with sparsity, half without"),
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": Peak(756e12, "NVIDIA H100 Tensor Core GPU Architecture whitepaper, H100 PCIe"),
    "NVIDIA GH200 480GB": Peak(989.4e12, "NVIDIA GH200 datasheet: 1,979 TFLOP/s with sparsity, half without"),
    "NVIDIA B200": Peak(2250e12, "NVIDIA HGX B200 datasheet: 36 PFLOP/s with sparsity on eight, half without"),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100-SXM4-40GB": Peak(312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100 80GB PCIe": Peak(312e12, "NVIDIA A100 datasheet"),
    "NVIDIA L40S": Peak(362.05e12, "NVIDIA L40S datasheet: 362.05 TFLOP/s without sparsity"),
}
"""By the name that the driver gives the whole GPU; a MIG instance has another name, and no peak here."""


def peak_flops(name: str) -> float | None:
    """Peak of the GPU called `name`; None where unknown, never that of a similar one."""
    peak = PEAKS.get(name)
    return peak.flops if peak else None
