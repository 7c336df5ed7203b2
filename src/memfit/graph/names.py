"""How values are named: ``module.path::aten.op#k``, in plans, reports and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

NO_GRADIENTS = " (no gradients)"
"""Follows an op's name in the names of values that were made while gradients were disabled."""


class ValueName(NamedTuple):
    """The name of a value: the k-th call of an op in a module, and which of the op's outputs it is."""

    module: str
    op: str
    call: int
    output: int = 0

    def __str__(self) -> str:
        position = f".{self.output}" if self.output else ""
        return f"{self.module}::{self.op}#{self.call}{position}"


def parse_value_name(text: str) -> ValueName:
    """Return the parts of ``text``, the inverse of ``str(name)``."""
    module, _, call = text.rpartition("::")
    op, _, number = call.rpartition("#")
    index, _, output = number.partition(".")
    return ValueName(module, op, int(index), int(output or 0))


def is_value_name(text: str) -> bool:
    """Return whether ``text`` is what `parse_value_name` reads, written as ``str(name)`` writes it."""
    try:
        return str(parse_value_name(text)) == text
    except ValueError:
        return False


def path_and_ancestors(path: str) -> Iterator[str]:
    """Yield the module path and those of the modules around it, the root's empty one last."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def is_within(module: str, ancestor: str) -> bool:
    """Return whether the module at path ``module`` is ``ancestor`` or lies inside it. The root's path is empty."""
    return not ancestor or module == ancestor or module.startswith(ancestor + ".")


def kind_from_before(name: str) -> str:
    """Return what a value is that exists before the step: "weights", "optimizer state", "batch" or "gradients"."""
    if name.startswith("batch#"):
        return "batch"
    if name.startswith("optimizer state#"):
        return "optimizer state"
    return "gradients" if name.endswith(".grad") else "weights"
