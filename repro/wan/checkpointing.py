"""Checkpoints of a sharded run: complete or not there at all, written while training goes on.

`torch.distributed.checkpoint` writes every rank's shards into a hidden folder; when all are on disk the folder is
renamed to `step-00001000`, and `latest` is replaced last. A run killed at any moment leaves its last complete
checkpoint untouched. `about.json` in it says what it is of, so that a wrong one is refused before anything is loaded;
`tensors.json` what lies where, so that nothing is read as a pickle (`repro.wan.checkpoint_index`).
On several nodes the folder must be on a file system that they share.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from repro.records import files
from repro.wan import checkpoint_index
from repro.wan.parallel import World, WorldError, on_first

FORMAT = 2
_LATEST = "latest"
_ABOUT = "about.json"


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which, why, and what to do."""


class SaveError(OSError):
    """A checkpoint could not be written; the message says which and why. Complete ones stand as they were."""


class Checkpoints:
    """The checkpoints in one folder; every rank makes one and calls its methods together with the others.

    keep: complete checkpoints to keep; older ones are removed once a newer one is complete.
    Raises ValueError for keep below 1, OSError for a folder that cannot be written.
    """

    def __init__(self, folder: Path, world: World, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint, got {keep}")
        self.folder, self.world, self.keep = folder, world, keep
        # Its own: saving goes on while training uses the other.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.patience))
        self._saving: Future[Any] | None = None
        self._name = ""
        self._committed = threading.Event()
        self._failure: BaseException | None = None
        on_first(world, self._begin, self._group)

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob(".step-*"):  # of a run that was killed
            shutil.rmtree(partial)

    def newest(self) -> Path | None:
        """The checkpoint to go on from, on every rank the same: what `latest` names, or else the newest one."""
        found = [on_first(self.world, self._newest, self._group)]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return self.folder / found[0] if found[0] else None

    def _newest(self) -> str | None:
        named = self.folder / _LATEST
        name = named.read_text(errors="replace").strip() if named.exists() else ""
        complete = [p.name for p in self._complete()]
        return name if name in complete else complete[-1] if complete else None

    def _complete(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("step-*") if (p / ".metadata").exists())

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        about: dict[str, Any],
        used: npt.NDArray[np.uint8],
    ) -> None:
        """Start to save what `step` optimizer steps made; returns once it is copied to host memory.

        about: JSON that `read_about` gives back, with the model's description under "model". used: any array.
        Raises SaveError, on all ranks, for the save before, and where this one cannot begin.
        """
        self.wait()
        name = f"step-{step:08d}"
        partial = self.folder / f".{name}"
        text = json.dumps({"format": FORMAT, "step": step, "torch": torch.__version__, **about}, indent=1)
        try:
            on_first(self.world, lambda: files.replace(partial / _ABOUT, text.encode()), self._group)
        except (OSError, WorldError) as error:
            raise SaveError(self._told(name, str(error))) from error
        fresh = not optimizer.state
        model_state, optimizer_state = get_state_dict(model, optimizer)
        if fresh:  # what had no state was given one by a step of zeros: it must not count as a step
            for of_parameter in optimizer.state.values():
                of_parameter["step"].zero_()
        state: dict[str, Any] = {
            "model": model_state,
            "optimizer": optimizer_state,
            "used": torch.from_numpy(used),
            **_random_state(self.world.rank),
        }
        self._name = name
        writer = checkpoint_index.Writer(partial)
        self._saving = cast("Future[Any]", dcp.async_save(state, storage_writer=writer, process_group=self._group))
        if self.world.is_first:
            self._committed.clear()
            self._saving.add_done_callback(lambda done: self._commit(done, partial, name))

    def _commit(self, done: Future[Any], partial: Path, name: str) -> None:
        """On the first rank, once all have written: make it visible, then the newest, then remove old ones."""
        try:
            done.result()
            final = self.folder / name
            if final.exists():  # written before a return to an older one
                self._remove(final)
            os.replace(partial, final)
            _sync_folder(self.folder)
            files.replace(self.folder / _LATEST, f"{name}\n".encode())
            for old in [p for p in self._complete() if p.name != name][: -(self.keep - 1) or None]:
                self._remove(old)
        except BaseException as error:  # runs in a thread: `wait` raises it where it is seen
            self._failure = error
        finally:
            self._committed.set()

    def _remove(self, path: Path) -> None:
        """Hidden first, so that what a kill leaves of it is not taken for a checkpoint."""
        hidden = path.with_name(f".{path.name}.removed")
        os.replace(path, hidden)
        shutil.rmtree(hidden)

    def wait(self, alone: bool = False) -> None:
        """Wait until a save under way is complete. Raises SaveError, on all ranks if one of them cannot write.

        alone: this rank is ending, and does not ask the others.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        failure = saving.exception()
        if self.world.is_first:
            self._committed.wait()  # a future wakes its waiters before it calls back
            failure, self._failure = failure or self._failure, None
        cause = _cause(failure) if failure is not None else ""
        if not alone:
            cause = self._some(cause)
        if cause:
            raise SaveError(self._told(self._name, cause)) from failure

    def _some(self, mine: str) -> str:
        """The first rank's text that has one, on all ranks."""
        texts: list[str] = [""] * self.world.size
        dist.all_gather_object(texts, mine, group=self._group)
        return next(filter(None, texts), "")

    def _broken(self, path: Path, metadata: Metadata) -> str:
        try:
            checkpoint_index.check_tensors(path, metadata, self.world.rank, self.world.size)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _told(self, name: str, cause: str) -> str:
        return (
            f"{self.folder / name} could not be written: {cause}; complete checkpoints stand: see to space there, and "
            "the same command goes on"
        )

    def read_about(self, path: Path, model: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint is of. Raises CheckpointError for an unreadable one, or of another model than `model`."""
        try:
            about = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
            version, of = about["format"], dict(about["model"])
            if version == FORMAT:
                _check_state(about)
                checkpoint_index.check(path, _ABOUT)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is no checkpoint: {type(error).__name__}: {error}; remove that folder to go on from the one "
                "before"
            ) from error
        if version != FORMAT:
            raise CheckpointError(f"{path} has checkpoint format {version}, this reads {FORMAT}")
        different = [f"{k} {of.get(k)} (here {model.get(k)})" for k in {**of, **model} if of.get(k) != model.get(k)]
        if different:
            raise CheckpointError(
                f"{path} is of another model: {', '.join(different)}; give the same model, or another folder"
            )
        return about

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, used_bytes: int) -> npt.NDArray[Any]:
        """Load model, optimizer and random state in place, on any number of ranks; returns `used`, [2, used_bytes].

        All of it is read once before, for its checksums. A rank that the interrupted run did not have keeps its own
        random state. Raises CheckpointError, on all ranks, for files that are missing or damaged.
        """
        try:
            metadata = checkpoint_index.read(path)
            checkpoint_index.check(path, checkpoint_index.NAME)
            if broken := self._some(self._broken(path, metadata)):
                raise ValueError(broken)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            random = {k: v for k, v in _random_state(self.world.rank).items() if k in metadata.state_dict_metadata}
            used = torch.zeros(2, used_bytes, dtype=torch.uint8)
            state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "used": used, **random}
            dcp.load(
                state,
                storage_reader=checkpoint_index.Reader(path, metadata),
                planner=checkpoint_index.Planner(),
                process_group=self._group,
            )
            set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state["optimizer"])
        except (CheckpointException, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[-300:]
            raise CheckpointError(
                f"{path} is damaged: {type(error).__name__}: {reason}; remove that folder to go on from the one before"
            ) from error
        _set_random_state(self.world.rank, random)
        return used.numpy()


def _cause(error: BaseException) -> str:
    """What came first: `torch.distributed.checkpoint` wraps it, rank by rank and layer by layer."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _check_state(about: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError where a description lacks what a run goes on from."""
    dict(about["options"])
    sampler = dict(about["sampler"])
    dict(sampler["settings"]), str(sampler["corpus"]), str(sampler["schedule"])
    numbers = {"step": about["step"], **{name: sampler[name] for name in ("seed", "epoch", "steps")}}
    for name, value in numbers.items():
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")


def _random_state(rank: int) -> dict[str, Tensor]:
    """This rank's generators, under keys of its own."""
    state = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(rank: int, state: dict[str, Tensor]) -> None:
    if (cpu := state.get(f"random.cpu.{rank}")) is not None:
        torch.set_rng_state(cpu)
    if (cuda := state.get(f"random.cuda.{rank}")) is not None:
        torch.cuda.set_rng_state(cuda)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
