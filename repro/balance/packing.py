"""From counts of micro-batches to slots: cutting samples into micro-batches and dealing these to ranks.

Legend: K used buckets, dearest first; T steps; M slots (micro-batches a step and rank); R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.balance import assign
from repro.balance.schedule import ABSENT, IntArray, Layout
from repro.balance.types import Cost

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Buckets:
    """Buckets in order of what a full micro-batch costs, dearest first.

    tokens, batch: int64 [K], tokens of a sample and samples of a full micro-batch. cost: of any micro-batch.
    """

    tokens: IntArray
    batch: IntArray
    cost: Cost

    def seconds(self, bucket: IntArray, batch: IntArray) -> FloatArray:
        """Seconds of micro-batches, arrays of one shape; 0 where absent, what one sample costs for a filler."""
        return np.where(bucket == ABSENT, 0.0, self.cost.seconds(np.maximum(batch, 1), self.tokens[bucket]))

    def cut(self, micro_batches: IntArray, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Bucket and batch of each micro-batch, row by row and bucket by bucket, int64 [sum(micro_batches)].

        micro_batches, samples: int64 [..., K]. All are full but the last of a row and bucket, which has the rest.
        """
        number = micro_batches.ravel()
        bucket = np.repeat(np.tile(np.arange(self.batch.size), number.size // self.batch.size), number)
        batch = self.batch[bucket]
        last = (np.cumsum(number) - 1)[number > 0]
        batch[last] = (samples - (micro_batches - 1) * self.batch).ravel()[number > 0]
        return bucket, batch

    def deal(self, micro_batches: IntArray, samples: IntArray, layout: Layout) -> tuple[IntArray, IntArray]:
        """Bucket and batch, int64 [T, M, R], of T steps of M * R micro-batches each; arguments [T, K] as in `cut`."""
        steps = micro_batches.shape[0]
        size = layout.micro_batches * layout.ranks
        bucket, batch = (a.reshape(steps, size) for a in self.cut(micro_batches, samples))
        index = assign.aligned(self.seconds(bucket, batch), layout.ranks)
        flat = index.reshape(bucket.shape)
        shape = (steps, layout.micro_batches, layout.ranks)
        return (
            np.take_along_axis(bucket, flat, axis=1).reshape(shape),
            np.take_along_axis(batch, flat, axis=1).reshape(shape),
        )

    def deal_rest(self, left: IntArray, layout: Layout) -> tuple[IntArray, IntArray]:
        """Bucket and batch, int64 [T, M, R], of the steps that use up `left` samples [K], matched as far as it goes.

        Slots are filled in order of cost and go to the steps in turn, so that each has dear and cheap ones; the first
        steps may have a slot less. The cheapest slot, which not all ranks may be needed for, ends the last step.
        """
        ranks = layout.ranks
        bucket, batch = self.cut(-(-left // self.batch), left)
        dearest_first = np.argsort(-self.seconds(bucket, batch), kind="stable")
        bucket, batch = bucket[dearest_first], batch[dearest_first]
        slots = -(-bucket.size // ranks)
        if bucket.size % ranks:
            head = (slots - 1) * ranks
            cheapest = self.spread(bucket[head:], batch[head:], ranks)
            bucket, batch = np.append(bucket[:head], cheapest[0]), np.append(batch[:head], cheapest[1])
        steps = -(-slots // layout.micro_batches)
        out_bucket = np.full((steps, layout.micro_batches, ranks), ABSENT, dtype=np.int64)
        out_batch = np.zeros_like(out_bucket)
        step_of = steps - 1 - np.arange(slots)[::-1] % max(steps, 1)
        for step in range(steps):
            own = np.flatnonzero(step_of == step)
            b, n = bucket.reshape(slots, ranks)[own].ravel(), batch.reshape(slots, ranks)[own].ravel()
            index = assign.aligned(self.seconds(b, n)[None], ranks)[0]
            out_bucket[step, : own.size], out_batch[step, : own.size] = b[index], n[index]
        return out_bucket, out_batch

    def spread(self, bucket: IntArray, batch: IntArray, ranks: int) -> tuple[IntArray, IntArray]:
        """Cut fewer than R micro-batches anew into R, the dearest ever smaller; fillers where samples are too few."""
        kinds, which = np.unique(bucket, return_inverse=True)
        samples = np.bincount(which, weights=batch).astype(np.int64)
        pieces = np.bincount(which)
        while pieces.sum() < ranks:
            largest = -(-samples // pieces)
            dearest = int(np.where(largest > 1, self.seconds(kinds, largest), -np.inf).argmax())
            if largest[dearest] == 1:
                break
            pieces[dearest] += 1
        place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        out_bucket = np.repeat(kinds, pieces)
        out_batch = np.repeat(samples // pieces, pieces) + (place < np.repeat(samples % pieces, pieces))
        fillers = ranks - out_bucket.size
        shortest = kinds[self.tokens[kinds].argmin()]
        return np.append(out_bucket, np.full(fillers, shortest)), np.append(out_batch, np.zeros(fillers, np.int64))
