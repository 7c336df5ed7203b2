"""Compiled blocks in plan and profile files: the fields of the data classes, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from memfit.documents import check_fields
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.graph.compiled_data.compiled_blocks import CompiledKind, CompiledPlan, CompiledProfile
from memfit.validation import shown, whole_number


def compiled_document(compiled: CompiledPlan | CompiledProfile) -> dict[str, Any]:
    """Return ``compiled`` as files carry it."""
    return asdict(compiled)


def compiled_plan_from_document(document: Any, place: str) -> CompiledPlan:
    """Return the compiled blocks of a plan file; what is wrong with them is a ``PlanFileError`` with the place."""
    plan: CompiledPlan = _decoded(CompiledPlan, document, place)
    paths = _checked_paths(plan.kinds, place)
    if paths != set(plan.choice):
        differing = sorted(paths ^ set(plan.choice))[0]
        raise PlanFileError(f"{place}: choice must have a partition for each block and no other; see {differing!r}")
    for path in plan.offloaded:
        if path not in paths:
            raise PlanFileError(f"{place}: offloaded: {path!r} is not one of the blocks")
    for kind in plan.kinds:
        names = [partition.name for partition in kind.partitions]
        for path in kind.blocks:
            if plan.choice[path] not in names:
                raise PlanFileError(
                    f"{place}: choice: {path!r} must use one of its kind's partitions ({', '.join(names)}); got "
                    f"{shown(plan.choice[path])}"
                )
    return plan


def compiled_profile_from_document(document: Any, place: str) -> CompiledProfile:
    """Return the compiled blocks of a profile file."""
    profile: CompiledProfile = _decoded(CompiledProfile, document, place)
    paths = _checked_paths(profile.kinds, place)
    if sorted(paths) != sorted(block.path for block in profile.blocks):
        raise PlanFileError(f"{place}: blocks must be those of the kinds, each once")
    for number, block in enumerate(profile.blocks):
        if block.kind >= len(profile.kinds) or block.path not in profile.kinds[block.kind].blocks:
            raise PlanFileError(f"{place}: blocks[{number}]: kind must be the place of the kind that has its path")
        if len(block.measured) != len(profile.kinds[block.kind].partitions):
            raise PlanFileError(
                f"{place}: blocks[{number}]: measured must have an entry for each partition of its kind"
            )
    for number, choice in enumerate(profile.outside):
        if len(choice.base_bytes) != len(profile.segments):
            raise PlanFileError(f"{place}: outside[{number}]: base_bytes must have an entry for each segment")
    for number, segment in enumerate(profile.segments):
        if max(segment.num_held, 0 if segment.block is None else segment.block + 1) > len(profile.blocks):
            raise PlanFileError(f"{place}: segments[{number}]: there are only {len(profile.blocks)} blocks")
    return profile


def _checked_paths(kinds: tuple[CompiledKind, ...], place: str) -> set[str]:
    """Return the paths of all blocks, of which none may be of two kinds; each kind needs partitions."""
    paths: set[str] = set()
    for number, kind in enumerate(kinds):
        if not kind.partitions:
            raise PlanFileError(f"{place}: kinds[{number}]: partitions must not be empty")
        for path in kind.blocks:
            if path in paths:
                raise PlanFileError(f"{place}: the block {path!r} is listed twice")
            paths.add(path)
    return paths


def _decoded(kind: Any, entry: Any, place: str) -> Any:
    """Return ``entry`` as a value of the type ``kind``."""
    try:
        return _of_type(kind, entry, place)
    except InvalidParameterError as error:
        raise PlanFileError(f"{place}: {error}") from None


def _of_type(kind: Any, entry: Any, place: str) -> Any:
    name = place.rpartition(": ")[2]
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        given = check_fields(entry, place, required=frozenset(field.name for field in fields(kind)))
        values = {key: _decoded(hints[key], value, f"{place}: {key}") for key, value in given.items()}
        return kind(**values)  # type: ignore[operator]
    if origin is UnionType:
        return None if entry is None else _of_type(arguments[0], entry, place)
    if origin is tuple:
        if not isinstance(entry, (list, tuple)):
            raise InvalidParameterError(f"must be a list; got {shown(entry)}")
        return tuple(_decoded(arguments[0], each, f"{place}[{number}]") for number, each in enumerate(entry))
    if origin is Mapping:
        if not isinstance(entry, dict):
            raise InvalidParameterError(f"must be an object; got {shown(entry)}")
        return {key: _decoded(arguments[1], value, f"{place}: {key}") for key, value in entry.items()}
    if kind is int:
        return whole_number(entry, name)
    if kind is float:
        if isinstance(entry, bool) or not isinstance(entry, (int, float)) or not math.isfinite(entry):
            raise InvalidParameterError(f"must be a number; got {shown(entry)}")
        return float(entry)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if entry not in list(kind):
            raise InvalidParameterError(f"must be one of {', '.join(kind)}; got {shown(entry)}")
        return kind(entry)
    if not isinstance(entry, str):
        raise InvalidParameterError(f"must be a text; got {shown(entry)}")
    return entry
