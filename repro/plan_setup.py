"""What a plan stands on: the training run to plan for, and what rows of a device say about it.

Step time and memory of the whole model where it was swept (`shape_sweep`), else of a few blocks (`block_time`), scaled
to the model's depth. Nothing is borrowed silently: no rows of this model and AdaLN on this device, no plan; shapes
beyond the measured ones only on request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from repro.balance import whole
from repro.balance.cost import PowerCost, QuadraticCost
from repro.balance.fit import Observations, fit, observations
from repro.balance.memory import MemoryFit, fit_memory, memory_limit
from repro.balance.models import MODELS, ModelSize
from repro.balance.types import Sync
from repro.names import unknown
from repro.records import Store

SHORTEST = 256
"""Tokens of the shortest bucket that a memory limit must hold: a 256 px image, the least that Wan 2.1 trains on."""


MOST_RANKS, MOST_MICRO_BATCHES, MOST_TOKENS, MOST_BYTES = 65_536, 4_096, 10**9, 10**15
"""Above these a value is a mistake, and would be simulated for ever."""


class PlanError(ValueError):
    """No plan can be made of this; the message is what the user reads."""


@dataclass(frozen=True)
class Setup:
    """A training run to plan for.

    device: slug of the results that step times come from. memory_bytes: of one device. adaln: as in `block_time`.
    m_mem: tokens of the largest micro-batch; None for what measured memory gives. token_budget: of the equal-token
    baseline's micro-batches; None for m_mem. bandwidth: bus bandwidth of the
    collectives in bytes/s; None where communication is taken to hide under compute. extrapolate: go beyond the longest
    and largest shapes that were measured.
    """

    model: ModelSize
    device: str
    memory_bytes: float
    ranks: int
    sync: Sync = "micro_batch"
    micro_batches: int = 1
    adaln: str = "eager"
    m_mem: int | None = None
    token_budget: int | None = None
    bandwidth: float | None = None
    extrapolate: bool = False

    def __post_init__(self) -> None:
        for name, most in (
            ("ranks", MOST_RANKS),
            ("micro_batches", MOST_MICRO_BATCHES),
            ("memory_bytes", MOST_BYTES),
            ("bandwidth", MOST_BYTES),
            ("m_mem", MOST_TOKENS),
            ("token_budget", MOST_TOKENS),
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:  # also catches NaN
                raise PlanError(f"{name} must be from 1 to {most:,}, got {value}")
        if self.m_mem is not None and self.m_mem < SHORTEST:
            raise PlanError(f"m_mem must be at least {SHORTEST} tokens, got {self.m_mem}")


@dataclass(frozen=True)
class Costs:
    """Costs of the full model, fitted to one device's rows.

    power: the paper's form, for the paper's rule. quadratic: ours, for everything predicted. error_tokens, errors:
    float64 [L], measured lengths and the mean of fitted / measured - 1 at each when it was held out. held_out_mape: %.
    told: what was measured, for notes.
    """

    power: PowerCost
    quadratic: QuadraticCost
    error_tokens: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    held_out_mape: float
    told: str

    @property
    def source(self) -> str:
        """run_ids of the rows."""
        return self.quadratic.source


def known_model(name: str) -> ModelSize:
    """The model called `name`. Raises PlanError for any other."""
    if name not in MODELS:
        raise PlanError(unknown("model", name, MODELS))
    return MODELS[name]


def require_measured(store: Store, device: str) -> None:
    """Raise PlanError, naming the devices that can be planned for, where `device` has no step times."""
    if store.rows("block_time", device, "full").empty:
        measured = [d for d in store.devices() if len(store.rows("block_time", d, "full"))]
        raise PlanError(
            f"no step times of {device!r}; measured: {', '.join(measured) or 'no device yet'}. Measure it "
            "(python -m repro.all --profile full --only block_time), or plan with another's times and --memory-gb"
        )


def recorded_memory(store: Store, device: str) -> float | None:
    """Bytes of one device, from its newest run that recorded them."""
    sizes = [run.get("machine", {}).get("memory_bytes") for run in store.runs(device)]
    return next((float(size) for size in reversed(sizes) if size), None)


def read_costs(store: Store, setup: Setup) -> tuple[Costs, MemoryFit | None]:
    """Costs of the model on the device, and its memory where that was measured. Raises PlanError without its rows."""
    rows = store.gather(whole.SUITES, setup.device, "full")
    try:
        data = observations(rows, setup.model.name, setup.adaln)
        power, quadratic = fit("power", data), fit("quadratic", data)
    except ValueError as error:
        raise PlanError(f"step times of {setup.model.name} on {setup.device}: {error}") from error
    lengths, errors = _errors_by_length(data, quadratic.held_out)
    costs = Costs(
        power=cast(PowerCost, power.cost.scaled(setup.model.layers).extrapolating()),
        quadratic=cast(QuadraticCost, quadratic.cost.scaled(setup.model.layers).extrapolating()),
        error_tokens=lengths,
        errors=errors,
        held_out_mape=quadratic.held_out_mape,
        told=whole.told(rows, setup.model.name, data.source),
    )
    try:
        return costs, fit_memory(rows, setup.model.name, setup.adaln)
    except ValueError:
        return costs, None


def _errors_by_length(
    data: Observations, held_out: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    lengths, at = np.unique(data.tokens, return_inverse=True)
    return lengths.astype(np.float64), np.bincount(at, held_out) / np.bincount(at)


def token_limit(setup: Setup, costs: Costs, memory: MemoryFit | None) -> tuple[int, list[str]]:
    """M_mem in tokens, and what the user should know about it.

    Raises PlanError where nothing says how much fits, or less than one sample does.
    """
    measured = costs.quadratic.range.micro_batch_tokens
    if setup.m_mem is not None:
        if setup.m_mem > measured and not setup.extrapolate:
            raise PlanError(
                f"M_mem of {setup.m_mem:,} tokens is beyond the largest micro-batch measured on {setup.device}, "
                f"{measured:,} tokens: lower --m-mem or allow --extrapolate"
            )
        return setup.m_mem, []
    if memory is None:
        raise PlanError(f"no memory of {setup.model.name} measured on {setup.device}: give --m-mem TOKENS")
    try:
        fits = memory_limit(memory, setup.model, setup.memory_bytes, setup.ranks, setup.sync, SHORTEST)
    except ValueError as error:
        raise PlanError(str(error)) from error
    if fits > measured and not setup.extrapolate:
        return measured, [
            f"memory would hold {fits:,} tokens a micro-batch; the plan stops at the {measured:,} that were measured "
            "(--extrapolate goes on)"
        ]
    return fits, []
