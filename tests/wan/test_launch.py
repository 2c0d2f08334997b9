"""Ranks that a single process asks: they answer, keep what they hold, and never outlive their use."""

from __future__ import annotations

import pytest

from repro.wan import launch
from repro.wan.launch import Ranks, RanksError

HERE = "tests.wan.launched"


@pytest.fixture
def two():
    ranks = Ranks(2, "cpu")
    yield ranks
    ranks.close()


def test_they_are_one_group_and_keep_what_they_hold(two):
    assert two.ask(f"{HERE}:total", {"start": 0.5}) == {"sum": 2.0, "asked": 1, "device": "cpu"}
    assert two.ask(f"{HERE}:total", {"start": 1.5})["asked"] == 2
    children = list(two._children)
    two.close()
    assert not two.alive and all(child.returncode is not None for child in children)
    assert all(child._output.closed for child in children), "what they printed takes no handle any more"
    with pytest.raises(RanksError, match="have ended"):
        two.ask(f"{HERE}:total", {"start": 0.5})


@pytest.mark.parametrize(
    ("call", "arguments", "seconds", "message", "raised"),
    [
        ("fail", {"rank": 1}, 60, "rank 1: ArithmeticError: no such number", "ArithmeticError"),
        ("die", {"rank": 0}, 60, "rank 0 ended with code -9: last words", ""),
        ("wait_for_ever", {}, 0.5, "was not done with tests.wan.launched:wait_for_ever in time", ""),
        ("unknown", {}, 60, "AttributeError", "AttributeError"),
    ],
)
def test_what_goes_wrong_is_named_and_ends_all_of_them(two, call, arguments, seconds, message, raised):
    children = list(two._children)
    with pytest.raises(RanksError, match=message) as error:
        two.ask(f"{HERE}:{call}", arguments, seconds)
    assert error.value.raised == raised
    assert not two.alive and all(child.returncode is not None for child in children)


def test_a_death_is_told_though_another_rank_noticed_first(two, monkeypatch):
    child, waited = two._children[0], []
    poll = child.poll

    def late():
        if waited:
            return poll()
        two._store.wait(["answer/1/1"])  # what the rank says that has lost the other one
        return waited.append(True)

    monkeypatch.setattr(child, "poll", late)
    with pytest.raises(RanksError, match="rank 0 ended with code -9: last words"):
        two.ask(f"{HERE}:die", {"rank": 0}, 60)


def test_ranks_are_shared_until_others_are_wanted_and_end_when_idle(monkeypatch):
    monkeypatch.setattr(launch, "IDLE_SECONDS", 600.0)
    first = launch.ranks(1, "cpu")
    assert launch.ranks(1, "cpu") is first
    second = launch.ranks(2, "cpu")
    assert not first.alive and second.alive
    monkeypatch.setattr(launch, "IDLE_SECONDS", 0.1)
    children = list(second._children)
    second.ask(f"{HERE}:total", {"start": 0.0})
    assert [child.wait(timeout=60) for child in children] == [-9, -9]


def test_ranks_that_are_about_to_be_asked_do_not_end(monkeypatch):
    monkeypatch.setattr(launch, "IDLE_SECONDS", 600.0)
    ranks = launch.ranks(1, "cpu")
    ranks.ask(f"{HERE}:total", {"start": 0.0})
    idle = ranks._timer
    assert not idle.finished.is_set()
    assert launch.ranks(1, "cpu") is ranks and idle.finished.is_set(), "what prepares a request may take its time"
    ranks.close()
    assert launch.ranks(1, "cpu") is not ranks
    launch.ranks(1, "cpu").close()
