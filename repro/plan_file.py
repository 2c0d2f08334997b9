"""A plan on disk: YAML that says what each bucket's batch size is, for which setup, and on what it rests.

Other loaders need `batch_size` of each bucket; `policies` has the sizes and predicted times of all rules.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from repro.corpus.shapes import Shape
from repro.plan_setup import MOST_BYTES, PlanError
from repro.planner import Plan
from repro.records import files

FORMAT = 1
SAME_MEMORY = 0.02
"""Relative difference up to which two memory sizes are the same: tools count a driver's reserve differently."""


@dataclass(frozen=True)
class PlanFile:
    """What a loader needs of a plan.

    batch_size: samples of a full micro-batch by bucket. policy: the rule that they follow. device, memory_bytes, ranks,
    m_mem: what the plan was made for.
    """

    batch_size: dict[Shape, int]
    policy: str
    device: str
    memory_bytes: float
    ranks: int
    m_mem: int

    def mismatches(self, device: str, memory_bytes: float | None = None, ranks: int | None = None) -> list[str]:
        """What of this plan does not fit the machine at hand, a line each; empty where it was made for it.

        device: slug; how many GPUs it counts does not matter. memory_bytes: of one device.
        """
        found = []
        if one_device(device) != one_device(self.device):
            found.append(f"plan is made for {self.device}, this is {device}: step times and batch sizes differ")
        if memory_bytes is not None and abs(memory_bytes / self.memory_bytes - 1) > SAME_MEMORY:
            found.append(
                f"plan is made for {self.memory_bytes / 1e9:.0f} GB a device, here are {memory_bytes / 1e9:.0f} GB"
            )
        if ranks is not None and ranks != self.ranks:
            found.append(f"plan is made for {self.ranks} ranks, here are {ranks}: the memory that is left differs")
        return found


def one_device(slug: str) -> str:
    """The slug without the number of GPUs: nvidia-h200-x8 is nvidia-h200."""
    head, _, tail = slug.rpartition("-x")
    return head if head and tail.isdigit() else slug


def write(plan: Plan, policy: str, path: Path) -> None:
    """Write the plan with `policy`'s batch sizes as those to use. Raises PlanError for a policy that it has not."""
    if policy not in plan.buckets:
        raise PlanError(f"no policy {policy!r} in the plan; it has {', '.join(plan.buckets)}")
    text = yaml.safe_dump(_document(plan, policy), sort_keys=False, allow_unicode=True, width=120)
    files.replace(path, ("# Batch sizes from python -m repro.plan. Times and gains are simulated.\n" + text).encode())


def read(path: Path) -> PlanFile:
    """Read a plan. Raises PlanError for a file that is none, of a newer format, or with values that no plan has."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise PlanError(f"has plan format {reprlib.repr(document['format'])}, this reads {FORMAT}")
        made_for = document["made_for"]
        return PlanFile(
            batch_size=_batch_sizes(document["buckets"]),
            policy=str(document["policy"]),
            device=str(made_for["device"]),
            memory_bytes=float(_whole(made_for, "memory_bytes")),
            ranks=_whole(made_for, "ranks"),
            m_mem=_whole(document["limits"], "m_mem"),
        )
    except PlanError as error:
        raise PlanError(f"{path} {error}") from error
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no plan: {type(error).__name__}: {error}") from error


def _batch_sizes(buckets: list[dict[str, Any]]) -> dict[Shape, int]:
    found: dict[Shape, int] = {}
    for bucket in buckets:
        shape = Shape(*(_whole(bucket, side) for side in ("frames", "height", "width")))
        if shape in found:
            raise PlanError(f"has the bucket {shape} twice: remove one of them")
        found[shape] = _whole(bucket, "batch_size")
    if not found:
        raise PlanError("has no bucket: make it anew with python -m repro.plan --write")
    return found


def _whole(of: Mapping[str, Any], name: str) -> int:
    value = of[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_BYTES:
        raise PlanError(f"has {name} {reprlib.repr(value)}: want a whole number from 1 to {MOST_BYTES:,}")
    return value


def _document(plan: Plan, policy: str) -> dict[str, Any]:
    setup, corpus = plan.setup, plan.corpus
    pinned = plan.pinned
    buckets = []
    for k, shape in enumerate(corpus.shapes):
        entry = {
            "frames": shape.frames,
            "height": shape.height,
            "width": shape.width,
            "tokens": int(corpus.tokens[k]),
            "clips": int(corpus.counts[k]),
            "batch_size": int(plan.buckets[policy].batch[k]),
            "policies": {
                name: {"batch_size": int(b.batch[k]), "seconds": round(float(b.seconds[k]), 4)}
                for name, b in plan.buckets.items()
            },
        }
        if pinned[k]:
            entry["pinned_at_1_by"] = pinned[k]
        buckets.append(entry)
    return {
        "format": FORMAT,
        "kind": "simulated",
        "policy": policy,
        "corpus": {"name": corpus.name, "source": corpus.source, "clips": corpus.samples},
        "made_for": {
            "model": setup.model.name,
            "adaln": setup.adaln,
            "device": setup.device,
            "memory_bytes": int(setup.memory_bytes),
            "ranks": setup.ranks,
            "micro_batches": setup.micro_batches,
            "sync": setup.sync,
            "token_budget": setup.token_budget or plan.limits.m_mem,
            "bandwidth_bytes_per_s": setup.bandwidth,
        },
        "limits": {
            "m_mem": plan.limits.m_mem,
            "m_comp": float(f"{plan.limits.m_comp:.6g}"),
            "p": round(plan.limits.p, 4),
            "target_seconds": round(plan.target_seconds, 4),
        },
        "buckets": buckets,
        "gains": {
            g.policy: {
                "samples_per_s": round(g.samples_per_s, 4),
                "gain": round(g.gain, 4),
                "interval": [round(g.low, 4), round(g.high, 4)],
                "share_of_perfect": round(g.share_of_perfect, 4),
                "mix_distance": round(g.mix_distance, 4),
            }
            for g in plan.gains
        },
        "rests_on": {"what": plan.costs.told, "runs": plan.costs.source.split()},
        "warnings": list(plan.warnings),
    }
