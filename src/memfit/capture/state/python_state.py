"""Snapshots of the plain Python state that can be reached from attributes: counters, caches, nested lists, generators.

What hangs together is walked once, level by level, and each object that can change is kept as a shallow copy beside the
object itself; comparing and putting back are then walks over a list. Putting back leaves every object the same object,
with one exception: an ``itertools.count`` cannot be turned back, so its holders get one that goes on from where it was.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from memfit.capture.state.python_objects import Kind, count_of, kinds_of

# What lies in attributes themselves is always kept. Behind that, the nearest objects are, up to so many: a model that
# refers to its trainer refers to everything.
MOST_OBJECTS = 10_000
# Of the contents of arrays, so much is copied; larger ones are left alone, tables that are looked up as a rule.
MOST_ARRAY_BYTES = 64 * 2**20


class AttributeSnapshot:
    """The entries of the mappings and other objects ``attributes``, and of all that is reached from there, as they are.

    What is in ``but`` is left alone.
    """

    def __init__(self, attributes: Iterable[Any], but: Iterable[object] = ()) -> None:
        self._nodes: list[_Node] = []
        self._counts: dict[int, _Count] = {}
        self._kinds = _KindsByClass()
        self._num_array_bytes_left = MOST_ARRAY_BYTES
        self._walk(list(attributes), set(map(id, but)))

    def has_changed(self) -> bool:
        """Return whether some entry is another object now, or holds others, or may have been drawn from."""
        return any(count.has_changed() for count in self._counts.values()) or any(
            node.kind.has_changed(node.value, node.state) for node in self._nodes
        )

    def has_drawn(self) -> bool:
        """Return whether random numbers may have been drawn from a generator among the entries."""
        return any(node.kind.seed is not None and node.kind.has_changed(node.value, node.state) for node in self._nodes)

    def seed(self, seed: int) -> None:
        """Let the generators among the entries begin anew from ``seed``."""
        for kind, value, _ in self._nodes:
            if kind.seed is not None:
                kind.seed(value, seed)

    def restore(self) -> None:
        """Make the entries what they were; the objects in them stay the same objects."""
        for count in self._counts.values():
            if count.has_changed():
                count.begin_anew()
        for kind, value, state in self._nodes:
            if kind.has_changed(value, state):
                kind.write(value, state)

    def _walk(self, attributes: list[Any], left_alone: set[int]) -> None:
        seen = set(map(id, attributes)) | left_alone
        level = self._kept(attributes, seen, most=sys.maxsize)
        num_left = MOST_OBJECTS
        while level:
            level = self._kept(level, seen, most=num_left)
            num_left -= len(level)

    def _kept(self, level: list[Any], seen: set[int], most: int) -> list[Any]:
        """Keep the state of the objects in ``level``, and return what they hold that was not ``seen`` yet."""
        kinds = self._kinds
        behind: list[Any] = []
        for value in level:
            for kind in kinds[type(value)]:
                if kind.num_bytes is not None:
                    num_bytes = kind.num_bytes(value)
                    if num_bytes > self._num_array_bytes_left:
                        continue
                    self._num_array_bytes_left -= num_bytes
                if kind.read is not None:
                    state = kind.read(value)
                    self._nodes.append(_Node(kind, value, state))
                held = kind.held(value)
                classes = set(map(type, held))
                if not classes:
                    continue
                if itertools.count in classes and kind.read is not None:
                    self._note_counts(state)
                # Long lists of numbers are passed over at once.
                if any(kinds[cls] for cls in classes):
                    for entry in held:
                        if len(behind) >= most:
                            break
                        if kinds[type(entry)] and id(entry) not in seen:
                            seen.add(id(entry))
                            behind.append(entry)
        return behind

    def _note_counts(self, state: Any) -> None:
        if not isinstance(state, (dict, list)):
            return
        for place, entry in state.items() if isinstance(state, dict) else enumerate(state):
            if type(entry) is itertools.count:
                self._counts.setdefault(id(entry), _Count(entry)).holders.append((state, place))


class _Node(NamedTuple):
    kind: Kind
    value: Any
    state: Any


class _KindsByClass(dict[type, tuple[Kind, ...]]):
    """What was found out of classes, for one walk: classes come and go."""

    def __missing__(self, cls: type) -> tuple[Kind, ...]:
        kinds = self[cls] = kinds_of(cls)
        return kinds


class _Count:
    """An ``itertools.count`` of whole numbers, and the states in which it stands."""

    def __init__(self, count: itertools.count[Any]) -> None:
        self._count = count
        self._text = repr(count)
        self.holders: list[tuple[Any, Any]] = []

    def has_changed(self) -> bool:
        return repr(self._count) != self._text

    def begin_anew(self) -> None:
        """Let the states hold one that is where this one was; what differs from its state is then put back."""
        count = count_of(self._text)
        if count is not None:
            self._count = count
            for state, place in self.holders:
                state[place] = count
