"""Plans for batches of many sizes: which plan a forward pass runs by, found by the shapes of its inputs. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from memfit.graph.inputs import Input, larger_inputs
from memfit.graph.plan import Plan


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """The plan for one size, and the seconds that its step is predicted to take.

    ``sizes`` has a length for each size of the batches that varies on its own. ``plan.inputs`` are the inputs of a step
    of that size.
    """

    sizes: tuple[int, ...]
    plan: Plan
    step_seconds: float

    @property
    def size_in_words(self) -> str:
        """The sizes as messages have them: ``128``, or ``8 x 128``."""
        return " x ".join(map(str, self.sizes))


class SizePlans:
    """Plans, the fastest first. A step runs by the first whose inputs are at least as large in every dimension.

    A plan never takes more memory for a smaller step than for the step that it was made for. Found plans are remembered
    by the shapes. ``entries`` are by ascending predicted overhead, those of one overhead by ascending size; ``largest``
    is the plan for the largest of the batches that were given.
    """

    def __init__(self, entries: Sequence[SizedPlan], largest: SizedPlan) -> None:
        self.entries = tuple(sorted(entries, key=_order))
        self.largest = largest
        self._places: dict[tuple[Input, ...], tuple[int, ...]] = {}

    def add(self, entry: SizedPlan) -> None:
        """Add a plan for one more size."""
        self.entries = tuple(sorted([*self.entries, entry], key=_order))
        self._places.clear()

    def replace_plan(self, place: int, plan: Plan) -> None:
        """Put another plan in the place of one."""
        replaced = self.entries[place]
        entry = SizedPlan(replaced.sizes, plan, replaced.step_seconds)
        self.entries = (*self.entries[:place], entry, *self.entries[place + 1 :])
        if replaced is self.largest:
            self.largest = entry

    def places_for(self, inputs: tuple[Input, ...]) -> tuple[int, ...]:
        """Return the places of the plans for a step on ``inputs`` among the entries; none where none is large enough.

        The first is the fastest; each that follows recomputes at least as much.
        """
        if inputs not in self._places:
            self._places[inputs] = tuple(
                place
                for place, entry in enumerate(self.entries)
                if _have_form(inputs, entry.plan.inputs) and not larger_inputs(entry.plan.inputs, inputs)
            )
        return self._places[inputs]

    def is_of_their_form(self, inputs: tuple[Input, ...]) -> bool:
        """Return whether ``inputs`` differ from those planned for in nothing but sizes."""
        return _have_form(inputs, self.largest.plan.inputs)


def _order(entry: SizedPlan) -> tuple[float, int]:
    return entry.plan.predicted_overhead, prod(entry.sizes)


def _have_form(inputs: Sequence[Input], planned: Sequence[Input]) -> bool:
    """Return whether ``planned`` has each of ``inputs`` with the same type and number of dimensions."""
    forms = {(entry.name, entry.dtype, len(entry.shape)) for entry in planned}
    return all((entry.name, entry.dtype, len(entry.shape)) in forms for entry in inputs)
