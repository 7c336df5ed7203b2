"""Plans for batches of many sizes: which plan a forward pass runs by, found by the shapes of its inputs. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.graph.inputs import Input
from memfit.graph.plan import Plan


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """The plan for one size, and the seconds that its step is predicted to take.

    ``size`` is the length of the dimension that varies most. ``plan.inputs`` are the inputs of a step of that size.
    """

    size: int
    plan: Plan
    step_seconds: float


class SizePlans:
    """Plans by ascending size. A step runs by the first whose inputs are at least as large in every dimension.

    Between two sizes that plan is a little slower than one made for the size itself, and never takes more memory than
    the step that it was made for. Found plans are remembered by the shapes.
    """

    def __init__(self, entries: Sequence[SizedPlan]) -> None:
        self._entries = sorted(entries, key=lambda entry: entry.size)
        self._places: dict[tuple[Input, ...], int | None] = {}

    @property
    def entries(self) -> tuple[SizedPlan, ...]:
        """The plans, by ascending size."""
        return tuple(self._entries)

    @property
    def largest(self) -> SizedPlan:
        """The plan for the largest size."""
        return self._entries[-1]

    def add(self, entry: SizedPlan) -> None:
        """Add a plan for one more size."""
        self._entries = sorted([*self._entries, entry], key=lambda each: each.size)
        self._places.clear()

    def replace_largest(self, entry: SizedPlan) -> None:
        """Put another plan in the place of that for the largest size."""
        self._entries[-1] = entry
        self._places.clear()

    def place_for(self, inputs: tuple[Input, ...]) -> int | None:
        """Return the place of the plan for a step on ``inputs`` among the entries, None where none is large enough."""
        if inputs not in self._places:
            places = (place for place, entry in enumerate(self._entries) if _is_within(inputs, entry.plan.inputs))
            self._places[inputs] = next(places, None)
        return self._places[inputs]

    def is_of_their_form(self, inputs: tuple[Input, ...]) -> bool:
        """Return whether ``inputs`` differ from those planned for in nothing but sizes."""
        planned = {entry.name: entry for entry in self.largest.plan.inputs}
        return all(
            entry.name in planned
            and entry.dtype == planned[entry.name].dtype
            and len(entry.shape) == len(planned[entry.name].shape)
            for entry in inputs
        )


def _is_within(inputs: tuple[Input, ...], planned: tuple[Input, ...]) -> bool:
    """Return whether each of ``inputs`` is there in ``planned``, of the same type and no smaller in any dimension."""
    by_name = {entry.name: entry for entry in planned}
    for entry in inputs:
        other = by_name.get(entry.name)
        if other is None or other.dtype != entry.dtype or len(other.shape) != len(entry.shape):
            return False
        if any(size > most for size, most in zip(entry.shape, other.shape, strict=True)):
            return False
    return True
