"""Finds the modules that the engine must listen to for a plan. Ops outside them pay nothing."""

from __future__ import annotations

from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.names import is_within


def listening_regions(profile: ModelProfile, recomputed: set[int]) -> tuple[str, ...]:
    """Return the outermost modules, in the order in which they ran, in which something that matters happens.

    That is: an op whose output is recomputed; one that reads such an output, for autograd may save it there; and one
    that writes over such an output or over what its replay starts from, which must then be copied first. Several such
    modules in one block are one region, the block: going in and out costs more than listening to a few more ops. Where
    the regions hold most of the model's ops, the model itself is one around them, for the same reason; it then also
    hears of writes between its blocks that the profiled step did not make.
    """
    forward = [op for op in profile.ops if op.phase is Phase.FORWARD]
    replayed = [op for op in forward if any(output in recomputed for output in op.outputs)]
    touched = recomputed.union(*(op.inputs for op in replayed))
    modules = {op.module: None for op in replayed}
    for op in forward:
        if not recomputed.isdisjoint(op.inputs) or not touched.isdisjoint(op.rewrites):
            modules[op.module] = None
    paths = _outermost([path for path in modules if path is not None])
    for block in profile.blocks:
        inside = [path for path in paths if is_within(path, block.path)]
        if len(inside) > 1:
            paths[paths.index(inside[0])] = block.path
    paths = _outermost(paths)
    in_model = [op.module for op in forward if op.module is not None]
    num_heard = sum(any(is_within(module, path) for path in paths) for module in in_model)
    is_most = paths and "" not in paths and 2 * num_heard >= len(in_model)
    return ("", *paths) if is_most else tuple(paths)


def _outermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(path != other and is_within(path, other) for other in paths)]
