"""Ranks that answer: a process group in child processes, asked one thing after another by a process that is none.

`python -m repro.all` is a single process and its suites measure case by case; what they measure may take several ranks
and a model that is slow to make. `Ranks` starts the processes once and keeps them, with whatever they hold, between
requests. They end when they are closed, when nothing was asked for `IDLE_SECONDS`, and when the process that started
them dies.

Requests and answers are JSON in a TCP store, which the asking process hosts.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from repro.wan.parallel import join, leave

IDLE_SECONDS = 3.0
"""Without a request for as long, the ranks end: the next suite gets the GPUs to itself."""
START_SECONDS = 120.0
_STORE = "REPRO_RANKS_STORE"
_HOST = "127.0.0.1"
_POLL_SECONDS = 0.02
_LINES = 8


class RanksError(RuntimeError):
    """A rank failed, died or took too long; all of them have been ended. The message holds what it said last.

    raised: name of the exception that the rank raised; empty where it did not.
    """

    def __init__(self, message: str, raised: str = "") -> None:
        super().__init__(message)
        self.raised = raised


class Ranks:
    """A process group of `count` ranks on this machine.

    device: "cuda", a GPU for each rank, or "cpu". Raises RanksError where they do not come up.
    """

    def __init__(self, count: int, device: str) -> None:
        self.count, self.device = count, device
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._output = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115 - as long as the ranks
        self._children = [self._start(rank) for rank in range(count)]
        self._asked = itertools.count()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        atexit.register(self.close)
        self.ask(f"{__name__}:ready", {}, START_SECONDS)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        environment = os.environ | {
            _STORE: str(self._store.port),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.count),
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        }
        if self.device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        output = self._output[rank]
        command = [sys.executable, "-m", __name__, self.device]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    @property
    def alive(self) -> bool:
        """Whether they can be asked."""
        return bool(self._children) and all(child.poll() is None for child in self._children)

    def ask(self, call: str, arguments: Mapping[str, Any], seconds: float = 600.0) -> Any:
        """Have every rank run `call`, "module:function", as function(world, **arguments); the first one's value.

        Arguments and values are what JSON holds. Raises RanksError where a rank raises, dies, or is not done in time.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
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

    def _answer(self, number: int, rank: int, deadline: float, call: str) -> Any:
        while True:
            for r, child in enumerate(self._children):  # first, since others fail when one is gone
                if child.poll() is not None:
                    raise RanksError(f"rank {r} ended with code {child.returncode}: {self._last_lines(r)}")
            for r in range(self.count):
                if not self._store.check([f"answer/{number}/{r}"]):
                    continue
                answer = json.loads(self._store.get(f"answer/{number}/{r}"))
                if "error" in answer:
                    raise RanksError(f"rank {r}: {answer['raised']}: {answer['error']}", answer["raised"])
                if r == rank:
                    return answer["value"]
            if time.monotonic() > deadline:
                raise RanksError(f"rank {rank} was not done with {call} in time: {self._last_lines(rank)}")
            time.sleep(_POLL_SECONDS)

    def _last_lines(self, rank: int) -> str:
        with open(self._output[rank].fileno(), "rb", closefd=False) as file:
            file.seek(0)
            return " | ".join(file.read().decode(errors="replace").split("\n")[-_LINES:]).strip(" |") or "no output"

    def close(self) -> None:
        """End them; safe to call again."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        for child in self._children:
            child.kill()  # nothing of theirs is worth saving, and one may be stuck in a collective
        for child in self._children:
            child.wait()
        self._children = []
        atexit.unregister(self.close)


_current: Ranks | None = None


def ranks(count: int, device: str) -> Ranks:
    """The running ranks if there are as many on that kind of device, else new ones in their place."""
    global _current
    if _current is None or not _current.alive or (_current.count, _current.device) != (count, device):
        if _current is not None:
            _current.close()
        _current = Ranks(count, device)
    return _current


def ready(_world: object) -> bool:
    """Answered once a rank has joined the others."""
    return True


def _serve(device: str) -> None:
    """A rank's life: requests in their order, until the asking process is gone."""
    connect = functools.partial(dist.TCPStore, _HOST, int(os.environ[_STORE]), is_master=False)
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
