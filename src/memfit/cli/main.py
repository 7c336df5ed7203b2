"""The ``memfit`` command: global options, exit codes, and the list of commands. Each command has its own file.

Exit codes: 0 done, 1 a check did not hold, 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from memfit._version import __version__
from memfit.cli.commands import (
    demo_command,
    fit_command,
    frontier_command,
    plan_command,
    profile_command,
    report_command,
    tune_command,
    verify_command,
)
from memfit.cli.exit_codes import INTERRUPTED, exit_code_of
from memfit.cli.options import is_json_wanted
from memfit.cli.output import error_document, print_json, print_message
from memfit.errors import InfeasibleBudgetError, MemfitError
from memfit.units import budget_text

_EXAMPLES = """
[bold]Examples[/]

memfit demo

memfit fit memfit.models:gpt --arg layers=12 --budget 300MiB

memfit profile train.py:build -o profile.json

memfit plan profile.json --budget 2GiB -o plan.json

memfit verify train.py:build plan.json
"""


class _ErrorsInOneLine(TyperGroup):
    """Turns memfit's errors into a line on standard error and an exit code; others are bugs and keep their trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: print_message("warning", str(message))
                return super().invoke(ctx)
        except MemfitError as error:
            if is_json_wanted(ctx):
                print_json(error_document(error))
            _report(ctx, str(error))
            if isinstance(error, InfeasibleBudgetError) and not ctx.params.get("debug"):
                print_message("hint", f"the smallest budget is --budget {budget_text(error.minimum_bytes)}")
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt as error:
            _report(ctx, "interrupted; the model is restored, and no file is half written")
            raise typer.Exit(INTERRUPTED) from error


def _report(ctx: Any, message: str) -> None:
    """Print the error that is being handled: its ``message``, or with ``--debug`` its whole trace."""
    if ctx.params.get("debug"):
        traceback.print_exc()
    else:
        print_message("error", message)


app = typer.Typer(
    cls=_ErrorsInOneLine,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fits a PyTorch training step into the memory you have, at the lowest slowdown the hardware allows.",
    epilog=_EXAMPLES,
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


app.command("demo")(demo_command.demo)
app.command("fit")(fit_command.fit)
app.command("profile")(profile_command.profile)
app.command("plan")(plan_command.plan)
app.command("frontier")(frontier_command.frontier)
app.command("verify")(verify_command.verify)
app.command("tune")(tune_command.tune)
app.command("report")(report_command.report)


def run() -> None:
    """Run the commands; what the ``memfit`` script calls is in ``memfit.__main__``."""
    # Without a C++ compiler, torch's profiler measures memory, and torch 2.13 logs each of its starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        app(prog_name="memfit")
    except BrokenPipeError:
        # The reader (head, less) has gone. Point standard output away so that Python's last flush is quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
