"""What lies where in a checkpoint, as JSON, so that nothing of a checkpoint is read as a pickle.

`torch.distributed.checkpoint` keeps an index of its own, `.metadata`, in Python's pickle format, and unpickles whatever
is no tensor (an optimizer's settings); a pickle runs code as it is read. Its index is written here again as
`tensors.json`, and that is read in its place; what is no tensor is read with `weights_only`, as tensors are anyway.
`.metadata` stays for PyTorch's own tools.

Nor is a checkpoint read that has changed on the disk: `digests.json` has the small files' SHA-256, and tensors carry a
CRC-32 of PyTorch's, which PyTorch itself does not look at.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from repro.records import files

NAME = "tensors.json"
DIGESTS = "digests.json"
_DATA = re.compile(r"__\d+_\d+\.distcp")


def write(folder: Path, metadata: Metadata) -> None:
    """Write the index of the checkpoint in `folder`. metadata: what `torch.distributed.checkpoint` says of it."""
    tensors, others = {}, {}
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            tensors[name] = {
                "dtype": str(about.properties.dtype).removeprefix("torch."),
                "size": list(about.size),
                "chunks": [
                    [list(c.offsets), list(c.sizes), *_place(metadata, MetadataIndex(name, c.offsets))]
                    for c in about.chunks
                ],
            }
        else:
            others[name] = _place(metadata, MetadataIndex(name))
    files.replace(folder / NAME, json.dumps({"tensors": tensors, "others": others}).encode())
    files.replace(folder / DIGESTS, json.dumps(digests(folder), indent=1).encode())


def check(folder: Path, name: str) -> None:
    """Raise ValueError where a small file is not as it was written, OSError where one is missing."""
    try:
        told = dict(json.loads((folder / DIGESTS).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{DIGESTS} is malformed ({type(error).__name__}: {error})") from error
    if digests(folder)[name] != told.get(name):
        raise ValueError(f"{name} has changed since it was written")


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the JSON files, what `DIGESTS` holds, by name."""
    small = sorted(p for p in folder.glob("*.json") if p.name != DIGESTS)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in small}


def check_tensors(folder: Path, metadata: Metadata, rank: int, ranks: int) -> None:
    """Read a rank's part of everything there is, the parts of all ranks being the whole.

    About a second a gigabyte. Raises ValueError where something is not as it was written, OSError for a missing file.
    """
    places = sorted({(i.relative_path, i.offset, i.length) for i in metadata.storage_data.values()})
    for path, offset, length in places[rank::ranks]:
        try:
            with (folder / path).open("rb") as file:
                file.seek(offset)
                broken = zipfile.ZipFile(io.BytesIO(file.read(length))).testzip()
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise ValueError(f"{path} has changed at byte {offset:,}: {error}") from error
        if broken is not None:
            raise ValueError(f"{path} has changed at byte {offset:,}: CRC-32 of {broken}")


def read(folder: Path) -> Metadata:
    """The index of the checkpoint in `folder`. Raises OSError, and ValueError for one that is malformed."""
    about: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    try:
        told = json.loads((folder / NAME).read_text(encoding="utf-8"))
        for name, tensor in dict(told["tensors"]).items():
            dtype = getattr(torch, str(tensor["dtype"]), None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has no dtype {tensor['dtype']!r}")
            chunks = []
            for offsets, sizes, *place in tensor["chunks"]:
                chunks.append(ChunkStorageMetadata(_size(offsets), _size(sizes)))
                storage[MetadataIndex(name, chunks[-1].offsets)] = _info(*place)
            about[name] = TensorStorageMetadata(TensorProperties(dtype), _size(tensor["size"]), chunks)
        for name, place in dict(told["others"]).items():
            about[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = _info(*place)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{NAME} is malformed ({type(error).__name__}: {error})") from error
    return Metadata(about, storage_data=storage)


class Writer(_FileSystemWriter):
    """Writes the index too, once all ranks have written, on the rank that coordinates.

    Not `dcp.FileSystemWriter`, which copies the state to host memory in a way of its own.
    """

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        storage = {r.index: r.storage_data for of_rank in results for r in of_rank}
        write(Path(self.path), replace(metadata, storage_data=storage))


class Reader(dcp.FileSystemReader):
    """Reads what the index says, and never `.metadata`."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._index = metadata

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # no arguments: of one rank alone there is none
        return self._index


class Planner(dcp.DefaultLoadPlanner):
    """Reads what is no tensor with `weights_only`, and only in place of a value of its own type."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        before, found = self.state_dict[name], torch.load(value, weights_only=True)
        if None not in (before, found) and type(before) is not type(found):
            raise ValueError(f"{name} must be a {type(before).__name__}, got {found!r:.80}")
        where: Any = self.original_state_dict
        *way, last = self.mappings[name]
        for key in way:
            where = where[key]
        where[last] = found


def _place(metadata: Metadata, index: MetadataIndex) -> list[Any]:
    info = metadata.storage_data[index]
    return [info.relative_path, info.offset, info.length]


def _info(path: str, offset: int, length: int) -> _StorageInfo:
    if not _DATA.fullmatch(path):
        raise ValueError(f"{path!r} is no file of a checkpoint")
    return _StorageInfo(path, *_size((offset, length)))


def _size(numbers: Iterable[int]) -> torch.Size:
    """Whole numbers of at least 0. Raises ValueError for anything else."""
    found = list(numbers)
    for number in found:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"want a whole number of at least 0, got {number!r}")
    return torch.Size(found)
