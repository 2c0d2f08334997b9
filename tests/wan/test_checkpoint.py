"""Checkpoints: killed anywhere, a run goes on as if nothing had happened; another run's are refused."""

from __future__ import annotations

import json
import shutil

import pytest
from torch.multiprocessing import ProcessExitedException

from repro.wan import checkpoint_index
from repro.wan.checkpointing import CheckpointError, Checkpoints
from tests.wan import checkpoint_ranks, ranks
from tests.wan.checkpoint_ranks import SAMPLES

STEPS = 8
TO_GO_ON = "; remove that folder to go on from the one before$"


def records(folder, tag, ranks_=2):
    """{(step, rank): (epoch, loss, ids)}, later lines of a step in place of earlier ones that a kill undid."""
    found = {}
    for rank in range(ranks_):
        for line in (folder / f"{tag}-{rank}.txt").read_text().splitlines():
            step, epoch, loss, ids = line.split(" ")
            found[int(step), rank] = (int(epoch), loss, tuple(map(int, filter(None, ids.split(",")))))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    ranks.run(checkpoint_ranks.train, 2, folder / "checkpoints", STEPS, "whole")
    return folder


@pytest.mark.parametrize(
    ("killed", "goes_on_after"),
    [
        ("during step 14", 2),  # two micro-batches a step: in the middle of step 6 of 8, while step 6 may be saved
        ("before .step-00000004/about.json 1", 2),
        ("before .step-00000004/.metadata 1", 2),
        ("before step-00000004 1", 2),
        ("after step-00000004 1", 2),
        ("after latest 2", 4),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, undisturbed, killed, goes_on_after):
    folder = tmp_path / "checkpoints"
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        ranks.run(checkpoint_ranks.train, 2, folder, STEPS, "killed", killed)
    ranks.run(checkpoint_ranks.train, 2, folder, STEPS, "killed")
    notes = (tmp_path / "killed-0-notes.txt").read_text().splitlines()
    assert len(notes) == 1, "nothing changed, so only the step is told"
    assert int(notes[0].split(" after ")[1].split()[0]) >= goes_on_after
    assert records(tmp_path, "killed") == records(undisturbed, "whole")
    kept = sorted(p.name for p in folder.iterdir())
    assert kept == ["latest", "step-00000006", "step-00000008"]
    assert (folder / "latest").read_text() == "step-00000008\n"


@pytest.mark.parametrize("other", [1, 3])
def test_on_another_number_of_ranks_the_rest_of_the_epoch_is_dealt_once(tmp_path, undisturbed, other):
    folder = tmp_path / "checkpoints"
    ranks.run(checkpoint_ranks.train_and_keep, 2, folder, 4)
    ranks.run(checkpoint_ranks.loaded_is_saved, other, folder)
    ranks.run(checkpoint_ranks.train, other, folder, 40, "other")
    notes = (tmp_path / "other-0-notes.txt").read_text()
    assert f"ranks: 2 -> {other}" in notes and "samples left of epoch 0 are dealt anew" in notes
    before = [i for (step, _), (_, _, ids) in records(undisturbed, "whole").items() if step < 4 for i in ids]
    after = [i for (epoch, _, ids) in records(tmp_path, "other", other).values() if epoch == 0 for i in ids]
    assert sorted(before + after) == list(range(SAMPLES))
    epochs = {epoch for epoch, _, _ in records(tmp_path, "other", other).values()}
    assert len(epochs) > 2, "later epochs are whole again"


def test_a_full_disk_ends_the_run_on_all_ranks_and_costs_only_what_came_after(tmp_path, undisturbed):
    folder = tmp_path / "checkpoints"
    ranks.run(checkpoint_ranks.train, 2, folder, 4, "again")
    ranks.run(checkpoint_ranks.cannot_write, 2, folder)
    assert (folder / "latest").read_text() == "step-00000004\n"
    ranks.run(checkpoint_ranks.train, 2, folder, STEPS, "again")
    assert "after 4 steps" in (tmp_path / "again-0-notes.txt").read_text()
    assert records(tmp_path, "again") == records(undisturbed, "whole")


@pytest.mark.parametrize("about", ["[]", '{"format": 1, "model": 3}', '{"format": 1}', "{"])
def test_a_damaged_description_is_said(tmp_path, about):
    (tmp_path / "about.json").write_text(about)
    with pytest.raises(CheckpointError, match=rf"is no checkpoint: \w+Error: .*{TO_GO_ON}"):
        Checkpoints.read_about(None, tmp_path, {})


def test_missing_digests_are_said_and_what_to_do(tmp_path, undisturbed):
    newest = shutil.copytree(undisturbed / "checkpoints" / "step-00000008", tmp_path / "step-00000008")
    model = json.loads((newest / "about.json").read_text())["model"]
    assert Checkpoints.read_about(None, newest, model)["step"] == 8
    (newest / checkpoint_index.DIGESTS).unlink()
    with pytest.raises(CheckpointError, match=rf"step-00000008 is no checkpoint: .*digests\.json.*{TO_GO_ON}"):
        Checkpoints.read_about(None, newest, model)


def test_what_does_not_fit_is_refused_before_the_first_step(tmp_path, undisturbed):
    folder = tmp_path / "checkpoints"
    shutil.copytree(undisturbed / "checkpoints", folder)
    ranks.run(checkpoint_ranks.refused, 1, folder, "another model: layers 2 (here 3)", {"layers": 3})
    ranks.run(checkpoint_ranks.refused, 1, folder, "another corpus", {"samples": SAMPLES + 1})
    shard = next((folder / "step-00000008").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    ranks.run(checkpoint_ranks.refused, 1, folder, "is damaged", {})
    shutil.rmtree(folder / "step-00000008")
    ranks.run(checkpoint_ranks.train, 2, folder, STEPS, "repaired")
    assert "after 6 steps" in (tmp_path / "repaired-0-notes.txt").read_text()
    whole = records(undisturbed, "whole")
    assert records(tmp_path, "repaired") == {k: v for k, v in whole.items() if k[0] >= 6}
