"""Ranks that answer: a process group in child processes, asked one thing after another by a process that is none.

`python -m repro.all` is a single process and its suites measure case by case; what they measure may take several ranks
and a model that is slow to make. `Ranks` starts the processes once and keeps them, with whatever they hold, between
requests. They end when they are closed, when nothing was asked for `IDLE_SECONDS`, and when the process that started
them dies.

Requests and answers are JSON in a TCP store, which the asking process hosts. On several machines the others start their
share of the ranks for it (`repro.wan.nodes`).
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from repro.wan.nodes import Leader
from repro.wan.parallel import join, leave
from repro.wan.rank_process import STORE, of_node

IDLE_SECONDS = 10.0
"""Without a request for as long, the ranks end: the next suite gets the GPUs to itself. Between two cases of a suite
lie rows, schedules and intervals, a second or two, which must not cost an engine."""
START_SECONDS = 120.0
_HOST = "127.0.0.1"
_POLL_SECONDS = 0.02
_DEATH_SECONDS = 0.5
"""What a process may take to end after its connections are cut, on a busy machine."""


class RanksError(RuntimeError):
    """A rank failed, died or took too long; all of them have been ended. The message holds what it said last.

    raised: name of the exception that the rank raised; empty where it did not.
    """

    def __init__(self, message: str, raised: str = "") -> None:
        super().__init__(message)
        self.raised = raised


class Ranks:
    """A process group of `count` ranks on this machine, or on all that `leader` leads where they can share them evenly.

    device: "cuda", a GPU for each rank, or "cpu". Raises RanksError where they do not come up.
    """

    def __init__(self, count: int, device: str, leader: Leader | None = None) -> None:
        self.count, self.device = count, device
        self._leader = leader if leader is not None and leader.nodes.hosts(count) else None
        nodes = self._leader.nodes if self._leader is not None else None
        host = nodes.host if nodes is not None else _HOST
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._group = self._leader.start(count, device, self._store.port) if self._leader is not None else -1
        self._children = of_node(count, device, (host, self._store.port), nodes=1 if nodes is None else nodes.count)
        self._asked = itertools.count()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        atexit.register(self.close)
        self.ask(f"{__name__}:ready", {}, START_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether they can be asked."""
        return bool(self._children) and all(child.poll() is None for child in self._children)

    def ask(self, call: str, arguments: Mapping[str, Any], seconds: float = 600.0) -> Any:
        """Have every rank run `call`, "module:function", as function(world, **arguments); the first one's value.

        Arguments and values are what JSON holds. Raises RanksError where a rank raises, dies, or is not done in time.
        """
        with self._lock:
            self._stay()
            if not self._children:
                raise RanksError("the ranks have ended: start others")
            number, deadline = next(self._asked), time.monotonic() + seconds
            self._store.set(f"request/{number}", json.dumps({"call": call, "arguments": dict(arguments)}))
            try:
                answers = [self._answer(number, rank, deadline, call) for rank in range(self.count)]
            except BaseException:
                self._end()
                raise
            self._timer = threading.Timer(IDLE_SECONDS, self.close)
            self._timer.daemon = True
            self._timer.start()
            return answers[0]

    def keep(self) -> bool:
        """Whether they can be asked; if so they wait for the next request, however long."""
        with self._lock:
            self._stay()
            return self.alive

    def _stay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _answer(self, number: int, rank: int, deadline: float, call: str) -> Any:
        while True:
            for child in self._children:  # first, since others fail when one is gone
                if child.poll() is not None:
                    raise RanksError(child.told())
            if self._leader is not None and (told := self._leader.ended(self._group)) is not None:
                raise RanksError(told)
            for r in range(self.count):
                if not self._store.check([f"answer/{number}/{r}"]):
                    continue
                answer = json.loads(self._store.get(f"answer/{number}/{r}"))
                if "error" in answer:
                    self._look_for_killed()
                    if self._leader is not None and (told := self._leader.ended(self._group, failed=True)) is not None:
                        raise RanksError(told)
                    raise RanksError(f"rank {r}: {answer['raised']}: {answer['error']}", answer["raised"])
                if r == rank:
                    return answer["value"]
            if time.monotonic() > deadline:
                here = next((child for child in self._children if child.rank == rank), None)
                told = here.last_lines() if here is not None else "it lives on another node"
                raise RanksError(f"rank {rank} was not done with {call} in time: {told}")
            time.sleep(_POLL_SECONDS)

    def _look_for_killed(self) -> None:
        """Raise RanksError where a signal ends a rank of this machine: others may notice before that is seen here."""
        until = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < until:
            for child in self._children:
                if (child.poll() or 0) < 0:
                    raise RanksError(child.told())
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End them; safe to call again."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._leader is not None and self._children:
            self._leader.stop(self._group)
        for child in self._children:
            child.end()
        self._children = []
        atexit.unregister(self.close)


_current: Ranks | None = None
_leader: Leader | None = None


def lead(leader: Leader | None) -> None:
    """Spread ranks over the machines that `leader` leads, from now on; None: over this one alone."""
    global _current, _leader
    if _current is not None:
        _current.close()
    _current, _leader = None, leader


def ranks(count: int, device: str) -> Ranks:
    """The running ranks if there are as many on that kind of device, else new ones in their place."""
    global _current
    if _current is None or (_current.count, _current.device) != (count, device) or not _current.keep():
        if _current is not None:
            _current.close()
        _current = Ranks(count, device, _leader)
    return _current


def patience(seconds: float) -> float:
    """Seconds after which ranks that were to take `seconds` are given up: they hang, and other cases wait."""
    return 100 + 3 * seconds


def ready(_world: object) -> bool:
    """Answered once a rank has joined the others."""
    return True


def _serve(device: str) -> None:
    """A rank's life: requests in their order, until the asking process is gone."""
    host, _, port = os.environ[STORE].rpartition(":")
    connect = functools.partial(dist.TCPStore, host, int(port), is_master=False)
    # Two connections: waiting on one blocks it, and the process group uses its own in the background.
    requests = connect(timeout=timedelta(days=1))
    world = join(device, dist.PrefixStore("group", connect()))
    try:
        for number in itertools.count():
            request = json.loads(requests.get(f"request/{number}"))
            module, _, name = request["call"].partition(":")
            try:
                value = getattr(importlib.import_module(module), name)(world, **request["arguments"])
                answer = {"value": value}
            except Exception as error:
                answer = {"error": " ".join(str(error).split()), "raised": type(error).__name__}
            requests.set(f"answer/{number}/{world.rank}", json.dumps(answer))
    except (dist.DistNetworkError, dist.DistStoreError):
        leave()


if __name__ == "__main__":
    _serve(sys.argv[1])
