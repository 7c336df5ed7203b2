"""Regions: the modules inside which the tape listens, and what becomes of the values that are made in each."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from enum import IntEnum

from torch import Tensor, nn

from memfit.graph.names import is_within, parse_value_name
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


class Region:
    """A module inside which the tape listens, and the decisions for the ops that run in it.

    ``records`` says that the ops inside are recorded, ``watches`` that what autograd saves inside is seen to.
    ``patterns`` maps an op's name to what becomes of its outputs at each of its calls in one forward pass of the model,
    in the order of the calls, or to True where everything is dropped. Calls beyond the list are saved: the step
    took a way that the plan has not seen, which costs memory, not correctness. ``num_calls`` is how many calls the plan
    expects, where it tells. At most ``window_bytes`` of offloaded values are on their way at a time.
    """

    def __init__(
        self,
        path: str,
        model: nn.Module,
        patterns: Mapping[str, bool | tuple[FatePattern, ...]],
        *,
        num_calls: Mapping[str, int] | None = None,
        window_bytes: int = 0,
        records: bool = True,
        watches: bool = True,
    ) -> None:
        self.path = path
        self.place = Place(path, model)
        self.patterns = dict(patterns)
        self.num_calls = dict(num_calls or {})
        self.window_bytes = window_bytes
        self.records = records
        self.watches = watches
        # What the engine in C++ makes of the above, when it first gets here.
        self.in_native_form: object = None


def regions_of(plan: Plan, model: nn.Module) -> list[Region]:
    """Return the modules to listen in. A decision belongs to the innermost of the plan's regions around its value."""
    # Op name -> the calls seen, in order -> the outputs' decisions, for each region.
    calls: dict[str, dict[str, dict[tuple[str, int], dict[int, Fate]]]] = {path: {} for path in plan.recorded_modules}
    for text, decision in plan.decisions.items():
        name = parse_value_name(text)
        around = [path for path in plan.recorded_modules if is_within(name.module, path)]
        if around:
            outputs = calls[max(around, key=len)].setdefault(name.op, {}).setdefault((name.module, name.call), {})
            outputs[name.output] = _FATES.get(decision, Fate.SAVE)
    watched = set(plan.hooked_modules)
    recording = [
        Region(
            path,
            model,
            {op: _simplest([_pattern(outputs) for outputs in by_call.values()]) for op, by_call in calls[path].items()},
            num_calls={op: len(by_call) for op, by_call in calls[path].items()},
            window_bytes=plan.window_bytes,
            watches=path in watched,
        )
        for path in plan.recorded_modules
    ]
    return recording + [Region(path, model, {}, records=False) for path in plan.hooked_modules if path not in calls]


def _pattern(outputs: Mapping[int, Fate]) -> FatePattern:
    fates = tuple(outputs.get(position, Fate.SAVE) for position in range(max(outputs) + 1))
    return fates if len(set(fates)) > 1 else fates[0]


def _simplest(patterns: list[FatePattern]) -> bool | tuple[FatePattern, ...]:
    """Return the patterns of all calls, or one for them all where counting the calls can be spared."""
    if all(pattern == Fate.DROP for pattern in patterns):
        return True
    return any(pattern != Fate.SAVE for pattern in patterns) and tuple(patterns)
