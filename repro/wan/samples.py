"""Where samples come from, as the trainer sees it, and their losses.

A source knows the shape of every sample (`corpus`, what policies and samplers work on) and hands out the samples of a
micro-batch by id. What it hands out for an id never depends on who else is in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from repro.balance.models import TEXT_TOKENS, TEXT_WIDTH
from repro.balance.types import MicroBatch
from repro.corpus.shapes import Corpus, Shape
from repro.wan import draws
from repro.wan.objective import FlowMatching


class DataError(ValueError):
    """Stored samples that are missing, broken, or not of the shape they should have."""


@dataclass(frozen=True)
class Samples:
    """latents: [B, 16, T, H, W]. text: [B, 512, 4096], zero after the end of a prompt. Each in its own float dtype."""

    latents: Tensor
    text: Tensor


class SampleSource(Protocol):
    """Samples by id."""

    @property
    def corpus(self) -> Corpus:
        """Shapes of all samples; ids are 0 .. corpus.samples - 1."""
        ...

    def fetch(self, shape: Shape, sample_ids: Sequence[int], device: torch.device | str) -> Samples:
        """The samples of these ids, all of `shape`, on `device`. Raises DataError for samples that are not."""
        ...


@dataclass(frozen=True)
class FlowLosses:
    """Losses of a micro-batch: fetch its samples, make them noisy, compare what the model says.

    Called as (model, micro_batch, epoch) -> float [B], with graph.
    """

    source: SampleSource
    flow: FlowMatching
    device: torch.device

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, epoch: int) -> Tensor:
        ids = micro_batch.sample_ids
        samples = self.source.fetch(micro_batch.shape, ids, self.device)
        return self.flow.losses(model, samples.latents, samples.text, ids, epoch)


def word_embeddings(words: Sequence[int | str], device: torch.device | str = "cpu") -> Tensor:
    """fp32 [L, 4096], a fixed random vector for each word: what stands in for the text encoder.

    The same word gives the same vector in every corpus, so captions can be learned from, though not generalised from.
    """
    return draws.normal(draws.keys(words, "word", device=device), (TEXT_WIDTH,))


def pad_prompt(words_LD: Tensor) -> Tensor:
    """[L, D] -> [512, D], cut or filled with zeros."""
    return torch.nn.functional.pad(words_LD[:TEXT_TOKENS], (0, 0, 0, max(0, TEXT_TOKENS - words_LD.shape[0])))
