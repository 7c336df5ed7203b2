"""Which Python objects hold state that can be put back, and how each kind is read, compared and written.

Everything goes by the built-in methods, never by those that a subclass may have put in their place: a cache that
counts its reads, or a dict that refuses ``update``, is to notice nothing. What others may be using at the same time
(threads, locks, files, queues), what torch and memfit keep for themselves, and objects of extension types that are not
named here are left alone.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from operator import is_
from types import CellType, MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Kind:
    """One part of the state of objects: what they hold, and where that can change, how it is read and put back.

    Where it is an array of bytes, of which there may be many, ``num_bytes`` is how many. ``seed`` lets a random
    number generator begin anew.
    """

    held: Callable[[Any], Collection[Any]] = lambda value: ()
    read: Callable[[Any], Any] | None = None
    has_changed: Callable[[Any, Any], bool] = lambda value, state: False
    write: Callable[[Any, Any], object] = lambda value, state: None
    num_bytes: Callable[[Any], int] | None = None
    seed: Callable[[Any, int], object] | None = None


def kinds_of(cls: type) -> tuple[Kind, ...]:
    """Return the parts of the state of an instance of ``cls``; none where it is to be left alone."""
    if issubclass(cls, _LEFT_ALONE):
        return ()
    # In their order: an OrderedDict is a dict too.
    kinds = tuple(kind for built_in, kind in _BUILT_IN.items() if issubclass(cls, built_in))[:1]
    if cls not in _BUILT_IN and _is_written_in_python(cls):
        slots = _slots_of(cls)
        kinds += (_ATTRIBUTES,) if cls.__dictoffset__ else ()
        kinds += (_kind_of_slots(slots),) if slots else ()
    return kinds


def _is_written_in_python(cls: type) -> bool:
    """Return whether ``cls`` and all its bases, down to a plain container, are Python classes that may be looked into.

    Extension types may be heap types too; like ``copyreg``, tell them by a constructor of their own.
    """
    for base in cls.__mro__:
        package = str(base.__module__).partition(".")[0]
        if package in _CLOSED_PACKAGES and (base is cls or not _is_interface(base)):
            return False
        new = base.__new__
        if not base.__flags__ & _HEAP_TYPE or (isinstance(new, _BUILT_IN_METHOD) and new.__self__ is base):
            return base in _PLAIN_BASES
    return False


def _is_interface(base: type) -> bool:
    """Return whether ``base`` only names methods for its subclasses, such as torch's ``Stateful`` and ``Dataset``."""
    return getattr(base, "_is_protocol", False) or ("__init__" not in vars(base) and "__new__" not in vars(base))


def _slots_of(cls: type) -> list[MemberDescriptorType]:
    # What built-in and extension classes keep in such places is theirs, and some of it cannot be written.
    in_python = [base for base in cls.__mro__ if "__slots__" in vars(base) and base not in _PLAIN_BASES]
    return [slot for base in in_python for slot in vars(base).values() if isinstance(slot, MemberDescriptorType)]


def _kind_of_slots(slots: list[MemberDescriptorType]) -> Kind:
    def read(value: Any) -> list[Any]:
        contents = []
        for slot in slots:
            try:
                contents.append(slot.__get__(value))
            except AttributeError:
                contents.append(_EMPTY)
        return contents

    def write(value: Any, state: list[Any]) -> None:
        for slot, now, then in zip(slots, read(value), state, strict=True):
            if then is _EMPTY and now is not _EMPTY:
                slot.__delete__(value)
            elif then is not now:
                slot.__set__(value, then)

    return Kind(read, read, lambda value, state: not all(map(is_, read(value), state)), write)


def _itself(value: Any) -> Any:
    return value


def _attributes_of(value: Any) -> tuple[dict[str, Any]]:
    return (object.__getattribute__(value, "__dict__"),)


def _dict_changed(value: Any, state: dict[Any, Any]) -> bool:
    if dict.__len__(value) != len(state):
        return True
    # Most are the empty dicts of hooks that modules do not have.
    return bool(state) and not (
        all(map(is_, dict.keys(value), state)) and all(map(is_, dict.values(value), state.values()))
    )


def _write_dict(value: Any, state: dict[Any, Any]) -> None:
    # Not empty in between, unless the order has changed: Ctrl-C may come at any time, and these may be all the
    # attributes of a module.
    dict.update(value, state)
    for name in [name for name in dict.keys(value) if name not in state]:
        dict.__delitem__(value, name)
    if not all(map(is_, dict.keys(value), state)):
        dict.clear(value)
        dict.update(value, state)


def _read_ordered(value: Any) -> dict[Any, Any]:
    # An OrderedDict keeps an order of its own, which move_to_end changes; the dict below it does not know of that.
    return dict(OrderedDict.items(value))


def _ordered_changed(value: Any, state: dict[Any, Any]) -> bool:
    return dict.__len__(value) != len(state) or (bool(state) and _dict_changed(_read_ordered(value), state))


def _write_ordered(value: Any, state: dict[Any, Any]) -> None:
    OrderedDict.clear(value)
    for name, content in state.items():
        OrderedDict.__setitem__(value, name, content)


def _list_changed(value: Any, state: list[Any]) -> bool:
    return list.__len__(value) != len(state) or not all(map(is_, list.__iter__(value), state))


def _read_deque(value: Any) -> list[Any]:
    return list(deque.__iter__(value))


def _write_deque(value: Any, state: list[Any]) -> None:
    # Where the deque has a largest length, what was in it falls out at the left by itself.
    deque.extend(value, state)
    while deque.__len__(value) > len(state):
        deque.popleft(value)


def _write_set(value: Any, state: set[Any]) -> None:
    set.intersection_update(value, state)
    set.update(value, state)


def _read_array(value: Any) -> Any:
    return value.view(np.ndarray).copy() if value.flags.writeable else None


def _array_changed(value: Any, state: Any) -> bool:
    if state is None or value.shape != state.shape:
        return False
    if value.dtype.hasobject:
        return not all(map(is_, value.flat, state.flat))
    # By their bytes, since what is no number never equals itself.
    return bool(value.tobytes() != state.tobytes())


def _write_array(value: Any, state: Any) -> None:
    value.view(np.ndarray)[...] = state


def _numpy_state_changed(state: Any, former: Any) -> bool:
    if isinstance(state, dict):
        return any(_numpy_state_changed(state[name], former[name]) for name in state)
    return not np.array_equal(state, former)


def _write_bit_generator(value: Any, state: Any) -> None:
    value.state = state


def count_of(text: str) -> itertools.count[Any] | None:
    """Return a count of whole numbers from its ``repr``; None for one of other numbers."""
    numbers = re.fullmatch(r"count\((-?\d+)(?:, (-?\d+))?\)", text)
    if numbers is None:
        return None
    return itertools.count(*(int(number) for number in numbers.groups() if number is not None))


class GlobalVariables(NamedTuple):
    """Variables of a module: some names in its ``namespace``."""

    namespace: dict[str, Any]
    names: set[str]


def _read_globals(value: GlobalVariables) -> dict[str, Any]:
    return {name: value.namespace[name] for name in value.names if name in value.namespace}


def _globals_changed(value: GlobalVariables, state: dict[str, Any]) -> bool:
    return any(value.namespace.get(name, _EMPTY) is not content for name, content in state.items())


def content_of(cell: CellType) -> list[Any]:
    """Return what a variable of a closure is bound to; nothing where it is bound to nothing."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _write_cell(cell: CellType, state: list[Any]) -> None:
    if state:
        cell.cell_contents = state[0]


def _position_of(value: Any) -> int | None:
    """Return how far an iterator has come; None where it is at its end, and knows no more what it went through."""
    reduced = value.__reduce__()
    return reduced[2] if len(reduced) > 2 else None


_HEAP_TYPE = 1 << 9
_BUILT_IN_METHOD = type(int.__new__)
_EMPTY = object()
# Of the standard library, only classes that do nothing but hold what users put there, and those without attributes.
_OPEN_PACKAGES = {"abc", "argparse", "builtins", "collections", "contextlib", "dataclasses", "types", "typing"}
_CLOSED_PACKAGES = (sys.stdlib_module_names - _OPEN_PACKAGES) | {"torch", "memfit"}
# Modules have snapshots of their own, tensors are put back by whoever sees them written, and what an optimizer keeps
# is to stay from step to step.
_LEFT_ALONE = (nn.Module, Tensor, torch.optim.Optimizer, torch.Size, torch.UntypedStorage, Enum)
# Where such an iterator ends in a step, it cannot be put back.
_ITERATOR = Kind(
    read=_position_of,
    has_changed=lambda value, state: _position_of(value) != state,
    write=lambda value, state: None if state is None else value.__setstate__(state),
)
_DICT = Kind(dict.values, dict.copy, _dict_changed, _write_dict)
# The attributes of an object are a dict like any other, and looked at as one.
_ATTRIBUTES = Kind(_attributes_of)
_BUILT_IN: dict[type, Kind] = {
    OrderedDict: Kind(
        OrderedDict.values,
        _read_ordered,
        _ordered_changed,
        _write_ordered,
    ),
    dict: _DICT,
    list: Kind(_itself, list.copy, _list_changed, lambda value, state: list.__setitem__(value, slice(None), state)),
    GlobalVariables: Kind(
        held=lambda value: _read_globals(value).values(),
        read=_read_globals,
        has_changed=_globals_changed,
        write=lambda value, state: value.namespace.update(state),
    ),
    CellType: Kind(
        held=content_of,
        read=content_of,
        has_changed=lambda cell, state: _list_changed(content_of(cell), state),
        write=_write_cell,
    ),
    tuple: Kind(_itself),
    deque: Kind(_itself, _read_deque, lambda value, state: _list_changed(_read_deque(value), state), _write_deque),
    set: Kind(_itself, set.copy, lambda value, state: not set.__eq__(value, state), _write_set),
    frozenset: Kind(_itself),
    type(iter([])): _ITERATOR,
    type(iter(())): _ITERATOR,
    bytearray: Kind(
        read=bytes,
        has_changed=bytearray.__ne__,
        write=lambda value, state: bytearray.__setitem__(value, slice(None), state),
        num_bytes=len,
    ),
    array: Kind(
        read=lambda value: value[:],
        has_changed=lambda value, state: value.tobytes() != state.tobytes(),
        write=lambda value, state: array.__setitem__(value, slice(None), state),
        num_bytes=lambda value: len(value) * value.itemsize,
    ),
    np.ndarray: Kind(
        held=lambda value: value.ravel().tolist() if value.dtype == object else (),
        read=_read_array,
        has_changed=_array_changed,
        write=_write_array,
        num_bytes=lambda value: value.nbytes if value.flags.writeable else 0,
    ),
    np.random.Generator: Kind(held=lambda value: (value.bit_generator,)),
    np.random.BitGenerator: Kind(
        read=lambda value: value.state,
        has_changed=lambda value, state: _numpy_state_changed(value.state, state),
        write=_write_bit_generator,
        seed=lambda value, seed: _write_bit_generator(value, type(value)(seed).state),
    ),
    np.random.RandomState: Kind(
        read=lambda value: value.get_state(legacy=False),
        has_changed=lambda value, state: _numpy_state_changed(value.get_state(legacy=False), state),
        write=np.random.RandomState.set_state,
        seed=np.random.RandomState.seed,
    ),
    random.Random: Kind(
        read=random.Random.getstate,
        has_changed=lambda value, state: random.Random.getstate(value) != state,
        write=random.Random.setstate,
        seed=random.Random.seed,
    ),
    # Fake tensors cannot be compared, and a step may be run on those: taken for drawn from, as generators mostly are.
    torch.Generator: Kind(
        read=torch.Generator.get_state,
        has_changed=lambda value, state: True,
        write=torch.Generator.set_state,
        seed=torch.Generator.manual_seed,
    ),
}
_PLAIN_BASES = (object, SimpleNamespace, dict, OrderedDict, defaultdict, list, tuple, deque, set, frozenset, bytearray)
