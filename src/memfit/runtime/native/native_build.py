"""Builds the C++ part of the engine for the torch at hand, once, and loads it.

Where it cannot be built (no compiler, another platform), the engine of `tape.py` does the same in Python, and slower.
``MEMFIT_NATIVE=0`` asks for that; ``MEMFIT_CACHE`` says where to keep what was built.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memfit.progress import Progress
from memfit.runtime.native.shared_header import SHARED_HEADER, shared_header

_SOURCES = Path(__file__).parent
_MODULE = "memfit_native_tape"
_ENGINE_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")
_METER_LIBRARIES = ("-lc10", "-ltorch_cpu")
_METER = "allocation_meter.cpp"


@functools.cache
def native_module() -> Any:
    """Return the built and loaded module, or None where there is none. The first call on a machine builds it."""
    if sys.platform == "linux" and os.environ.get("MEMFIT_NATIVE") != "0" and (reason := why_not_native()) is not None:
        warnings.warn(
            f"{reason}. Until then memfit runs on its engine in Python, which does the same and takes about 5 times "
            "longer for each op it records; MEMFIT_NATIVE=0 switches this warning off",
            stacklevel=2,
        )
    return _usable(lambda compiler: _loaded(_built(compiler)))


@functools.cache
def native_allocation_meter() -> ctypes.CDLL | None:
    """Return the library of ``allocation_meter.cpp``, or None where there is none. It is built in seconds."""
    library: ctypes.CDLL | None = _usable(
        lambda compiler: ctypes.CDLL(str(_built(compiler, _METER, ("-lc10", "-ltorch_cpu"))))
    )
    return library


def _usable(built_by: Callable[[str], Any]) -> Any:
    """Return what is built with the compiler at hand, None where that cannot be."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if why_not_native() is not None or compiler is None:
        return None
    try:
        return built_by(compiler)
    except (OSError, ImportError, RuntimeError) as error:
        warnings.warn(
            f"the C++ part of memfit could not be built with {compiler} ({error}); the engine in Python does the same, "
            "for more time on each op. MEMFIT_NATIVE=0 asks for that one",
            stacklevel=3,
        )
        return None


def _built(compiler: str, main: str = "module.cpp", libraries: Sequence[str] = _ENGINE_LIBRARIES) -> Path:
    """Return the library for this torch and this Python, building it if needed."""
    command = _command(compiler, main, libraries)
    library = _library(command, main)
    if library.exists():
        return library
    folder = library.parent
    with (folder / f"{library.name}.lock").open("w") as lock:
        # If many processes start at once, one builds and the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                result = Path(scratch) / library.name
                (Path(scratch) / SHARED_HEADER).write_text(shared_header())
                options = [f"-I{scratch}", "-o", str(result)]
                run = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
                if run.returncode != 0:
                    raise RuntimeError(_first_error(run.stderr))
                result.replace(library)
    return library


def _library(command: list[str], main: str = "module.cpp") -> Path:
    """Return where the library lies that ``command`` builds from this source, for this torch and this Python."""
    # The meter includes none of the other files.
    all_sources = sorted(path for path in _SOURCES.iterdir() if path.suffix in (".h", ".cpp") and path.name != _METER)
    sources = [path.read_text() for path in ([_SOURCES / main] if main == _METER else all_sources)]
    torch_build = f"{torch.__version__} {torch.version.git_version}"
    shared = "" if main == _METER else shared_header()
    ingredients = "\n".join([*sources, shared, torch_build, sys.version, *command])
    name = "memfit_allocation_meter" if main == _METER else _MODULE
    return _writable_folder() / f"{name}-{hashlib.sha256(ingredients.encode()).hexdigest()[:16]}.so"


def _command(compiler: str, main: str, libraries: Sequence[str]) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    includes = (torch_folder / "include", Path(sysconfig.get_paths()["include"]))
    return [
        compiler,
        *("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w"),
        f"-DMEMFIT_MODULE={_MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in includes),
        str(_SOURCES / main),
        f"-L{torch_folder / 'lib'}",
        *libraries,
    ]


def _writable_folder() -> Path:
    """Return the folder for libraries: MEMFIT_CACHE, the user's cache, or a temporary folder if there is none."""
    given = os.environ.get("MEMFIT_CACHE")
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        return Path(given)
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass  # No home, or one that cannot be written to.
    folder = Path(tempfile.gettempdir()) / f"memfit-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise RuntimeError(f"{folder} is owned by another user; set MEMFIT_CACHE to a folder of your own")
    return folder


def _first_error(output: str) -> str:
    lines = output.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _loaded(library: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(library))
    spec = importlib.util.spec_from_file_location(_MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def why_not_native() -> str | None:
    """Return why the engine in C++ cannot be used here, None if it can."""
    if os.environ.get("MEMFIT_NATIVE") == "0":
        return "MEMFIT_NATIVE=0"
    if sys.platform != "linux":
        return f"the engine in C++ is built on Linux only, and this is {sys.platform}"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler {compiler!r} was found: install one, or set CXX"
    return None


def is_built() -> bool:
    """Return whether the engine in C++ needs no building: it is there, or cannot be built here."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if why_not_native() is not None or compiler is None:
        return True
    try:
        return _library(_command(compiler, "module.cpp", _ENGINE_LIBRARIES)).exists()
    except (OSError, RuntimeError):
        return True


def build_engine(progress: Progress) -> None:
    """Build the engine in C++ where it is still to be built, as a stage of its own."""
    if not is_built():
        progress.stage("building the engine in C++ for this torch (once, about 30 s)")
        native_module()
