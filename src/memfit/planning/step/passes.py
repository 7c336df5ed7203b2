"""The forward passes of a step, and the values that the engine does not tell apart because they belong to several.

The engine counts the calls of modules and ops anew in each pass (`memfit.graph.outline`). So where a step has several,
as with gradient accumulation, one decision is for all values at an address. And each pass has its own records: what is
read in a later pass than the one that made it is held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.outline import StepOutline, forward_passes


class Passes:
    """``of_op`` is the number of each op's forward pass, -1 where it ran in none; ``ends`` the last op of each."""

    def __init__(self, profile: ModelProfile) -> None:
        ops = profile.ops
        if profile.module_calls:
            spans = [(call.begin, call.end) for call in forward_passes(profile.module_calls) if call.begin < call.end]
        else:
            spans = [(0, max((i + 1 for i, op in enumerate(ops) if op.module is not None), default=0))]
        self.of_op = [-1] * len(ops)
        for number, (begin, end) in enumerate(spans):
            for op in range(begin, end):
                if ops[op].module is not None:
                    self.of_op[op] = number
        self.ends = [end - 1 for _, end in spans]

    def values_read_later(self, profile: ModelProfile) -> set[int]:
        """Return the values that ops of the forward pass read in another pass than the one that made them."""
        return {
            value
            for number, op in zip(self.of_op, profile.ops, strict=True)
            if number >= 0
            for value in op.inputs
            if (made_by := profile.values[value].op_index) is not None and self.of_op[made_by] != number
        }


class AlikeValues:
    """For each value the others with which it shares its decision, where there are any."""

    def __init__(self, profile: ModelProfile, outline: StepOutline, recorded_modules: Collection[str]) -> None:
        self._others: dict[int, tuple[int, ...]] = {}
        for values in _values_by_address(profile, outline, recorded_modules):
            if len(values) > 1:
                self._others |= dict.fromkeys(values, tuple(values))

    def __bool__(self) -> bool:
        return bool(self._others)

    def with_others(self, values: Iterable[int]) -> frozenset[int]:
        """Return ``values`` and all that are like one of them."""
        values = frozenset(values)
        return values.union(*(self._others[value] for value in values if value in self._others)) if self else values

    def without_parts(self, values: Set[int]) -> frozenset[int]:
        """Return those of ``values`` of which all that are alike are among them."""
        if not self:
            return frozenset(values)
        return frozenset(value for value in values if all(other in values for other in self._others.get(value, ())))


def _values_by_address(
    profile: ModelProfile, outline: StepOutline, recorded_modules: Collection[str]
) -> Iterable[list[int]]:
    by_address: dict[object, list[int]] = {}
    ops = [op for op in profile.ops if op.phase is Phase.FORWARD and op.module is not None and op.has_gradients]
    for op, address in zip(ops, outline.addresses(recorded_modules), strict=True):
        for position, value in enumerate(op.outputs):
            if address is not None and value is not None:
                by_address.setdefault((address, position), []).append(value)
    return by_address.values()


def are_told_apart(
    profile: ModelProfile, outline: StepOutline, recorded_modules: Collection[str], decisions: Mapping[int, object]
) -> bool:
    """Return whether values with different ``decisions`` have different addresses in ``recorded_modules``."""
    return all(
        len({decisions.get(value) for value in values}) == 1
        for values in _values_by_address(profile, outline, recorded_modules)
    )
