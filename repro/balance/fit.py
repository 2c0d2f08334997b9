"""Cost models fitted to measured step times: least squares on relative error, intervals, held-out error.

Relative error, because a bucket of images and a bucket of long clips matter alike: each gets its share of the steps.
Held out are whole lengths, never single batch sizes: a model that has seen (4, S) hardly has to predict (5, S).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy import stats

from repro.balance import whole
from repro.balance.cost import UNIT, Floats, MeasuredCost, PowerCost, QuadraticCost, Range, TableCost
from repro.balance.models import MODELS
from repro.names import unknown

if TYPE_CHECKING:
    import pandas as pd

Form = Literal["power", "quadratic", "table"]
FORMS: tuple[Form, ...] = get_args(Form)
FOLDS = 5
RESAMPLES = 200

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Observations:
    """Measured step times of one model width, depth and AdaLN.

    batch, tokens: int64 [M]. seconds: float64 [M]. layers: blocks measured. measured: bool [M], False where the
    time was put together from another AdaLN's (`with_adaln`). source: run_ids, separated by spaces.
    """

    batch: Ints
    tokens: Ints
    seconds: Floats
    layers: int
    measured: Bools
    source: str

    def __post_init__(self) -> None:
        if not self.batch.size == self.tokens.size == self.seconds.size == self.measured.size:
            raise ValueError("batch, tokens, seconds and measured must be equally long")
        wrong = self.seconds[~((self.seconds > 0) & np.isfinite(self.seconds))]
        if wrong.size:
            raise ValueError(f"step times must be positive and finite, got {wrong[0]}")
        for name in ("batch", "tokens"):
            if (getattr(self, name) < 1).any():
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name).min()}")


@dataclass(frozen=True)
class Fit:
    """A fitted cost and how good it is.

    cost: at the measured depth. residuals, held_out: float64 [M], fitted / measured - 1 with all data and with the
    shape's length held out, which for the shortest and the longest is extrapolation.
    """

    cost: MeasuredCost
    observations: Observations
    residuals: Floats
    held_out: Floats

    @property
    def mape(self) -> float:
        """Mean absolute percentage error over measured shapes."""
        return self.error(self.residuals)[0]

    @property
    def held_out_mape(self) -> float:
        """The same with the lengths held out."""
        return self.error(self.held_out)[0]

    def error(self, relative: Floats) -> tuple[float, float, float]:
        """Mean absolute percentage of relative errors [M] over measured shapes, with its 95% interval.

        Over all where every time was put together. Shapes of one length err alike, and lengths are few: Student's t
        with the cluster-robust error of a ratio of sums (Cochran, Sampling Techniques, 1977, section 6.3), lengths less
        one degrees of freedom. A single length has no interval: 0 to infinity.
        """
        measured = self.observations.measured
        measured = measured if measured.any() else ~measured
        tokens, percent = self.observations.tokens[measured], 100 * np.abs(relative[measured])
        _, length = np.unique(tokens, return_inverse=True)
        total, count = np.bincount(length, percent), np.bincount(length)
        mean, lengths = float(percent.mean()), total.size
        if lengths < 2:
            return mean, 0.0, float("inf")
        error = np.sqrt(lengths / (lengths - 1) * np.sum((total - mean * count) ** 2)) / count.sum()
        half = float(stats.t.ppf(0.975, lengths - 1) * error)
        return mean, max(0.0, mean - half), mean + half


def observations(rows: pd.DataFrame, model: str, adaln: str, layers: int | None = None) -> Observations:
    """Step times of `model` with `adaln` from rows of suites `shape_sweep` and `block_time`.

    layers: depth of plain blocks to take; None for the whole model where it was measured (`repro.balance.whole`), else
    for the blocks' depth that was measured most. Shapes of AdaLNs other than that which was measured on all of them are
    completed by `with_adaln`. Raises ValueError where there are no such rows, or no such model or AdaLN.
    """
    _require_names(rows, model, adaln)
    found = whole.find(rows, model) if layers is None else None
    if found is not None:
        return _of_whole_model(rows, model, adaln, found)
    eager = _read(rows, model, "eager", layers)
    return eager if adaln == "eager" else with_adaln(eager, _read(rows, model, adaln, eager.layers))


def with_adaln(eager: Observations, other: Observations) -> Observations:
    """Times of another AdaLN on all of eager's shapes.

    Measured where it was measured; elsewhere eager's time plus delta_0 + delta_1 * B * S, fitted to the differences at
    the shapes that both have: AdaLN is launches and traffic proportional to tokens. Comparing AdaLNs through such pairs
    keeps a cost model's own error, which is larger than the difference, out of the comparison.

    Raises ValueError for fewer than three common shapes.
    """
    times, shapes = dict(zip(_shapes(other), other.seconds, strict=True)), _shapes(eager)
    common = np.array([shape in times for shape in shapes], dtype=bool)
    delta = _difference(eager, other)
    own = np.array([times.get(shape, np.nan) for shape in shapes])
    completed = np.where(common, own, eager.seconds + delta[0] + delta[1] * eager.batch * eager.tokens / UNIT)
    return replace(eager, seconds=completed, measured=common, source=_merged(eager.source, other.source))


def _of_whole_model(rows: pd.DataFrame, model: str, adaln: str, found: whole.WholeModel) -> Observations:
    """Times of the whole model; with another AdaLN than its own plus what that one adds to each block."""
    batch, tokens, ms = (found.cells[c].to_numpy() for c in ("batch", "tokens", "forward_backward"))
    own = Observations(
        batch, tokens, ms.astype(np.float64) / 1e3, MODELS[model].layers, np.ones(batch.size, dtype=bool), found.source
    )
    if adaln == found.adaln:
        return own
    base = _read(rows, model, found.adaln, None)
    other = _read(rows, model, adaln, base.layers)
    delta = _difference(base, other) * (own.layers / base.layers)
    return replace(
        own,
        seconds=own.seconds + delta[0] + delta[1] * batch * tokens / UNIT,
        measured=np.zeros(batch.size, dtype=bool),
        source=_merged(own.source, base.source, other.source),
    )


def _shapes(data: Observations) -> list[tuple[int, int]]:
    return list(zip(data.batch.tolist(), data.tokens.tolist(), strict=True))


def _difference(base: Observations, other: Observations) -> Floats:
    """float64 [2], delta_0 and delta_1 of other = base + delta_0 + delta_1 * B * S / 10^4, in s.

    Least squares relative to base's times, over the shapes that both have. Raises ValueError for fewer than three.
    """
    times = dict(zip(_shapes(other), other.seconds, strict=True))
    common = np.array([shape in times for shape in _shapes(base)], dtype=bool)
    if common.sum() < whole.FEWEST_COMMON:
        raise ValueError(f"at least three shapes must be measured with both AdaLNs, got {common.sum()}")
    both = _take(base, common)
    difference = np.array([times[shape] for shape in _shapes(both)]) - both.seconds
    design = np.stack([np.ones(both.batch.size), both.batch * both.tokens / UNIT], axis=1) / both.seconds[:, None]
    delta, *_ = np.linalg.lstsq(design, difference / both.seconds, rcond=None)
    return np.asarray(delta, np.float64)


def fit(form: Form, data: Observations) -> Fit:
    """Fit `form` to the observations.

    Bounds: a, b, c, d >= 0 and 0.5 <= p <= 3, within which each term has a meaning. `table` corrects the fitted
    quadratic. Raises ValueError where there are fewer observations than parameters or fewer lengths than folds, and for
    another form.
    """
    lengths = np.unique(data.tokens)
    if lengths.size < FOLDS or data.batch.size <= len(_NAMES["quadratic"]):
        raise ValueError(
            f"a cost needs at least {FOLDS} lengths and {len(_NAMES['quadratic']) + 1} shapes, "
            f"got {lengths.size} lengths and {data.batch.size} shapes"
        )
    cost = _fit_cost(form, data)
    held_out = np.empty_like(data.seconds)
    for left_out in folds(data.tokens):
        partial = _fit_cost(form, _take(data, ~left_out)).extrapolating()
        held_out[left_out] = partial.seconds(data.batch[left_out], data.tokens[left_out]) / data.seconds[left_out] - 1
    return Fit(cost, data, cost.seconds(data.batch, data.tokens) / data.seconds - 1, held_out)


def measured_cost(rows: pd.DataFrame, model: str, adaln: str, form: Form = "table") -> MeasuredCost:
    """Cost of the full model: `form` fitted to `observations`, scaled to the model's depth.

    Raises ValueError as `observations`, and for another form.
    """
    return _fit_cost(form, observations(rows, model, adaln)).scaled(MODELS[model].layers)


def parameter_intervals(
    form: Form, data: Observations, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float, float]]:
    """Each parameter of `power` or `quadratic` with its 95% interval (value, low, high), at the measured depth.

    Bootstrap over lengths, as in `Fit.error`. A table has no parameters: it gives an empty dictionary.
    """
    if form == "table":
        return {}
    generator = np.random.default_rng(0)
    lengths = np.unique(data.tokens)
    of_length = [np.flatnonzero(data.tokens == s) for s in lengths]
    values = []
    for _ in range(resamples):
        picks = np.concatenate([of_length[i] for i in generator.integers(0, lengths.size, lengths.size)])
        values.append(_parameters(form, _fit_cost(form, _take(data, picks))))
    low, high = np.quantile(np.array(values), [0.025, 0.975], axis=0)
    best = _parameters(form, _fit_cost(form, data))
    return {
        name: (v, min(float(lo), v), max(float(hi), v))
        for name, v, lo, hi in zip(_NAMES[form], best, low, high, strict=True)
    }


def folds(tokens: Ints) -> Iterator[Bools]:
    """FOLDS masks [M] that hold every shape out once: every FOLDS-th length, so that each fold spans the range."""
    rank = np.searchsorted(np.unique(tokens), tokens)
    return (rank % FOLDS == k for k in range(FOLDS))


_NAMES: dict[str, tuple[str, ...]] = {"power": ("a", "b", "p"), "quadratic": ("a", "b", "c", "d")}


def _fit_cost(form: Form, data: Observations) -> MeasuredCost:
    """The cost alone. Raises ValueError for a form that there is not."""
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    about: dict[str, Any] = {
        "layers": data.layers,
        "measured_layers": data.layers,
        "range": Range.of(data.batch, data.tokens),
        "source": data.source,
    }
    b, s = data.batch.astype(np.float64), data.tokens / UNIT
    launches, per_token = 0.5 * float(data.seconds.min()), float(np.median(data.seconds / (b * s)))
    if form == "power":
        x = _solve(
            lambda x: x[0] + x[1] * b * s ** x[2],
            data.seconds,
            start=(launches, per_token, 1.2),
            lower=(0, 0, 0.5),
            upper=(np.inf, np.inf, 3),
        )
        return PowerCost(a=x[0], b=x[1], p=x[2], **about)
    x = _solve(
        lambda x: x[0] + b * (x[1] * s + x[2] * s * s + x[3]),
        data.seconds,
        start=(launches, per_token, 0.3 * per_token, 0.01 * per_token),
        lower=(0, 0, 0, 0),
        upper=(np.inf, np.inf, np.inf, np.inf),
    )
    quadratic = QuadraticCost(a=x[0], b=x[1], c=x[2], d=x[3], **about)
    if form == "quadratic":
        return quadratic
    b_tuple, s_tuple, measured = (tuple(x.tolist()) for x in (data.batch, data.tokens, data.seconds))
    return TableCost(base=quadratic, batch=b_tuple, tokens=s_tuple, measured_seconds=measured, **about)


def _solve(
    model: Callable[[Floats], Floats],
    seconds: Floats,
    start: Sequence[float],
    lower: Sequence[float],
    upper: Sequence[float],
) -> list[float]:
    """Parameters that minimise the squared relative error of `model`."""
    from scipy.optimize import least_squares  # takes a quarter of a second, and most commands fit nothing

    def relative_error(x: Floats) -> Floats:
        return model(x) / seconds - 1

    x0 = np.asarray(start, np.float64)
    result = least_squares(relative_error, x0, bounds=(lower, upper), x_scale=x0, xtol=1e-12)
    return [float(x) for x in result.x]


def _parameters(form: Form, cost: MeasuredCost) -> list[float]:
    return [float(getattr(cost, name)) for name in _NAMES[form]]


def _take(data: Observations, at: Ints | Bools) -> Observations:
    return replace(
        data, batch=data.batch[at], tokens=data.tokens[at], seconds=data.seconds[at], measured=data.measured[at]
    )


def _require_names(rows: pd.DataFrame, model: str, adaln: str) -> None:
    """Raise ValueError as `whole.require`, and where the model was measured without this AdaLN or the eager one."""
    whole.require(rows, model)
    steps = rows[rows["suite"].isin(whole.SUITES)]
    own = steps[steps["model"] == model]
    if own.empty:
        raise ValueError(
            f"no block_time rows of model {model!r}; measured: {', '.join(sorted(steps['model'].unique()))}"
        )
    measured = sorted(own["adaln"].unique())
    if adaln not in measured:
        raise ValueError(unknown("measured AdaLN", adaln, measured))
    if "eager" not in measured:
        raise ValueError(
            f"AdaLN {adaln!r} is compared with 'eager', of which model {model!r} has no rows: measure both"
        )


def _read(rows: pd.DataFrame, model: str, adaln: str, layers: int | None) -> Observations:
    at = (rows["suite"] == "block_time") & (rows["metric"] == "forward_backward")
    table = rows[at & (rows["model"] == model) & (rows["adaln"] == adaln)]
    depths = table["layers"].astype(int)
    if layers is None and not table.empty:
        layers = int(depths.value_counts().index[0])
    table = table[depths == layers]
    if table.empty:
        depth = "" if layers is None else f" and layers {layers}"
        raise ValueError(f"no block_time rows of model {model!r} with adaln {adaln!r}{depth}")
    return Observations(
        table["batch"].to_numpy().astype(np.int64),
        table["tokens"].to_numpy().astype(np.int64),
        table["value"].to_numpy(np.float64) / 1e3,
        int(layers or 0),
        np.ones(len(table), dtype=bool),
        _merged(*table["run_id"].astype(str)),
    )


def _merged(*sources: str) -> str:
    return " ".join(sorted({run for source in sources for run in source.split()}))


def _mape(relative: Floats) -> float:
    return 100 * float(np.mean(np.abs(relative)))
