"""Samples read from disk while the GPU computes: a micro-batch ahead, in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from repro.balance.types import MicroBatch
from repro.corpus.shapes import Corpus, Shape
from repro.wan.samples import Samples, SampleSource

Wanted = tuple[Shape, tuple[int, ...]]


class ReadAhead:
    """A source that reads what is expected next before it is asked for.

    source: hands out samples on the CPU. device: where they are needed; for a GPU they wait in pinned memory, and are
    copied without the host waiting. Whatever is expected, `fetch` hands out what it is asked for, or raises as the
    source does for these samples. All reading is done by one thread.
    """

    def __init__(self, source: SampleSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self._thread = ThreadPoolExecutor(1, "read-ahead", initializer=self._begin)
        self._expected: deque[Wanted] = deque()
        self._slot: tuple[Wanted, Future[Samples]] | None = None

    @property
    def corpus(self) -> Corpus:
        """Of the source."""
        return self._source.corpus

    def expect(self, micro_batches: Iterable[MicroBatch]) -> None:
        """These are asked for next, in this order, in place of what was expected before."""
        self._expected = deque((m.shape, tuple(m.sample_ids)) for m in micro_batches)
        if self._slot is not None:
            if self._expected and self._expected[0] == self._slot[0]:
                self._expected.popleft()
            else:
                self._slot = None
        self._start()

    def fetch(self, shape: Shape, sample_ids: Sequence[int], device: torch.device | str) -> Samples:
        """As `SampleSource.fetch`."""
        wanted = shape, tuple(sample_ids)
        if self._slot is not None and self._slot[0] == wanted:
            found = self._slot[1]
        else:
            found = self._thread.submit(self._read, wanted)
        self._slot = None
        self._start()  # queues behind what is waited for here
        samples = found.result()
        return Samples(samples.latents.to(device, non_blocking=True), samples.text.to(device, non_blocking=True))

    def _start(self) -> None:
        if self._slot is None and self._expected:
            wanted = self._expected.popleft()
            self._slot = wanted, self._thread.submit(self._read, wanted)

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else pinning would open a context on the first GPU

    def _read(self, wanted: Wanted) -> Samples:
        samples = self._source.fetch(*wanted, "cpu")
        if self._device.type != "cuda":
            return samples
        return Samples(samples.latents.pin_memory(), samples.text.pin_memory())
