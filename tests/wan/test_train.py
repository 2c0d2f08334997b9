"""`python -m repro.train` end to end on CPUs: alone, under torchrun, on two nodes, and with what it must refuse."""

from __future__ import annotations

import csv
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from repro import train
from repro.corpus.shapes import Shape, Tokenizer
from repro.wan import checkpointing, sweep
from repro.wan.batching import MODES
from repro.wan.config import WanConfig
from repro.wan.convert import to_diffusers
from repro.wan.log import COLUMNS
from repro.wan.model import WanModel
from repro.wan.samples import FlowLosses
from repro.wan.shards import ShardWriter
from repro.wan.trainer import StopSignals

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--model", "tiny", "--layers", "1", "--corpus", "tiny", "--samples", "60", "--m-mem", "256", "--device", "cpu"]
RULES = {"baseline": "equal_token over", "adaptiveload": "dual_constraint over", "balanced": "balanced over"}


def run(out, *options):
    return CliRunner().invoke(train.app, [*TINY, "--out", str(out), *options])


def rows(out):
    with (out / "steps.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("mode", RULES)
def test_each_mode_trains_and_logs(tmp_path, mode):
    done = run(tmp_path, "--mode", mode, "--steps", "3", "--log-every", "1")
    assert done.exit_code == 0, done.output
    assert RULES[mode] in done.output and "costs: FLOPs (no step times of cpu-" in done.output
    assert ("eager AdaLN" if mode == "baseline" else "fused AdaLN") in done.output
    assert "step 2  loss" in done.output and "MFU unknown" in done.output and "left 0:00:00" in done.output
    logged = rows(tmp_path)
    assert [r["step"] for r in logged] == ["0", "1", "2"] and tuple(logged[0]) == COLUMNS
    assert all(int(r["tokens"]) <= 256 and r["peak_memory_bytes"] == "" for r in logged)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000003\n"


def test_policy_and_adaln_are_chosen_one_by_one_and_the_same_command_goes_on(tmp_path):
    assert run(tmp_path, "--policy", "equal_time", "--adaln", "eager", "--steps", "2").exit_code == 0
    again = run(tmp_path, "--policy", "longest_first", "--adaln", "wan", "--steps", "4")
    assert again.exit_code == 0, again.output
    for told in ("after 2 steps", "adaln: eager -> wan", "policy: equal_time -> longest_first", "dealt anew"):
        assert told in again.output
    assert [r["step"] for r in rows(tmp_path)] == ["0", "1", "2", "3"]
    assert run(tmp_path, "--steps", "4", "--policy", "longest_first").exit_code == 0, "nothing left to do is no error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "wan-2b"], "no model 'wan-2b'; nearest: wan-1"),
        (["--mode", "fast"], "no mode 'fast'; known: baseline, adaptiveload, balanced"),
        (["--policy", "balanced-load"], "no policy 'balanced-load'; nearest: balanced"),
        (["--adaln", "magic"], "magic"),
        (["--corpus", "wan_unifrom"], "no corpus 'wan_unifrom'; nearest: wan-uniform"),
        (["--sync", "never"], "sync must be one of step, micro_batch, got 'never'"),
        (["--lr", "-1"], "lr must be positive, got -1"),
        (["--ranks", "3"], "--ranks 3, but 1 were started"),
        (["--m-mem", "100"], "exceeds the memory limit of 100 tokens"),
        (["--data", "nowhere"], "nowhere"),
        (["--costs", "nowhere"], "no step times of 'nowhere'; known: cpu-x86-64-2c"),
        (["--costs", "nvidia-h200"], "of model 'tiny'; measured: wan-1.3b, wan-14b: leave out --costs"),
        (["--device", "tpu"], "--device must be cuda or cpu, got 'tpu'"),
        (["--calibrate", "nan"], "calibrate must be positive and finite, got nan"),
        (["--p", "inf"], "p must be positive and finite, got inf"),
        (["--lr", "inf"], "lr must be finite"),
        (["--weighting", "heavy"], "weighting must be sample or batch_mean, got 'heavy'"),
        (["--mode", "adaptiveload", "--token-budget", "100"], "180 tokens, more than a token budget of 100"),
        (["--init", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_ends_before_the_first_step(tmp_path, options, message):
    done = run(tmp_path, "--steps", "1", *options)
    assert done.exit_code == 2 and "error: " in done.output and message in done.output.replace("\n", " ")
    assert "Traceback" not in done.output and not (tmp_path / "steps.csv").exists()


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path):
    assert run(tmp_path, "--steps", "1").exit_code == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    done = run(tmp_path, "--steps", "2", "--layers", "2")
    assert done.exit_code == 2 and "another model: layers 1 (here 2)" in done.output.replace("\n", " ")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_encoded_samples_on_disk_are_trained_on_and_a_corrupt_shard_is_refused(tmp_path):
    rng, data = np.random.default_rng(0), tmp_path / "data"
    with ShardWriter(data, "small", "test") as writer:
        for i in range(12):
            shape = (Shape(1, 32, 32), Shape(5, 32, 48))[i % 2]
            latents = rng.normal(size=(16, *Tokenizer().latent(shape)))
            writer.add(shape, latents, rng.normal(size=(3, 4096)))
    done = run(tmp_path / "run", "--data", str(data), "--m-mem", "24", "--steps", "2")
    assert done.exit_code == 0 and "small (test)" in done.output, done.output
    shard = next(data.glob("*.tar"))
    content = bytearray(shard.read_bytes())
    content[2000] ^= 1
    shard.write_bytes(content)
    done = run(tmp_path / "other", "--data", str(data), "--m-mem", "24", "--steps", "2")
    assert done.exit_code == 2 and "is corrupt" in done.output and not (tmp_path / "other").exists()


def test_packages_that_are_not_there_are_named(tmp_path, monkeypatch):
    """What `pip install .` alone does not bring."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for options in (["--data", str(tmp_path)], ["--init", str(tmp_path)]):
        done = run(tmp_path / "run", "--steps", "1", *options)
        told = " ".join(done.output.split())
        assert done.exit_code == 2 and "pip install 'adaptiveload-repro[data]'" in told, told


def test_weights_are_taken_from_a_folder(tmp_path):
    """An untrained head predicts zero, whatever the rest; that of the folder does not."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = WanModel(WanConfig.preset("tiny", 1))
    torch.nn.init.normal_(model.head.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    save_file(to_diffusers(model.state_dict()), tmp_path / "diffusion_pytorch_model.safetensors")
    first = []
    for name, options in (("random", []), ("given", ["--init", str(tmp_path)])):
        assert run(tmp_path / name, "--steps", "1", *options).exit_code == 0
        first.append(float(rows(tmp_path / name)[0]["loss"]))
    assert first[1] > 1.01 * first[0], "weights that no training has made"


def test_on_a_cpu_no_micro_batch_exceeds_the_longest_sample_unless_asked(tmp_path):
    """48,000 tokens, GPUs' default, would be 12,000 of the smallest images with 50 GB of text."""
    options = [o for o in TINY if o not in ("--m-mem", "256")]
    for more in ([], ["--calibrate", "0.001"]):
        out = tmp_path / str(len(more))
        done = CliRunner().invoke(train.app, [*options, "--out", str(out), "--steps", "2", *more])
        assert done.exit_code == 0 and "batch 45\n" in done.output, done.output
        assert all(int(r["tokens"]) <= 180 for r in rows(out))


def test_steps_of_many_micro_batches_are_announced(tmp_path):
    """A small token budget beside a large M_mem: the published rule takes several batches for the samples of one.

    As published it takes one all the same, which is what the paper's two modes do unless told otherwise.
    """
    options = ["--mode", "adaptiveload", "--m-mem", "1000", "--token-budget", "180", "--steps", "1"]
    matched = run(tmp_path / "matched", *options, "--protocol", "matched")
    assert matched.exit_code == 0, matched.output
    assert re.search(r"5\.\d micro-batches a step and rank: as many samples as 1 of 1,000 tokens", matched.output)
    published = run(tmp_path / "published", *options)
    assert published.exit_code == 0 and "micro-batches a step and rank" not in published.output
    assert (rows(tmp_path / "matched")[0]["micro_batches"], rows(tmp_path / "published")[0]["micro_batches"]) == (
        "5",
        "1",
    )


def test_the_paper_s_modes_take_one_micro_batch_a_step_unless_more_are_asked_for():
    protocols = {name: [mode.protocol_of(m) for m in (1, 2)] for name, mode in MODES.items()}
    assert protocols == {
        "baseline": ["as_published", "matched"],
        "adaptiveload": ["as_published", "matched"],
        "balanced": ["matched", "matched"],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--m-mem", "100"], "exceeds the memory limit of 100 tokens"),
        (["--protocol", "fair"], "protocol must be 'as_published' or 'matched', got 'fair'"),
        (["--protocol", "as_published", "--micro-batches", "2"], "as_published means one micro-batch a step and rank"),
        (["--policy", "equal_token", "--token-budget", "500"], "more than the memory limit of 256: lower its budget"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_measured(tmp_path, options, message):
    done = run(tmp_path, "--steps", "1", "--calibrate", "3", *options)
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
    assert not (tmp_path / "calibration.csv").exists()


def test_calibrate_and_train_in_one_command(tmp_path):
    options = ["--calibrate", "0.001", "--mode", "adaptiveload", "--m-mem", "180", "--steps"]
    done = run(tmp_path, *options, "2")
    assert done.exit_code == 0, done.output
    assert "shapes measured by this run; held-out error" in done.output and "batch 1\n" in done.output
    assert "measuring for about 0.001 minutes" in done.output and re.search(r"fitted, in seconds: \S+ \+ ", done.output)
    assert re.search(r"M_mem 180 tokens, M_comp \S+ tokens\^p, p \d", done.output)
    measured = (tmp_path / "calibration.csv").read_text()
    again = run(tmp_path, *options, "4")
    assert again.exit_code == 0 and "dealt anew" not in again.output, "no new measurement, so the same schedule"
    assert f"shapes as measured before: {tmp_path}/calibration.csv" in again.output
    assert (tmp_path / "calibration.csv").read_text() == measured


@pytest.mark.parametrize(
    "broken", ["setting,shape\n1,2\n", "{whole}s,1x32x32,two,4,0.5,-1,1\n", "{whole}s,1,2,4,1,-1,1\n"]
)
def test_a_damaged_record_of_a_calibration_is_named(tmp_path, broken):
    (tmp_path / "calibration.csv").write_text(broken.replace("{whole}", ",".join(sweep._COLUMNS) + "\n"))
    done = run(tmp_path, "--calibrate", "0.001", "--steps", "2")
    told = " ".join(done.output.split())
    assert done.exit_code == 2 and "calibration.csv is no record of a sweep" in told and "move it away" in told, told


def test_another_corpus_is_refused_before_anything_is_measured(tmp_path):
    assert run(tmp_path, "--steps", "1").exit_code == 0
    done = run(tmp_path, "--samples", "61", "--calibrate", "3", "--steps", "2")
    assert done.exit_code == 2 and "samples are another corpus" in " ".join(done.output.split()), done.output
    assert not (tmp_path / "calibration.csv").exists()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ["--sync", "micro_batch", "--checkpointing", "full"],
        ["--sync", "step", "--checkpointing", "selective", "--micro-batches", "2"],
        ["--sync", "micro_batch", "--checkpointing", "none", "--compile"],
    ],
)
def test_one_gpu_trains_in_bf16_and_goes_on(tmp_path, options):
    options = [*options, "--device", "cuda", "--log-every", "1"]
    assert run(tmp_path, "--steps", "2", *options).exit_code == 0
    done = run(tmp_path, "--steps", "4", *options)
    assert done.exit_code == 0 and "after 2 steps" in done.output, done.output
    logged = rows(tmp_path)
    assert [r["step"] for r in logged] == ["0", "1", "2", "3"]
    assert all(int(r["peak_memory_bytes"]) > 0 for r in logged)
    assert all(0 <= float(r["wait_seconds"]) < float(r["step_seconds"]) for r in logged)


def torchrun(out, *agent, options=()):
    command = [sys.executable, "-m", "torch.distributed.run", *agent, "-m", "repro.train", *TINY, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_two_nodes_meet_at_one_rendezvous(tmp_path):
    """Two torchrun agents, as on two machines, with a rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agents = [
        torchrun(
            tmp_path,
            *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"),
            *("--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"),
            options=("--ranks", "2", "--steps", "3", "--save-every", "2", "--micro-batches", "2", "--log-every", "1"),
        )
        for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sum("step 2  loss" in output for output in outputs) == 1, "only the first rank speaks"
    logged = rows(tmp_path)
    assert [(r["step"], r["rank"]) for r in logged] == [(str(s), str(k)) for s in range(3) for k in range(2)]
    assert len({(r["step"], r["loss"]) for r in logged}) == 3, "a loss is the step's, not the rank's"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000003\n"


def test_the_second_signal_acts_as_it_would_have():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    try:
        with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.asked == "SIGINT"
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_shell_ignores_in_the_background_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.asked is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_ends_a_run_in_order(tmp_path, name):
    """Sent to one of two ranks, in the middle of a step: both finish it, save, and exit 0; the same command goes on."""
    options = ("--steps", "100000", "--save-every", "100000", "--log-every", "1", "--lr", "1e-6")
    agent = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", options=options)
    while not (line := agent.stdout.readline()).startswith("step 2 "):
        assert line, "ended early"
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.Signals[name])
    output = agent.communicate(timeout=100)[0]
    assert agent.returncode == 0, output
    assert re.search(rf"stopped by ({name}|another rank) after (\d+) steps, saved; the same command goes on", output)
    steps = int(re.search(r"after (\d+) steps", output)[1])
    assert rows(tmp_path)[-1]["step"] == str(steps - 1)
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step-{steps:08d}\n"
    again = run(tmp_path, "--steps", str(steps + 1), "--lr", "1e-6")
    assert again.exit_code == 0 and f"after {steps} steps" in again.output, again.output


def test_a_run_without_checkpoints_that_is_stopped_does_not_say_that_it_goes_on(tmp_path, monkeypatch, capfd):
    class Stopped(StopSignals):
        def __enter__(self):
            self._ask(signal.SIGINT, None)
            return self

    monkeypatch.setattr(train, "StopSignals", Stopped)
    done = run(tmp_path, "--steps", "9", "--save-every", "0")
    assert (
        done.exit_code == 0
        and "after 1 steps, not saved; the same command begins again where this one did" in done.output
    )
    assert capfd.readouterr().err == "SIGINT: the step under way is finished first\n"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train._finishing(True).startswith("the step under way is finished and saved first, if there is time: torch")


def test_a_run_may_leave_no_checkpoint(tmp_path):
    assert run(tmp_path, "--steps", "2", "--save-every", "0").exit_code == 0
    assert len(rows(tmp_path)) == 2 and not list((tmp_path / "checkpoints").iterdir())


def nan_at_call(number, monkeypatch):
    """The number-th micro-batch's loss is NaN; returns the sample ids of every call, to be cleared before a run."""
    real, calls = FlowLosses.__call__, []

    def broken(self, model, micro_batch, epoch):
        calls.append(micro_batch.sample_ids)
        return real(self, model, micro_batch, epoch) * (float("nan") if len(calls) == number else 1.0)

    monkeypatch.setattr(FlowLosses, "__call__", broken)
    return calls


def test_a_loss_that_is_not_finite_ends_the_run_or_is_skipped_and_counted(tmp_path, monkeypatch):
    calls = nan_at_call(2, monkeypatch)
    done = run(tmp_path / "stop", "--steps", "3")
    assert done.exit_code == 1 and f"loss is not finite; samples {calls[1][0]}" in done.output, done.output
    assert [r["step"] for r in rows(tmp_path / "stop")] == ["0"]
    calls.clear()
    done = run(tmp_path / "skip", "--steps", "3", "--on-nonfinite", "skip", "--log-every", "1")
    assert done.exit_code == 0 and "1 skipped" in done.output, done.output
    assert [(r["skipped"], r["loss"] == "nan") for r in rows(tmp_path / "skip")] == [
        ("0", False),
        ("1", True),
        ("0", False),
    ]


def test_saving_before_the_first_update_does_not_count_as_one(tmp_path, monkeypatch):
    """AdamW has no state yet, and a checkpoint wants one: losses are those of a run that saves nothing."""
    calls = nan_at_call(1, monkeypatch)
    losses = []
    for save_every in ("0", "1"):
        calls.clear()
        out = tmp_path / save_every
        assert run(out, "--steps", "4", "--on-nonfinite", "skip", "--save-every", save_every).exit_code == 0
        losses.append([r["loss"] for r in rows(out)])
    assert losses[0] == losses[1] and losses[0][0] == "nan"


def test_another_weighting_is_told_on_resuming(tmp_path):
    assert run(tmp_path, "--steps", "1").exit_code == 0
    assert "weighting: sample -> batch_mean" in run(tmp_path, "--steps", "2", "--weighting", "batch_mean").output


def test_memory_that_runs_out_while_training_names_the_way_out(tmp_path, monkeypatch):
    def short(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    monkeypatch.setattr(FlowLosses, "__call__", short)
    done = run(tmp_path, "--steps", "1")
    assert done.exit_code == 1 and "give a smaller --m-mem: CUDA out of memory" in done.output.replace("\n", " ")


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    failed = Future()
    failed.set_exception(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(checkpointing.dcp, "async_save", lambda *_, **__: failed)
    done = run(tmp_path, "--steps", "3", "--save-every", "1")
    told = " ".join(done.output.split())
    assert done.exit_code == 1 and "could not be written: OSError: [Errno 28] No space left on device" in told, told
