"""What the project promises about itself: packages, commands, imports without PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_holds_every_package_and_the_kernels():
    on_disk = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in (ROOT / "repro").rglob("__init__.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk | {"repro.csrc"}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"repro.csrc": "csrc"}


@pytest.mark.parametrize(
    "module", ["records", "claims", "verdicts", "report.draw", "runner", "corpus", "balance", "all"]
)
def test_imports_without_pytorch(module):
    program = f"import sys, repro.{module}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_suites_import_without_pytorch():
    program = (
        "import sys\nfrom repro import suite\n"
        "for name in suite.names():\n    suite.load(name)\n    assert 'torch' not in sys.modules, name"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_every_claim_of_a_suite_is_a_claim_of_the_paper():
    from repro import suite
    from repro.claims import BY_ID

    for name in suite.names():
        assert set(suite.load(name).CLAIMS) <= set(BY_ID), name


def test_the_readme_prints_exactly_two_marked_commands():
    text = (ROOT / "README.md").read_text()
    commands = dict(re.findall(r"<!-- command: (\w+) -->\n```bash\n(.*?)\n```", text, re.DOTALL))
    assert list(commands) == ["run", "test"]
    assert commands["run"].endswith("python -m repro.all")
    assert commands["test"].endswith("pytest")


def test_ci_reads_its_commands_from_the_readme():
    """The shell in .ci/run must find the same blocks as the test above."""
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\).*?^    \S.*?README\.md\n}$", script, re.DOTALL | re.MULTILINE)
    assert function
    for name in ("run", "test"):
        done = subprocess.run(
            ["bash", "-c", f"{function.group()}\nreadme_command {name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stdout.strip() and f"```bash\n{done.stdout.strip()}\n```" in (ROOT / "README.md").read_text()
