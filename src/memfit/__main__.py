"""The entry point of ``memfit`` and ``python -m memfit``; imports little, so that Ctrl-C is handled from the start."""

from __future__ import annotations

import sys

from memfit.cli.exit_codes import INTERRUPTED


def run() -> None:
    """Run the command line."""
    try:
        from memfit.cli.main import run as run_commands

        run_commands()
    except KeyboardInterrupt:
        # Once a command runs, it reports its own interruptions.
        sys.stderr.write("error: interrupted before anything was done\n")
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    run()
