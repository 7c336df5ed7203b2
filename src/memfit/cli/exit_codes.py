"""What the command line returns."""

from __future__ import annotations

from memfit.errors import InfeasibleBudgetError, MemfitError, VerificationError

CHECK_DID_NOT_HOLD = 1
"""Infeasible, gradients differ, over budget."""

WRONG_USE = 2
"""Wrong arguments, wrong files, an error in the user's own code."""

INTERRUPTED = 130
"""Ctrl-C, as shells report it."""


def exit_code_of(error: MemfitError) -> int:
    """Return the exit code for ``error``: whether it is about a check, or about how memfit was used."""
    return CHECK_DID_NOT_HOLD if isinstance(error, (InfeasibleBudgetError, VerificationError)) else WRONG_USE
