"""Building the kernels: what is cached, what is said, and what happens where they cannot be built."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import re
import subprocess
import sys
import sysconfig
import threading
import types
import warnings
from pathlib import Path

import filelock
import pytest
import torch
from torch.utils import cpp_extension

from repro.adaln import build, composite, ops
from tests.adaln import op_cases

CHECKOUT = Path(__file__).parents[2]
ENTRY_POINTS = types.ModuleType("repro_adaln")


class PretendCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU: enough for the choice of a kernel."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # what is computed from it is a plain tensor


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with one sm_90 GPU, PyTorch for CUDA 13.0 and a complete toolchain whose compiler only pretends."""
    tools = tmp_path / "tools"
    (tools / "cuda" / "bin").mkdir(parents=True)
    for name, says in (("cuda/bin/nvcc", "Cuda compilation tools, release 13.0, V13.0.88"), ("c++", ""), ("ninja", "")):
        (tools / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tools / name).chmod(0o755)
    (tmp_path / "csrc").mkdir()
    for name in ("binding.cpp", "forward.cu", "vector.cuh"):
        (tmp_path / "csrc" / name).write_text(f"// {name}\n")

    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "_failure", None)
    monkeypatch.setattr(build, "native", None)
    monkeypatch.setattr(build, "sources", lambda: tmp_path / "csrc")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tools / "cuda"))
    monkeypatch.setitem(sys.modules, "ninja", None)  # pip's, whose folder would be added to PATH
    monkeypatch.setenv("PATH", str(tools), prepend=None)
    monkeypatch.setenv("REPRO_BUILD_DIR", str(tmp_path / "builds"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return tools


@pytest.fixture
def builder(monkeypatch):
    """Stand-ins for PyTorch's builder and loader; `calls` records the builder's arguments and environment."""
    calls = []

    def load(name, source_files, *, build_directory, **options):
        with pytest.raises(filelock.Timeout):  # other processes wait while this one builds
            filelock.FileLock(Path(build_directory, "building")).acquire(timeout=0)
        calls.append({"sources": source_files, "architectures": os.environ["TORCH_CUDA_ARCH_LIST"], **options})
        Path(build_directory, f"{name}.so").touch()

    def import_(path):
        assert Path(path).is_file()
        return ENTRY_POINTS

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(build, "_import", import_)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: key == "CUDA")
    return calls


def _without(name):
    return lambda tools, patch: (tools / name).unlink()


def _nvcc_of(release):
    def change(tools, patch):
        (tools / "cuda/bin/nvcc").write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n"
        )

    return change


def _attribute(owner, name, value):
    return lambda tools, patch: patch.setattr(owner, name, value)


def _unwritable(tools, patch):
    (tools / "file").touch()
    patch.setenv("REPRO_BUILD_DIR", str(tools / "file"))


def _failing_when(method, name, error):
    """Path's `method` raises where the file is called `name`; the rest of the file system works."""

    def change(tools, patch):
        original = getattr(Path, method)

        def call(path, *args, **options):
            if path.name == name:
                raise error
            return original(path, *args, **options)

        patch.setattr(Path, method, call)

    return change


def _raising(error):
    def fail(*_, **__):
        raise error

    return fail


FAILURES = {
    "ninja": (_without("ninja"), "ninja is not installed", "pip install ninja"),
    "compiler": (_without("c++"), r"no C\+\+ compiler \(c\+\+\)", r"install g\+\+, or set CXX"),
    "CXX": (
        lambda tools, patch: patch.setenv("CXX", "clang++-99"),
        r"no C\+\+ compiler \(clang\+\+-99\)",
        r"install g\+\+, or set CXX",
    ),
    "Python's headers": (
        _attribute(sysconfig, "get_path", lambda name: "/nowhere"),
        "no Python.h in /nowhere",
        "install Python's headers",
    ),
    "nvcc": (_without("cuda/bin/nvcc"), "nvcc does not exist", "install the CUDA toolkit 13.0 .* set CUDA_HOME"),
    "toolkit": (
        _attribute(cpp_extension, "CUDA_HOME", None),
        "no CUDA toolkit was found",
        "install the CUDA toolkit 13.0 .* set CUDA_HOME",
    ),
    "major version": (
        _nvcc_of("12.4"),
        "is 12.4, PyTorch was built with 13.0",
        "install toolkit 13.0 .* set CUDA_HOME",
    ),
    "PyTorch": (_attribute(torch.version, "cuda", None), "not built for CUDA", "install a CUDA build of PyTorch"),
    "device": (_attribute(torch.cuda, "device_count", lambda: 0), "no CUDA device is visible", "CUDA_VISIBLE_DEVICES"),
    "forked process": (
        _attribute(
            torch.cuda, "get_device_capability", _raising(RuntimeError("Cannot re-initialize CUDA in forked process"))
        ),
        r"CUDA does not start in this process \(Cannot re-initialize CUDA in forked process\)",
        "start workers with spawn",
    ),
    "driver": (
        _attribute(torch.cuda, "device_count", _raising(RuntimeError("CUDA unknown error\nmore"))),
        r"CUDA does not start in this process \(CUDA unknown error\)",
        "check the driver",
    ),
    "nvcc that does not run": (
        lambda tools, patch: (tools / "cuda/bin/nvcc").chmod(0o644),
        "nvcc does not run .*Permission denied",
        "install the CUDA toolkit and set CUDA_HOME",
    ),
    "folder": (_unwritable, "cannot write to", "set REPRO_BUILD_DIR"),
    "unreadable folder": (
        _failing_when("exists", "complete", PermissionError(13, "Permission denied")),
        "cannot write to .*Permission denied",
        "set REPRO_BUILD_DIR",
    ),
    "file system without locks": (
        _attribute(filelock.FileLock, "acquire", _raising(NotImplementedError("no flock"))),
        "cannot write to .*no flock",
        "set REPRO_BUILD_DIR",
    ),
    "sources": (
        lambda tools, patch: (tools.parent / "csrc/binding.cpp").unlink(),
        "sources are not at",
        "install from the wheel or run from a checkout",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_one_warning_names_what_is_missing_and_the_composite_goes_on(machine, builder, monkeypatch, failure):
    change, missing, remedy = FAILURES[failure]
    change(machine, monkeypatch)
    monkeypatch.setattr(composite, "_use_inductor", False)
    inputs = op_cases.make((2, 5, 24))
    x, shift, scale, dy = (t.as_subclass(PretendCuda) for t in inputs)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        y, statistics = ops._forward_kernel(x, shift, scale, 1e-6, None, "fused")
        dx, dshift, dscale = ops._backward_kernel(dy, x, scale, statistics, torch.float32, "fused")
    op_cases.assert_close(op_cases.Results(y, dx, dshift, dscale), op_cases.exact(inputs), op_cases.BARS[torch.float32])
    (message,) = (str(w.message) for w in heard if issubclass(w.category, RuntimeWarning))
    assert re.search(rf"runs without its CUDA kernels.*{missing}.*{remedy}", message)
    assert build.failure() in message and not builder


def test_minor_versions_may_differ(machine, builder, monkeypatch):
    _nvcc_of("13.2")(machine, monkeypatch)
    assert build.ensure_loaded()


def test_built_once_then_loaded_from_the_cache(machine, builder, monkeypatch, capsys):
    assert build.ensure_loaded() and build.failure() is None and build.native is ENTRY_POINTS
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "building the fused AdaLN extension for sm_90 (about 60 s, once; cached in" in said[0]
    (call,) = builder
    assert [Path(path).name for path in call["sources"]] == ["binding.cpp", "forward.cu"]
    assert call["architectures"] == "9.0" and call["is_python_module"] is False
    assert not any("fast_math" in flag for flag in call["extra_cuda_cflags"])
    assert "TORCH_CUDA_ARCH_LIST" not in os.environ, "the environment is put back"

    monkeypatch.setattr(build, "_loaded", None)  # as in another process, and with no toolchain left
    (machine / "ninja").unlink()
    assert build.ensure_loaded() and len(builder) == 1 and not capsys.readouterr().err


def test_the_users_environment_is_put_back(machine, builder, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    path = os.environ["PATH"]
    assert build.ensure_loaded()
    (call,) = builder
    assert call["architectures"] == "9.0", "what is built is for the visible GPUs"
    assert (os.environ["TORCH_CUDA_ARCH_LIST"], os.environ["PATH"]) == ("8.0", path)


def test_a_killed_build_is_built_again(machine, builder):
    """A folder without its completion mark is not trusted, and PyTorch's lock file in it not waited for."""
    directory = build.build_directory()
    directory.mkdir(parents=True)
    (directory / "repro_adaln.so").write_text("half")
    (directory / "lock").touch()
    assert build.ensure_loaded() and len(builder) == 1
    assert not (directory / "lock").exists()


def test_concurrent_first_calls_build_once(machine, builder):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(build.ensure_loaded())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8 and len(builder) == 1


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_another_process_waits_for_the_build_and_does_not_repeat_it(machine, builder, monkeypatch, tmp_path):
    """It has found no build and waits for the lock when the first one is done. Forked, for the stand-ins' sake."""
    context = multiprocessing.get_context("fork")
    building, waiting = context.Event(), context.Event()
    builds = tmp_path / "builds.txt"

    def load(name, source_files, *, build_directory, **options):
        with builds.open("a") as f:
            f.write(f"{os.getpid()}\n")
        building.set()
        assert waiting.wait(60)
        Path(build_directory, f"{name}.so").touch()

    def later_process():
        acquire = filelock.FileLock.acquire

        def announced(lock, *args, **options):
            waiting.set()
            return acquire(lock, *args, **options)

        filelock.FileLock.acquire = announced
        assert building.wait(60)
        sys.exit(0 if build.ensure_loaded() else 1)

    monkeypatch.setattr(cpp_extension, "load", load)
    later = context.Process(target=later_process)
    later.start()
    assert build.ensure_loaded(), build.failure()
    later.join(60)
    assert later.exitcode == 0
    assert builds.read_text().split() == [str(os.getpid())]


def test_a_disk_that_fills_up_while_building_leaves_the_composite(machine, builder, monkeypatch):
    _failing_when("touch", "complete", OSError(28, "No space left on device"))(machine, monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"cannot write to .*No space left on device.*set REPRO_BUILD_DIR") as heard:
        assert not build.ensure_loaded() and not build.ensure_loaded()
    assert len(heard) == len(builder) == 1

    with filelock.FileLock(build.build_directory() / "building", timeout=0):
        pass  # it is free: nobody waits for a build that failed


def test_errors_of_the_program_itself_are_not_taken_for_a_missing_build(machine, builder, monkeypatch):
    monkeypatch.setattr(build, "sources", _raising(TypeError("a bug")))
    with pytest.raises(TypeError, match="a bug"):
        build.ensure_loaded()


def test_a_failed_build_shows_the_compilers_last_lines_on_request(machine, monkeypatch):
    def load(*args, **options):
        raise RuntimeError("Error building extension 'repro_adaln':\n" + "noise\n" * 100 + "forward.cu(7): error: no")

    monkeypatch.setattr(cpp_extension, "load", load)
    with pytest.warns(RuntimeWarning, match=r"the build failed .*REPRO_BUILD_DEBUG=1") as heard:
        assert not build.ensure_loaded()
    assert "forward.cu(7)" not in str(heard[0].message)

    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setenv("REPRO_BUILD_DEBUG", "1")
    with pytest.warns(RuntimeWarning, match=r"forward.cu\(7\): error: no"):
        assert not build.ensure_loaded()
    assert not (build.build_directory() / "complete").exists()


def test_a_library_without_the_kernels_is_refused(machine, builder, monkeypatch):
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    with pytest.warns(RuntimeWarning, match="does not register layer_norm_modulate"):
        assert not build.ensure_loaded()


def test_a_library_that_does_not_load_is_refused(machine, builder, monkeypatch):
    monkeypatch.setattr(build, "_import", _raising(ImportError("undefined symbol")))
    with pytest.warns(RuntimeWarning, match=r"cannot load the build in .*undefined symbol.*remove that folder"):
        assert not build.ensure_loaded()
    assert build.native is None


def test_a_file_that_is_no_extension_does_not_import(tmp_path):
    with pytest.raises(ImportError, match=r"kernels\.txt is no extension module"):
        build._import(tmp_path / "kernels.txt")
    (tmp_path / "repro_adaln.so").write_text("half")
    with pytest.raises(ImportError):
        build._import(tmp_path / "repro_adaln.so")


def test_directory_tells_builds_apart(machine, monkeypatch):
    """Sources (headers too), flags, CUDA, architectures and PyTorch each make another build."""
    seen = [build.build_directory()]
    (build.sources() / "vector.cuh").write_text("// changed\n")
    seen.append(build.build_directory())
    monkeypatch.setattr(build, "CUDA_CFLAGS", ("-O2",))
    seen.append(build.build_directory())
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    seen.append(build.build_directory())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: ((9, 0), (10, 0))[i])
    seen.append(build.build_directory())
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0" if name == "torch" else version(name))
    seen.append(build.build_directory())
    assert len(set(seen)) == 6 and seen[-1].name.endswith("cu131-sm90-sm100")
    (build.sources() / "NOTES.md").write_text("not compiled\n")
    assert build.build_directory() == seen[-1]


def test_hash_without_torch():
    """Provenance reads the hash on machines and in processes that do not load PyTorch."""
    code = "import sys; from repro.adaln import build; print(build.build_hash()); assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == build.build_hash() and len(build.build_hash()) == 16


def test_sources_are_in_the_checkout():
    assert (build.sources() / "adaln.h").is_file()


def test_first_cuda_tensor_goes_to_the_kernels_once_loaded(monkeypatch):
    """By then the extension has registered them: the call is dispatched again, with its arguments as they came."""
    monkeypatch.setattr(build, "_loaded", True)
    x = torch.zeros(1, 2, 8).as_subclass(PretendCuda)
    kernel = ops._kernel(lambda *args: ("operator", *args), "forward", 1)
    assert kernel(x, 1, 2, 1e-6, None, "dtile") == ("operator", x, 1, 2, 1e-6, None, "dtile")


def test_inductor_compiles_the_composite_where_the_kernels_are_missing(monkeypatch):
    """Same answers; on CPU through AOTAutograd alone, since only the plumbing is at stake here."""
    compiled = []

    def compile_step(step):
        compiled.append(step)
        return torch.compile(step, backend="aot_eager")

    torch._dynamo.reset()
    monkeypatch.setattr(build, "_loaded", False)
    monkeypatch.setattr(composite, "_use_inductor", True)
    monkeypatch.setattr(composite, "_compiled", compile_step)
    inputs = op_cases.make((2, 5, 24))
    x, shift, scale, dy = (t.as_subclass(PretendCuda) for t in inputs)
    y, statistics = ops._forward_kernel(x, shift, scale, 1e-6, None, "fused")
    gradients = ops._backward_kernel(dy, x, scale, statistics, torch.float32, "fused")
    op_cases.assert_close(op_cases.Results(y, *gradients), op_cases.exact(inputs), op_cases.BARS[torch.float32])
    assert len(compiled) == 2


def test_inductor_that_fails_is_not_tried_again(monkeypatch):
    attempts = []

    def compile_step(step):
        def broken(*args):
            attempts.append(step)
            step(*args)  # as a failure half way would, with results already written
            raise RuntimeError("Failed to find C compiler")

        return broken

    monkeypatch.setattr(build, "_loaded", False)
    monkeypatch.setattr(composite, "_use_inductor", True)
    monkeypatch.setattr(composite, "_compiled", compile_step)
    inputs = op_cases.make((2, 5, 24))
    x, shift, scale, dy = (t.as_subclass(PretendCuda) for t in inputs)
    _, statistics = ops._forward_kernel(x, shift, scale, 1e-6, None, "fused")
    monkeypatch.setattr(composite, "_use_inductor", True)
    gradients = ops._backward_kernel(dy, x, scale, statistics, torch.float32, "fused")
    for got, want in zip(gradients, op_cases.exact(inputs)[1:], strict=True):
        assert op_cases.error(got, want) <= 1e-5, "sums start afresh"
    ops._forward_kernel(x, shift, scale, 1e-6, None, "fused")
    assert len(attempts) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_without_toolkit(tmp_path):
    """pip's PyTorch and nothing else: one warning, then the composite, compiled by Inductor; gradients included."""
    code = """
import warnings, torch
from tests.adaln import op_cases
from repro.adaln import layer_norm_modulate, composite
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for rows in (40, 50, 60):
        inputs = op_cases.make((2, rows, 264), "cuda")
        got = op_cases.differentiate(layer_norm_modulate, inputs)
        op_cases.assert_close(got, op_cases.exact(inputs), op_cases.BARS[torch.float32])
print(sum("without its CUDA kernels" in str(w.message) for w in heard), composite._use_inductor)
"""
    environment = {**os.environ, "CUDA_HOME": str(tmp_path), "REPRO_BUILD_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["1", "True"]
