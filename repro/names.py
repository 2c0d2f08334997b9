"""What to tell people who ask for a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The line of an error: no suite 'sped'; nearest: speed. All known names where it is like none.

    Case and the difference of - and _ do not count.
    """
    plain = {_plain(k): k for k in known}
    near = difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.4)
    told = f"nearest: {', '.join(plain[n] for n in near)}" if near else f"known: {', '.join(plain.values()) or 'none'}"
    return f"no {kind} {name!r}; {told}"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
