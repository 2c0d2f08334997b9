"""What the package runs, reads and reaches: no code from data, no shell, no network; and what it is installed with."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from typer.testing import CliRunner

from repro import compare, plan

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(p for folder in ("repro", "suites") for p in (ROOT / folder).rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOWEST = ROOT / "tests" / "lowest.txt"

PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
NETWORK = {
    "aiohttp", "ftplib", "http", "httpx", "huggingface_hub", "requests", "smtplib", "socket", "socketserver",
    "telnetlib", "urllib", "urllib3", "webbrowser", "xmlrpc",
}  # fmt: skip
CALLS = {
    "__import__", "compile", "eval", "exec", "from_pretrained", "os.popen", "os.system", "pd.read_pickle",
    "subprocess.getoutput", "subprocess.getstatusoutput", "torch.hub.load", "urlopen",
}  # fmt: skip
NEEDS_ARGUMENT = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
}
YAML = {"yaml.dump", "yaml.full_load", "yaml.load", "yaml.load_all", "yaml.unsafe_load"}
ALLOWED = {
    ("repro/adaln/diffusers_wan.py", "compile"): "a forward method of the installed Diffusers, its norms replaced",
    ("repro/adaln/diffusers_wan.py", "exec"): "the same",
    ("repro/wan/nodes.py", "socket"): "whether the node that was named with --rendezvous listens",
}
"""What is there all the same, and what it runs: nothing that comes from a file of the user's."""


def dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression, else nothing."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def hazards(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything that is not to be in the package."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.split(".")[0] in PICKLES | NETWORK:
                yield node.lineno, name
        if not isinstance(node, ast.Call):
            continue
        called, given = dotted(node.func), {k.arg: k.value for k in node.keywords}
        if called in CALLS | YAML or called.split(".")[-1] in {"from_pretrained", "urlopen"}:
            yield node.lineno, called
        shell = given.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            yield node.lineno, "shell"
        if called in NEEDS_ARGUMENT:
            name, wanted = NEEDS_ARGUMENT[called]
            value = given.get(name)
            if not (isinstance(value, ast.Constant) and value.value is wanted):
                yield node.lineno, f"{called} without {name}={wanted}"


def test_the_package_runs_no_data_and_reaches_no_network() -> None:
    found = {(str(path.relative_to(ROOT)), name): line for path in FILES for line, name in hazards(path.read_text())}
    assert len(FILES) > 100
    assert found.keys() == ALLOWED.keys(), found


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("import requests.sessions as s", "requests.sessions"),
        ("def f():\n    import socket", "socket"),
        ("eval(text)", "eval"),
        ("yaml.load(text)", "yaml.load"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=safe)", "torch.load without weights_only=True"),
        ("np.load(path, allow_pickle=True)", "np.load without allow_pickle=False"),
        ("subprocess.run(line, shell=True)", "shell"),
        ("os.system(line)", "os.system"),
        ("Model.from_pretrained(name)", "Model.from_pretrained"),
    ],
)
def test_each_hazard_is_found(source: str, name: str) -> None:
    assert [found for _, found in hazards(source)] == [name]


def test_what_is_safe_is_let_be() -> None:
    safe = "yaml.safe_load(t)\ntorch.load(p, weights_only=True)\nre.compile(t)\nsubprocess.run(['git'])\nmodel.eval()"
    assert list(hazards(safe)) == []


def test_the_report_brings_no_code_but_its_own() -> None:
    """It is opened from disk: no script of elsewhere, nothing fetched, no text run as code."""
    for path in (ROOT / "repro" / "report" / "assets").iterdir():
        text = path.read_text()
        for pattern in (r"\beval\(", r"new Function", r"\bfetch\(", "XMLHttpRequest", "WebSocket", r"\bimport\(",
                        r"<(script|link|img|iframe)[^>]+(src|href)=[\"']?https?:"):  # fmt: skip
            assert not re.search(pattern, text), (path.name, pattern)


_watched: list[str] | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _watched is not None and event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request"):
        _watched.append(f"{event} {arguments[1:] if event == 'socket.connect' else arguments}")


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What reaches for the network in here, by the interpreter's audit events (PEP 578)."""
    global _watched
    _watched = []
    try:
        yield _watched
    finally:
        _watched = None


sys.addaudithook(_audit)  # stays for good, and costs nothing outside `watched`


@pytest.mark.parametrize("command", ["compare", "plan", "train"])
def test_commands_reach_no_network(command: str, tmp_path: Path) -> None:
    app, arguments = {
        "compare": (compare.app, []),
        "plan": (plan.app, ["wan-uniform", "--ranks", "8"]),
        "train": (None, ["--model", "tiny", "--layers", "1", "--corpus", "tiny", "--samples", "20", "--m-mem", "256",
                         "--device", "cpu", "--steps", "1", "--out", tmp_path]),
    }[command]  # fmt: skip
    if app is None:
        app = pytest.importorskip("repro.train").app
    with watched() as reached:
        done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    assert reached == []


def test_the_watch_sees_what_reaches_out() -> None:
    import socket

    with watched() as reached, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("127.0.0.1", 9))
    assert len(reached) == 1


def test_the_lowest_versions_are_those_that_the_project_names() -> None:
    """`tox -e lowest` installs them: a bound that is not in its list has not been tried."""
    pinned = dict(line.split("==") for line in LOWEST.read_text().splitlines() if line and not line.startswith("#"))
    extras = PROJECT["optional-dependencies"]
    named = [*PROJECT["dependencies"], *(r for extra in ("data", "corpus", "test") for r in extras[extra])]
    bounds = {}
    for text in named:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            continue
        (bound,) = (s for s in requirement.specifier if s.operator == ">=")
        bounds[requirement.name] = Version(bound.version)
        assert pinned[requirement.name] in requirement.specifier, text
    assert {name: Version(version) for name, version in pinned.items()} == bounds
