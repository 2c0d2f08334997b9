"""From what a run is asked to be to a trainer that is ready for its next step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from filelock import BaseFileLock, Timeout
from rich.console import Console

from repro.balance import policies
from repro.balance.models import ModelSize
from repro.balance.policies import Policy
from repro.balance.schedule import Layout
from repro.balance.types import Protocols, Weighting
from repro.corpus.mixes import TOKEN_BUDGET
from repro.measure.machine import read_machine
from repro.names import unknown
from repro.plan_file import one_device
from repro.records import Store, files
from repro.wan import batching, peaks
from repro.wan.batching import BatchLimits, Costs
from repro.wan.calibrate import calibrate
from repro.wan.checkpointing import Checkpoints
from repro.wan.config import WanConfig
from repro.wan.convert import load_diffusers
from repro.wan.engine import Engine, OptimizerSettings, SampleLosses
from repro.wan.epochs import Epochs, check_corpus, corpus_hash
from repro.wan.log import RunLog, require_tensorboard
from repro.wan.model import WanModel
from repro.wan.objective import FlowMatching
from repro.wan.parallel import Parallelism, World, WorldError, agree, on_first
from repro.wan.read_ahead import ReadAhead
from repro.wan.samples import FlowLosses, SampleSource
from repro.wan.shards import ShardedSamples
from repro.wan.sweep import Sweep
from repro.wan.trainer import Length, Trainer


@dataclass(frozen=True)
class Batching:
    """How samples become micro-batches.

    policy: its name. m_mem: tokens a micro-batch; None for what calibration finds, or else the published baseline's
    48,000; on CPUs, whose memory is not measured, the longest sample's. token_budget, m_comp, p: as in `BatchLimits`.
    calibrate: minutes of measuring shapes first; None for costs that `results` hold of `costs` (a device's slug, which
    must be there; None for this one's), or FLOPs.

    Raises ValueError for a value that no run can have.
    """

    policy: str
    m_mem: int | None = None
    token_budget: int | None = None
    m_comp: float | None = None
    p: float | None = None
    micro_batches: int = 1
    protocol: Protocols = "matched"
    weighting: Weighting = "sample"
    calibrate: float | None = None
    costs: str | None = None
    results: Path = Path("results")

    def __post_init__(self) -> None:
        if self.policy not in policies.NAMES:
            raise ValueError(unknown("policy", self.policy, policies.NAMES))
        if self.weighting not in get_args(Weighting):
            raise ValueError(f"weighting must be {' or '.join(get_args(Weighting))}, got {self.weighting!r}")
        # What these cannot hold is refused before a model is made.
        BatchLimits(1, self.token_budget, self.m_comp, self.p)
        Layout(1, 1, self.micro_batches, protocol=self.protocol)
        if self.calibrate is not None and not 0 < self.calibrate < math.inf:
            raise ValueError(f"calibrate must be positive and finite, got {self.calibrate} minutes")


@dataclass(frozen=True)
class Run:
    """Everything that decides a run, and where it goes.

    init: folder of weights in Diffusers' format; None for random ones. out: the run's folder. keep: checkpoints. ranks:
    refuse any other number; None for any.

    Raises ValueError where TensorBoard is asked for and not installed.
    """

    config: WanConfig
    adaln: str
    source: SampleSource
    flow: FlowMatching
    batching: Batching
    parallelism: Parallelism
    optimizer: OptimizerSettings
    length: Length
    out: Path
    seed: int = 0
    init: Path | None = None
    keep: int = 2
    ranks: int | None = None
    log_every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.tensorboard:
            require_tensorboard()


@contextlib.contextmanager
def prepared(run: Run, world: World) -> Iterator[tuple[Trainer, RunLog | None]]:
    """The trainer, at the step where it goes on, and the log on the first rank. All ranks call it together.

    As long as it lasts, no other run can use the folder. Raises ValueError (WorldError, CheckpointError, ResumeError,
    DataError and others) for whatever does not fit, OSError where the folder cannot be written.
    """
    _check_world(run, world)
    lock = on_first(world, partial(_occupy, run.out))
    log: RunLog | None = None
    try:
        trainer, log = _prepare(run, world)
        yield trainer, log
    finally:
        if log is not None:
            log.close()
        if lock is not None:
            lock.release()


def _occupy(out: Path) -> BaseFileLock | None:
    """Keep other runs out of the folder: they would remove what this one is writing. None where files have no locks."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        return files.hold(out, seconds=0)
    except Timeout as error:
        raise ValueError(f"{out} is in use by a run that is still going: wait for it, or give another --out") from error
    except NotImplementedError:
        return None


def _prepare(run: Run, world: World) -> tuple[Trainer, RunLog | None]:
    console = Console(highlight=False, soft_wrap=True)
    size, corpus = run.config.size, run.source.corpus
    if isinstance(run.source, ShardedSamples):
        run = replace(run, source=ReadAhead(run.source, world.device))
    checkpoints = Checkpoints(run.out / "checkpoints", world, run.keep)
    if (newest := checkpoints.newest()) is not None:  # refused before anything is measured, or takes memory
        check_corpus(corpus, checkpoints.read_about(newest, asdict(size))["sampler"])
    engine, m_mem, costs = _engine_and_costs(run, world, console)
    given = run.batching
    limits = BatchLimits(m_mem, given.token_budget, given.m_comp, given.p)
    policy = batching.make_policy(given.policy, costs, corpus, limits)
    layout = Layout(world.size, m_mem, given.micro_batches, run.parallelism.sync, given.protocol)
    epochs = Epochs(policy, corpus, layout, world.rank, run.seed, given.weighting)
    agree(world, "schedule", str(epochs.sampler.state_dict(0)["schedule"]))
    trainer = Trainer(engine, epochs, checkpoints, size, asdict(size), run.length, _options(run))
    if isinstance(run.source, ReadAhead):
        trainer.expect = run.source.expect
    notes = trainer.resume()
    peak = peaks.peak_flops(_device_name(world))
    last = run.length.steps
    log = on_first(world, lambda: RunLog(run.out, trainer.step, last, peak, console, run.log_every, run.tensorboard))
    if log is not None:
        log.say([*_introduction(run, world, policy, costs, epochs), *notes])
    return trainer, log


def _check_world(run: Run, world: World) -> None:
    """Raise WorldError where the ranks that were started are not those asked for, or more than there are samples."""
    if run.ranks is not None and run.ranks != world.size:
        raise WorldError(
            f"--ranks {run.ranks}, but {world.size} were started: match torchrun's --nnodes x --nproc-per-node"
        )
    corpus = run.source.corpus
    if world.size > corpus.samples:
        raise WorldError(f"{world.size} ranks, but {corpus.name} has {corpus.samples} samples: start fewer")


def make_engine(
    config: WanConfig,
    adaln: str,
    losses: SampleLosses,
    parallelism: Parallelism,
    optimizer: OptimizerSettings,
    world: World,
    seed: int = 0,
    init: Path | None = None,
) -> Engine:
    """The engine around a Wan model that is made of shards from the start.

    init: folder of weights in Diffusers' format; None for random ones from `seed`.
    """

    def materialize(model: torch.nn.Module) -> None:
        assert isinstance(model, WanModel)
        model.to_empty(device=world.device)
        if init is None:
            model.reset_parameters(seed)
        else:
            load_diffusers(model, init)

    with torch.device("meta"):
        model = WanModel(config, adaln)
    return Engine(model, losses, parallelism, optimizer, world, materialize)


def _engine(run: Run, world: World) -> Engine:
    losses = FlowLosses(run.source, run.flow, world.device)
    return make_engine(run.config, run.adaln, losses, run.parallelism, run.optimizer, world, run.seed, run.init)


def _engine_and_costs(run: Run, world: World, console: Console) -> tuple[Engine, int, Costs]:
    """The engine, tokens that a micro-batch may hold, and what micro-batches cost."""
    given, size = run.batching, run.config.size
    cuda, corpus = world.device.type == "cuda", run.source.corpus
    default = TOKEN_BUDGET if cuda else int(corpus.tokens[corpus.counts > 0].max())
    if given.calibrate is None or given.m_mem or not cuda:  # else M_mem is still to be found
        limits = BatchLimits(given.m_mem or default, given.token_budget, given.m_comp, given.p)
        batching.check(given.policy, size, corpus, limits, Layout(world.size, limits.m_mem))
    if given.calibrate is None:
        store = Store(given.results)
        if given.costs is not None:
            found = _costs_of(store, given.costs, size, run.adaln)
        else:
            slug = read_machine(None if cuda else 0).slug
            found = batching.find_costs(store, slug, size, run.adaln, corpus)
        return _engine(run, world), given.m_mem or default, found

    def say(line: str) -> None:
        if world.is_first:
            console.print(line, markup=False)

    m_mem = given.m_mem if cuda else given.m_mem or default
    accumulates = given.protocol == "matched"
    bisected = f"bisected for {'several micro-batches' if accumulates else 'one micro-batch'} a step"
    setting = (
        f"{size.name} {size.layers} layers; {run.adaln}; {run.parallelism}; {world.size} x {_device_name(world)}; "
        f"corpus {corpus_hash(corpus)}; M_mem {m_mem or bisected}"
    ).replace(",", "")
    sweep = Sweep(lambda: _engine(run, world), world, run.out / "calibration.csv", setting)
    done = calibrate(sweep, size, corpus, given.calibrate, m_mem, say, accumulates)
    sweep.close()
    return sweep.engine, done.m_mem, done.costs


def _costs_of(store: Store, device: str, size: ModelSize, adaln: str) -> Costs:
    """Costs of the device that was asked for. Raises ValueError where there are none."""
    known = store.devices()
    if one_device(device) not in known:
        raise ValueError(f"no step times of {device!r}; known: {', '.join(known)}; --calibrate measures this run's own")
    try:
        return batching.measured_costs(store, device, size, adaln)
    except ValueError as error:
        raise ValueError(f"{error}: leave out --costs to go by FLOPs, or give --calibrate") from error


def _introduction(run: Run, world: World, policy: Policy, costs: Costs, epochs: Epochs) -> list[str]:
    size, corpus = run.config.size, run.source.corpus
    return [
        f"{size.name}, {size.layers} layers, {size.parameters:,} parameters, {run.adaln} AdaLN, on "
        f"{world.size} x {_device_name(world)}",
        f"{policy.name} over {corpus.name} ({corpus.source}); costs: {costs.source}",
        batching.limits_line(policy, epochs.layout.m_mem),
        *batching.batch_table(policy, corpus),
        epochs.report(),
        *_accumulation(run, epochs),
    ]


def _accumulation(run: Run, epochs: Epochs) -> list[str]:
    """A line where steps have more micro-batches than were asked for, to match equal-token's samples a step."""
    mean, asked = float(epochs.sampler.schedule.slots_of_step.mean()), run.batching.micro_batches
    if mean <= 1.05 * asked:
        return []
    return [
        f"{mean:.1f} micro-batches a step and rank: as many samples as {asked} of {epochs.layout.m_mem:,} tokens under "
        "equal_token hold; --protocol as_published takes one"
    ]


def _options(run: Run) -> dict[str, Any]:
    """What a resumed run is compared by, besides model and schedule."""
    optimizer = {k: v for k, v in asdict(run.optimizer).items() if k != "betas"}
    weighting = run.batching.weighting
    return {
        "adaln": run.adaln,
        "seed": run.seed,
        "weighting": weighting,
        **asdict(run.flow),
        **asdict(run.parallelism),
        **optimizer,
    }


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
