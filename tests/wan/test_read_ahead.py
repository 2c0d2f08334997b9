"""Reading ahead: the same samples in the same order, already under way when they are asked for."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance.types import MicroBatch
from repro.corpus.shapes import Shape
from repro.wan.read_ahead import ReadAhead
from repro.wan.samples import DataError, Samples
from repro.wan.shards import ShardedSamples
from tests.wan.test_data import SHAPES, ids_of, write
from tests.wan.test_epochs import all_ranks

CPU = torch.device("cpu")
SHAPE = Shape(1, 32, 32)


class Disk:
    """A source that notes what is read, in which thread; reading 13 fails."""

    corpus = None

    def __init__(self):
        self.read, self.threads = [], set()
        self.begun = {i: threading.Event() for i in range(30)}

    def fetch(self, shape, sample_ids, device):
        self.read.append(tuple(sample_ids))
        self.threads.add(threading.get_ident())
        for i in sample_ids:
            self.begun[i].set()
            if i == 13:
                raise DataError("sample 13 cannot be read")
        return Samples(torch.tensor(sample_ids), torch.tensor(sample_ids) + 0.5)


def micro_batches(*ids):
    return [MicroBatch(SHAPE, (i,), (1.0,)) for i in ids]


def test_the_next_one_is_read_while_this_one_is_used():
    disk = Disk()
    source = ReadAhead(disk, CPU)
    source.expect(micro_batches(1, 2, 3))
    assert disk.begun[1].wait(10), "before it is asked for"
    assert source.fetch(SHAPE, [1], "cpu").latents.tolist() == [1]
    assert disk.begun[2].wait(10) and not disk.begun[3].is_set(), "one ahead, not all"
    source.expect(micro_batches(2, 4))
    assert source.fetch(SHAPE, [2], "cpu").text.tolist() == [2.5]
    assert disk.begun[4].wait(10)
    assert source.fetch(SHAPE, [4], "cpu").latents.tolist() == [4]
    assert disk.read == [(1,), (2,), (4,)], "each once"
    assert len(disk.threads) == 1 and threading.get_ident() not in disk.threads


@given(calls=st.lists(st.one_of(st.integers(0, 12), st.lists(st.integers(0, 12), max_size=4)), min_size=1, max_size=12))
@settings(derandomize=True, max_examples=50, deadline=None)
def test_whatever_is_expected_what_is_asked_for_comes(calls):
    """An integer asks for that sample; a list is what is expected from there on, be it right or wrong."""
    source = ReadAhead(Disk(), CPU)
    for call in calls:
        if isinstance(call, list):
            source.expect(micro_batches(*call))
        else:
            assert source.fetch(SHAPE, [call], "cpu").latents.tolist() == [call]


def test_an_error_comes_where_its_sample_is_asked_for_and_not_before():
    source = ReadAhead(Disk(), CPU)
    source.expect(micro_batches(1, 13, 2))
    assert source.fetch(SHAPE, [1], "cpu").latents.tolist() == [1]
    with pytest.raises(DataError, match="sample 13 cannot be read"):
        source.fetch(SHAPE, [13], "cpu")
    assert source.fetch(SHAPE, [2], "cpu").latents.tolist() == [2]


def test_shards_read_ahead_are_the_shards(tmp_path):
    write(tmp_path)
    plain = ShardedSamples(tmp_path)
    source = ReadAhead(ShardedSamples(tmp_path), CPU)
    assert source.corpus.shapes == plain.corpus.shapes
    asked = [(SHAPES[k], [i]) for k in (2, 0, 1) for i in ids_of(plain.corpus, k)]
    source.expect([MicroBatch(shape, tuple(ids), (1.0,)) for shape, ids in asked])
    for shape, ids in asked:
        got, want = source.fetch(shape, ids, "cpu"), plain.fetch(shape, ids, "cpu")
        assert torch.equal(got.latents, want.latents) and torch.equal(got.text, want.text)


def test_a_peek_is_the_step_to_come_and_deals_nothing():
    (epochs,) = all_ranks(1)
    dealt = iter(epochs)
    for _ in range(40):
        state, peeked = epochs.state(), epochs.peek()
        assert epochs.state() == state
        step = next(dealt)
        assert peeked == (step.micro_batches if step.epoch == state["epoch"] else ())
    assert step.epoch > 0


@pytest.mark.gpu
def test_samples_arrive_on_a_gpu_through_pinned_memory():
    device = torch.device("cuda", 0)
    source = ReadAhead(Disk(), device)
    source.expect(micro_batches(1, 2))
    for i in (1, 2):
        found = source.fetch(SHAPE, [i], device)
        assert found.latents.device == device and found.latents.tolist() == [i] and found.text.tolist() == [i + 0.5]
