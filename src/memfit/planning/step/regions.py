"""Finds the modules in which the engine must listen for a plan, and what that costs. Ops outside them pay nothing.

It listens in two ways. Where ops are *recorded*, each one passes through Python; that is for the ops whose outputs are
recomputed. Where saves are *watched*, each tensor that autograd saves does; that is for the ops that save such outputs,
which often run elsewhere: the linear layer after the activation. Going into a module costs something too, so that the
modules are chosen to make it as little as possible altogether.

The engine in C++ knows from the step before between which ops something dropped is saved, and watches saves only then
(`HostCosts.hooks_only_dropped_saves`). It hears of ops where they are recorded, which costs a tenth of watching saves:
so they are recorded, too, in modules that save much else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from memfit.graph.model_profile import HostCosts, ModelProfile, Phase
from memfit.graph.names import is_within

# Where they were not measured: about what `capture.host_costs` finds on an AMD EPYC, with the engine in C++. Only their
# ratios matter then.
USUAL_COSTS = HostCosts(
    forward=0.0,
    backward=0.0,
    recorded_op=3e-7,
    dropped_op=1e-6,
    module_entry=5e-7,
    hooked_save=2e-6,
    replayed_op=2e-6,
    hooks_only_dropped_saves=True,
)


class Listening(NamedTuple):
    """The modules to listen in, in the order in which they ran: where ops are recorded, and where saves are watched.

    Where the whole model is recorded, its blocks are named beside it: they tell the calls of an op apart.
    """

    recorded_modules: tuple[str, ...]
    hooked_modules: tuple[str, ...]


class ListeningCost(NamedTuple):
    """The seconds that listening adds to what the host does in the forward and in the backward pass."""

    forward: float
    backward: float


class Listeners:
    """Where to listen in one profiled step, for any plan of it.

    Recorded are the ops whose outputs are recomputed, and those that write over such an output or over what its replay
    starts from, which must then be copied first. Watched are the ops that save such outputs.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self._costs = profile.host or USUAL_COSTS
        ops = profile.ops
        forward = [op for op in ops if op.phase is Phase.FORWARD]
        self._op_of_value = [None if value.op_index is None else ops[value.op_index] for value in profile.values]
        written_by = [(frozenset((*op.rewrites, *op.hidden_writes)), op.module) for op in forward]
        self._writers = [(written, module) for written, module in written_by if written]
        self._saved_in = [
            # Where it is not known for which op it was saved, it may be any.
            tuple("" if save.op_index is None else ops[save.op_index].module for save in value.saves)
            for value in profile.values
        ]
        calls_of = Counter((op.module, op.op) for op in forward if op.module is not None)
        num_ops: Counter[str] = Counter()
        num_entries: dict[str, int] = {}
        for (module, _), num_calls in calls_of.items():
            num_ops[module] += num_calls
            # A module that runs several times runs each of its ops as often, at least.
            num_entries[module] = min(num_calls, num_entries.get(module, num_calls))
        num_saves = Counter(module for modules in self._saved_in for module in modules if module is not None)
        self._saving_ops = [
            tuple(save.op_index for save in value.saves if save.op_index is not None) for value in profile.values
        ]
        self._num_saved_by = Counter(op_index for saving_ops in self._saving_ops for op_index in saving_ops)
        self._module_of = [op.module for op in ops]
        self._num_ops, self._num_saves = num_ops, num_saves
        # Between which two ops values are saved: what an op reads before it, what it makes after it.
        self._saved_after = [
            tuple(
                save.op_index - (save.op_index != value.op_index) for save in value.saves if save.op_index is not None
            )
            for value in profile.values
        ]
        self._num_saved_after = Counter(op_index for saved_after in self._saved_after for op_index in saved_after)
        self._blocks = [block.path for block in profile.blocks]
        # A container such as nn.ModuleList is never called, so that nothing can be put around it. A module that several
        # paths lead to is called from several places, and would not know from which.
        ran = list(dict.fromkeys([*num_ops, *self._blocks]))
        if profile.module_calls:
            callable_paths = {call.path for call in profile.module_calls}
            ran = [path for path in ran if path in callable_paths]
            self._blocks = [path for path in self._blocks if path in callable_paths]
        entry_costs = {
            path: self._costs.module_entry * (num_entries.get(path, 1) if path else 1) for path in ("", *ran)
        }
        self._recording = _Cover(entry_costs, num_ops, self._costs.recorded_op)
        self._watching = _Cover(entry_costs, num_saves, self._costs.hooked_save)

    def modules_for(self, recomputed: Set[int]) -> Listening:
        """Return where to listen so that the values with the indices in ``recomputed`` are dropped and brought back."""
        recorded, watched = self._recorded_in(recomputed), self._watched_in(recomputed)
        if self._costs.hooks_only_dropped_saves:
            regions = self._recording.cheapest(recorded | self._worth_recording(recomputed))[1]
            around = [path for path in regions if any(is_within(module, path) for module in watched)]
            others = {
                self._watching.nearest(module)
                for module in watched
                if not any(is_within(module, path) for path in regions)
            }
            watching = _outermost([*around, *sorted(others)])
        else:
            regions = self._recording.cheapest(recorded)[1]
            watching = self._watching.cheapest(watched)[1]
        # Where a block is skipped, its calls must not be missing among those of the module around it.
        blocks_inside = [
            block
            for block in _outermost(self._blocks)
            if block not in regions and any(is_within(block, path) for path in regions)
        ]
        order = self._recording.order
        return Listening(order([*regions, *blocks_inside]), order(watching))

    def cost_of(self, recomputed: Set[int], num_replayed: int) -> ListeningCost:
        """Return what that costs the host, where ``num_replayed`` ops are run again."""
        recorded_in = self._recorded_in(recomputed)
        if self._costs.hooks_only_dropped_saves:
            recorded, _ = self._recording.cheapest(recorded_in | self._worth_recording(recomputed))
            moments = {moment for value in recomputed for moment in self._saved_after[value]}
            watched = self._costs.hooked_save * sum(self._num_saved_after[moment] for moment in moments)
        else:
            recorded, _ = self._recording.cheapest(recorded_in)
            watched, _ = self._watching.cheapest(self._watched_in(recomputed))
        # A save comes by once in each pass. An op with several recomputed outputs is dropped once; so few have that
        # counting values is as good.
        return ListeningCost(
            forward=recorded + watched / 2 + self._costs.dropped_op * len(recomputed),
            backward=watched / 2 + self._costs.replayed_op * num_replayed,
        )

    def _recorded_in(self, recomputed: Set[int]) -> set[str]:
        replayed = [op for value in recomputed if (op := self._op_of_value[value]) is not None]
        modules = {op.module for op in replayed}
        if self._writers:
            touched = set(recomputed).union(*(op.inputs for op in replayed))
            modules.update(module for rewritten, module in self._writers if not touched.isdisjoint(rewritten))
        return {module for module in modules if module is not None}

    def _worth_recording(self, recomputed: Set[int]) -> set[str]:
        """Return the modules in which so much else is saved that to record their ops is cheaper than to watch it."""
        num_asked: Counter[str] = Counter()
        for op_index in {op_index for value in recomputed for op_index in self._saving_ops[value]}:
            module = self._module_of[op_index]
            if module is not None:
                num_asked[module] += self._num_saved_by[op_index]
        costs = self._costs
        return {
            module
            for module, number in num_asked.items()
            if costs.hooked_save * (self._num_saves[module] - number) > costs.recorded_op * self._num_ops[module]
        }

    def _watched_in(self, recomputed: Set[int]) -> set[str]:
        return {module for value in recomputed for module in self._saved_in[value] if module is not None}


class _Cover:
    """Finds the modules to go into so as to have given ones in them, at the least cost of going in and of listening.

    ``entry_costs`` has the modules that can be gone into, the model first; ``counts`` how many things, at
    ``cost_of_each``, happen in each module itself.
    """

    def __init__(self, entry_costs: Mapping[str, float], counts: Mapping[str, int], cost_of_each: float) -> None:
        self._position = {path: position for position, path in enumerate(entry_costs)}
        self._around: dict[str, str] = {}
        self._cost_of_whole: dict[str, float] = {"": counts.get("", 0) * cost_of_each + entry_costs[""]}
        for path in sorted((path for path in self._position if path), key=len):
            self._around[path] = next(
                other for other in path_and_ancestors(path) if other != path and other in self._cost_of_whole
            )
            self._cost_of_whole[path] = entry_costs[path]
        for path, count in counts.items():
            if path:
                for ancestor in self._and_around(self.nearest(path)):
                    self._cost_of_whole[ancestor] += count * cost_of_each

    def cheapest(self, needed: Set[str]) -> tuple[float, list[str]]:
        """Return the cost and the modules; whatever is needed lies in one of them."""
        needed = {self.nearest(module) for module in needed}
        concerned = {path for module in needed for path in self._and_around(module)}
        best: dict[str, tuple[float, list[str]]] = dict.fromkeys(concerned, (0.0, []))
        total: tuple[float, list[str]] = (0.0, [])
        for path in sorted(concerned, key=len, reverse=True):
            of_parts, parts = best[path]
            of_whole = self._cost_of_whole[path]
            total = (of_whole, [path]) if path in needed or of_whole <= of_parts else (of_parts, parts)
            if path:
                cost_around, parts_around = best[self._around[path]]
                best[self._around[path]] = (cost_around + total[0], parts_around + total[1])
        return total

    def nearest(self, module: str) -> str:
        """Return the module itself, or the nearest one around it that can be recorded."""
        return next(path for path in path_and_ancestors(module) if path in self._position)

    def order(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return the modules in the order in which they ran, the model first."""
        return tuple(sorted(paths, key=self._position.__getitem__))

    def _and_around(self, path: str) -> Iterator[str]:
        yield path
        while path:
            path = self._around[path]
            yield path


def path_and_ancestors(path: str) -> Iterator[str]:
    """Yield the module path and those of the modules around it, the root's empty one last."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _outermost(paths: list[str]) -> list[str]:
    present = set(paths)
    return [path for path in paths if not any(other != path and other in present for other in path_and_ancestors(path))]
