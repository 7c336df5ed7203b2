"""Finds what a step's functions reach: modules, optimizers, schedulers, gradient scalers, closures and globals."""

from __future__ import annotations

import functools
import itertools
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from memfit.capture.state.python_objects import GlobalVariables, content_of, kinds_of
from memfit.errors import InvalidParameterError
from memfit.runtime.torch_internals import DataLoaderIterator

# The nearest objects are looked at, up to so many: a step that refers to its trainer refers to everything.
_MOST_OBJECTS = 10_000
_HOOKS_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class ReachedObjects:
    """What is reached from ``roots``: functions, modules, optimizers and other objects.

    ``holders`` are the mappings, containers, objects and variables whose content a step may change. ``optimizers``
    includes wrappers of optimizers.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self.holders: list[Any] = []
        self._globals: dict[int, GlobalVariables] = {}
        self._seen: set[int] = set()
        roots = list(roots)
        self._waiting: deque[Any] = deque(roots)
        self._alive: list[Any] = []
        for root in roots:
            if isinstance(root, MethodType):
                _refuse_iterators_of(root)
        while self._waiting and len(self._seen) < _MOST_OBJECTS:
            self._visit(self._waiting.popleft())

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (Tensor, type)):
            return
        self._seen.add(id(value))
        # An id is another object's once this one is gone.
        self._alive.append(value)
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, MethodType):
            self._waiting.extend((value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            self._waiting.extend((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, nn.Module):
            self._visit_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
            self._waiting.extend(entry for name, entry in vars(value).items() if name not in ("state", "param_groups"))
        elif isinstance(value, (LRScheduler, torch.amp.GradScaler)):
            self.holders.append(vars(value))
            self._waiting.extend(vars(value).values())
        elif kinds_of(type(value)):
            self.holders.append(value)
            if isinstance(value, Mapping):
                self._wait_for(value.values())
            elif isinstance(value, (list, tuple, set, frozenset, deque)):
                self._wait_for(value)
            self._wait_for(getattr(value, "__dict__", {}).values())

    def _wait_for(self, entries: Iterable[Any]) -> None:
        """Visit the entries of an object later, and of functions of installed libraries only what they are bound to.

        Trainers hold many of those, whose modules keep what all programs share and nothing of this training loop.
        """
        for entry in entries:
            if isinstance(entry, MethodType) and _is_of_a_library(entry.__func__):
                self._waiting.append(entry.__self__)
            elif not (isinstance(entry, FunctionType) and _is_of_a_library(entry)):
                self._waiting.append(entry)

    def _visit_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        for name, entry in vars(module).items():
            if name == "_parameters":
                for parameter in entry.values():
                    for hooks in _HOOKS_OF_PARAMETERS:
                        self._waiting.extend((getattr(parameter, hooks, None) or {}).values())
            elif name in _HOOKS_OF_MODULES:
                self._wait_for(entry.values())
            elif name == "_modules" or not name.startswith("_"):
                self._waiting.extend(entry.values() if name == "_modules" else (entry,))

    def _visit_function(self, function: FunctionType) -> None:
        module = str(function.__module__)
        if module.partition(".")[0] in ("torch", "memfit") and not module.startswith("memfit.integrations."):
            return
        for cell in function.__closure__ or ():
            self.holders.append(cell)
            self._visit_variables(content_of(cell))
        self._waiting.extend((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        namespace = function.__globals__
        names = {name for name in _names_in(function.__code__) if name in namespace}
        if id(namespace) not in self._globals:
            self._globals[id(namespace)] = GlobalVariables(namespace, set())
            self.holders.append(self._globals[id(namespace)])
        self._globals[id(namespace)].names.update(names)
        self._visit_variables([namespace[name] for name in names])

    def _visit_variables(self, values: Iterable[Any]) -> None:
        for value in values:
            _refuse_iterator(value)
            self._waiting.append(value)


def _refuse_iterators_of(method: Any) -> None:
    """Raise where the object of a step that is a method has an iterator that the method names."""
    attributes = getattr(method.__self__, "__dict__", {})
    code = getattr(method.__func__, "__code__", None)
    if code is not None and not isinstance(method.__self__, nn.Module):
        for name in _names_in(code):
            _refuse_iterator(attributes.get(name))


def _refuse_iterator(value: object) -> None:
    """Raise where ``value`` is an iterator that cannot be put back to where it was."""
    is_built_in = isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")
    if isinstance(value, DataLoaderIterator) or (
        is_built_in and not isinstance(value, itertools.count) and not kinds_of(type(value))
    ):
        name = type(value).__name__
        article = "an" if name[0] in "aeiou" else "a"
        raise InvalidParameterError(
            f"step= or loss= refers to {article} {name}, which cannot be put back to where it was: draw the batch "
            "before, pass it as batch=, and let the function take it as its argument"
        )


def _is_of_a_library(function: Any) -> bool:
    """Return whether ``function`` is in a file of Python or of an installed package."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_LIBRARIES)


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in ``code`` and in the functions that are defined in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))
