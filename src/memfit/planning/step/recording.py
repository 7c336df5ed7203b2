"""Chooses the modules in which the engine records for a plan, and computes what that costs the host.

In a *recorded* module every op is recorded, because ops in it make dropped values. In a *hooked* module saved-tensor
hooks are active, because ops in it save dropped values; those are often other modules: the linear layer after the
activation. Entering a module costs something too, so the modules are chosen to minimize the sum. Ops elsewhere cost
nothing.

The engine in C++ knows from the step before between which ops something dropped is saved, and activates the hooks only
there (`HostCosts.hooks_only_dropped_saves`). Where ops are recorded it knows when that is, and recording an op costs a
tenth of hooking a save: so modules that save much else are recorded, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.graph.model_profile import HostCosts, ModelProfile, Phase, RecordedOp
from memfit.graph.names import path_and_ancestors
from memfit.planning.step.ragged import Ints, Ragged
from memfit.planning.step.seconds import Seconds

# Where they are not known: those of an AMD EPYC, with the engine in C++. Only their ratios matter then.
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

Mask = npt.NDArray[np.bool_]


class ChosenModules(NamedTuple):
    """The modules to record and those to hook, in the order in which they ran.

    Where the whole model is recorded, its blocks are named as well: they identify the calls of an op.
    """

    recorded_modules: tuple[str, ...]
    hooked_modules: tuple[str, ...]


class RecordingChoice:
    """What to record in one profiled step, for any plan of it.

    Recorded are the ops whose outputs are dropped, and those that rewrite such an output or what its replay starts
    from, which must then be copied first. Hooked are the ops that save such outputs.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self._costs = costs = profile.host or USUAL_COSTS
        ops, values = profile.ops, profile.values
        calls_of = Counter((op.module, op.op) for op in ops if op.phase is Phase.FORWARD and op.module is not None)
        num_entries: dict[str, int] = {}
        for (module, _), num_calls in calls_of.items():
            # A module that runs several times runs each of its ops as often, at least.
            num_entries[module] = min(num_calls, num_entries.get(module, num_calls))
        # A container such as nn.ModuleList is never called, so that nothing can be put around it. A module that several
        # paths lead to is called from several places, and would not know from which.
        self._blocks = [block.path for block in profile.blocks]
        ran = list(dict.fromkeys([*num_entries, *self._blocks, *profile.skipped_modules]))
        callable_paths = {call.path for call in profile.module_calls} or {"", *ran}
        nearest = (next((path for path in path_and_ancestors(ran_in) if path in callable_paths), "") for ran_in in ran)
        self._blocks, self._skipped = (
            [path for path in paths if path in callable_paths] for paths in (self._blocks, profile.skipped_modules)
        )
        self._tree = tree = _ModuleTree(["", *(path for path in dict.fromkeys(nearest) if path)])
        entry_costs = [costs.module_entry * (num_entries.get(path, 1) if path else 1) for path in tree.paths]
        # A step may call parts of the model by themselves, and never the model.
        is_model_called = "" in callable_paths
        if not is_model_called:
            entry_costs[0] = math.inf
        self.paths: tuple[str, ...] = tuple(tree.paths if is_model_called else tree.paths[1:])
        """The modules that can be recorded and in which ops ran, in the order in which they ran."""

        def node_of(op: RecordedOp) -> int:
            node = -1 if op.module is None else tree.nearest(op.module)
            return node if node or is_model_called else -1

        node_of_op = [node_of(op) for op in ops]
        self._node_of_op: Ints = np.array(node_of_op, dtype=np.int64)
        self._op_of_value: Ints = np.array([-1 if v.op_index is None else v.op_index for v in values], dtype=np.int64)
        self._inputs = Ragged([op.inputs for op in ops])
        writing = [op for op in ops if op.phase is Phase.FORWARD and (op.rewrites or op.hidden_writes)]
        writes = [(node_of(op), (*op.rewrites, *op.hidden_writes)) for op in writing if op.module is not None]
        self._written = Ragged([written for _, written in writes])
        self._node_of_write: Ints = np.array([node for node, _ in writes], dtype=np.int64)
        known_saves = [[save.op_index for save in value.saves if save.op_index is not None] for value in values]
        self._saving_ops = Ragged(known_saves)
        self._num_saved_by = np.bincount(self._saving_ops.items, minlength=len(ops))
        # Where it is not known for which op a value was saved, it may be any.
        anywhere = [0] if is_model_called else [node for node in range(1, len(tree.paths)) if not tree.parents[node]]
        self._saving_nodes = Ragged(
            [
                [
                    node
                    for save in value.saves
                    for node in (anywhere if save.op_index is None else [node_of_op[save.op_index]])
                ]
                for value in values
            ]
        )
        # After which op values are saved: what an op reads before it runs, what it makes after it.
        self._saved_after = Ragged(
            [
                [1 + op_index - (op_index != value.op_index) for op_index in saving_ops]
                for value, saving_ops in zip(values, known_saves, strict=True)
            ]
        )
        self._num_saved_after = np.bincount(self._saved_after.items)
        forward = [node for node, op in zip(node_of_op, ops, strict=True) if op.phase is Phase.FORWARD and node >= 0]
        saving, num_nodes = self._saving_nodes.items, len(tree.paths)
        self._num_ops = np.bincount(np.array(forward, dtype=np.int64), minlength=num_nodes)
        self._num_saves = np.bincount(saving[saving >= 0], minlength=num_nodes)
        self._recording = _Cover(tree, entry_costs, self._num_ops * costs.recorded_op)
        self._hooking = _Cover(tree, entry_costs, self._num_saves * costs.hooked_save)

    def modules_for(self, dropped: Set[int]) -> ChosenModules:
        """Return where to record so that the values with the indices in ``dropped`` are dropped and restored."""
        values, tree = np.array(list(dropped), dtype=np.int64), self._tree
        recorded, hooked = self._recorded_nodes(values), self._saved_nodes(values)
        if self._costs.hooks_only_dropped_saves:
            chosen = self._recording.cheapest(recorded | self._worth_recording(values))
            saving = np.flatnonzero(hooked).tolist()
            hooked_nodes = tree.outermost(next((n for n in tree.around(at) if n in chosen), at) for at in saving)
        else:
            chosen, hooked_nodes = self._recording.cheapest(recorded), self._hooking.cheapest(hooked)
        # Where a module is skipped, its calls must not be missing among those of the module around it.
        apart = {*tree.outermost(tree.nearest(path) for path in self._blocks), *map(tree.nearest, self._skipped)}
        inside = {node for node in apart if not chosen.isdisjoint(tree.around(node))}
        return ChosenModules(
            *(tuple(tree.paths[node] for node in sorted(nodes)) for nodes in (chosen | inside, hooked_nodes))
        )

    def cost_of(self, dropped: Set[int], num_replayed: int) -> Seconds:
        """Return the seconds that this adds to what the host does, where ``num_replayed`` ops are run again."""
        values, costs = np.array(list(dropped), dtype=np.int64), self._costs
        nodes = self._recorded_nodes(values)
        if costs.hooks_only_dropped_saves:
            recording = self._recording.cost(nodes | self._worth_recording(values))
            moments = np.unique(self._saved_after.of(values)[0])
            hooking = costs.hooked_save * int(self._num_saved_after[moments].sum())
        else:
            recording, hooking = self._recording.cost(nodes), self._hooking.cost(self._saved_nodes(values))
        # A save is hooked once in each pass. An op with several dropped outputs is dropped once; so few have that
        # counting values is as good.
        return Seconds(
            forward=costs.planned_pass + recording + hooking / 2 + costs.dropped_op * len(dropped),
            backward=hooking / 2 + costs.replayed_op * num_replayed,
        )

    def _nodes(self, nodes: Ints) -> Mask:
        mask = np.zeros(len(self._tree.paths) + 1, dtype=bool)
        mask[nodes] = True
        # Ops outside the model have the node -1.
        return mask[:-1]

    def _recorded_nodes(self, values: Ints) -> Mask:
        ops = self._op_of_value[values]
        ops = ops[ops >= 0]
        nodes = self._node_of_op[ops]
        if len(self._node_of_write):
            is_touched = np.zeros(len(self._op_of_value), dtype=bool)
            is_touched[values] = True
            is_touched[self._inputs.of(ops)[0]] = True
            hit = np.logical_or.reduceat(is_touched[self._written.items], self._written.starts)
            nodes = np.concatenate([nodes, self._node_of_write[hit]])
        return self._nodes(nodes)

    def _saved_nodes(self, values: Ints) -> Mask:
        return self._nodes(self._saving_nodes.of(values)[0])

    def _worth_recording(self, values: Ints) -> Mask:
        """Return the modules in which so much else is saved that recording their ops is cheaper than hooking it."""
        ops = np.unique(self._saving_ops.of(values)[0])
        ops = ops[self._node_of_op[ops] >= 0]
        num_needed = np.bincount(self._node_of_op[ops], self._num_saved_by[ops], minlength=len(self._num_ops))
        costs = self._costs
        is_cheaper = costs.hooked_save * (self._num_saves - num_needed) > costs.recorded_op * self._num_ops
        return np.asarray(is_cheaper & (num_needed > 0))


class _ModuleTree:
    """The modules that can be recorded, by number, in the order in which they ran; number 0 is the model itself."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self._nearest: dict[str, int] = {path: node for node, path in enumerate(paths)}
        self.parents = [self.nearest(path.rpartition(".")[0]) for path in paths]
        depths = [sum(1 for _ in self.around(node)) for node in range(len(paths))]
        self.levels: list[Ints] = [np.flatnonzero(np.array(depths) == depth) for depth in range(max(depths), 1, -1)]
        """The modules, the innermost first, without the model itself."""

    def nearest(self, path: str) -> int:
        """Return the module itself, or the nearest one around it that can be recorded."""
        if path not in self._nearest:
            self._nearest[path] = next(
                self._nearest[other] for other in path_and_ancestors(path) if other in self._nearest
            )
        return self._nearest[path]

    def around(self, node: int) -> Iterator[int]:
        """Yield the module and those around it."""
        yield node
        while node:
            node = self.parents[node]
            yield node

    def outermost(self, nodes: Iterable[int]) -> set[int]:
        """Return those of the modules that lie in no other one of them."""
        present = set(nodes)
        return {node for node in present if not any(other in present for other in self.around(node) if other != node)}


class _Cover:
    """Finds the modules that contain given ones, at the least cost of entering them and of what happens in them."""

    def __init__(self, tree: _ModuleTree, entry_costs: list[float], own_costs: npt.NDArray[np.floating]) -> None:
        self._tree, self._parents = tree, np.array(tree.parents)
        self._cost_of_whole: npt.NDArray[np.float64] = own_costs.astype(np.float64)
        for nodes in tree.levels:
            np.add.at(self._cost_of_whole, self._parents[nodes], self._cost_of_whole[nodes])
        self._cost_of_whole += entry_costs

    def cost(self, needed: Mask) -> float:
        """Return the least cost of modules that contain all ``needed`` ones."""
        return self._decided(needed)[0]

    def cheapest(self, needed: Mask) -> set[int]:
        """Return these modules."""
        return self._tree.outermost(np.flatnonzero(self._decided(needed)[1]).tolist())

    def _decided(self, needed: Mask) -> tuple[float, Mask]:
        """Return the least cost, and which modules are cheaper as a whole than in parts."""
        is_whole, cost_of_parts = needed.copy(), np.zeros(len(needed))
        for nodes in self._tree.levels:
            whole, parts = self._cost_of_whole[nodes], cost_of_parts[nodes]
            is_whole[nodes] |= (parts > 0) & (whole <= parts)
            np.add.at(cost_of_parts, self._parents[nodes], np.where(is_whole[nodes], whole, parts))
        is_whole[0] |= 0 < cost_of_parts[0] >= self._cost_of_whole[0]
        return float(self._cost_of_whole[0] if is_whole[0] else cost_of_parts[0]), is_whole
