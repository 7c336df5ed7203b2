"""Selectors, ``MODULE_GLOB::op``: how users name values to be saved or recomputed."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase

from memfit.errors import InvalidParameterError
from memfit.graph.names import NO_GRADIENTS, ValueName, path_and_ancestors


def select(selector: str, names: Collection[ValueName]) -> list[ValueName]:
    """Return the names that ``selector`` picks; an error with the nearest ones where it picks none.

    ``layers.*.mlp::aten.silu`` picks the calls of one op inside the modules that match, submodules included;
    without ``::`` it picks every op there. ``*`` matches across dots, and the root module too. A value's own name picks
    that value (and the like-named ones in submodules).
    """
    if not isinstance(selector, str) or not selector:
        raise InvalidParameterError(
            f"a selector is a text such as 'layers.*.mlp::aten.silu' or 'layers.0', got {selector!r}"
        )
    module_glob, separator, op_glob = selector.partition("::")
    chosen = [
        name
        for name in names
        if (
            not separator
            or fnmatchcase(name.op.removesuffix(NO_GRADIENTS), op_glob)
            or str(name).endswith(f"::{op_glob}")
        )
        and any(fnmatchcase(path, module_glob) for path in path_and_ancestors(name.module))
    ]
    if not chosen:
        raise InvalidParameterError(_no_match_message(selector, names))
    return chosen


def _no_match_message(selector: str, names: Collection[ValueName]) -> str:
    known = sorted({f"{name.module}::{name.op}" for name in names})
    if "::" not in selector:
        known = sorted({path for name in names for path in path_and_ancestors(name.module) if path})
    # However far, the nearest show what names look like here; upper and lower case are easily mistaken.
    written_as = {name.lower(): name for name in known}
    near = get_close_matches(selector.lower(), written_as, n=3, cutoff=0.0)
    nearest = f"; the nearest are {', '.join(repr(written_as[name]) for name in near)}" if near else ""
    return (
        f"the selector {selector!r} matches none of the {len(names)} values of this profile{nearest}. "
        "A selector is MODULE_GLOB::op or MODULE_GLOB, such as 'layers.*.mlp::aten.silu'"
    )
