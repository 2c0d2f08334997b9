"""What the documents hold: fenced blocks, and commands in them and between backticks."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"(?:python3? -m|(?:pytest|tox|torchrun|pip|sbatch|git)(?= |$)|\.ci/)")


@dataclass(frozen=True)
class Block:
    """A fenced block. before: the line above it that is not empty. marked: whether that is a `command:` marker."""

    language: str
    text: str
    before: str

    @property
    def marked(self) -> bool:
        return self.before.startswith("<!-- command: ")


def blocks(path: Path, *languages: str) -> list[Block]:
    """Fenced blocks in these languages."""
    text = path.read_text()
    found = [
        Block(m.group(1), m.group(2), text[: m.start()].rstrip().rpartition("\n")[2]) for m in _FENCE.finditer(text)
    ]
    return [b for b in found if b.language in languages]


def prose(path: Path) -> str:
    """The text without fenced blocks."""
    return _FENCE.sub("", path.read_text())


def inline_code(path: Path) -> list[str]:
    """What stands between backticks, line breaks as spaces."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(path))]


def printed_commands(path: Path) -> list[tuple[str, ...]]:
    """Commands in bash blocks, word by word; without marked ones, which .ci/run runs, and without whole scripts."""
    found = []
    for block in blocks(path, "bash"):
        if block.marked or block.text.startswith("#!"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            found.append(tuple(shlex.split(line, comments=True)))
    return [words for words in found if words]


def inline_commands(path: Path) -> list[tuple[str, ...]]:
    """Commands between backticks; of those with a placeholder in capitals (SUITE) what comes before its option."""
    found = [code for code in inline_code(path) if _COMMAND.match(code)]
    return [tuple(shlex.split(re.sub(r" --\S+ [A-Z]+$", "", code))) for code in found]
