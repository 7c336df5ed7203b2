"""Where the ``memfit`` command and ``python -m memfit`` begin, with next to nothing imported before Ctrl-C is heard."""

from __future__ import annotations

import sys

from memfit.cli.exit_codes import INTERRUPTED


def run() -> None:
    """Run the command line."""
    try:
        from memfit.cli.main import run as run_commands

        run_commands()
    except KeyboardInterrupt:
        # Once a command runs it tells of its own interruptions.
        sys.stderr.write("error: interrupted before anything was done\n")
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    run()
