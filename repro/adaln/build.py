"""Compile and load the CUDA kernels of `csrc/`: on first use, once, cached by everything that goes into them.

The library registers kernels and autograd of `repro_adaln`'s operators when it loads, and is a Python module of entry
points besides (`native`). Where it cannot be built, one warning says what is missing and how to get it, and the
operators keep their composite.

Environment: REPRO_BUILD_DIR, where builds are kept (default: PyTorch's extension cache); REPRO_BUILD_DEBUG=1 adds
the end of the compiler's output to the warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import filelock

NAME = "repro_adaln"
OPERATORS = (
    "layer_norm_modulate",
    "layer_norm_modulate_backward",
    "gated_residual_layer_norm_modulate",
    "gated_residual_layer_norm_modulate_backward",
)

# No -std: PyTorch's builder passes the one that its headers need. The kernels are written for plain nvcc, without
# the macros by which that builder takes the half types' operators away. --use_fast_math would cost accuracy.
CFLAGS = ("-O3",)
CUDA_CFLAGS = (
    "-O3",
    "-lineinfo",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
)
_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")

native: ModuleType | None = None
"""The loaded extension: `layer_norm_modulate` and `gated_residual_layer_norm_modulate` as `repro.adaln.api` has them,
with all arguments by position. They return None where plain CUDA tensors that fit is not what they were given."""

_lock = threading.Lock()
_loaded: bool | None = None
_failure: str | None = None


class BuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says what is missing and how to get it."""


def ensure_loaded() -> bool:
    """Whether CUDA tensors reach the compiled kernels; the first call builds them if need be, and warns if it cannot.

    Thread-safe. Call it ahead of time to keep the build out of a first step, or before CUDA-graph capture.
    """
    global _loaded, _failure
    if _loaded is None:
        with _lock:
            if _loaded is None:
                try:
                    _load()
                    _loaded = True
                except BuildError as error:
                    _failure = str(error)
                    _loaded = False
                    warnings.warn(
                        f"repro.adaln runs without its CUDA kernels, on plain tensor operations: {_failure}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
    return _loaded


def failure() -> str | None:
    """Why `ensure_loaded` returned False: what is missing and how to get it; None before a failure."""
    return _failure


def sources() -> Path:
    """Folder of the kernels' sources: bundled with an installed package, `csrc/` in a checkout."""
    package = Path(__file__).parents[1]
    bundled = package / "csrc"
    return bundled if bundled.is_dir() else package.parent / "csrc"


def build_hash() -> str:
    """16 hex digits over the sources, the flags and PyTorch's version. Does not import torch.

    Raises importlib.metadata.PackageNotFoundError where PyTorch is not installed.
    """
    digest = hashlib.sha256()
    for item in (importlib.metadata.version("torch"), *CFLAGS, *CUDA_CFLAGS):
        digest.update(item.encode() + b"\0")
    for path in sorted(sources().glob("*")):
        if path.suffix in _SUFFIXES:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build_directory() -> Path:
    """Where this build lives: its name holds the hash, Python, CUDA and the architectures of the visible GPUs."""
    import torch

    architectures = "-".join(f"sm{a.replace('.', '')}" for a in _architectures())
    python = sys.implementation.cache_tag
    name = f"{NAME}-{build_hash()}-{python}-cu{(torch.version.cuda or '').replace('.', '')}-{architectures}"
    root = os.environ.get("REPRO_BUILD_DIR") or os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        from torch.utils.cpp_extension import get_default_build_root

        root = get_default_build_root()
    return Path(root).expanduser() / name


def _load() -> None:
    """Load the library, from the cache or else built now. Raises BuildError."""
    global native
    import torch

    if torch.version.cuda is None:
        raise BuildError("this PyTorch is not built for CUDA; install a CUDA build of PyTorch")
    if not (sources() / "binding.cpp").is_file():
        raise BuildError(f"the kernels' sources are not at {sources()}; install from the wheel or run from a checkout")
    if not _architectures():
        raise BuildError("no CUDA device is visible; check the driver and CUDA_VISIBLE_DEVICES")
    directory = build_directory()
    try:
        _build_once(directory)
    except (OSError, NotImplementedError) as error:  # the latter: filelock, where the file system has no locks
        raise BuildError(f"cannot write to {directory} ({error}); set REPRO_BUILD_DIR to another folder") from error
    try:
        loaded = _import(directory / f"{NAME}.so")
    except (ImportError, OSError) as error:
        raise BuildError(f"cannot load the build in {directory} ({error}); remove that folder and try again") from error
    for operator in OPERATORS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAME}::{operator}", "CUDA"):
            raise BuildError(f"the build in {directory} does not register {operator}; remove that folder and try again")
    native = loaded


def _import(library: Path) -> ModuleType:
    """Load the library as a Python module, whatever the import path. Raises ImportError."""
    spec = importlib.util.spec_from_file_location(NAME, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no extension module of this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_once(directory: Path) -> None:
    """Build into `directory` where no whole build is.

    Raises BuildError; OSError or NotImplementedError where the folder cannot be written or locked.
    """
    complete = directory / "complete"
    if complete.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    # The ranks of a job wait for the first; the system frees the lock if its holder dies.
    with filelock.FileLock(directory / "building"):
        if not complete.exists():
            _compile(directory)
            complete.touch()


def _compile(directory: Path) -> None:
    """Build `directory`/repro_adaln.so. Raises BuildError."""
    with _environment(TORCH_CUDA_ARCH_LIST=";".join(_architectures()), PATH=_path_with_ninja()):
        _check_toolchain()
        from torch.utils import cpp_extension

        architectures = ", ".join(f"sm_{a.replace('.', '')}" for a in _architectures())
        print(
            f"building the fused AdaLN extension for {architectures} (about 60 s, once; cached in {directory})",
            file=sys.stderr,
            flush=True,
        )
        # PyTorch's own lock file; one that a killed build left behind would be waited for without end.
        (directory / "lock").unlink(missing_ok=True)
        folder = sources()
        try:
            cpp_extension.load(
                NAME,
                [str(path) for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cpp")])],
                extra_cflags=list(CFLAGS),
                extra_cuda_cflags=list(CUDA_CFLAGS),
                extra_include_paths=[str(folder)],
                build_directory=str(directory),
                with_cuda=True,
                is_python_module=False,
            )
        except Exception as error:  # RuntimeError, CalledProcessError, OSError, ValueError: by kind of failure
            raise BuildError(_explain(error)) from error


def _check_toolchain() -> None:
    """Raise BuildError that names the first missing tool and how to get it."""
    import torch

    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise BuildError(f"PyTorch's extension builder does not import ({error}); pip install setuptools") from error
    if shutil.which("ninja") is None:
        raise BuildError("ninja is not installed; pip install ninja")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise BuildError(f"there is no C++ compiler ({compiler}); install g++, or set CXX to yours")
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        raise BuildError(f"there is no Python.h in {headers}; install Python's headers (python3-dev, python3-devel)")
    wanted = str(torch.version.cuda)
    home = cpp_extension.CUDA_HOME
    nvcc = Path(home or "", "bin", "nvcc")
    if home is None or not nvcc.is_file():
        where = "no CUDA toolkit was found" if home is None else f"{nvcc} does not exist"
        raise BuildError(
            f"{where}; install the CUDA toolkit {wanted} (PyTorch's pip packages lack nvcc) and set CUDA_HOME"
        )
    found = _release(nvcc)
    if found is not None and found.split(".")[0] != wanted.split(".")[0]:
        raise BuildError(
            f"the CUDA toolkit at {home} is {found}, PyTorch was built with {wanted}; "
            f"install toolkit {wanted} (or PyTorch for CUDA {found}) and set CUDA_HOME"
        )


def _release(nvcc: Path) -> str | None:
    """The toolkit's version as nvcc prints it, such as 13.0; None where it prints something else.

    Raises BuildError where nvcc does not run.
    """
    try:
        printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"{nvcc} does not run ({error}); install the CUDA toolkit and set CUDA_HOME") from error
    match = re.search(r"release (\d+\.\d+)", printed)
    return match.group(1) if match else None


def _architectures() -> list[str]:
    """Compute capabilities of the visible GPUs, such as ["9.0"]. Raises BuildError where CUDA does not start."""
    import torch

    try:
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    except RuntimeError as error:  # a forked process, a driver that is too old, a GPU that is lost or another's alone
        raise BuildError(
            f"CUDA does not start in this process ({str(error).splitlines()[0]}); "
            "check the driver, and start workers with spawn, not fork"
        ) from error
    return [f"{major}.{minor}" for major, minor in sorted(capabilities)]


def _path_with_ninja() -> str:
    """PATH with pip's ninja on it, which an environment that was never activated leaves out."""
    path = os.environ.get("PATH", os.defpath)
    try:
        import ninja
    except ImportError:
        return path
    return f"{path}{os.pathsep}{ninja.BIN_DIR}"


def _explain(error: Exception) -> str:
    """First line of a failed build, or with REPRO_BUILD_DEBUG=1 its last lines."""
    if isinstance(error, OSError) and error.__cause__ is not None:
        error = OSError(error.__cause__)  # the loader's own words, which torch.ops.load_library leaves out
    lines = str(error).splitlines() or [type(error).__name__]
    if os.environ.get("REPRO_BUILD_DEBUG") == "1":
        return "the build failed:\n" + "\n".join(lines[-30:])
    return f"the build failed ({lines[0]}); set REPRO_BUILD_DEBUG=1 to see the compiler's last lines"


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables, and put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
