"""The planned modules, in which the engine records ops or hooks saves, and the decisions for their values."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from enum import IntEnum

from torch import Tensor, nn

from memfit.graph.names import parse_value_name
from memfit.graph.outline import Address, OpCall, StepOutline, outline_of_names
from memfit.graph.plan import Decision, Plan
from memfit.runtime.engine.call_arguments import is_strided


class Fate(IntEnum):
    """What the engine does with a value after the op that made it. Values that are not saved are restored when read."""

    SAVE = 0
    OFFLOAD = 1
    DROP = 2


_FATES = {Decision.RECOMPUTE: Fate.DROP, Decision.OFFLOAD: Fate.OFFLOAD}

# The decisions for the outputs of one op call: one for all, or one each.
FatePattern = Fate | tuple[Fate, ...]


def fate_of(position: int, pattern: FatePattern) -> Fate:
    """Return the decision for the output at ``position``."""
    if not isinstance(pattern, tuple):
        return pattern
    return pattern[position] if position < len(pattern) else Fate.SAVE


def has_drops(pattern: FatePattern) -> bool:
    """Return whether any output is dropped."""
    return pattern == Fate.DROP or (isinstance(pattern, tuple) and Fate.DROP in pattern)


def without_drops(pattern: FatePattern) -> FatePattern:
    """Return ``pattern`` for an op that cannot be replayed: its dropped outputs are saved."""
    if isinstance(pattern, tuple):
        return tuple(Fate.SAVE if fate == Fate.DROP else fate for fate in pattern)
    return Fate.SAVE if pattern == Fate.DROP else pattern


class Place:
    """A module of a model, and the names of the model's tensors, for error messages."""

    def __init__(self, path: str, model: nn.Module) -> None:
        self.path = path
        self._model = weakref.ref(model)

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as it exists."""
        return self._model()

    def owned_name(self, tensor: Tensor) -> str | None:
        """Return the name by which the model owns ``tensor`` or its base, or None."""
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
    """The decisions for the values of one call of a recorded module.

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


class PlannedModule:
    """A recorded module, or one with saved-tensor hooks, and the decisions for the ops that run in it.

    ``records`` says that the ops inside are recorded, ``hooks_saves`` that saved-tensor hooks are installed inside.
    ``patterns`` and ``num_calls`` are those of a `CallPlan`, for the module's first call with gradients in a forward
    pass; ``later_calls`` has the plans of the calls after it. A call beyond those takes the plan that saves the fewest
    values. The profiled step had ``num_passes`` forward passes. At most ``window_bytes`` of offloaded values are being
    copied at a time.
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
        hooks_saves: bool = True,
        num_passes: int = 1,
    ) -> None:
        self.path = path
        self.place = Place(path, model)
        self.calls = (CallPlan(patterns, num_calls), *later_calls)
        self.beyond = max(range(len(self.calls)), key=lambda number: self.calls[number].num_decided)
        self.window_bytes = window_bytes
        self.records = records
        self.hooks_saves = hooks_saves
        self.num_passes = num_passes
        # The same for the engine in C++, made when it first runs this module.
        self.in_native_form: object = None

    def call_plan(self, number: int) -> CallPlan:
        """Return the plan of the module's call of that number."""
        return self.calls[number if number < len(self.calls) else self.beyond]


def planned_modules_of(plan: Plan, model: nn.Module) -> list[PlannedModule]:
    """Return the modules that ``plan`` records or puts hooks around."""
    outline = plan.outline or outline_of_names(plan.decisions)
    num_calls = outline.num_calls(plan.recorded_modules)
    # By module and number of its call, then by op: the decisions for each call of the op, which are in order.
    patterns: dict[tuple[str, int], dict[str, list[FatePattern]]] = {}
    for (path, call, op, _), fates in _fates_by_address(plan, outline).items():
        patterns.setdefault((path, call), {}).setdefault(op, []).append(_pattern(fates))
    calls: dict[str, list[CallPlan]] = {path: [] for path in (*plan.recorded_modules, *plan.hooked_modules)}
    for (path, call), of_ops in sorted(patterns.items()):
        calls[path] += [CallPlan({})] * (call - len(calls[path]))
        numbers = {op: num_calls[path, call, op] for op in of_ops}
        planned = {op: number for op, number in numbers.items() if number is not None}
        calls[path].append(CallPlan({op: _simplest(of_calls) for op, of_calls in of_ops.items()}, planned))
    return [
        PlannedModule(
            path,
            model,
            of_module[0].patterns if of_module else {},
            num_calls=of_module[0].num_calls if of_module else {},
            later_calls=of_module[1:],
            window_bytes=plan.window_bytes,
            records=path in plan.recorded_modules,
            hooks_saves=path in plan.hooked_modules,
            num_passes=outline.num_passes,
        )
        for path, of_module in calls.items()
    ]


def _fates_by_address(plan: Plan, outline: StepOutline) -> dict[Address, dict[int, Fate]]:
    """Return the decision for each output of each op call in the plan's recorded modules.

    Several forward passes of the profiled step may have reached one address. Planned decisions are the same for all of
    them; otherwise dropping takes precedence over offloading, and that over saving.
    """
    outputs_of: dict[OpCall, dict[int, Fate]] = {}
    for text, decision in plan.decisions.items():
        name = parse_value_name(text)
        outputs_of.setdefault(OpCall(*name[:3]), {})[name.output] = _FATES.get(decision, Fate.SAVE)
    fates: dict[Address, dict[int, Fate]] = {}
    for op, address in zip(outline.ops, outline.addresses(plan.recorded_modules), strict=True):
        if address is not None:
            known = fates.setdefault(address, {})
            for position, fate in outputs_of.get(op, {}).items():
                known[position] = max(known.get(position, Fate.SAVE), fate)
    return fates


def _pattern(outputs: Mapping[int, Fate]) -> FatePattern:
    fates = tuple(outputs.get(position, Fate.SAVE) for position in range(max(outputs, default=0) + 1))
    return fates if len(set(fates)) > 1 else fates[0]


def _simplest(patterns: list[FatePattern]) -> bool | tuple[FatePattern, ...]:
    """Return the patterns of all calls; a single one for all calls if it spares counting them."""
    if all(pattern == Fate.DROP for pattern in patterns):
        return True
    return any(pattern != Fate.SAVE for pattern in patterns) and tuple(patterns)
