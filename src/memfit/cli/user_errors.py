"""Separates errors of the user's own code from memfit's, and shows where in the user's code they are."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import memfit
from memfit.errors import MemfitError

_OURS = Path(memfit.__file__).parent
# The built-in models stand for a user's.
_MODELS = _OURS / "models"
_NOT_THEIRS = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@contextmanager
def users_own_errors(when: str) -> Iterator[None]:
    """Turn errors of the user's code inside the block into a ``MemfitError`` that says what happened where.

    Errors that were raised by our own code stay as they are.
    """
    try:
        yield
    except MemfitError:
        raise
    except SystemExit as error:
        raise MemfitError(f"{when}: it called sys.exit({error.code!r}); let the function return instead") from error
    except SyntaxError as error:
        raise MemfitError(f"{when}: {error.filename}, line {error.lineno}: SyntaxError: {error.msg}") from error
    except Exception as error:
        place = _place_of(error)
        if place is None:
            raise
        raise MemfitError(f"{when}: {place}{type(error).__name__}: {error}") from error


def _place_of(error: Exception) -> str | None:
    """Return where in the user's code ``error`` came from, "" for deep in a library; None where it is our own."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_theirs(Path(frame.filename))]
    if theirs:
        frame = theirs[-1]
        line = f" ({frame.line})" if frame.line else ""
        return f"{frame.filename}, line {frame.lineno}, in {frame.name}{line}: "
    return None if _is_ours(Path(frames[-1].filename)) else ""


def _is_theirs(path: Path) -> bool:
    if path.is_relative_to(_MODELS):
        return True
    if _is_ours(path) or not path.is_file():
        return False
    return not any(path.is_relative_to(folder) for folder in _NOT_THEIRS) and path != Path(sys.argv[0])


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(_OURS)
