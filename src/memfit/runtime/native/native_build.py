"""Builds the C++ part of the engine for the torch at hand, once, and loads it.

Where it cannot be built (no compiler, another platform), the engine of `tape.py` does the same in Python, and slower.
``MEMFIT_NATIVE=0`` asks for that; ``MEMFIT_CACHE`` says where to keep what was built.
"""

from __future__ import annotations

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from memfit.progress import Progress
from memfit.runtime.native.shared_header import SHARED_HEADER, shared_header

_SOURCES = Path(__file__).parent
_MODULE = "memfit_native_tape"
# A quarter less time to build than with -O2, and engines as fast: its time goes into calls of torch and into memory.
_OPTIMIZATION = "-O1"
# The engine needs less memory than this; without collections of garbage, GCC compiles it in a sixth less time.
_GARBAGE_COLLECTION = ("--param", "ggc-min-heapsize=1000000")


@functools.cache
def native_module() -> Any:
    """Return the built and loaded module, or None where there is none. The first call on a machine builds it."""
    reason = why_not_native()
    if reason is not None:
        if sys.platform == "linux" and os.environ.get("MEMFIT_NATIVE") != "0":
            warnings.warn(
                f"{reason}. Until then memfit runs on its engine in Python, which does the same and takes about 5 "
                "times longer for each op it records; MEMFIT_NATIVE=0 switches this warning off",
                stacklevel=2,
            )
        return None
    try:
        return _loaded(_built())
    except (OSError, ImportError, RuntimeError) as error:
        warnings.warn(
            f"the C++ part of memfit could not be built with {_compiler()} ({error}); the engine in Python does the "
            "same, for more time on each op. MEMFIT_NATIVE=0 asks for that one",
            stacklevel=2,
        )
        return None


def _compiler() -> str | None:
    """Return the path of the C++ compiler, None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def _built() -> Path:
    """Return the library for this torch and this Python, building it if needed."""
    library = _library()
    if library.exists():
        return library
    folder = library.parent
    with (folder / f"{library.name}.lock").open("w") as lock:
        # If many processes start at once, one builds and the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _build(Path(scratch)).replace(library)
    return library


def _build(scratch: Path) -> Path:
    """Return the library, built in the folder ``scratch``: all sources at the same time, then linked."""
    (scratch / SHARED_HEADER).write_text(shared_header())
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    compile_command = [*_compile_command(), f"-I{scratch}"]
    with ThreadPoolExecutor(len(sources)) as threads:
        compiled = [
            threads.submit(_run, [*compile_command, str(source), "-o", str(target)])
            for source, target in zip(sources, objects, strict=True)
        ]
        for each in compiled:
            each.result()
    library = scratch / "built.so"
    _run([str(_compiler()), "-shared", *map(str, objects), *_link_options(), "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(_first_error(run.stderr))


def _library() -> Path:
    """Return where the library lies that the compiler builds from these sources, for this torch and this Python."""
    sources = [path.read_text() for suffix in ("cpp", "h") for path in sorted(_SOURCES.glob(f"*.{suffix}"))]
    torch_build = f"{torch.__version__} {torch.version.git_version}"
    commands = [*_compile_command(), *_link_options()]
    ingredients = "\n".join([*sources, shared_header(), torch_build, sys.version, *commands])
    return _writable_folder() / f"{_MODULE}-{hashlib.sha256(ingredients.encode()).hexdigest()[:16]}.so"


def _compile_command() -> list[str]:
    includes = (Path(torch.__file__).parent / "include", Path(sysconfig.get_paths()["include"]))
    return [
        str(_compiler()),
        *("-c", _OPTIMIZATION, "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"),
        *_GARBAGE_COLLECTION,
        f"-DMEMFIT_MODULE={_MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in includes),
    ]


def _link_options() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


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
    if _compiler() is None:
        compiler = os.environ.get("CXX", "c++")
        return f"no C++ compiler {compiler!r} was found: install one, or set CXX"
    return None


def is_built() -> bool:
    """Return whether the engine in C++ needs no building: it is there, or cannot be built here."""
    try:
        return why_not_native() is not None or _library().exists()
    except (OSError, RuntimeError):
        return True


def build_engine(progress: Progress) -> None:
    """Build the engine in C++ where it is still to be built, as a stage of its own."""
    if not is_built():
        progress.stage("building the engine in C++ for this torch (once, about 15 s)")
        native_module()
