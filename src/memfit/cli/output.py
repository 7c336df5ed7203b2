"""Where the commands print and write: tables and data to standard output, errors to standard error."""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

from rich.console import Console

from memfit.documents import check_writable
from memfit.errors import InfeasibleBudgetError, InvalidParameterError, MemfitError, PlanFileError

# Wide enough for every table.
_WIDTH_OF_FILES = 120
# How the files begin that memfit writes; a list of layers is written by hand.
_OURS = (b'"memfit-profile"', b'"memfit-plan"', b'"memfit-verification"', b'"memfit-layer-plan"', b"memfit</title>")
_HEAD_BYTES = 4096
_GZIP_MAGIC = b"\x1f\x8b"
_PLOTS = (".png", ".svg", ".pdf")


def console() -> Console:
    """Return a console on standard output as it is now; highlighting is left to the tables."""
    screen = Console(highlight=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        # A pipe or a file has no width, and rows on one line each can be searched.
        screen.width = _WIDTH_OF_FILES
    return screen


def print_json(document: object) -> None:
    """Print ``document`` for machines: one object, nothing else on standard output."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


def error_document(error: MemfitError) -> dict[str, object]:
    """Return ``error`` for machines: its type, its message, and for an infeasible budget the smallest feasible one."""
    document: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, InfeasibleBudgetError):
        document["minimum_bytes"] = error.minimum_bytes
    return {"error": document}


@contextmanager
def prints_aside(wanted: bool) -> Iterator[None]:
    """Where ``wanted``, send what the user's code prints inside the block to standard error.

    Standard output is then left for the one JSON object.
    """
    with redirect_stdout(sys.stderr) if wanted else nullcontext():
        yield


def print_message(kind: str, message: str) -> None:
    """Print one line to standard error, an "error", a "hint" or a "warning", as it is: no wrapping, no markup."""
    sys.stderr.write(f"{kind}: {' '.join(message.split())}\n")


def print_written(*paths: Path | None) -> None:
    """Print a line for each file that was written."""
    for path in paths:
        if path is not None:
            console().print(f"Wrote {path}.", markup=False, soft_wrap=True)


def check_outputs(*paths: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Raise before the work begins if an output cannot be written, is one of the ``inputs``, or is given twice."""
    read = list(inputs)
    written: list[Path] = []
    for path in paths:
        if path is None:
            continue
        for other in read:
            if _is_same_file(path, other):
                same = "" if str(path) == str(other) else f" ({other} is the same file)"
                raise InvalidParameterError(f"{path} is an input of this command{same}; write to another file")
        if any(_is_same_file(path, other) for other in written):
            raise InvalidParameterError(f"{path} is given for two outputs; write each to a file of its own")
        check_writable(path)
        refuse_other_content(path)
        written.append(path)


def refuse_other_content(path: Path) -> None:
    """Raise where ``path`` is a file that memfit did not write, such as a module that the TARGET imports.

    What memfit writes can be written over: its JSON files, compressed or not, its pages and its plots.
    """
    if not path.is_file() or path.suffix.lower() in _PLOTS:
        return
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(_GZIP_MAGIC):
        head = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(head, _HEAD_BYTES)
    if head.strip() and not any(mark in head for mark in _OURS):
        raise InvalidParameterError(
            f"{path} is there already, and memfit did not write it; write to another file, or remove this one first"
        )


def _is_same_file(path: Path, other: Path) -> bool:
    """Return whether both are one regular file, through links and whatever the spelling."""
    try:
        if path.exists() and other.exists():
            return path.is_file() and path.samefile(other)
        return path.resolve() == other.resolve()
    # Paths that cannot be resolved, such as a loop of links, are for check_writable to refuse.
    except (OSError, ValueError, RuntimeError):
        return False


def make_folder(path: Path) -> None:
    """Make ``path`` a folder, and those that it lies in, where they are not there yet."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanFileError(f"{path}: cannot be made a folder: {error.strerror}") from None
