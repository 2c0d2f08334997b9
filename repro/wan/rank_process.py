"""One rank of `repro.wan.launch` as a child process of this one, with what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from repro.adaln import build

STORE = "REPRO_RANKS_STORE"
"""Where a rank finds its requests: host:port."""
_ENTRY = "repro.wan.launch"
_LINES = 8


class RankProcess(subprocess.Popen[bytes]):
    """Rank `rank` of `count`, number `local` of the `here` ranks of this machine.

    device: "cuda", a GPU for each rank, or "cpu". store: host and port of the store that it is asked through.
    """

    def __init__(self, rank: int, count: int, local: int, here: int, device: str, store: tuple[str, int]) -> None:
        self.rank = rank
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the rank
        root = str(Path(__file__).resolve().parents[2])
        environment = os.environ | {
            STORE: f"{store[0]}:{store[1]}",
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(here),
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        }
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        if sys.platform == "linux" and here == count:
            # gloo would look up the host's name, which a machine without a network cannot
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, "-m", _ENTRY, device]
        super().__init__(command, env=environment, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output)

    def last_lines(self) -> str:
        """The end of what it printed."""
        with open(self._output.fileno(), "rb", closefd=False) as file:
            file.seek(0)
            return " | ".join(file.read().decode(errors="replace").split("\n")[-_LINES:]).strip(" |") or "no output"

    def told(self) -> str:
        """How it ended, for people."""
        return f"rank {self.rank} ended with code {self.returncode}: {self.last_lines()}"

    def end(self) -> None:
        """Kill it, which then tells nothing any more: it may be stuck in a collective, and has nothing worth saving."""
        self.kill()
        self.wait()
        self._output.close()


def of_node(count: int, device: str, store: tuple[str, int], node: int = 0, nodes: int = 1) -> list[RankProcess]:
    """Start the ranks of one of `nodes` machines: of `count` consecutive ones a part as large on each."""
    if device == "cuda":
        build.ensure_loaded()  # a build takes a minute or two, which no request should be blamed for
    here = count // nodes
    return [RankProcess(node * here + local, count, local, here, device, store) for local in range(here)]
