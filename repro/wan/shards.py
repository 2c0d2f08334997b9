"""Encoded samples on disk: WebDataset shards, read by index.

A folder holds tar shards and `index.json`, which the `webdataset` package's wids reads too (its `shardlist`, with what
this module needs beside it). A sample is three members of a shard: `KEY.latents.npy` (float16 [16, T, H, W]),
`KEY.text.npy` (float16 [L, 4096], not padded) and `KEY.json` (anything worth knowing). Sample ids count through the
shards in the index's order.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from repro.balance.models import LATENT_CHANNELS, TEXT_WIDTH
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.records import files
from repro.wan.samples import DataError, Samples, pad_prompt

if TYPE_CHECKING:
    from wids.wids import IndexedTarSamples

INDEX = "index.json"
VERSION = 1
HASHED_BYTES = 4 << 30
"""Folders up to this size have their checksums compared when they are opened; larger ones only their shards' sizes."""

OPEN_SHARDS = 64
_LARGEST = 1 << 20
"""Frames, height or width from here on are a mistake."""


class ShardWriter:
    """Writes a folder of shards; the index appears last, so that a folder without one is known to be incomplete.

    folder: created; must not hold an index yet. name, source: of the corpus. shard_bytes: about where a shard ends.
    Raises FileExistsError where there is a corpus already.
    """

    def __init__(self, folder: str | Path, name: str, source: str, shard_bytes: int = 64 << 20) -> None:
        self.folder, self.name, self.source, self.shard_bytes = Path(folder), name, source, shard_bytes
        require_empty(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.samples = 0
        self._shapes: dict[Shape, int] = {}
        self._shards: list[dict[str, Any]] = []
        self._tar: Any = None

    def add(
        self,
        shape: Shape,
        latents: npt.NDArray[np.floating],
        text: npt.NDArray[np.floating],
        facts: Mapping[str, object] = {},
    ) -> int:
        """Append a sample and return its id.

        Raises DataError where latents or text do not fit the shape, or hold what float16 cannot.
        """
        _check(f"sample {self.samples}", shape, latents, text)
        with np.errstate(over="ignore"):
            halves = {"latents.npy": latents.astype(np.float16), "text.npy": text.astype(np.float16)}
        for name, half in halves.items():
            if not np.isfinite(half).all():
                raise DataError(f"sample {self.samples}: {name} has values that are not finite in float16")
        if self._tar is None:
            self._open()
        self._tar.write(
            {
                "__key__": f"{self.samples:08d}",
                **halves,
                "json": {"shape": str(shape), **facts},
            }
        )
        self._shards[-1]["nsamples"] += 1
        self._shards[-1]["buckets"].append(self._shapes.setdefault(shape, len(self._shapes)))
        self.samples += 1
        if self._path().stat().st_size >= self.shard_bytes:
            self._close()
        return self.samples - 1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the index, unless something went wrong."""
        self._close()
        if kind is not None:
            return
        index = {
            "wids_version": 1,
            "version": VERSION,
            "name": self.name,
            "source": self.source,
            "shapes": [[s.frames, s.height, s.width] for s in self._shapes],
            "shardlist": self._shards,
        }
        partial = self.folder / f"{INDEX}.partial"
        partial.write_text(json.dumps(index))
        partial.replace(self.folder / INDEX)

    def _path(self) -> Path:
        return self.folder / str(self._shards[-1]["url"])

    def _open(self) -> None:
        from webdataset import TarWriter

        self._shards.append({"url": f"shard-{len(self._shards):06d}.tar", "nsamples": 0, "buckets": []})
        self._tar = TarWriter(str(self._path()), mtime=0.0, user="", group="")

    def _close(self) -> None:
        if self._tar is None:
            return
        self._tar.close()
        self._tar = None
        self._shards[-1] |= {"filesize": self._path().stat().st_size, "sha256": _sha256(self._path())}


class ShardedSamples:
    """Samples of a folder that `ShardWriter` made.

    verify: compare checksums, not only sizes; by default for folders of up to 4 GiB.

    Raises FileNotFoundError for a missing folder, index or shard, DataError for one that is broken and where webdataset
    is not installed; all before any sample is asked for.
    """

    def __init__(self, folder: str | Path, verify: bool | None = None) -> None:
        if importlib.util.find_spec("wids") is None:
            raise DataError("reading samples needs webdataset below 1.0: pip install 'adaptiveload-repro[data]'")
        self.folder = Path(folder)
        index = _read_index(self.folder / INDEX)
        self._shards: list[dict[str, Any]] = index["shardlist"]
        if verify is None:
            verify = sum(s["filesize"] for s in self._shards) <= HASHED_BYTES
        for shard in self._shards:
            self._check_shard(shard, verify)
        self._ends = list(itertools.accumulate(s["nsamples"] for s in self._shards))
        shapes = [Shape(*s) for s in index["shapes"]]
        buckets = np.concatenate([np.asarray(s["buckets"], np.int32) for s in self._shards])
        tokens = np.array([Tokenizer().tokens(s) for s in shapes])
        order = np.argsort(tokens, kind="stable")
        self.corpus = Corpus(
            index["name"],
            index["source"],
            tuple(shapes[k] for k in order),
            tokens[order].astype(np.int64),
            np.argsort(order).astype(np.int32)[buckets],
        )
        self._open = functools.lru_cache(maxsize=OPEN_SHARDS)(self._open_shard)

    def fetch(self, shape: Shape, sample_ids: Sequence[int], device: torch.device | str) -> Samples:
        """Latents and text float16, as stored (see `SampleSource.fetch`)."""
        latents, texts = [], []
        for i in sample_ids:
            sample = self.read(i)
            where = f"sample {i} in {sample['__shard__']}"
            _check(where, shape, sample["latents"], sample["text"])
            latents.append(torch.from_numpy(sample["latents"]))
            texts.append(pad_prompt(torch.from_numpy(sample["text"])))
        return Samples(torch.stack(latents).to(device), torch.stack(texts).to(device))

    def read(self, sample_id: int) -> dict[str, Any]:
        """One sample: `latents` and `text` as arrays, `facts` as a dict, `__shard__`. Raises DataError if broken."""
        if not 0 <= sample_id < self.corpus.samples:
            raise DataError(f"sample ids of {self.folder} end at {self.corpus.samples - 1}, got {sample_id}")
        number = bisect.bisect_right(self._ends, sample_id)
        path = self.folder / self._shards[number]["url"]
        try:
            stored = self._open(number)[sample_id - self._ends[number] + self._shards[number]["nsamples"]]
            return {
                "latents": np.load(stored[".latents.npy"], allow_pickle=False),
                "text": np.load(stored[".text.npy"], allow_pickle=False),
                "facts": json.load(stored[".json"]),
                "__shard__": str(path),
            }
        except (ValueError, KeyError, IndexError, OSError, EOFError) as error:
            raise DataError(f"sample {sample_id} cannot be read from {path}: {error!r}") from error

    def _open_shard(self, number: int) -> IndexedTarSamples:
        from wids.wids import IndexedTarSamples

        return IndexedTarSamples(path=str(self.folder / self._shards[number]["url"]))

    def _check_shard(self, shard: Mapping[str, Any], verify: bool) -> None:
        path = self.folder / shard["url"]
        if not path.is_file():
            raise FileNotFoundError(f"shard {path} is missing: copy it again or make the corpus anew")
        if path.stat().st_size != shard["filesize"]:
            raise DataError(f"shard {path} has {path.stat().st_size} bytes, its index says {shard['filesize']}")
        if verify and _sha256(path) != shard["sha256"]:
            raise DataError(f"shard {path} is corrupt: its checksum is not the one in its index")


def require_empty(folder: Path) -> None:
    """Raise OSError where no corpus can be made: there is one already, or the folder is a file or below one."""
    files.require_target(folder / INDEX)
    if (folder / INDEX).exists():
        raise FileExistsError(f"{folder} already holds a corpus: choose another folder or delete it")


def _read_index(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the folder holds no corpus, or its making was interrupted")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version = index["version"]
        wrong = "" if version != VERSION else _wrong(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not an index of encoded samples: {type(error).__name__}: {error}") from error
    if version != VERSION:
        raise DataError(f"{path} has version {version!r}, this release reads {VERSION}")
    if wrong:
        raise DataError(f"{path} has {wrong}: copy it again or make the corpus anew")
    return index


def _wrong(index: Mapping[str, Any]) -> str:
    """What of an index cannot be, in words; empty where all is well. Raises as its parts are taken out."""
    shapes, shards = [tuple(s) for s in index["shapes"]], index["shardlist"]
    if not (isinstance(index["name"], str) and isinstance(index["source"], str)):
        return "a name or source that is no text"
    for shape in shapes:
        if len(shape) != 3 or not all(type(n) is int and n < _LARGEST for n in shape):
            return f"a shape {list(shape)!r}, want three whole numbers below {_LARGEST:,}"
        Tokenizer().tokens(Shape(*shape))
    if not shards or not shapes or len(set(shapes)) != len(shapes):
        return "no shard, no shape, or one shape twice"
    for shard in shards:
        buckets = shard["buckets"]
        if len(buckets) != shard["nsamples"] or not all(type(b) is int and 0 <= b < len(shapes) for b in buckets):
            return f"buckets of {shard['url']!r} that are not one of {len(shapes)} shapes for each sample"
        if type(shard["filesize"]) is not int or not isinstance(shard["sha256"], str):
            return f"no size or checksum of {shard['url']!r}"
        if Path(shard["url"]).name != shard["url"]:
            return f"a shard {shard['url']!r} that does not lie beside it"
    return ""


def _check(where: str, shape: Shape, latents: npt.NDArray[np.floating], text: npt.NDArray[np.floating]) -> None:
    wanted = (LATENT_CHANNELS, *Tokenizer().latent(shape))
    if latents.shape != wanted:
        raise DataError(f"{where}: latents must be {list(wanted)} for {shape}, got {list(latents.shape)}")
    if text.ndim != 2 or text.shape[1] != TEXT_WIDTH:
        raise DataError(f"{where}: text must be [L, {TEXT_WIDTH}], got {list(text.shape)}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
