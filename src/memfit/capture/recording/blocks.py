"""Finds the blocks of a model: its repeated modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, called: Collection[str]) -> list[str]:
    """Return the paths of the model's blocks among the ``called`` modules, in the order in which they were called.

    Blocks are entries of a list of modules, or siblings, that have children of their own and share their class with
    another: the outermost such, except that blocks inside a container or inside mere siblings come first (an encoder
    and a decoder of one class are no blocks, their layers are). Where none has children, single layers of a list count.
    """
    order = {path: position for position, path in enumerate(called)}
    modules = dict(model.named_modules())
    found = [path for path in _blocks_in(model, "") if path in order]
    composite = [path for path in found if _has_children(modules[path])]
    return sorted(composite or found, key=order.__getitem__)


def _blocks_in(module: nn.Module, path: str) -> list[str]:
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    num_alike = Counter(_class_name(child) for _, child in children)
    is_list = isinstance(module, _CONTAINERS)
    blocks: list[str] = []
    for child_path, child in children:
        is_repeated = num_alike[_class_name(child)] > 1 and (is_list or _has_children(child))
        if is_repeated and is_list and not isinstance(child, _CONTAINERS):
            blocks.append(child_path)
            continue
        inner = _blocks_in(child, child_path)
        has_blocks = any(_has_children(child.get_submodule(block[len(child_path) + 1 :])) for block in inner)
        blocks.extend([child_path] if is_repeated and not has_blocks else inner)
    return blocks


def _class_name(module: nn.Module) -> str:
    # By name: parametrizations give each module a class of its own, all of one name; torch.compile() gives all one.
    return type(getattr(module, "_orig_mod", module)).__qualname__


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
