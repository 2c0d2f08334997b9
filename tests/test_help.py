"""`--help` of every entry point: it fits a screen, shows examples, and says what exit codes mean."""

from __future__ import annotations

import importlib
import re
import shlex

import pytest
from typer.testing import CliRunner

ENTRIES = {"all": 40, "plan": 40, "compare": 40, "wan.make_corpus": 40, "adaln.sanitize": 40, "train": 54}
"""Module below repro -> lines that its help may have; the trainer has more options than a screen has lines."""


def help_of(module: str) -> str:
    if module in ("train", "wan.make_corpus", "adaln.sanitize"):
        pytest.importorskip("torch")
    app = importlib.import_module(f"repro.{module}").app
    # as in a terminal of 100 columns, of which two are left free
    done = CliRunner().invoke(app, ["--help"], terminal_width=98, prog_name=f"python -m repro.{module}")
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("module", ENTRIES)
def test_help_fits_a_screen_and_has_examples(module: str) -> None:
    text = help_of(module)
    lines = text.splitlines()
    assert len(lines) <= ENTRIES[module]
    assert max(map(len, lines)) <= 100
    assert len(re.findall(rf"-m repro\.{module}(?: |$)", text, re.M)) >= 3, "want examples"
    assert "Exit codes: 0 " in " ".join(text.split())


@pytest.mark.parametrize("module", ENTRIES)
def test_options_in_examples_exist(module: str) -> None:
    text = help_of(module)
    examples = [line for line in text.splitlines() if re.match(r"  (CUDA_HOME=\S+ )?(python|torchrun) ", line)]
    assert examples
    for line in examples:
        # up to what explains it, set off by more than one space
        words = shlex.split(re.split(r"\s{3,}", line.strip())[0])
        if f"repro.{module}" not in words:
            continue
        for option in (w for w in words[words.index(f"repro.{module}") :] if w.startswith("--")):
            assert re.search(rf"(^|\s){option}\s", text.split("Options:")[1]), f"{option} of {line!r} is no option"
