"""Finds the modules that the engine must listen to for a plan. Ops outside them pay nothing."""

from __future__ import annotations

from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.names import is_within


def listening_regions(profile: ModelProfile, recomputed: set[int]) -> tuple[str, ...]:
    """Return the outermost modules, in the order in which they ran, in which something that matters happens.

    That is: an op whose output is recomputed, or one that writes over such an output or over what such an op reads,
    which must then be copied first.
    """
    replayed = [op for op in profile.ops if any(output in recomputed for output in op.outputs)]
    touched = recomputed.union(*(op.inputs for op in replayed))
    modules = {op.module: None for op in replayed}
    for op in profile.ops:
        if op.phase is Phase.FORWARD and any(index in touched for index in op.rewrites):
            modules[op.module] = None
    paths = [path for path in modules if path is not None]
    return tuple(path for path in paths if not any(path != other and is_within(path, other) for other in paths))
