"""What the command line returns."""

from __future__ import annotations

CHECK_DID_NOT_HOLD = 1
"""Infeasible, gradients differ, over budget."""

WRONG_USE = 2
"""Wrong arguments, wrong files, an error in the user's own code."""

INTERRUPTED = 130
"""Ctrl-C, as shells report it."""
