"""The ``memfit`` command: global options, exit codes, and the list of commands. Each command has its own file.

Exit codes: 0 done, 1 a check did not hold, 2 wrong use.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from memfit._version import __version__
from memfit.cli import demo_command, plan_command
from memfit.cli.output import print_error
from memfit.errors import InfeasibleBudgetError, MemfitError

CHECK_DID_NOT_HOLD = 1
WRONG_USE = 2


class _ErrorsInOneLine(TyperGroup):
    """Turns memfit's errors into a line on standard error and an exit code; others are bugs and keep their trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MemfitError as error:
            if ctx.params.get("debug"):
                raise
            print_error(str(error))
            raise typer.Exit(CHECK_DID_NOT_HOLD if isinstance(error, InfeasibleBudgetError) else WRONG_USE) from error


app = typer.Typer(
    cls=_ErrorsInOneLine,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fits a PyTorch training step into the memory you have, at the lowest slowdown the hardware allows.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memfit {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole trace of an error.")] = False,
) -> None:
    """Read the options that stand before the command; typer takes the help from the app itself."""


app.command("plan")(plan_command.plan)
app.command("demo")(demo_command.demo)


def run() -> None:
    """Run the command line; this is what the ``memfit`` script calls."""
    try:
        app(prog_name="memfit")
    except BrokenPipeError:
        # The reader (head, less) has gone. Point standard output away so that Python's last flush is quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
