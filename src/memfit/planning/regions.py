"""Finds the modules in which the engine must listen for a plan. Ops outside them pay nothing.

It listens in two ways. Where ops are *recorded*, each one passes through Python; that is for the ops whose outputs are
recomputed. Where saves are *watched*, each tensor that autograd saves does; that is for the ops that save such outputs,
which often run elsewhere: the linear layer after the activation. Going into a module costs something too, so that the
modules are chosen to make it as little as possible altogether.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.names import is_within

# In the cost of one op that passes through Python: going into a module, and one tensor that autograd saves.
_ENTRY_COST = 0.6
_SAVE_COST = 0.4
# Ops in a profile leave out views, which pass through Python as well: about one for each op.
_CALLS_PER_OP = 2.0


class Listening(NamedTuple):
    """The modules to listen in, in the order in which they ran: where ops are recorded, and where saves are watched.

    Where the whole model is recorded, its blocks are named beside it: they tell the calls of an op apart.
    """

    regions: tuple[str, ...]
    watched: tuple[str, ...]


def listening_for(profile: ModelProfile, recomputed: Set[int]) -> Listening:
    """Return where to listen so that the values with the indices in ``recomputed`` are dropped and brought back.

    Recorded are the ops whose outputs are recomputed, and those that write over such an output or over what its replay
    starts from, which must then be copied first.
    """
    forward = [op for op in profile.ops if op.phase is Phase.FORWARD]
    replayed = [op for op in forward if any(output in recomputed for output in op.outputs)]
    touched = set(recomputed).union(*(op.inputs for op in replayed))
    recording = {op.module for op in replayed}
    recording.update(op.module for op in forward if not touched.isdisjoint(op.rewrites))
    watching = {
        # Where it is not known for which op it was saved, it may be any.
        "" if save.op_index is None else profile.ops[save.op_index].module
        for value in recomputed
        for save in profile.values[value].saves
    }
    tree = _ModuleTree(profile)
    regions = tree.cheapest_cover(recording, Counter({path: _CALLS_PER_OP * n for path, n in tree.num_ops.items()}))
    watched = tree.cheapest_cover(watching, Counter({path: _SAVE_COST * n for path, n in tree.num_saves.items()}))
    return Listening(tree.with_blocks(regions, recording), watched)


class _ModuleTree:
    """The modules known to have run, with how many ops ran and how many tensors were saved in each itself."""

    def __init__(self, profile: ModelProfile) -> None:
        forward = [op for op in profile.ops if op.phase is Phase.FORWARD and op.module is not None]
        saving = [save.op_index for value in profile.values for save in value.saves if save.op_index is not None]
        self.num_ops = Counter(op.module or "" for op in forward)
        self.num_saves = Counter(profile.ops[index].module or "" for index in saving)
        self._blocks = [block.path for block in profile.blocks]
        # A container such as nn.ModuleList is never called, so that nothing can be put around it.
        ran = dict.fromkeys([*self.num_ops, *self._blocks])
        self._children: dict[str, list[str]] = {"": []}
        for path in sorted(ran, key=len):
            if path:
                self._children.setdefault(path, [])
                around = next(other for other in path_and_ancestors(path) if other != path and other in self._children)
                self._children[around].append(path)
        self._order = {path: position for position, path in enumerate(ran)}

    def cheapest_cover(self, needed: Set[str | None], cost_inside: Mapping[str, float]) -> tuple[str, ...]:
        """Return modules that have the ``needed`` ones in them, of which going in and listening costs the least."""
        cost_of_all = dict.fromkeys(self._children, 0.0)
        best: dict[str, tuple[float, list[str]]] = {}
        for path in sorted(self._children, key=len, reverse=True):
            parts = [best[child] for child in self._children[path]]
            cost_of_all[path] = cost_inside.get(path, 0.0) + sum(cost_of_all[child] for child in self._children[path])
            of_parts = sum(cost for cost, _ in parts)
            of_whole = _ENTRY_COST + cost_of_all[path]
            if path in needed or of_whole <= of_parts:
                best[path] = (of_whole, [path])
            else:
                best[path] = (of_parts, [module for _, modules in parts for module in modules])
        return tuple(sorted(best[""][1], key=lambda path: self._order.get(path, -1)))

    def with_blocks(self, regions: tuple[str, ...], needed: Set[str | None]) -> tuple[str, ...]:
        """Return ``regions`` and the outermost blocks inside them that have needed modules in them."""
        around_needed = {ancestor for path in needed if path is not None for ancestor in path_and_ancestors(path)}
        inside = [
            block
            for block in _outermost(self._blocks)
            if block in around_needed and block not in regions and any(is_within(block, path) for path in regions)
        ]
        return tuple(sorted((*regions, *inside), key=lambda path: self._order.get(path, -1)))


def path_and_ancestors(path: str) -> Iterator[str]:
    """Yield the module path and those of the modules around it, the root's empty one last."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _outermost(paths: list[str]) -> list[str]:
    present = set(paths)
    return [path for path in paths if not any(other != path and other in present for other in path_and_ancestors(path))]
