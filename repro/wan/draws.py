"""Random numbers that depend on what they are for, and on nothing else: not on batch, rank, order or device.

A draw is addressed by a key (hashed from a seed, a purpose and a sample id) and a counter, and every number is a hash
of the two: SplitMix64's output function (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")
in wrapping int64 arithmetic, which CPUs and GPUs do alike. Uniforms agree bit for bit everywhere; normals up to the
rounding of log, sin and cos.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def keys(ids: Sequence[int | str], *purpose: int | str, device: torch.device | str = "cpu") -> Tensor:
    """int64 [B], a key for each id; draws for other purposes (seed, epoch, name, ...) or other ids are unrelated."""
    prefix = "/".join(map(str, purpose))
    hashed = [hashlib.blake2b(f"{prefix}/{i}".encode(), digest_size=8).digest() for i in ids]
    return torch.tensor([int.from_bytes(h, "little", signed=True) for h in hashed], dtype=torch.int64).to(device)


def uniform(keys_B: Tensor, count: int) -> Tensor:
    """float64 [B, count], uniform on the open interval (0, 1): multiples of 2^-52, shifted by half a step."""
    return (_shift_right(_bits(keys_B, count), 12).double() + 0.5) * 2.0**-52


def integers(keys_B: Tensor, count: int, below: int) -> Tensor:
    """int64 [B, count], uniform on 0 .. below - 1 (to within below / 2^52)."""
    return (uniform(keys_B, count) * below).long()


def normal(keys_B: Tensor, shape: Sequence[int]) -> Tensor:
    """float32 [B, *shape], standard normal (Box and Muller 1958; 32 random bits for each of radius and angle)."""
    count = math.prod(shape)
    bits = _bits(keys_B, (count + 1) // 2)
    # Exact in float64, then rounded: a radius of 0.5 / 2^32 gives the largest magnitude, 6.8.
    radius = ((_shift_right(bits, 32).double() + 0.5) * 2.0**-32).float().log_().mul_(-2).sqrt_()
    angle = ((bits & 0xFFFFFFFF).double() * (2 * math.pi * 2.0**-32)).float()
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)
    return pairs.flatten(1)[:, :count].reshape(-1, *shape)


def _bits(keys_B: Tensor, count: int) -> Tensor:
    """int64 [B, count] of random bits."""
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=keys_B.device)
    z = keys_B[:, None] + counter * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, places: int) -> Tensor:
    """Logical shift: int64's own carries the sign along."""
    return (z >> places) & ((1 << (64 - places)) - 1)
