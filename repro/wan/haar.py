"""A space-time transform that stands in for the video VAE: fixed, linear, invertible, and causal like it.

Grey clips, in the range -1 to 1, a quarter of the nominal height and width: [F, H/4, W/4] for a `Shape(F, H, W)`. The
first frame is a block of its own (repeated fourfold, as a causal VAE pads it); after it four frames are a block. Each
block of 4 frames and 2 x 2 pixels becomes the 16 channels of one latent element through the orthonormal Haar basis,
time by space by space; a latent thus has the shape of Wan's, [16, (F - 1) / 4 + 1, H/8, W/8]. Channels are then scaled
by fixed gains, so that natural pictures give latents of about unit variance.

Legend: [F, h, w] a clip, [C, T, H, W] its latents.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

REDUCTION = 4
"""Nominal height and width over those of the clip: the VAE's stride of 8 over this transform's of 2."""

_FRAMES = 4
_HAAR_2 = np.array([[1, 1], [1, -1]]) / 2**0.5
_HAAR_4 = np.array([[1, 1, 1, 1], [1, 1, -1, -1], [2**0.5, -(2**0.5), 0, 0], [0, 0, 2**0.5, -(2**0.5)]]) / 2
_BASIS = np.kron(_HAAR_4, np.kron(_HAAR_2, _HAAR_2)).astype(np.float32)  # [channel, element of a block]

# Reciprocals of the channels' deviations over the corpus of `repro.wan.make_corpus`, rounded; time by height by width.
GAINS = np.array([0.45, 4, 4, 9, 4, 20, 17, 48, 7, 29, 22, 70, 7, 29, 22, 70], np.float32)


def encode(clip: Floats) -> Floats:
    """Latents [16, T, h/2, w/2] of a clip [F, h, w] in -1 .. 1, F = 4k + 1.

    Raises ValueError for another number of frames or an odd height or width.
    """
    frames, height, width = clip.shape
    if frames % _FRAMES != 1 or height % 2 or width % 2:
        raise ValueError(f"clip must have 4k + 1 frames and an even height and width, got {list(clip.shape)}")
    padded = np.concatenate([np.repeat(clip[:1], _FRAMES - 1, axis=0), clip])
    blocks = padded.reshape(-1, _FRAMES, height // 2, 2, width // 2, 2).transpose(1, 3, 5, 0, 2, 4)
    latents = np.tensordot(_BASIS, blocks.reshape(16, *blocks.shape[3:]), axes=1)
    return (latents * GAINS[:, None, None, None]).astype(np.float32)


def decode(latents: Floats) -> Floats:
    """The clip [F, h, w] of latents [16, T, h/2, w/2]: `encode` undone.

    Of the first block, whose frames need not agree in latents that a model made, the last frame is taken.
    """
    _, t, h, w = latents.shape
    blocks = np.tensordot(_BASIS.T, latents / GAINS[:, None, None, None], axes=1)
    clip = blocks.reshape(_FRAMES, 2, 2, t, h, w).transpose(3, 0, 4, 1, 5, 2).reshape(_FRAMES * t, 2 * h, 2 * w)
    return clip[_FRAMES - 1 :].astype(np.float32)
