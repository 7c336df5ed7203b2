"""Regions: the modules inside which the tape listens, and what becomes of the values that are made in each."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from enum import IntEnum

from torch import Tensor, nn

from memfit.graph.names import parse_value_name
from memfit.graph.outline import Address, OpCall, outline_of_names
from memfit.graph.plan import Decision, Plan
from memfit.runtime.call_arguments import is_strided


class Fate(IntEnum):
    """What becomes of a value after the op that made it; what is not saved comes back in the backward pass."""

    SAVE = 0
    DROP = 1
    OFFLOAD = 2


_FATES = {Decision.RECOMPUTE: Fate.DROP, Decision.OFFLOAD: Fate.OFFLOAD}

# What becomes of the outputs of one call: the same of all, or of each as told.
FatePattern = Fate | tuple[Fate, ...]


def fate_of(position: int, pattern: FatePattern) -> Fate:
    """Return what becomes of the output at ``position``."""
    if not isinstance(pattern, tuple):
        return pattern
    return pattern[position] if position < len(pattern) else Fate.SAVE


def has_drops(pattern: FatePattern) -> bool:
    """Return whether any output is dropped."""
    return pattern == Fate.DROP or (isinstance(pattern, tuple) and Fate.DROP in pattern)


def without_drops(pattern: FatePattern) -> FatePattern:
    """Return what is left of ``pattern`` where the op cannot be run again."""
    if isinstance(pattern, tuple):
        return tuple(Fate.SAVE if fate == Fate.DROP else fate for fate in pattern)
    return Fate.SAVE if pattern == Fate.DROP else pattern


class Place:
    """A module of a model, and whose tensors are met there: what an error message tells."""

    def __init__(self, path: str, model: nn.Module) -> None:
        self.path = path
        self._model = weakref.ref(model)

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as it exists."""
        return self._model()

    def owned_name(self, tensor: Tensor) -> str | None:
        """Return under which name the model owns ``tensor`` or what it is a view of, or None."""
        model = self._model()
        if model is None or not is_strided(tensor):
            return None
        address = tensor.untyped_storage().data_ptr()
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, owned in named:
                if is_strided(owned) and owned.untyped_storage().data_ptr() == address:
                    return f"the {kind} {name!r}"
        return None


Patterns = Mapping[str, bool | tuple[FatePattern, ...]]


class CallPlan:
    """What becomes of the values of one call of a recorded module.

    ``patterns`` maps an op's name to what becomes of its outputs at each of its calls with gradients in that call of
    the module, in order, or to True where everything is dropped. Calls beyond the list are saved. ``num_calls`` is how
    many calls the plan expects, where it knows.
    """

    def __init__(self, patterns: Patterns, num_calls: Mapping[str, int] | None = None) -> None:
        self.patterns = dict(patterns)
        self.num_calls = dict(num_calls or {})

    @property
    def num_decided(self) -> int:
        """How many op calls do not save everything."""
        return sum(
            self.num_calls.get(op, 1) if patterns is True else sum(pattern != Fate.SAVE for pattern in patterns or ())
            for op, patterns in self.patterns.items()
        )


class Region:
    """A recorded module, or one with saved-tensor hooks, and the decisions for the ops that run in it.

    ``records`` says that the ops inside are recorded, ``watches`` that what autograd saves inside passes hooks.
    ``patterns`` and ``num_calls`` are those of a `CallPlan`, for the module's first call with gradients since the last
    backward pass; ``later_calls`` has the plans of the calls after it. A call beyond those takes the plan that saves
    the fewest values. At most ``window_bytes`` of offloaded values are on their way at a time.
    """

    def __init__(
        self,
        path: str,
        model: nn.Module,
        patterns: Patterns,
        *,
        num_calls: Mapping[str, int] | None = None,
        later_calls: Sequence[CallPlan] = (),
        window_bytes: int = 0,
        records: bool = True,
        watches: bool = True,
    ) -> None:
        self.path = path
        self.place = Place(path, model)
        self.calls = (CallPlan(patterns, num_calls), *later_calls)
        self.beyond = max(range(len(self.calls)), key=lambda number: self.calls[number].num_decided)
        self.window_bytes = window_bytes
        self.records = records
        self.watches = watches
        # What the engine in C++ makes of the above, when it first gets here.
        self.in_native_form: object = None
        self._round: int | None = None
        self._num_calls = 0

    def next_call(self, pass_round: int) -> int:
        """Return the number of the call that begins now, in a pass of the round ``pass_round``."""
        if pass_round != self._round:
            self._round, self._num_calls = pass_round, 0
        self._num_calls += 1
        return self._num_calls - 1

    def call_plan(self, number: int) -> CallPlan:
        """Return the plan of the module's call of that number."""
        return self.calls[number if number < len(self.calls) else self.beyond]


def regions_of(plan: Plan, model: nn.Module) -> list[Region]:
    """Return the modules to record, or to put hooks around, for ``plan``."""
    calls: dict[str, list[_Outputs]] = {path: [] for path in plan.recorded_modules}
    for (module, call, op, number), fates in fates_by_address(plan).items():
        of_module = calls[module]
        of_module.extend({} for _ in range(call + 1 - len(of_module)))
        of_op = of_module[call].setdefault(op, [])
        of_op.extend({} for _ in range(number + 1 - len(of_op)))
        of_op[number] = fates
    watched = set(plan.hooked_modules)
    recording = []
    for path, outputs_of_calls in calls.items():
        first, *later = [_call_plan(outputs) for outputs in outputs_of_calls] or [CallPlan({})]
        recording.append(
            Region(
                path,
                model,
                first.patterns,
                num_calls=first.num_calls,
                later_calls=later,
                window_bytes=plan.window_bytes,
                watches=path in watched,
            )
        )
    return recording + [Region(path, model, {}, records=False) for path in plan.hooked_modules if path not in calls]


# Op name -> for each of its calls in one call of a module, what becomes of which output.
_Outputs = dict[str, list[dict[int, Fate]]]


def fates_by_address(plan: Plan) -> dict[Address, dict[int, Fate]]:
    """Return what becomes of which output of each op call in the plan's recorded modules.

    Where the profiled step reached one address several times (in passes that each had their backward pass), dropping
    takes precedence over offloading, and that over saving.
    """
    outline = plan.outline or outline_of_names(plan.decisions)
    outputs_of: dict[OpCall, dict[int, Fate]] = {}
    for text, decision in plan.decisions.items():
        name = parse_value_name(text)
        outputs_of.setdefault(OpCall(*name[:3]), {})[name.output] = _FATES.get(decision, Fate.SAVE)
    fates: dict[Address, dict[int, Fate]] = {}
    for op, address in zip(outline.ops, outline.addresses(plan.recorded_modules), strict=True):
        if address is not None:
            known = fates.setdefault(address, {})
            for position, fate in outputs_of.get(op, {}).items():
                known[position] = max(known.get(position, Fate.SAVE), fate, key=_PRECEDENCE.index)
    return fates


_PRECEDENCE = (Fate.SAVE, Fate.OFFLOAD, Fate.DROP)


def _call_plan(outputs: _Outputs) -> CallPlan:
    patterns = {op: _simplest([_pattern(each) for each in of_calls]) for op, of_calls in outputs.items()}
    return CallPlan(patterns, {op: len(of_calls) for op, of_calls in outputs.items()})


def _pattern(outputs: Mapping[int, Fate]) -> FatePattern:
    fates = tuple(outputs.get(position, Fate.SAVE) for position in range(max(outputs, default=0) + 1))
    return fates if len(set(fates)) > 1 else fates[0]


def _simplest(patterns: list[FatePattern]) -> bool | tuple[FatePattern, ...]:
    """Return the patterns of all calls, or one for them all where counting the calls can be spared."""
    if all(pattern == Fate.DROP for pattern in patterns):
        return True
    return any(pattern != Fate.SAVE for pattern in patterns) and tuple(patterns)
