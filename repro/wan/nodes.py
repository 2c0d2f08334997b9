"""Several machines that measure as one: the first leads, asks and writes; the others lend it their ranks.

Every machine (node) runs the same command with its own number. The leading one hosts a TCP store at the rendezvous,
through which it tells the others which ranks to start and when to end them. They end with it, and their ranks with
them. Of the ranks of a group, as many consecutive ones live on every node, the first ones on the leading node.

Imports PyTorch only where nodes talk, so that a plan for two nodes can be shown without it.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from repro.records.provenance import source_hash

if TYPE_CHECKING:
    import torch.distributed as dist

    from repro.measure.machine import Machine
    from repro.wan.rank_process import RankProcess

JOIN_SECONDS = 600.0
"""How long nodes wait for each other at the start."""
HOST_SECONDS = 30.0
"""How long a store that is there may take to answer."""
LEAVE_SECONDS = 10.0
_POLL_SECONDS = 0.05


class NodesError(RuntimeError):
    """Nodes did not come, do not fit each other, or the leading one is gone; the message is what the user reads."""


@dataclass(frozen=True)
class Nodes:
    """This machine among `count`. rank: 0 leads. host, port: of the leading one, as all of them reach it."""

    count: int
    rank: int
    host: str
    port: int

    @classmethod
    def of(cls, count: int, rank: int, rendezvous: str | None) -> Nodes | None:
        """From what torchrun calls --nnodes, --node-rank and the endpoint; None for a single node.

        rendezvous: "host:port", a host of IPv6 numbers in brackets or not.

        Raises ValueError for what does not fit together.
        """
        if count == 1:
            if rank or rendezvous:
                raise ValueError("--node-rank and --rendezvous go with --nnodes of at least 2")
            return None
        if not 0 <= rank < count:
            raise ValueError(f"--node-rank must lie in 0..{count - 1} for --nnodes {count}, got {rank}")
        host, _, port = (rendezvous or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"--rendezvous must be host:port of node 0, as every node reaches it, got {rendezvous!r}")
        return cls(count, rank, host.removeprefix("[").removesuffix("]"), int(port))

    def hosts(self, ranks: int) -> bool:
        """Whether so many ranks are spread over all nodes; else they live on the leading one."""
        return ranks % self.count == 0


class Leader:
    """What node 0 holds. about: facts of this machine that must be the others' too, name -> value.

    joined: what each node said about itself, this one first. Raises NodesError where one does not come or differs.
    """

    def __init__(self, nodes: Nodes, about: Mapping[str, Any], seconds: float = JOIN_SECONDS) -> None:
        import torch.distributed as dist

        self.nodes = nodes
        self._groups = itertools.count()
        patience = timedelta(seconds=min(seconds, HOST_SECONDS))
        try:
            self._store = dist.TCPStore(
                nodes.host, nodes.port, is_master=True, wait_for_workers=False, timeout=patience
            )
        except dist.DistError as error:
            raise NodesError(
                f"node 0 cannot host {nodes.host}:{nodes.port}: --rendezvous must be an address of this machine and a "
                f"free port ({_line(error)})"
            ) from error
        self._await([f"node/{rank}" for rank in range(1, nodes.count)], seconds)
        found = [json.loads(self._store.get(f"node/{rank}")) for rank in range(1, nodes.count)]
        self.joined = [dict(about), *found]
        for rank, other in enumerate(self.joined):
            different = [name for name, value in about.items() if other.get(name) != value]
            if different:
                told = ", ".join(f"{n} ({about[n]} here, {other.get(n)} there)" for n in different)
                self.dismiss()
                raise NodesError(f"node {rank} differs from node 0 in {told}: nodes must be alike")

    def _await(self, keys: list[str], seconds: float) -> None:
        """Not a blocking wait of the store's, which would not hear Ctrl-C or SIGTERM."""
        until = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > until:
                count = self.nodes.count
                raise NodesError(
                    f"not all of {count} nodes came to {self.nodes.host}:{self.nodes.port} within {seconds:g} s: start "
                    f"the same command with --node-rank 1 to {count - 1} on the others"
                )
            time.sleep(_POLL_SECONDS)

    def start(self, count: int, device: str, port: int) -> int:
        """Have the others start their ranks of a group whose store is at `port` here. Returns the group's number."""
        group = next(self._groups)
        self._store.set(f"group/{group}", json.dumps({"count": count, "device": device, "port": port}))
        return group

    def ended(self, group: int, failed: bool = False) -> str | None:
        """What a node said of a rank that has ended; None while all run.

        failed: a rank has reported an error, which may be that another one is gone: then its node is given a moment.
        """
        until = time.monotonic() + (10 * _POLL_SECONDS if failed else 0.0)
        while True:
            for rank in range(1, self.nodes.count):
                if self._store.check([f"ended/{group}/{rank}"]):
                    return f"node {rank}: {self._store.get(f'ended/{group}/{rank}').decode()}"
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_SECONDS)

    def stop(self, group: int) -> None:
        """Have the others end their ranks of a group."""
        self._store.set(f"stop/{group}", "")

    def dismiss(self) -> None:
        """All is measured: the others may go. Waits a little until they have heard it."""
        import torch.distributed as dist

        self._store.set("done", "")
        try:
            heard = [f"left/{rank}" for rank in range(1, self.nodes.count)]
            self._store.wait(heard, timedelta(seconds=LEAVE_SECONDS))
        except dist.DistError:
            return  # a node that is gone already needs no telling


@contextmanager
def leading(nodes: Nodes, machine: Machine) -> Iterator[Machine]:
    """Inside, `repro.wan.launch.ranks` spreads ranks over all nodes; the machine with what they said in its record.

    Raises NodesError as `Leader`.
    """
    from repro.wan import launch

    leader = Leader(nodes, about(machine))
    launch.lead(leader)
    try:
        yield replace(machine, record={**machine.record, "nodes": leader.joined})
    finally:
        launch.lead(None)
        leader.dismiss()


def lend(nodes: Nodes, machine: Machine) -> None:
    """`follow`, with the extension built beforehand, which takes a minute or two. Raises NodesError as that does."""
    from repro.adaln import build

    if machine.has_gpu:
        build.ensure_loaded()
    follow(nodes, about(machine))


def about(machine: Machine) -> dict[str, Any]:
    """What all nodes must have in common."""
    facts = {name: machine.record.get(name) for name in ("torch", "torch_cuda")}
    return {"source": source_hash(), "device": machine.name, "GPUs in all": machine.gpu_count, **facts}


def follow(nodes: Nodes, about: Mapping[str, Any], seconds: float = JOIN_SECONDS) -> None:
    """A node's life that does not lead: ranks started and ended as node 0 says, until it is done.

    Raises NodesError where node 0 does not come, or is gone before it is done.
    """
    import torch.distributed as dist

    try:
        _await_port(nodes, seconds)
        store = dist.TCPStore(
            nodes.host, nodes.port, is_master=False, timeout=timedelta(seconds=min(seconds, HOST_SECONDS))
        )
    except (OSError, dist.DistError) as error:
        raise NodesError(
            f"no node 0 at {nodes.host}:{nodes.port} within {seconds:g} s: start it there, and let this machine reach "
            f"that port ({_line(error)})"
        ) from error
    try:
        store.set(f"node/{nodes.rank}", json.dumps(dict(about)))
        for group in itertools.count():
            while not store.check([f"group/{group}"]):
                if store.check(["done"]):
                    store.set(f"left/{nodes.rank}", "")
                    return
                time.sleep(_POLL_SECONDS)
            _lend(nodes, store, group, json.loads(store.get(f"group/{group}")))
    except dist.DistError as error:
        raise NodesError(
            f"node 0 is gone before it was done; what it measured is kept there ({_line(error)})"
        ) from error


def _await_port(nodes: Nodes, seconds: float) -> None:
    """Wait until node 0 listens. In Python, since the store's own wait would not hear Ctrl-C or SIGTERM."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((nodes.host, nodes.port), timeout=max(0.1, until - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() >= until:
                raise
        time.sleep(min(1.0, max(0.0, until - time.monotonic())))


def _lend(nodes: Nodes, store: dist.TCPStore, group: int, asked: Mapping[str, Any]) -> None:
    """This node's ranks of a group, for as long as node 0 wants them."""
    from repro.wan.rank_process import of_node

    children: list[RankProcess] = []
    try:
        children = of_node(asked["count"], asked["device"], (nodes.host, asked["port"]), nodes.rank, nodes.count)
        while not store.check([f"stop/{group}"]):
            dead = next((child for child in children if child.poll() is not None), None)
            if dead is not None and not store.check([f"ended/{group}/{nodes.rank}"]):
                store.set(f"ended/{group}/{nodes.rank}", dead.told())
            time.sleep(_POLL_SECONDS)
    finally:
        for child in children:
            child.end()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
