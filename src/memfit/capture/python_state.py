"""Snapshots of the plain Python state that objects keep in their attributes: counters, lists, caches, generators."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import torch


class AttributeSnapshot:
    """The entries of ``attributes`` as they are now, and what is in those that are containers or generators."""

    def __init__(self, attributes: MutableMapping[Any, Any]) -> None:
        self.attributes = attributes
        self._entries = {name: (value, _state_of(value)) for name, value in attributes.items()}

    def has_changed(self) -> bool:
        """Return whether some entry is another object now, or holds others, or may have been drawn from."""
        return self.attributes.keys() != self._entries.keys() or any(
            self.attributes[name] is not value or _has_changed(value, state)
            for name, (value, state) in self._entries.items()
        )

    def restore(self) -> None:
        """Make the entries what they were; the objects in them stay the same objects."""
        for name in self.attributes.keys() - self._entries.keys():
            del self.attributes[name]
        for name, (value, state) in self._entries.items():
            self.attributes[name] = value
            _set_state(value, state)


def _state_of(value: Any) -> Any:
    if isinstance(value, (list, dict, set, deque)):
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return None


def _has_changed(value: Any, state: Any) -> bool:
    if isinstance(value, (list, deque)):
        return len(value) != len(state) or any(now is not then for now, then in zip(value, state, strict=True))
    if isinstance(value, dict):
        return value.keys() != state.keys() or any(now is not state[name] for name, now in value.items())
    # Generators are there to be drawn from.
    return isinstance(value, (torch.Generator, random.Random)) or (isinstance(value, set) and value != state)


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, list):
        value[:] = state
    elif isinstance(value, deque):
        value.clear()
        value.extend(state)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
