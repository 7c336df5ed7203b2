"""Where the commands print and write: tables to standard output, mistakes in one line to standard error, folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from memfit.errors import PlanFileError
from memfit.layers.document import check_writable


def console() -> Console:
    """Return a console on standard output as it is now; highlighting is left to the tables."""
    return Console(highlight=False)


def print_json(document: object) -> None:
    """Print ``document`` for machines: one object, nothing else on standard output."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


def print_error(message: str) -> None:
    """Print one line to standard error, as it is: no wrapping, no markup."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


def print_warning(message: str) -> None:
    """Print one line to standard error that something is not as one would expect."""
    sys.stderr.write(f"warning: {' '.join(message.split())}\n")


def check_outputs(*paths: Path | None) -> None:
    """Raise where one of the files that were asked for cannot be written: before the work, not after it."""
    for path in paths:
        if path is not None:
            check_writable(path)


def make_folder(path: Path) -> None:
    """Make ``path`` a folder, and those that it lies in, where they are not there yet."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanFileError(f"{path}: cannot be made a folder: {error.strerror}") from None
