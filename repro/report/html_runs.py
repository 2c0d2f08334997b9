"""Run records as people read them: what ran, on what, with which versions, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from repro.records import Store

UNKNOWN = "unknown"


@dataclass(frozen=True)
class RunView:
    """One run for the page. facts: name and value of everything on record, unknown ones with the reason.

    line: the few facts that tell runs apart. duration: of the whole run; empty where it never ended. here: whether it
    ran on the device itself, not later, from the device's rows.
    """

    id: str
    device: str
    date: str
    profile: str
    command: str
    duration: str
    ended: str
    line: str
    here: bool
    facts: tuple[tuple[str, str], ...]

    @property
    def anchor(self) -> str:
        """Its id in the page."""
        return f"run-{self.device}-{self.id}"


def views(store: Store, wanted: Mapping[str, Collection[str]]) -> dict[tuple[str, str], RunView]:
    """The recorded ones of the wanted run_ids (by device), keyed by device and run_id, oldest first."""
    found = {}
    for device, ids in wanted.items():
        for record in store.runs(device):
            if record["run_id"] in ids:
                found[device, str(record["run_id"])] = view(record, device)
    return dict(sorted(found.items()))


def view(record: Mapping[str, Any], device: str) -> RunView:
    """A record of `runs.jsonl`, of whatever version: what it lacks is unknown."""
    machine, versions, end = (_mapping(record, name) for name in ("machine", "versions", "end"))
    seconds = end.get("seconds")
    here = not machine.get("facts_of_run")
    return RunView(
        id=str(record["run_id"]),
        device=device,
        date=str(record.get("started") or UNKNOWN)[:10],
        profile=str(record.get("profile") or UNKNOWN),
        command=command(record.get("command")),
        duration=_duration(seconds) if isinstance(seconds, int | float) else "",
        ended=_ended(end),
        line=", ".join([*(_stack(machine, versions) if here else ["computed from the device's rows"]), _code(record)]),
        here=here,
        facts=tuple(_facts(record, machine, versions, end)),
    )


def command(words: Any) -> str:
    """A recorded command as typed; of folders elsewhere on that machine only the name."""
    if not isinstance(words, list):
        return UNKNOWN
    paths = (PurePosixPath(str(w)) for w in words)
    return " ".join(p.name if p.is_absolute() else str(w) for p, w in zip(paths, words, strict=True))


def _stack(machine: Mapping[str, Any], versions: Mapping[str, Any]) -> list[str]:
    """Hardware and what runs on it, as far as known."""
    named = {"torch": versions.get("torch"), "CUDA": machine.get("torch_cuda"), "driver": machine.get("driver")}
    return [_hardware(machine), *(f"{name} {version}" for name, version in named.items() if version)]


def _code(record: Mapping[str, Any]) -> str:
    """The commit where it says which code ran, else the hash of the sources."""
    if record.get("commit") and record.get("clean"):
        return f"commit {str(record['commit'])[:12]}"
    return f"sources {str(record.get('source_hash') or UNKNOWN)[:12]}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _hardware(machine: Mapping[str, Any]) -> str:
    if machine.get("gpu_name"):
        count = machine.get("gpu_count")
        return f"{count} x {machine['gpu_name']}" if count else str(machine["gpu_name"])
    cores = f", {machine['cores']} cores" if machine.get("cores") else ""
    return f"{machine.get('cpu_name') or UNKNOWN}{cores}"


def _ended(end: Mapping[str, Any]) -> str:
    """How a run ended, with the counts of its cases."""
    counts = ", ".join(f"{count} {what}" for what, count in _mapping(end, "cases").items())
    return f"{end.get('status') or 'end not recorded'}{f' ({counts})' if counts else ''}"


def _facts(
    record: Mapping[str, Any], machine: Mapping[str, Any], versions: Mapping[str, Any], end: Mapping[str, Any]
) -> list[tuple[str, str]]:
    missing, unread = _mapping(record, "unavailable"), _mapping(machine, "unavailable")
    after = _mapping(end, "clocks")

    def of_run(name: str) -> str:
        return _told(record.get(name), missing.get(name))

    def of_machine(name: str, unit: str = "") -> str:
        return _told(machine.get(name), unread.get(name), unit)

    def around(name: str, unit: str = "") -> str:
        lost = _mapping(after, "unavailable")
        late = _told(after.get(name), lost.get(name) or after.get("unavailable"), unit)
        return f"{of_machine(name, unit)} before, {late} after"

    facts = [
        ("started", of_run("started")),
        ("ended", _ended(end)),
        ("hardware", _hardware(machine)),
        ("memory", _gigabytes(machine)),
        ("driver", of_machine("driver")),
        ("CUDA", f"{of_machine('torch_cuda')} (PyTorch), {of_machine('cuda_driver')} (driver)"),
        *((name, _told(version, missing.get(name))) for name, version in versions.items()),
        ("Python", of_machine("python")),
        ("platform", of_machine("platform")),
        ("power limit", of_machine("power_limit_w", " W")),
        ("SM clock", around("sm_clock_mhz", " MHz")),
        ("memory clock", around("memory_clock_mhz", " MHz")),
        ("throttle reasons", around("throttle_reasons")),
        ("temperature", around("temperature_c", " °C")),
        ("source hash", of_run("source_hash")),
        ("extension hash", of_run("extension_hash")),
        ("commit", f"{of_run('commit')}{'' if record.get('clean') else ', tree not known to be clean'}"),
        ("seed", of_run("seed")),
    ]
    if machine.get("facts_of_run"):
        run = machine["facts_of_run"]
        facts.insert(0, ("computed", f"from the device's rows; the machine's facts are those of run {run}"))
    return facts


def _gigabytes(machine: Mapping[str, Any]) -> str:
    size = machine.get("memory_bytes") or machine.get("host_memory_bytes")
    return f"{size / 1e9:.1f} GB" if isinstance(size, int | float) else UNKNOWN


def _told(value: Any, reason: Any, unit: str = "") -> str:
    """A fact, or why it is unknown."""
    if value is None or value == "":
        return f"{UNKNOWN} ({reason})" if isinstance(reason, str) and reason else UNKNOWN
    if isinstance(value, list):
        parts = [_told(v, None, unit) for v in value]
        return ", ".join(parts) or "none"
    return f"{value}{unit}"


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}
