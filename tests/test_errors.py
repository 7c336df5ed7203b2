"""The errors: how they travel between processes and threads, and which exit code each has."""

from __future__ import annotations

import copy
import pickle

import pytest

import memfit
from memfit import InfeasibleBudgetError, MemfitError
from memfit.cli.exit_codes import CHECK_DID_NOT_HOLD, WRONG_USE, exit_code_of

ERRORS = [value for name in memfit.__all__ if name.endswith("Error") and (value := getattr(memfit, name))]
MESSAGE = "what was given, what is allowed, what to do"


def made(kind: type[MemfitError]) -> MemfitError:
    return kind(MESSAGE, minimum_bytes=7) if issubclass(kind, InfeasibleBudgetError) else kind(MESSAGE)


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_pickled_and_copied_whole(kind: type[MemfitError]) -> None:
    error = made(kind)
    error.add_note("seen by worker 3")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert str(again) == MESSAGE
        assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", ERRORS)
def test_only_checks_that_do_not_hold_exit_1(kind: type[MemfitError]) -> None:
    is_check = kind in (memfit.InfeasibleBudgetError, memfit.VerificationError)
    assert exit_code_of(made(kind)) == (CHECK_DID_NOT_HOLD if is_check else WRONG_USE)
