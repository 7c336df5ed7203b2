"""Finds the modules that the engine must listen to for a plan. Ops outside them pay nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

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
    inside: dict[str, list[int]] = {block.path: [] for block in profile.blocks}
    for position, path in enumerate(paths):
        for ancestor in path_and_ancestors(path):
            if ancestor in inside:
                inside[ancestor].append(position)
    for block_path, positions in inside.items():
        # A block around this one may have taken the place already.
        if len(positions) > 1 and is_within(paths[positions[0]], block_path):
            paths[positions[0]] = block_path
    paths = _outermost(paths)
    num_in_model = Counter(op.module for op in forward if op.module is not None)
    heard = set(paths)
    num_heard = sum(num for module, num in num_in_model.items() if not heard.isdisjoint(path_and_ancestors(module)))
    is_most = paths and "" not in paths and 2 * num_heard >= num_in_model.total()
    return ("", *paths) if is_most else tuple(paths)


def path_and_ancestors(path: str) -> Iterator[str]:
    """Yield the module path and those of the modules around it, the root's empty one last."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _outermost(paths: list[str]) -> list[str]:
    present = set(paths)
    return [path for path in paths if not any(other != path and other in present for other in path_and_ancestors(path))]
