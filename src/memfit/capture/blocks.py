"""Finds the blocks of a model: its repeated modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, called: Iterable[str]) -> list[str]:
    """Return the paths of the model's blocks among the ``called`` modules, in the order in which they were called.

    Blocks are entries of a list of modules whose class occurs there at least twice, or siblings of one class with
    children of their own; the outermost such, except that lists inside are preferred to siblings around them (an
    encoder and a decoder of one class are no blocks, their layers are).
    """
    order = {path: position for position, path in enumerate(called)}
    return sorted((path for path in _blocks_in(model, "") if path in order), key=order.__getitem__)


def _blocks_in(module: nn.Module, path: str) -> list[str]:
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    num_of_class = Counter(type(child) for _, child in children)
    is_list = isinstance(module, _CONTAINERS)
    blocks: list[str] = []
    for child_path, child in children:
        is_repeated = num_of_class[type(child)] > 1 and not isinstance(child, _CONTAINERS)
        if is_list and is_repeated:
            blocks.append(child_path)
            continue
        inner = _blocks_in(child, child_path)
        has_children = next(child.children(), None) is not None
        blocks.extend([child_path] if is_repeated and has_children and not inner else inner)
    return blocks
