"""Several machines as one, played by threads of this process: ranks on both, one that dies, nodes that do not fit."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from contextlib import contextmanager

import pytest

from repro.wan import launch
from repro.wan.launch import Ranks, RanksError
from repro.wan.nodes import Leader, Nodes, NodesError, follow

ABOUT = {"source": "abc", "device": "cpu"}
CALL = "tests.wan.launched"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def node(rank: int, port: int) -> Nodes:
    return Nodes(2, rank, "127.0.0.1", port)


@contextmanager
def following(port: int, about=ABOUT):
    """Node 1 in a thread; yields what it raised, once it has ended."""
    raised: list[BaseException | None] = []

    def live() -> None:
        try:
            follow(node(1, port), about, 60)
            raised.append(None)
        except NodesError as error:
            raised.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    yield raised
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, "head:29500"), "--node-rank must lie in 0..1 for --nnodes 2, got 2"),
        ((2, -1, "head:29500"), "got -1"),
        ((2, 0, None), "--rendezvous must be host:port"),
        ((2, 0, "head"), "got 'head'"),
        ((2, 0, "head:0"), "got 'head:0'"),
        ((2, 0, "head:70000"), "got 'head:70000'"),
        ((2, 0, ":29500"), "got ':29500'"),
        ((1, 1, None), "go with --nnodes of at least 2"),
        ((1, 0, "head:29500"), "go with --nnodes of at least 2"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Nodes.of(*arguments)


def test_options_that_fit():
    assert Nodes.of(1, 0, None) is None
    assert Nodes.of(2, 1, "fe80::1:29500") == Nodes(2, 1, "fe80::1", 29500)
    assert Nodes.of(2, 1, "[fe80::1]:29500") == Nodes(2, 1, "fe80::1", 29500)
    assert node(0, 1).hosts(16) and not node(0, 1).hosts(1)


def test_ranks_live_on_both_nodes_and_a_death_on_the_other_is_told():
    port = free_port()
    with following(port) as raised:
        leader = Leader(node(0, port), ABOUT, 60)
        assert leader.joined == [ABOUT, ABOUT]
        launch.lead(leader)
        try:
            ranks = launch.ranks(2, "cpu")
            assert [child.rank for child in ranks._children] == [0]
            assert ranks.ask(f"{CALL}:total", {"start": 0.5})["sum"] == 2.0
            with pytest.raises(RanksError, match="node 1: rank 1 ended with code -9: last words"):
                ranks.ask(f"{CALL}:die", {"rank": 1})
            again = launch.ranks(2, "cpu")
            assert again is not ranks and again.ask(f"{CALL}:total", {"start": 0.0})["asked"] == 1
            alone = launch.ranks(1, "cpu")
            assert len(alone._children) == 1 and alone._leader is None, "one rank cannot be shared by two nodes"
        finally:
            launch.lead(None)
            leader.dismiss()
    assert raised == [None]


def test_nodes_that_differ_do_not_measure_together():
    port = free_port()
    told = r"node 1 differs from node 0 in source \(abc here, def there\)"
    with following(port, {**ABOUT, "source": "def"}) as raised, pytest.raises(NodesError, match=told):
        Leader(node(0, port), ABOUT, 60)
    assert raised == [None]


def test_nobody_waits_for_ever():
    port = free_port()
    with pytest.raises(NodesError, match=f"not all of 2 nodes came to 127.0.0.1:{port} within 0.5 s"):
        Leader(node(0, port), ABOUT, 0.5)
    with pytest.raises(NodesError, match=f"no node 0 at 127.0.0.1:{port} within 1 s"):
        follow(node(1, port), ABOUT, 1)


def test_a_port_that_is_taken_is_told_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NodesError, match=f"node 0 cannot host 127.0.0.1:{port}: .* a free port"):
            Leader(node(0, port), ABOUT, 60)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("wait", [Leader, follow])
def test_signals_are_heard_while_nodes_wait_for_each_other(wait):
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            wait(node(0, free_port()), ABOUT, 20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_without_node_0_the_others_end_with_their_ranks():
    port = free_port()
    with following(port) as raised:
        leader = Leader(node(0, port), ABOUT, 60)
        ranks = Ranks(2, "cpu", leader)
        store = leader._store
        ranks._leader = None
        ranks.close()
        del store, leader, ranks
        gc.collect()  # with the last reference the server goes, as with its process
    assert isinstance(raised[0], NodesError) and "node 0 is gone before it was done" in str(raised[0])
