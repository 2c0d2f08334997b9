"""Training of a small model on many ranks for long: python -m tests.faults.stress writes tests/stress.csv.

Eight gloo ranks on this machine's cores take steps of `balanced` over a corpus of random shapes. At seeded steps the
step's gradient is compared with that of one process that sees all of its samples, at the weights as they are then; at
every row the tensors that are alive are counted and resident memory is read. A test takes a few steps of the same run.
"""

from __future__ import annotations

import csv
import gc
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from repro.balance.schedule import Layout
from repro.balance.types import MicroBatch, Sync
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.wan.engine import Engine, OptimizerSettings
from repro.wan.epochs import DealtStep, Epochs
from repro.wan.initialize import clean_name
from repro.wan.parallel import Parallelism, join
from tests.wan import ranks, standin
from tests.wan.gradient_ranks import M_MEM, policy

RANKS, STEPS, EVERY = 8, 500, 20
SYNCS: tuple[Sync, ...] = ("micro_batch", "step")
COLUMNS = ("sync", "step", "epoch", "samples", "shapes", "gradient_error", "tensors", "resident_mb", "seconds")
GRADIENT_BAR = 1e-12
"""Relative error of norms, in float64: other orders of summation."""
STRESS = Path(__file__).resolve().parents[1] / "stress.csv"


def random_corpus(samples: int, shapes: int = 12) -> Corpus:
    """Samples of shapes drawn at random, of at most M_MEM tokens, some of them rare."""
    rng = np.random.default_rng(11)
    found: dict[Shape, int] = {}
    while len(found) < shapes:
        shape = Shape(int(4 * rng.integers(0, 5) + 1), *(16 * int(n) for n in rng.integers(1, 6, 2)))
        if (tokens := Tokenizer().tokens(shape)) <= M_MEM:
            found[shape] = tokens
    share = rng.dirichlet(np.full(shapes, 0.7))
    bucket_of = rng.choice(shapes, samples, p=share).astype(np.int32)
    return Corpus("random", "shapes drawn by seed", tuple(found), np.array(list(found.values())), bucket_of)


def train(out: Path, steps: int, every: int) -> None:
    """One rank's run under each sync; the first one writes a row for the first step and for each `every`-th one."""
    rows = [row for sync in SYNCS for row in _train(sync, steps, every)]
    if join("cpu").is_first:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _train(sync: Sync, steps: int, every: int) -> list[dict[str, object]]:
    world, corpus = join("cpu"), random_corpus(4_000)
    engine = Engine(
        standin.make(torch.float64), standin.losses, Parallelism(sync, "none", compute="master"),
        OptimizerSettings(lr=1e-3, warmup=0), world,
    )  # fmt: skip
    epochs = Epochs(policy("balanced"), corpus, Layout(world.size, M_MEM, 2, sync), world.rank, seed=5)
    rows: list[dict[str, object]] = []
    began = time.perf_counter()
    for step, dealt in zip(range(steps), epochs, strict=False):
        checked = step % every == 0 or step == steps - 1
        error = gradient_error(engine, corpus, dealt) if checked else 0.0
        result = engine.step(step, dealt.micro_batches, dealt.tokens[:, world.rank].tolist(), dealt.epoch)
        if result.samples != int(dealt.batch.sum()) or result.skipped:
            raise AssertionError(f"step {step} of {dealt.batch.sum()} samples: {result}")
        if checked:
            # Most of all ranks.
            seen = torch.tensor([error, float(living_tensors()), resident_bytes() / 1e6], dtype=torch.float64)
            dist.all_reduce(seen, dist.ReduceOp.MAX)
            used = len({corpus.tokens.tolist().index(t) for t in dealt.tokens.ravel().tolist()})
            values = (
                sync, step, dealt.epoch, result.samples, used, f"{seen[0]:.1e}", int(seen[1]), f"{seen[2]:.1f}",
                f"{time.perf_counter() - began:.1f}",
            )  # fmt: skip
            rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def gradient_error(engine: Engine, corpus: Corpus, dealt: DealtStep) -> float:
    """Largest relative error over parameters of the ranks' gradient against that of one process; 0 on other ranks."""
    engine.gradients(dealt.micro_batches, dealt.epoch)
    got = {clean_name(n): (p.full_tensor(), p.grad.full_tensor()) for n, p in engine.model.named_parameters()}
    engine.optimizer.zero_grad()
    everyone: list[list[int]] = [[]] * engine.world.size
    dist.all_gather_object(everyone, [i for m in dealt.micro_batches if any(m.weights) for i in m.sample_ids])
    if not engine.world.is_first:
        return 0.0
    model, ids = standin.make(torch.float64), [i for of_rank in everyone for i in of_rank]
    model.load_state_dict({name: weight.detach() for name, (weight, _) in got.items()})
    for i in ids:
        one = MicroBatch(corpus.shapes[corpus.bucket_of[i]], (i,), (1.0,))
        (standin.losses(model, one, dealt.epoch).sum() / len(ids)).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    return max(float((got[n][1] - want).norm() / want.norm()) for n, want in wanted.items())


def living_tensors() -> int:
    """Tensors that something still refers to."""
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def resident_bytes() -> int:
    """Of this process, as Linux counts them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(out: Path, steps: int, every: int) -> list[dict[str, str]]:
    """Train and return the rows that were written to `out`."""
    ranks.run(train, RANKS, out, steps, every)
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def problems(rows: list[dict[str, str]], steps: int) -> list[str]:
    """What is wrong with the rows of a run, a line each."""
    found = []
    for sync in SYNCS:
        own = [r for r in rows if r["sync"] == sync]
        if not own or int(own[-1]["step"]) != steps - 1:
            found.append(f"{sync}: did not come to step {steps - 1}")
            continue
        worst = max(float(r["gradient_error"]) for r in own)
        if not 0 < worst <= GRADIENT_BAR:  # exactly 0 would be a comparison with itself
            found.append(f"{sync}: gradients differ by {worst}")
        later = own[1:]  # optimizer state is there from the first update on
        counts = {r["tensors"] for r in later}
        if len(counts) > 1:
            found.append(f"{sync}: living tensors change: {sorted(counts)}")
        if len(later) >= 10:  # allocators settle at first; then 2% and 2 MB are for their arenas
            settled = [float(r["resident_mb"]) for r in later[len(later) // 5 :]]
            first, last = np.median(settled[: len(settled) // 4]), np.median(settled[-len(settled) // 4 :])
            if last > 1.02 * first + 2:
                found.append(f"{sync}: resident memory grows from {first:.0f} to {last:.0f} MB")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(run(STRESS, STEPS, EVERY), STEPS)) or 0)
