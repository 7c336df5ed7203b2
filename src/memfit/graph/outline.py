"""Where a plan's values are found while a step runs: the op calls of a profiled step and the module calls around them.

The engine counts, in each call of a recorded module, the calls of each op that run with gradients enabled. So a value's
address does not depend on other modules, on calls without gradients, or on how often the step ran. Calls of a module
are numbered anew in each forward pass, so that alike values of several passes, as in gradient accumulation, share an
address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from memfit.graph.model_profile import ModelProfile, ModuleCall, Phase
from memfit.graph.names import is_within, parse_value_name


class OpCall(NamedTuple):
    """An op call as values are named after it: the ``call``-th of ``op`` in the module at path ``module``."""

    module: str
    op: str
    call: int


class Address(NamedTuple):
    """An op call as the engine finds it: the ``number``-th of ``op`` in the ``call``-th call of a recorded module."""

    module: str
    call: int
    op: str
    number: int


@dataclass(frozen=True, slots=True)
class StepOutline:
    """The op calls of a forward pass with gradients, in order, and the calls of modules in which they ran.

    ``begin`` and ``end`` of ``module_calls`` are places in ``ops``. Without ``module_calls``, each module counts as
    called once, with all the ops in it and in modules below its path.
    """

    ops: tuple[OpCall, ...]
    module_calls: tuple[ModuleCall, ...] = ()

    def addresses(self, recorded_modules: Collection[str]) -> list[Address | None]:
        """Return the address of each op call; None where it ran in none of ``recorded_modules``."""
        num_calls: Counter[tuple[object, str]] = Counter()
        addresses: list[Address | None] = []
        for op, (key, around) in zip(self.ops, self._around(recorded_modules), strict=True):
            if around is None:
                addresses.append(None)
                continue
            addresses.append(Address(*around, op.op, num_calls[key, op.op]))
            num_calls[key, op.op] += 1
        return addresses

    @property
    def entries(self) -> tuple[str, ...]:
        """The modules with which forward passes begin: the model, or parts of it that the step calls by themselves."""
        if not self.module_calls:
            return ("",)
        return tuple(dict.fromkeys(call.path for call in forward_passes(self.module_calls)))

    @property
    def num_passes(self) -> int:
        """The number of forward passes."""
        return sum(1 for _ in forward_passes(self.module_calls)) or 1

    def num_calls(self, recorded_modules: Collection[str]) -> dict[tuple[str, int, str], int | None]:
        """Return how often each op is called in each call of each recorded module, by path, number and op.

        It is None where forward passes differ in it.
        """
        num_passes = Counter((call.path, call.number) for call in self.module_calls)
        num_calls: dict[tuple[str, int, str], int | None] = {}
        # An op's first call in each call of a module comes before its second one, and so on.
        for address, times in Counter(self.addresses(recorded_modules)).items():
            if address is not None:
                module, call, op, number = address
                is_in_all_passes = times == (num_passes[module, call] or 1)
                is_alike = is_in_all_passes and num_calls.get((module, call, op), 0) is not None
                num_calls[module, call, op] = number + 1 if is_alike else None
        return num_calls

    def _around(self, recorded_modules: Collection[str]) -> Iterator[tuple[object, tuple[str, int] | None]]:
        """Yield for each op which call of which recorded module it runs in, with a key of that very call."""
        if not self.module_calls:
            for op in self.ops:
                paths = [path for path in recorded_modules if is_within(op.module, path)]
                path = max(paths, key=len, default=None)
                yield path, None if path is None else (path, 0)
            return
        recorded = set(recorded_modules)
        following = [call for call in self.module_calls if call.path in recorded]
        following.reverse()
        open_calls: list[ModuleCall] = []
        for place in range(len(self.ops)):
            while open_calls and open_calls[-1].end <= place:
                open_calls.pop()
            while following and following[-1].begin <= place:
                call = following.pop()
                if call.end > place:
                    open_calls.append(call)
            innermost = open_calls[-1] if open_calls else None
            yield id(innermost), None if innermost is None else (innermost.path, innermost.number)


def forward_passes(module_calls: Iterable[ModuleCall]) -> Iterator[ModuleCall]:
    """Yield those of the calls, given in the order in which they began, that lie in no other."""
    end = 0
    for call in module_calls:
        if call.begin >= end:
            yield call
            end = call.end


def outline_of(profile: ModelProfile) -> StepOutline:
    """Return the outline of the step in ``profile``."""
    place_of = []
    ops: list[OpCall] = []
    for op in profile.ops:
        place_of.append(len(ops))
        if op.phase is Phase.FORWARD and op.module is not None and op.has_gradients:
            ops.append(OpCall(op.module, op.op, op.call))
    place_of.append(len(ops))
    calls = tuple(
        ModuleCall(call.path, call.number, place_of[call.begin], place_of[call.end], call.num_backward)
        for call in profile.module_calls
    )
    return StepOutline(tuple(ops), calls)


def outline_of_names(names: Collection[str]) -> StepOutline:
    """Return the outline of a step of which only the values are known, by name, in the order in which they are made."""
    calls = (parse_value_name(name) for name in names)
    return StepOutline(tuple(dict.fromkeys(OpCall(name.module, name.op, name.call) for name in calls)))
