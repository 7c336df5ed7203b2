"""Runs the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from memfit.cli.main import app


def memfit(*arguments: str, columns: int = 100) -> tuple[int, str, str]:
    """Run the command and return the exit code, standard output and what errors and warnings there are."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)}, prog_name="memfit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, without_stages(result.stderr)


def without_stages(errors: str) -> str:
    """Return what is left of standard error without the lines that name the stages of the work."""
    return "".join(line for line in errors.splitlines(keepends=True) if not line.startswith("memfit: "))
