"""One optimizer step over micro-batches of any shapes: the part of training that is arithmetic.

Gradients are those of sum(w_i * l_i) over the samples of all ranks, whatever the schedule: on a rank the loss is
R * sum(w_i * l_i), and FSDP averages over R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from repro.balance.types import MicroBatch
from repro.wan.optimizer import ShardedAdamW
from repro.wan.parallel import Parallelism, World, any_number_of_shapes, parallelize, prepare_micro_batch
from repro.wan.waiting import WaitClock

OnNonFinite = Literal["stop", "skip"]


class SampleLosses(Protocol):
    """Losses of a micro-batch's samples, each one the same in whatever batch and on whatever rank it is computed."""

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, epoch: int) -> Tensor:
        """Forward pass: float [B], one loss a sample, with graph."""
        ...


class NonFiniteLoss(RuntimeError):
    """A loss, or the gradient of finite losses, was NaN or infinite. sample_ids: whose."""

    def __init__(self, sample_ids: Sequence[int], what: str) -> None:
        shown = ", ".join(map(str, sample_ids[:20])) + (f" and {len(sample_ids) - 20} more" if sample_ids[20:] else "")
        super().__init__(f"{what} is not finite; samples {shown}")
        self.sample_ids = tuple(sample_ids)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with linear warm-up and clipping.

    lr: after `warmup` steps. clip: largest norm of the whole gradient; infinity leaves it as it is. on_nonfinite: what
    a step with a NaN or infinite loss or gradient does: `stop` with the sample ids, or `skip` the update and count.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup: int = 100
    clip: float = 1.0
    on_nonfinite: OnNonFinite = "stop"

    def __post_init__(self) -> None:
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not (math.isfinite(self.lr) and 0 <= self.weight_decay < math.inf):
            raise ValueError(
                f"lr must be finite and weight_decay at least 0 and finite, got {self.lr} and {self.weight_decay}"
            )
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0 steps, got {self.warmup}")
        if self.on_nonfinite not in get_args(OnNonFinite):
            raise ValueError(f"on_nonfinite must be stop or skip, got {self.on_nonfinite!r}")

    def lr_at(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        return self.lr * min(1.0, (step + 1) / self.warmup) if self.warmup else self.lr


@dataclass(frozen=True)
class RankStep:
    """What one rank did in a step.

    samples, tokens: of weight above 0. seconds: of the step; wait_seconds: of these, waited for other ranks.
    peak_bytes: most memory allocated on the GPU; -1 on a CPU, where nothing counts it.
    """

    samples: int
    tokens: int
    micro_batches: int
    seconds: float
    wait_seconds: float
    peak_bytes: int

    @property
    def compute_seconds(self) -> float:
        """The rank's own time."""
        return self.seconds - self.wait_seconds


@dataclass(frozen=True)
class StepResult:
    """loss: weighted mean over the step's samples. grad_norm: before clipping. skipped: no update was made.

    seconds: of the slowest rank. ranks: what each did. stop: some rank was asked to stop after this step.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    ranks: tuple[RankStep, ...]
    stop: bool = False

    @property
    def seconds(self) -> float:
        """Time of the step: that of its slowest rank."""
        return max(r.seconds for r in self.ranks)

    @property
    def tokens(self) -> int:
        """Tokens over all ranks."""
        return sum(r.tokens for r in self.ranks)

    @property
    def samples(self) -> int:
        """Samples over all ranks."""
        return sum(r.samples for r in self.ranks)


class Engine:
    """A model sharded over the ranks, its optimizer, and the step that both take.

    model: sharded in place; with its values there, the same on every rank, or on the meta device. materialize: gives a
    meta model, once sharded, its memory and values, so that the whole never exists anywhere.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: SampleLosses,
        parallelism: Parallelism,
        settings: OptimizerSettings,
        world: World,
        materialize: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.losses, self.parallelism, self.settings, self.world = losses, parallelism, settings, world
        self.clock = WaitClock(world.device)
        parallelize(model, parallelism, world, self.clock)
        if materialize is not None:
            materialize(model)
        self.model = model
        self.optimizer = ShardedAdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def gradients(
        self, micro_batches: Sequence[MicroBatch], epoch: int = 0, losses: SampleLosses | None = None
    ) -> list[Tensor]:
        """Forward and backward passes of this rank's micro-batches of a step; gradients are left in `.grad`.

        losses: another's than the engine's. Returns the losses, float [B] each, detached. All ranks call it together,
        with as many micro-batches each.
        """
        losses_of, found = losses or self.losses, []
        for i, micro_batch in enumerate(micro_batches, 1):
            prepare_micro_batch(self.model, self.parallelism, last=i == len(micro_batches))
            with any_number_of_shapes():
                losses_B = losses_of(self.model, micro_batch, epoch)
                if losses_B.shape != (len(micro_batch.sample_ids),):
                    raise ValueError(f"losses must be [{len(micro_batch.sample_ids)}], got {list(losses_B.shape)}")
                weights_B = torch.tensor(micro_batch.weights, dtype=losses_B.dtype, device=losses_B.device)
                (self.world.size * (weights_B * losses_B).sum()).backward()
            self.clock.backward_done()
            found.append(losses_B.detach())
        return found

    def step(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        tokens: Sequence[int],
        epoch: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Optimizer step number `step`; `tokens` [M] are those of one sample of each micro-batch.

        stop: asked once gradients are there; every rank learns the others' answers.
        Raises NonFiniteLoss on every rank, before anything is updated, unless such steps are skipped.
        """
        cuda = self.world.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.clock.start()
        losses = self.gradients(micro_batches, epoch)
        norm = self._clip()
        seconds, waited = self.clock.stop()
        weighted, bad = _examine(micro_batches, losses)
        sizes = [len(m.sample_ids) if any(m.weights) else 0 for m in micro_batches]
        mine = [
            weighted,
            float(sum(sizes)),
            float(sum(n * s for n, s in zip(sizes, tokens, strict=True))),
            float(len(micro_batches)),
            seconds,
            waited,
            float(torch.cuda.max_memory_allocated() if cuda else -1),
            float(len(bad)),
            float(stop()),
        ]
        everyone = self._gather(mine)
        loss = sum(row[0] for row in everyone)
        skipped = any(row[7] for row in everyone) or not torch.isfinite(torch.tensor(norm)).item()
        if skipped and self.settings.on_nonfinite == "stop":
            raise self._nonfinite(micro_batches, bad)
        own, lr = self.settings, self.settings.lr_at(step)
        if not skipped:
            for group in self.optimizer.param_groups:
                # All of them, since a checkpoint brings those of the run that made it.
                group.update(lr=lr, betas=own.betas, eps=own.eps, weight_decay=own.weight_decay)
            self.optimizer.step()
        self.optimizer.zero_grad()
        ranks = tuple(RankStep(int(r[1]), int(r[2]), int(r[3]), r[4], r[5], int(r[6])) for r in everyone)
        return StepResult(loss, norm, lr, skipped, ranks, any(row[8] for row in everyone))

    def _clip(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _gather(self, mine: list[float]) -> list[list[float]]:
        out = [torch.empty(len(mine), dtype=torch.float64) for _ in range(self.world.size)]
        dist.all_gather(out, torch.tensor(mine, dtype=torch.float64))
        return [row.tolist() for row in out]

    def _nonfinite(self, micro_batches: Sequence[MicroBatch], bad: list[int]) -> NonFiniteLoss:
        """The error, the same on every rank: whose losses are broken, or whose gradients are, with losses finite."""
        parts: list[tuple[list[int], list[int]]] = [([], [])] * self.world.size
        step_ids = [i for m in micro_batches if any(m.weights) for i in m.sample_ids]
        dist.all_gather_object(parts, (bad, step_ids))
        everyone = [i for of_rank, _ in parts for i in of_rank]
        if everyone:
            return NonFiniteLoss(everyone, "loss")
        return NonFiniteLoss([i for _, of_rank in parts for i in of_rank], "gradient")


def _examine(micro_batches: Sequence[MicroBatch], losses: Sequence[Tensor]) -> tuple[float, list[int]]:
    """This rank's share of the step's loss, and the ids of samples whose loss is not finite."""
    flat = torch.cat(list(losses)).double().cpu().tolist()
    ids = [i for m in micro_batches for i in m.sample_ids]
    weights = [w for m in micro_batches for w in m.weights]
    finite = torch.isfinite(torch.tensor(flat)).tolist()
    share = sum(w * x for w, x in zip(weights, flat, strict=True) if w)
    return share, [i for i, ok in zip(ids, finite, strict=True) if not ok]
