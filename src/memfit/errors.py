"""Every error memfit raises on purpose. Nothing but error classes lives here.

MemfitError
├── InvalidParameterError (ValueError)      an argument outside what is allowed
├── EmptyProfilesError (ValueError)         something asked of an empty list of layers
├── LayerIndexError (IndexError)            a layer that is not there
├── CheckpointMissingError (LookupError)    nothing stored for a layer
├── CheckpointCapacityError                 no free checkpoint slot
├── InfeasibleBudgetError                   no plan fits the budget; carries the smallest that does
├── VerificationError                       a plan that failed a check when it was run
├── PlanFileError (ValueError)              a file that is not what it claims to be
└── StaleValueError (RuntimeError)          a tensor changed between forward and backward
"""

from __future__ import annotations

from functools import partial
from typing import Any


class MemfitError(Exception):
    """The root of every error that memfit raises on purpose."""


class InvalidParameterError(MemfitError, ValueError):
    """An argument is outside what is allowed; the message says what was given and what is allowed."""


class EmptyProfilesError(MemfitError, ValueError):
    """Something was asked of an empty list of layers that only a layer can answer."""


class LayerIndexError(MemfitError, IndexError):
    """A layer was named that does not exist."""


class CheckpointMissingError(MemfitError, LookupError):
    """No activation is stored for the layer that was asked for."""


class CheckpointCapacityError(MemfitError):
    """Every checkpoint slot is taken and the layer to be stored has none of its own."""


class InfeasibleBudgetError(MemfitError):
    """No plan fits the budget. ``minimum_bytes`` is the smallest budget for which one was found.

    The message says whether none can be smaller, or below which size it is proven that none is.
    """

    def __init__(self, message: str, *, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is copied, and sent between processes, by calling its class with ``args`` alone.
        return partial(type(self), minimum_bytes=self.minimum_bytes), self.args, vars(self)


class VerificationError(MemfitError):
    """A plan failed a check when it was run: its gradients differ, or its peak is over the budget."""


class PlanFileError(MemfitError, ValueError):
    """A profile, plan or layer file cannot be read: cut off, of another kind, or of a later version."""


class StaleValueError(MemfitError, RuntimeError):
    """A tensor that a replay reads was changed between the forward and the backward pass."""
