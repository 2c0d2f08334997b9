"""The JSON index of a checkpoint says what PyTorch's pickled one says, and is what is read."""

from __future__ import annotations

import contextlib

import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from repro import train
from repro.wan import checkpoint_index
from tests.faults import doors_train


def test_it_says_what_the_pickled_one_says(tmp_path):
    folder = doors_train.trained(tmp_path) / doors_train.STEP
    ours, theirs = checkpoint_index.read(folder), dcp.FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.storage_data == theirs.storage_data
    for name, about in theirs.state_dict_metadata.items():
        read = ours.state_dict_metadata[name]
        assert type(read) is type(about)
        if isinstance(about, dcp.TensorStorageMetadata):
            assert (read.size, read.chunks) == (about.size, about.chunks)
            assert read.properties.dtype == about.properties.dtype


def test_pytorchs_pickled_index_is_never_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = doors_train.trained(tmp_path)
    (run / doors_train.STEP / ".metadata").write_bytes(doors_train.pickled_code())
    options = [*doors_train.TINY, *doors_train.MADE_UP, "--out", run]
    done = CliRunner().invoke(train.app, [str(o) for o in options])
    assert done.exit_code == 0 and "after 1 steps" in done.output, done.output
    assert not (tmp_path / doors_train.CODE_RAN).exists()


def test_the_code_that_doors_are_fed_would_run(tmp_path, monkeypatch):
    """What the two tests above, and the cases of checkpoints, rely on."""
    monkeypatch.chdir(tmp_path)
    folder = doors_train.trained(tmp_path) / doors_train.STEP
    (folder / ".metadata").write_bytes(doors_train.pickled_code())
    with contextlib.suppress(AttributeError):  # what the code gave is no index
        dcp.FileSystemReader(folder).read_metadata()
    assert (tmp_path / doors_train.CODE_RAN).exists()
