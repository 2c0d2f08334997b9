"""What each rank does in `test_checkpoint`: a small run that records every loss and sample, and may be killed."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from repro.balance.policies import EqualToken
from repro.balance.schedule import Layout
from repro.balance.types import MicroBatch
from repro.wan.checkpointing import CheckpointError, Checkpoints, SaveError
from repro.wan.engine import Engine, OptimizerSettings
from repro.wan.epochs import Epochs, ResumeError
from repro.wan.log import LoggedStep
from repro.wan.parallel import Parallelism, join
from repro.wan.trainer import Length, Trainer
from tests.wan import standin

SAMPLES = 40
BUDGET = 60


class Recorder:
    """Stands in for the log: a line a step with its loss, to the last bit, and this rank's sample ids."""

    def __init__(self, path: Path) -> None:
        self.path, self.ids = path, []

    def losses(self, model: torch.nn.Module, micro_batch: MicroBatch, epoch: int) -> torch.Tensor:
        self.ids += [i for i, w in zip(micro_batch.sample_ids, micro_batch.weights, strict=True) if w]
        # As a model with dropout would: the generator's state is part of the run.
        return standin.losses(model, micro_batch, epoch) * (0.5 + torch.rand(()))

    def step(self, logged: LoggedStep) -> None:
        with self.path.open("a") as file:
            file.write(f"{logged.step} {logged.epoch} {logged.result.loss!r} {','.join(map(str, self.ids))}\n")
        self.ids = []


def trainer(folder: Path, recorder: Recorder, steps: int, *, layers: int = 2, samples: int = SAMPLES) -> Trainer:
    world = join("cpu")
    engine = Engine(
        standin.make(torch.float32), recorder.losses, Parallelism(compute="master"), OptimizerSettings(lr=1e-2), world
    )
    torch.manual_seed(world.rank)  # ranks draw apart
    epochs = Epochs(EqualToken(BUDGET), standin.corpus(samples), Layout(world.size, BUDGET, 2), world.rank, seed=5)
    about = {"name": "stand-in", "layers": layers}
    return Trainer(engine, epochs, Checkpoints(folder, world), standin.SIZE, about, Length(steps, save_every=2))


def train(folder: Path, steps: int, tag: str, killed: str = "") -> None:
    """Go on from whatever is in `folder` until `steps`, recording to `<tag>-<rank>.txt`, which resumed runs extend."""
    _arm(folder, killed)
    rank = join("cpu").rank
    recorder = Recorder(folder.parent / f"{tag}-{rank}.txt")
    run = trainer(folder, recorder, steps)
    notes = run.resume()
    (folder.parent / f"{tag}-{rank}-notes.txt").write_text("\n".join(notes))
    run.run(recorder)


def refused(folder: Path, error: str, other: dict[str, int]) -> None:
    """A run that may not go on from `folder` says so before its first step, and touches nothing."""
    before = sorted(p.name for p in folder.iterdir())
    recorder = Recorder(folder.parent / "refused.txt")
    try:
        trainer(folder, recorder, 10, **other).resume()
    except (CheckpointError, ResumeError) as raised:
        assert error in str(raised), raised
    else:
        raise AssertionError("went on")
    assert sorted(p.name for p in folder.iterdir()) == before and not recorder.path.exists()


def cannot_write(folder: Path) -> None:
    """One rank's files may not grow any more: all ranks say so, and what was saved before stays."""
    recorder = Recorder(folder.parent / f"full-{join('cpu').rank}.txt")
    run = trainer(folder, recorder, 8)
    run.resume()
    if join("cpu").rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
    try:
        run.run(recorder)
    except SaveError as raised:
        assert "step-00000006 could not be written: " in str(raised), raised
    else:
        raise AssertionError("went on")


def loaded_is_saved(folder: Path) -> None:
    """Parameters and optimizer state after resuming are those saved by another number of ranks."""
    run = trainer(folder, Recorder(folder.parent / "unused.txt"), 1)
    run.resume()
    expected = torch.load(folder.parent / "whole.pt")
    for got, want in zip(whole_state(run.engine), expected, strict=True):
        assert torch.equal(got, want)


def whole_state(engine: Engine) -> list[torch.Tensor]:
    """Every parameter and its two moments, whole."""
    parameters = list(engine.model.parameters())
    moments = [engine.optimizer.state[p][m] for p in parameters for m in ("exp_avg", "exp_avg_sq")]
    return [t.full_tensor() for t in [*parameters, *moments]]


def train_and_keep(folder: Path, steps: int) -> None:
    """As `train`, and the state of the end beside it, for `loaded_is_saved`."""
    recorder = Recorder(folder.parent / f"kept-{join('cpu').rank}.txt")
    run = trainer(folder, recorder, steps)
    run.run(recorder)
    state = whole_state(run.engine)
    if join("cpu").is_first:
        torch.save(state, folder.parent / "whole.pt")


def _arm(folder: Path, killed: str) -> None:
    """Kill this process at its n-th renaming to a path in `folder` (`before latest 2`, `after latest 2`), or at the
    n-th call for losses (`during step 5`).
    """
    if not killed:
        return
    when, path, count = killed.split()
    left = int(count)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def renaming(rename: Callable[..., None]) -> Callable[..., None]:
        def wrapped(source: Any, target: Any, **options: Any) -> None:
            nonlocal left
            here = Path(target).is_relative_to(folder) and str(Path(target).relative_to(folder)) == path
            left -= here
            if here and left == 0 and when == "before":
                die()
            rename(source, target, **options)
            if here and left == 0 and when == "after":
                die()

        return wrapped

    if when == "during":
        losses = Recorder.losses

        def counted(self: Recorder, *args: Any) -> torch.Tensor:
            nonlocal left
            left -= 1
            if left == 0:
                die()
            return losses(self, *args)

        Recorder.losses = counted
    os.replace, os.rename = renaming(os.replace), renaming(os.rename)
