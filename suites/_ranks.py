"""How suites have ranks (`repro.wan.launch`) do something on this machine's GPUs, or on its CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from repro.suite import Case, CaseSkipped

if TYPE_CHECKING:
    from repro.measure.machine import Machine

OUT_OF_MEMORY = ("OutOfMemoryError",)


def ask(
    count: int,
    call: str,
    arguments: Mapping[str, Any],
    case: Case,
    machine: Machine,
    what: str,
    skipped: tuple[str, ...] = OUT_OF_MEMORY,
) -> Any:
    """What `count` ranks answer to `call` ("module:function") with these arguments.

    what: the case in words. skipped: exceptions of a rank, by name, that make it a case for another machine.

    Raises CaseSkipped for those, launch.RanksError for others and for ranks that die or take too long.
    """
    from repro.measure import stack_time
    from repro.wan import launch

    stack_time.free()  # another suite's, in this process
    try:
        ranks = launch.ranks(count, "cuda" if machine.has_gpu else "cpu")
        return ranks.ask(call, dict(arguments), launch.patience(case.seconds))
    except launch.RanksError as error:
        if error.raised not in skipped:
            raise
        raise CaseSkipped(f"{what}: {error}") from error
