"""What counts as a change of an object's plain Python state, and that it is undone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memfit.capture.python_state import AttributeSnapshot


def attributes() -> dict[str, Any]:
    return {
        "count": 1000,
        "weight": torch.ones(2),
        "list": [torch.ones(2)],
        "deque": deque([1, 2]),
        "dict": {"a": torch.ones(2)},
        "set": {1, 2},
    }


def test_nothing_has_changed_while_nobody_changes_anything() -> None:
    assert not AttributeSnapshot(attributes()).has_changed()


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another object": lambda there: there.update(count=there["count"] + 1),
    "another tensor that is equal": lambda there: there.update(weight=torch.ones(2)),
    "new": lambda there: there.update(new=1),
    "gone": lambda there: there.pop("count"),
    "longer list": lambda there: there["list"].append(1),
    "another one in a list": lambda there: there["list"].__setitem__(0, torch.ones(2)),
    "deque": lambda there: there["deque"].rotate(),
    "another one in a dict": lambda there: there["dict"].update(a=torch.ones(2)),
    "dict": lambda there: there["dict"].update(b=1),
    "set": lambda there: there["set"].add(3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_and_undone(change: Callable[[dict[str, Any]], object]) -> None:
    there = attributes()
    snapshot = AttributeSnapshot(there)
    change(there)
    assert snapshot.has_changed()
    snapshot.restore()
    assert not snapshot.has_changed()


@pytest.mark.parametrize("generator", [torch.Generator(), random.Random(0)], ids=["torch", "python"])
def test_generators_count_as_drawn_from_and_are_put_back(generator: Any) -> None:
    def draw() -> float:
        return (
            torch.rand((), generator=generator).item() if isinstance(generator, torch.Generator) else generator.random()
        )

    snapshot = AttributeSnapshot({"generator": generator})
    drawn = draw()
    assert snapshot.has_changed()
    snapshot.restore()
    assert draw() == drawn
