"""Progress of long work: stages, and steps within them. Long functions take one and report to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Receives the start of each stage and the end of each step in it."""

    def stage(self, name: str, num_steps: int | None = None) -> None:
        """A stage begins. ``num_steps`` is how many steps it will have, None where that is not known."""

    def advance(self) -> None:
        """A step of the stage is done."""


class Quiet:
    """Shows nothing."""

    def stage(self, name: str, num_steps: int | None = None) -> None:
        """Show nothing."""

    def advance(self) -> None:
        """Show nothing."""


class StageLines:
    """Prints each stage on a line of standard error when it begins, for logs and pipes."""

    def __init__(self) -> None:
        self._last = ""

    def stage(self, name: str, num_steps: int | None = None) -> None:
        """Print the name, unless the same stage goes on."""
        if name != self._last:
            self._last = name
            sys.stderr.write(f"memfit: {name}\n")
            sys.stderr.flush()

    def advance(self) -> None:
        """Print nothing."""


@contextmanager
def progress_on_terminal() -> Iterator[Progress]:
    """Show a bar on standard error while the block runs, where that is a terminal; else nothing."""
    if not sys.stderr.isatty():
        yield Quiet()
        return
    # Only a terminal needs it; everything else starts faster without.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with RichProgress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar)


@contextmanager
def progress_of_command() -> Iterator[Progress]:
    """Show a bar where standard error is a terminal, else one line for each stage."""
    if not sys.stderr.isatty():
        yield StageLines()
        return
    with progress_on_terminal() as progress:
        yield progress


class _Bar:
    """A bar with the number of steps done and their total."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def stage(self, name: str, num_steps: int | None = None) -> None:
        # A total cannot be taken back, so each stage is a task of its own.
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=num_steps)

    def advance(self) -> None:
        self._bar.advance(self._task)
