"""Bad input to `python -m repro.train` and `repro.wan.make_corpus`: options, shards, checkpoints, weights, logs."""

from __future__ import annotations

import functools
import json
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from repro import train
from repro.corpus.shapes import Shape, Tokenizer
from repro.wan import checkpoint_index
from repro.wan.log import COLUMNS
from repro.wan.shards import ShardedSamples, ShardWriter
from tests.faults.cases import Arguments, Case, options

TRAIN, MAKE_CORPUS, SHARDS, CHECKPOINTS = "repro.train", "repro.wan.make_corpus", "shards", "checkpoints"
TINY = ("--model", "tiny", "--layers", 1, "--samples", 40, "--m-mem", 256, "--device", "cpu", "--steps", 2)
MADE_UP = ("--corpus", "tiny")

ARGUMENTS = [
    *(options(TRAIN, "empty", rf"no {name} ''", f"--{name}", "") for name in ("model", "mode", "policy", "corpus")),
    options(TRAIN, "missing", "nowhere.*missing", "--data", "nowhere"),
    options(TRAIN, "missing", "nowhere", "--init", "nowhere"),
    options(TRAIN, "missing", "nowhere", "--costs", "nowhere"),
    options(TRAIN, "wrong type", "--lr", "--lr", "fast"),
    options(TRAIN, "wrong type", "--steps", "--steps", "1.5"),
    options(TRAIN, "wrong type", "adaln|impl|name", "--adaln", "magic"),
    options(TRAIN, "wrong type", "sync must be one of", "--sync", "always"),
    options(TRAIN, "wrong type", "checkpointing must be one of", "--checkpointing", "some"),
    options(TRAIN, "wrong type", "compute must be one of", "--compute", "fp4"),
    options(TRAIN, "wrong type", "weighting must be", "--weighting", "heavy"),
    options(TRAIN, "wrong type", "protocol must be", "--protocol", "none"),
    options(TRAIN, "wrong type", "draw must be one of", "--draw", "straws"),
    options(TRAIN, "wrong type", "on_nonfinite must be", "--on-nonfinite", "pray"),
    options(TRAIN, "wrong type", "--device must be cuda or cpu", "--device", "tpu"),
    options(TRAIN, "NaN", "lr must be", "--lr", "nan"),
    options(TRAIN, "NaN", "clip must be", "--clip", "nan"),
    options(TRAIN, "NaN", "shift must be", "--shift", "nan"),
    options(TRAIN, "NaN", "weight.decay", "--weight-decay", "nan"),
    options(TRAIN, "NaN", r"\bp\b", "--p", "nan"),
    options(TRAIN, "NaN", "m.comp", "--m-comp", "nan"),
    options(TRAIN, "NaN", "calibrate must be", "--calibrate", "nan"),
    options(TRAIN, "negative", "lr must be positive", "--lr", "-1"),
    options(TRAIN, "negative", "clip must be positive", "--clip", "-1"),
    options(TRAIN, "negative", "shift must be", "--shift", "0"),
    options(TRAIN, "negative", "--warmup", "--warmup", "-1"),
    options(TRAIN, "negative", "--steps", "--steps", "0"),
    options(TRAIN, "negative", "--m-mem", "--m-mem", "0"),
    options(TRAIN, "negative", "--keep", "--keep", "0"),
    options(TRAIN, "negative", "--layers", "--layers", "-1"),
    options(TRAIN, "negative", "--log-every", "--log-every", "0"),
    options(TRAIN, "negative", "--seed", "--seed", "-1"),
    options(TRAIN, "negative", "calibrate must be", "--calibrate", "-1"),
    options(TRAIN, "overflow", "lr must be", "--lr", "inf"),
    options(TRAIN, "overflow", "m.comp", "--m-comp", "inf"),
    options(TRAIN, "overflow", "--seed", "--seed", "9" * 30),
    options(TRAIN, "overflow", "--m-mem", "--m-mem", "9" * 30),
    options(TRAIN, "overflow", "samples", "--samples", "9" * 30),
    options(TRAIN, "huge", "samples", "--samples", 10**15),
    options(TRAIN, "huge", "layers", "--layers", 10**12),
    options(TRAIN, "huge", "--micro-batches", "--micro-batches", 10**15),
    options(MAKE_CORPUS, "missing", "Missing argument"),
    options(MAKE_CORPUS, "wrong type", "--samples", "clips", "--samples", "few"),
    options(MAKE_CORPUS, "negative", "--samples", "clips", "--samples", "0"),
    options(MAKE_CORPUS, "negative", "--seed", "clips", "--seed", "-1"),
    options(MAKE_CORPUS, "overflow", "--samples", "clips", "--samples", "9" * 30),
    options(MAKE_CORPUS, "huge", "--samples", "clips", "--samples", 10**15),
]


def _file(*given: object) -> Callable[[Path], Arguments]:
    def make(folder: Path) -> Arguments:
        (folder / "file").write_text("kept")
        return given

    return make


def _holds_a_corpus(folder: Path) -> Arguments:
    (folder / "clips").mkdir()
    (folder / "clips" / "index.json").write_text("{}")
    return ["clips"]


PLACES = [
    Case(MAKE_CORPUS, "duplicated", "a corpus is there", _holds_a_corpus, "clips already holds a corpus"),
    Case(MAKE_CORPUS, "adversarial", "the folder is a file", _file("file"), "file.*not a folder|file"),
    Case(MAKE_CORPUS, "adversarial", "below a file", _file("file/clips"), "file"),
    Case(TRAIN, "adversarial", "--out is a file", _file(*MADE_UP, "--out", "file"), "file"),
    Case(TRAIN, "adversarial", "--out below a file", _file(*MADE_UP, "--out", "file/run"), "file"),
    Case(TRAIN, "adversarial", "--data is a file", _file("--data", "file"), r"file/index\.json is missing"),
    Case(TRAIN, "adversarial", "--init is a file", _file(*MADE_UP, "--init", "file"), "file"),
    Case(TRAIN, "adversarial", "--results is a file", _file(*MADE_UP, "--results", "file", "--costs", "x"), "x"),
]


def written(folder: Path) -> Path:
    """A small corpus of two shapes."""
    rng = np.random.default_rng(0)
    with ShardWriter(folder / "data", "small", "test") as writer:
        for i in range(6):
            shape = (Shape(1, 32, 32), Shape(5, 32, 48))[i % 2]
            writer.add(shape, rng.normal(size=(16, *Tokenizer().latent(shape))), rng.normal(size=(3, 4096)))
    return folder / "data"


def shard(kind: str, name: str, told: str, break_it: Callable[[Path], None]) -> Case:
    """A folder of samples that was broken after it was written, opened and read through."""

    def given(folder: Path) -> Callable[[], object]:
        data = written(folder)
        break_it(data)

        def read() -> None:
            source = ShardedSamples(data)
            for i in range(source.corpus.samples):
                source.fetch(source.corpus.shapes[source.corpus.bucket_of[i]], [i], "cpu")

        return read

    return Case(SHARDS, kind, name, given, told)


def index(**changed: Any) -> Callable[[Path], None]:
    """Change entries of the index; those of the first shard as `shard_...`."""

    def change(data: Path) -> None:
        path = data / "index.json"
        told = json.loads(path.read_text())
        for name, value in changed.items():
            where, key = (told["shardlist"][0], name[6:]) if name.startswith("shard_") else (told, name)
            where[key] = value
        path.write_text(json.dumps(told))

    return change


def content(name: str, put: bytes) -> Callable[[Path], None]:
    """Replace a file's content."""
    return lambda data: (data / name).write_bytes(put) and None


def halve(name: str) -> Callable[[Path], None]:
    """Cut a file in the middle."""
    return lambda data: (
        (data / name).write_bytes((data / name).read_bytes()[: (data / name).stat().st_size // 2]) and None
    )


def _flip(data: Path) -> None:
    path = data / "shard-000000.tar"
    bits = bytearray(path.read_bytes())
    bits[2000] ^= 1
    path.write_bytes(bits)


def _other_tar(data: Path) -> None:
    """Another file, with its own checksum and size in the index."""
    import hashlib

    put = b"no tar at all" * 100
    (data / "shard-000000.tar").write_bytes(put)
    index(shard_filesize=len(put), shard_sha256=hashlib.sha256(put).hexdigest())(data)


INDEX = r"index\.json"
BREAKS = [
    shard("missing", "no index", INDEX + " is missing", lambda d: (d / "index.json").unlink()),
    shard("missing", "no shard", r"shard-000000\.tar is missing", lambda d: (d / "shard-000000.tar").unlink()),
    shard("empty", "an index of no bytes", INDEX, content("index.json", b"")),
    shard("empty", "no shards", INDEX, index(shardlist=[])),
    shard("empty", "a shard of no bytes", r"shard-000000\.tar has 0 bytes", content("shard-000000.tar", b"")),
    shard("malformed", "no JSON", INDEX, content("index.json", b"what")),
    shard("malformed", "a list", INDEX, content("index.json", b"[]")),
    shard(
        "malformed",
        "no shapes",
        INDEX,
        lambda d: content("index.json", (d / "index.json").read_bytes().replace(b"shapes", b"forms"))(d),
    ),
    shard("malformed", "another version", INDEX + " has version 99, this release reads 1", index(version=99)),
    shard("malformed", "no tar", r"shard-000000\.tar", _other_tar),
    shard("truncated", "the index", INDEX, halve("index.json")),
    shard("truncated", "a shard", r"shard-000000\.tar has \d+ bytes, its index says", halve("shard-000000.tar")),
    shard("not UTF-8", "the index", INDEX, content("index.json", b"\xff\xfe{}")),
    shard("wrong type", "shapes in words", INDEX, index(shapes=["1x32x32", "5x32x48"])),
    shard("wrong type", "a shape of two numbers", INDEX, index(shapes=[[1, 32], [5, 32]])),
    shard("wrong type", "a size in words", INDEX, index(shard_filesize="large")),
    shard("wrong type", "buckets in words", INDEX, index(shard_buckets=["a"] * 6)),
    shard("wrong type", "a url that is a number", INDEX, index(shard_url=5)),
    shard("duplicated", "one shape twice", INDEX, index(shapes=[[1, 32, 32], [1, 32, 32]])),
    shard("NaN", "a shape", INDEX, index(shapes=[[float("nan"), 32, 32], [5, 32, 48]])),
    shard("negative", "a bucket", INDEX, index(shard_buckets=[-1] * 6)),
    shard("negative", "a shape", INDEX, index(shapes=[[-3, 32, 32], [5, 32, 48]])),
    shard("overflow", "a bucket beyond the shapes", INDEX, index(shard_buckets=[7] * 6)),
    shard("overflow", "a bucket beyond 32 bits", INDEX, index(shard_buckets=[10**12] * 6)),
    shard("overflow", "more samples than buckets", INDEX, index(shard_nsamples=10**9)),
    shard(
        "huge",
        "a shape of millions of pixels",
        INDEX + "|latents must be",
        index(shapes=[[1, 16 * 10**9, 16], [5, 32, 48]]),
    ),
    shard("adversarial", "a flipped bit", r"shard-000000\.tar is corrupt", _flip),
    shard("adversarial", "buckets exchanged", "latents must be", index(shard_buckets=[1, 0, 1, 0, 1, 0])),
    shard("adversarial", "a shard outside the folder", INDEX, index(shard_url="../../shard-000000.tar")),
    shard("adversarial", "nested 100,000 deep", INDEX, content("index.json", b"[" * 100_000)),
]


@functools.cache
def _trained() -> tempfile.TemporaryDirectory[str]:
    """A run of one step, with its checkpoint."""
    folder = tempfile.TemporaryDirectory(prefix="trained-")
    few = [*TINY, *MADE_UP, "--steps", 1, "--out", folder.name]
    done = CliRunner().invoke(train.app, [str(a) for a in few])
    assert done.exit_code == 0, done.output
    return folder


def trained(folder: Path) -> Path:
    """A run of one step in `folder`."""
    return Path(shutil.copytree(_trained().name, folder / "run"))


def checkpoint(kind: str, name: str, told: str, break_it: Callable[[Path], None], *more: object) -> Case:
    """A run that is to go on from a checkpoint, or a log, that was broken."""

    def given(folder: Path) -> Arguments:
        step = trained(folder) / STEP
        break_it(folder / "run")
        # What was changed on purpose carries the right digest, so that what is behind that check is tried too.
        (step / checkpoint_index.DIGESTS).write_text(json.dumps(checkpoint_index.digests(step)))
        return [*TINY, *MADE_UP, "--out", folder / "run", *more]

    return Case(CHECKPOINTS, kind, name, given, told)


STEP = "checkpoints/step-00000001"
ABOUT, TENSORS = f"{STEP}/about.json", f"{STEP}/tensors.json"


def about(*path: str, value: Any = None) -> Callable[[Path], None]:
    """Put a value into about.json at `path`; None removes the entry."""

    def change(run: Path) -> None:
        file = run / ABOUT
        told = json.loads(file.read_text())
        where = told
        for key in path[:-1]:
            where = where[key]
        if value is None:
            del where[path[-1]]
        else:
            where[path[-1]] = value
        file.write_text(json.dumps(told))

    return change


def indexed(chunk: tuple[int, Any] | None = None, **changed: Any) -> Callable[[Path], None]:
    """Change what the index says of the first tensor: entries, or one number of its first chunk."""

    def change(run: Path) -> None:
        told = json.loads((run / TENSORS).read_text())
        first = next(iter(told["tensors"].values()))
        first.update(changed)
        if chunk is not None:
            first["chunks"][0][chunk[0]] = chunk[1]
        (run / TENSORS).write_text(json.dumps(told))

    return change


CODE_RAN = "code-ran"


class Code:
    """What makes the file `CODE_RAN` as its pickle is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(CODE_RAN),)


def pickled_code() -> bytes:
    """A whole file of it."""
    return pickle.dumps(Code())


def saved(setting: str, value: object) -> Callable[[Path], None]:
    """Put a value, pickled, in the place of an optimizer's setting, or of the first tensor."""

    def change(run: Path) -> None:
        (shard,) = (run / STEP).glob("*.distcp")
        told = json.loads((run / TENSORS).read_text())
        where = [shard.name, shard.stat().st_size]
        with shard.open("ab") as file:
            torch.save(value, file)
        where.append(shard.stat().st_size - where[1])
        if setting:
            told["others"][f"optimizer.param_groups.0.{setting}"] = where
        else:
            next(iter(told["tensors"].values()))["chunks"][0][2:] = where
        (run / TENSORS).write_text(json.dumps(told))

    return change


def every_shard(change: Callable[[str], Callable[[Path], None]]) -> Callable[[Path], None]:
    """Break every file of tensors."""
    return lambda run: [change(str(p.relative_to(run)))(run) for p in (run / STEP).glob("*.distcp")] and None


NONE = "step-00000001 is no checkpoint"
DAMAGED = "step-00000001 is damaged"
STATES = [
    checkpoint("missing", "no about.json", NONE, lambda r: (r / ABOUT).unlink()),
    checkpoint("missing", "no tensors", DAMAGED, every_shard(lambda n: lambda r: (r / n).unlink())),
    checkpoint("empty", "about.json", NONE, content(ABOUT, b"")),
    checkpoint("empty", "tensors", DAMAGED, every_shard(lambda n: content(n, b""))),
    checkpoint("missing", "no index", DAMAGED, lambda r: (r / TENSORS).unlink()),
    checkpoint("empty", "index", DAMAGED, content(TENSORS, b"")),
    checkpoint("malformed", "a list", NONE, content(ABOUT, b"[]")),
    checkpoint("malformed", "no JSON", NONE, content(ABOUT, b"what")),
    checkpoint("malformed", "tensors", DAMAGED, every_shard(lambda n: content(n, b"what" * 1000))),
    checkpoint("malformed", "index", DAMAGED, content(TENSORS, b"what" * 100)),
    checkpoint("malformed", "an index that is a list", DAMAGED, content(TENSORS, b"[]")),
    checkpoint("malformed", "another format", "format 99, this reads 2", about("format", value=99)),
    checkpoint("malformed", "no step", NONE, about("step")),
    checkpoint("malformed", "no sampler", NONE, about("sampler")),
    checkpoint("malformed", "a sampler without corpus", NONE, about("sampler", "corpus")),
    checkpoint("malformed", "no options", NONE, about("options")),
    checkpoint("truncated", "about.json", NONE, halve(ABOUT)),
    checkpoint("truncated", "tensors", DAMAGED, every_shard(halve)),
    checkpoint("truncated", "index", DAMAGED, halve(TENSORS)),
    checkpoint("not UTF-8", "about.json", NONE, content(ABOUT, b"\xff\xfe{}")),
    checkpoint("not UTF-8", "index", DAMAGED, content(TENSORS, b"\xff\xfe{}")),
    checkpoint("wrong type", "a dtype that is a function", DAMAGED + ".*dtype", indexed(dtype="load")),
    checkpoint("wrong type", "a size in words", DAMAGED, indexed(size=["large"])),
    checkpoint("wrong type", "a setting in words", DAMAGED + ".*betas must be a tuple", saved("betas", "fast")),
    checkpoint("negative", "a place in a file", DAMAGED + ".*at least 0", indexed(chunk=(3, -1))),
    checkpoint("overflow", "a length", DAMAGED + ".*at least 0", indexed(chunk=(4, 10**30))),
    checkpoint("huge", "a length beyond the file", DAMAGED, indexed(chunk=(3, 10**15))),
    checkpoint("huge", "a tensor of 10^15 rows", DAMAGED, indexed(size=[10**15])),
    checkpoint("wrong type", "a model in words", NONE, about("model", value="large")),
    checkpoint("wrong type", "a step in words", NONE, about("step", value="one")),
    checkpoint("wrong type", "an epoch in words", NONE, about("sampler", "epoch", value="first")),
    checkpoint("negative", "a step", NONE, about("step", value=-1)),
    checkpoint("negative", "an epoch", NONE, about("sampler", "epoch", value=-1)),
    checkpoint("overflow", "an epoch", NONE, about("sampler", "epoch", value=10**30)),
    checkpoint("adversarial", "another corpus", "another corpus", lambda r: None, "--samples", 41),
    checkpoint("adversarial", "another model", "another model: layers 1", lambda r: None, "--layers", 2),
    checkpoint("adversarial", "code for a setting", DAMAGED, saved("betas", Code())),
    checkpoint("adversarial", "code for a tensor", DAMAGED, saved("", Code())),
    checkpoint("adversarial", "another file's tensors", DAMAGED + ".*no file of a", indexed(chunk=(2, "../../x.pt"))),
    checkpoint("adversarial", "an index nested 100,000 deep", DAMAGED, content(TENSORS, b"[" * 100_000)),
    checkpoint("adversarial", "nested 100,000 deep", NONE, content(ABOUT, b"[" * 100_000)),
    checkpoint(
        "malformed", "a log of another making", r"steps\.csv is no step log", content("steps.csv", b"a,b\n1,2\n")
    ),
    checkpoint("not UTF-8", "a log", r"steps\.csv", content("steps.csv", b"\xff\xfe\n")),
    checkpoint(
        "wrong type",
        "a log with words",
        r"steps\.csv",
        lambda r: content("steps.csv", (",".join(COLUMNS) + "\nx" + "," * (len(COLUMNS) - 1) + "\n").encode())(r),
    ),
]

CASES = [*ARGUMENTS, *PLACES, *BREAKS, *STATES]
