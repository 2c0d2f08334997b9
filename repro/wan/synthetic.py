"""Samples made up on the device: no disk, no host, a function of seed and sample id.

Legend: B samples, [T, H, W] latent grid, L words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.balance.models import LATENT_CHANNELS, TEXT_TOKENS
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.wan import draws
from repro.wan.samples import DataError, Samples, word_embeddings

CELL = (2, 4, 4)
"""Latent elements along time, height and width that share their coarse part."""

COARSE_SHARE = 0.8
"""Of the variance, what is shared within a cell and can hence be told from the noise of flow matching."""

VOCABULARY = 1024
PROMPT_WORDS = (8, 200)
"""Shortest and longest prompt, in tokens."""


@dataclass(frozen=True)
class SyntheticSamples:
    """Latents of blocks of constant colour plus detail, unit variance; prompts of random words, of random lengths.

    corpus: shapes to make. seed: another seed gives other samples for the same ids.
    """

    corpus: Corpus
    seed: int = 0

    def fetch(self, shape: Shape, sample_ids: Sequence[int], device: torch.device | str) -> Samples:
        """Latents fp32, text bf16 (as `SampleSource.fetch`). Raises DataError for an id that is not of `shape`."""
        for i in sample_ids:
            if not 0 <= i < self.corpus.samples:
                raise DataError(f"sample ids of {self.corpus.name} end at {self.corpus.samples - 1}, got {i}")
            if (actual := self.corpus.shapes[self.corpus.bucket_of[i]]) != shape:
                raise DataError(f"sample {i} of {self.corpus.name} is {actual}, asked for as {shape}")
        return Samples(self._latents(shape, sample_ids, device), self._text(sample_ids, device))

    def _latents(self, shape: Shape, sample_ids: Sequence[int], device: torch.device | str) -> Tensor:
        latent = Tokenizer().latent(shape)
        cells = [math.ceil(n / c) for n, c in zip(latent, CELL, strict=True)]
        latents = draws.normal(self._keys(sample_ids, "coarse", device), (LATENT_CHANNELS, *cells))
        for axis, (n, c) in enumerate(zip(latent, CELL, strict=True), start=2):
            latents = latents.repeat_interleave(c, dim=axis).narrow(axis, 0, n)
        detail = draws.normal(self._keys(sample_ids, "detail", device), (LATENT_CHANNELS, *latent))
        return latents * COARSE_SHARE**0.5 + detail * (1 - COARSE_SHARE) ** 0.5

    def _text(self, sample_ids: Sequence[int], device: torch.device | str) -> Tensor:
        shortest, longest = PROMPT_WORDS
        lengths = shortest + draws.integers(self._keys(sample_ids, "length", device), 1, longest - shortest + 1)
        words = draws.integers(self._keys(sample_ids, "words", device), TEXT_TOKENS, VOCABULARY)
        past_end = torch.arange(TEXT_TOKENS, device=device) >= lengths
        return _vocabulary(torch.device(device))[words.masked_fill(past_end, VOCABULARY)]

    def _keys(self, sample_ids: Sequence[int], purpose: str, device: torch.device | str) -> Tensor:
        return draws.keys(sample_ids, "synthetic", self.seed, purpose, device=device)


@functools.lru_cache(maxsize=1)
def _vocabulary(device: torch.device) -> Tensor:
    """bf16 [VOCABULARY + 1, 4096]; the last row, for what follows a prompt, is zero."""
    return torch.nn.functional.pad(word_embeddings(range(VOCABULARY), device), (0, 0, 0, 1)).bfloat16()
