"""What must hold of compiled blocks in plan and profile files, beyond the types of their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memfit.errors import InvalidParameterError
from memfit.graph.compiled_data.compiled_blocks import CompiledKind, CompiledPlan, CompiledProfile
from memfit.validation import shown


def _check_plan(plan: CompiledPlan) -> None:
    paths = _checked_paths(plan.kinds)
    if paths != set(plan.choice):
        differing = sorted(paths ^ set(plan.choice))[0]
        raise InvalidParameterError(f"choice must have a partition for each block and no other; see {differing!r}")
    for path in plan.offloaded:
        if path not in paths:
            raise InvalidParameterError(f"offloaded: {path!r} is not one of the blocks")
    for kind in plan.kinds:
        names = [partition.name for partition in kind.partitions]
        for path in kind.blocks:
            if plan.choice[path] not in names:
                raise InvalidParameterError(
                    f"choice: {path!r} must use one of its kind's partitions ({', '.join(names)}); got "
                    f"{shown(plan.choice[path])}"
                )


def _check_profile(profile: CompiledProfile) -> None:
    paths = _checked_paths(profile.kinds)
    if sorted(paths) != sorted(block.path for block in profile.blocks):
        raise InvalidParameterError("blocks must be those of the kinds, each once")
    for number, block in enumerate(profile.blocks):
        if block.kind >= len(profile.kinds) or block.path not in profile.kinds[block.kind].blocks:
            raise InvalidParameterError(f"blocks[{number}]: kind must be the place of the kind that has its path")
        if len(block.measured) != len(profile.kinds[block.kind].partitions):
            raise InvalidParameterError(f"blocks[{number}]: measured must have an entry for each partition of its kind")
    for number, choice in enumerate(profile.outside):
        if len(choice.base_bytes) != len(profile.segments):
            raise InvalidParameterError(f"outside[{number}]: base_bytes must have an entry for each segment")
    for number, segment in enumerate(profile.segments):
        if max(segment.num_held, 0 if segment.block is None else segment.block + 1) > len(profile.blocks):
            raise InvalidParameterError(f"segments[{number}]: there are only {len(profile.blocks)} blocks")


def _checked_paths(kinds: tuple[CompiledKind, ...]) -> set[str]:
    """Return the paths of all blocks, of which none may be of two kinds; each kind needs partitions."""
    paths: set[str] = set()
    for number, kind in enumerate(kinds):
        if not kind.partitions:
            raise InvalidParameterError(f"kinds[{number}]: partitions must not be empty")
        for path in kind.blocks:
            if path in paths:
                raise InvalidParameterError(f"the block {path!r} is listed twice")
            paths.add(path)
    return paths


COMPILED_CHECKS: Mapping[Any, Callable[[Any], None]] = {CompiledPlan: _check_plan, CompiledProfile: _check_profile}
"""For `Records`: raise where the parts of compiled blocks do not fit each other."""
