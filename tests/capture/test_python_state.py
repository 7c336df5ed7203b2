"""What counts as a change of the plain Python state behind attributes, and that it is undone in the same objects."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from array import array
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memfit.capture.state import python_state
from memfit.capture.state.python_state import AttributeSnapshot


class State:
    """A plain object, with whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    """A plain object without a dict, one of its slots empty."""

    __slots__ = ("count", "history", "late")

    def __init__(self) -> None:
        self.count = 1000
        self.history: list[int] = []


class SlottedNamespace(SimpleNamespace):
    """A slot over a built-in class that has places of its own, which cannot be written."""

    __slots__ = ("size",)


class Defaulting(defaultdict[str, Any]):
    """A dict with a slot, over a built-in class with a place that can be written."""

    __slots__ = ("size",)


@dataclass(frozen=True)
class Frozen:
    """A dataclass that refuses to be written."""

    history: list[int]


class Pair(NamedTuple):
    """A tuple that holds a list."""

    first: int
    history: list[int]


class RefusesUpdates(OrderedDict[str, Any]):
    """A dict that refuses what its base allows, as the outputs of transformers do, and has attributes besides."""

    hits = 0

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("nobody may call this")

    clear = copy = keys = items = update  # type: ignore[assignment]

    def __getitem__(self, name: str) -> Any:
        self.hits += 1
        return super().__getitem__(name)


def attributes() -> dict[str, Any]:
    shared = [1]
    return {
        "count": 1000,
        "weight": torch.ones(2),
        "list": [torch.ones(2)],
        "deque": deque([1, 2]),
        "bounded deque": deque([1, 2], maxlen=2),
        "dict": {"a": torch.ones(2), "b": 1},
        "ordered": OrderedDict(a=1, b=2),
        "defaults": defaultdict(list, a=[1]),
        "counter": Counter("aab"),
        "set": {1, 2},
        "bytes": bytearray(b"ab"),
        "numbers": array("d", [1.0]),
        "object": State(count=1000, history=[1], inner=State(count=1000)),
        "namespace": SimpleNamespace(count=1000),
        "slots": Slotted(),
        "slotted namespace": SlottedNamespace(count=1000),
        "slotted dict": Defaulting(list),
        "frozen": Frozen([1]),
        "tuple": ([1], Pair(1, [2])),
        "nested": [[{"a": [1]}]],
        "user dict": UserDict(a=[1]),
        "refuses": RefusesUpdates(a=1),
        "ndarray": np.array([1.0, np.nan]),
        "objects": np.array([State(count=1000), None]),
        "shared": shared,
        "shared again": {"shared": shared},
        "ids": itertools.count(5, 2),
        "more ids": [itertools.count(7)],
        "generator": np.random.default_rng(0),
        "random state": np.random.RandomState(0),
        "bit generator": np.random.PCG64(0),
        "python generator": random.Random(0),
    }


def test_nothing_has_changed_while_nobody_changes_anything() -> None:
    assert not AttributeSnapshot([attributes()]).has_changed()


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another object": lambda there: there.update(count=there["count"] + 1),
    "another tensor that is equal": lambda there: there.update(weight=torch.ones(2)),
    "new": lambda there: there.update(new=1),
    "gone": lambda there: there.pop("count"),
    "longer list": lambda there: there["list"].append(1),
    "another one in a list": lambda there: there["list"].__setitem__(0, torch.ones(2)),
    "deque": lambda there: there["deque"].rotate(),
    "longer deque": lambda there: there["deque"].append(1),
    "shorter deque": lambda there: there["deque"].pop(),
    "bounded deque": lambda there: there["bounded deque"].append(3),
    "shorter bounded deque": lambda there: there["bounded deque"].pop(),
    "another one in a dict": lambda there: there["dict"].update(a=torch.ones(2)),
    "dict": lambda there: there["dict"].update(b=1000),
    "order of a dict": lambda there: there["dict"].update(a=there["dict"].pop("a")),
    "order of an ordered dict": lambda there: there["ordered"].move_to_end("a"),
    "ordered dict": lambda there: there["ordered"].pop("a"),
    "a default taken": lambda there: there["defaults"]["b"],
    "in a default": lambda there: there["defaults"]["a"].append(1),
    "counter": lambda there: there["counter"].update("b"),
    "set": lambda there: there["set"].add(3),
    "smaller set": lambda there: there["set"].clear(),
    "bytes": lambda there: there["bytes"].append(1),
    "numbers": lambda there: there["numbers"].append(1),
    "attribute of an object": lambda there: setattr(there["object"], "count", 1001),
    "new attribute of an object": lambda there: setattr(there["object"], "new", 1),
    "list in an object": lambda there: there["object"].history.append(1),
    "object in an object": lambda there: setattr(there["object"].inner, "count", 1001),
    "namespace": lambda there: setattr(there["namespace"], "count", 1001),
    "slot": lambda there: setattr(there["slots"], "count", 1001),
    "slot filled": lambda there: setattr(there["slots"], "late", 1),
    "slot emptied": lambda there: delattr(there["slots"], "count"),
    "slot of a namespace": lambda there: setattr(there["slotted namespace"], "size", 1),
    "namespace with slots": lambda there: setattr(there["slotted namespace"], "count", 1001),
    "slot of a dict": lambda there: setattr(there["slotted dict"], "size", 1),
    "list in a slot": lambda there: there["slots"].history.append(1),
    "list in a frozen dataclass": lambda there: there["frozen"].history.append(1),
    "list in a tuple": lambda there: there["tuple"][0].append(1),
    "list in a named tuple": lambda there: there["tuple"][1].history.append(1),
    "deeply nested": lambda there: there["nested"][0][0]["a"].append(1),
    "user dict": lambda there: there["user dict"].update(b=1),
    "in a user dict": lambda there: there["user dict"]["a"].append(1),
    "dict that refuses updates": lambda there: there["refuses"].__setitem__("b", 1),
    "attribute of a dict": lambda there: there["refuses"]["a"],
    "ndarray": lambda there: there["ndarray"].__setitem__(0, 2.0),
    "view of an ndarray": lambda there: np.add(there["ndarray"][:1], 1, out=there["ndarray"][:1]),
    "one in an ndarray of objects": lambda there: there["objects"].__setitem__(1, 1),
    "object in an ndarray": lambda there: setattr(there["objects"][0], "count", 1001),
    "shared": lambda there: there["shared again"]["shared"].append(1),
    "count": lambda there: next(there["ids"]),
    "count in a list": lambda there: next(there["more ids"][0]),
    "generator": lambda there: there["generator"].random(),
    "random state": lambda there: there["random state"].normal(),
    "bit generator": lambda there: there["bit generator"].random_raw(),
    "python generator": lambda there: there["python generator"].random(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_and_undone_in_the_same_objects(change: Callable[[dict[str, Any]], object]) -> None:
    there = attributes()
    objects = {name: value for name, value in there.items() if name != "ids"}
    snapshot = AttributeSnapshot([there])
    before = looked_at(there)
    change(there)
    assert snapshot.has_changed()
    snapshot.restore()
    assert not snapshot.has_changed()
    assert looked_at(there) == before
    assert all(there[name] is value for name, value in objects.items())
    # Once more from the same snapshot, as between steps in a row.
    change(there)
    snapshot.restore()
    assert looked_at(there) == before


def looked_at(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return all that can be told of ``value`` from outside, the state of generators included."""
    if id(value) in around:
        return "itself"
    deeper = (*around, id(value))
    if isinstance(value, dict):
        items = OrderedDict.items(value) if isinstance(value, OrderedDict) else value.items()
        content: Any = [(name, looked_at(entry, deeper)) for name, entry in items]
    elif isinstance(value, (list, tuple, deque)):
        content = [looked_at(entry, deeper) for entry in value]
    elif isinstance(value, (set, bytearray, array)):
        content = copy.copy(value)
    elif isinstance(value, np.ndarray):
        content = [looked_at(entry, deeper) for entry in value] if value.dtype == object else value.tobytes()
    elif isinstance(value, np.random.Generator):
        content = repr(value.bit_generator.state)
    elif isinstance(value, np.random.BitGenerator):
        content = repr(value.state)
    elif isinstance(value, np.random.RandomState):
        content = repr(value.get_state())
    elif isinstance(value, random.Random):
        content = value.getstate()
    elif isinstance(value, torch.Tensor):
        content = id(value)
    elif isinstance(value, (int, float, str, type(None), itertools.count)):
        content = repr(value)
    else:
        content = None
    own = dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) else {}
    slots = (*Slotted.__slots__, "size") if isinstance(value, (Slotted, SlottedNamespace, Defaulting)) else ()
    own |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return type(value), content, [(name, looked_at(entry, deeper)) for name, entry in own.items()]


@pytest.mark.parametrize("generator", [torch.Generator(), random.Random(0)], ids=["torch", "python"])
def test_generators_count_as_drawn_from_and_are_put_back(generator: Any) -> None:
    def draw() -> float:
        return (
            torch.rand((), generator=generator).item() if isinstance(generator, torch.Generator) else generator.random()
        )

    snapshot = AttributeSnapshot([{"generator": generator}])
    drawn = draw()
    assert snapshot.has_changed()
    snapshot.restore()
    assert draw() == drawn


def test_a_count_that_two_share_is_still_shared() -> None:
    count = itertools.count(3)
    first, second = State(ids=count), {"ids": [count]}
    snapshot = AttributeSnapshot([vars(first), second])
    assert next(count) == 3
    snapshot.restore()
    assert [next(first.ids), next(second["ids"][0]), next(first.ids)] == [3, 4, 5]


def test_cycles_are_walked_once() -> None:
    first, second = State(count=1), State(count=1)
    first.other, second.other, first.all = second, first, [first, second]
    snapshot = AttributeSnapshot([{"first": first}])
    second.count = 2
    first.all.clear()
    assert snapshot.has_changed()
    snapshot.restore()
    assert (second.count, first.all) == (1, [first, second])


class Worker(threading.Thread):
    """A thread, which nobody is to put back."""

    count = 1


class OwnModule(nn.Module):
    """A module in an attribute of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []


def test_modules_optimizers_threads_classes_and_functions_are_left_alone() -> None:
    def function() -> None: ...

    module, thread, optimizer = OwnModule(), Worker(), torch.optim.SGD([torch.ones(1)], lr=0.1)
    attributes = {"all": [module, thread, optimizer, function, State, torch, threading.Lock(), torch.ones(1)]}
    snapshot = AttributeSnapshot([attributes])
    module.history.append(1)
    thread.count = 2
    optimizer.defaults["lr"] = 0.2
    function.count = 1  # type: ignore[attr-defined]
    State.count = 1  # type: ignore[attr-defined]
    try:
        assert not snapshot.has_changed()
        snapshot.restore()
        assert (module.history, thread.count, optimizer.defaults["lr"]) == ([1], 2, 0.2)
    finally:
        del State.count  # type: ignore[attr-defined]


def test_what_lies_in_attributes_is_always_kept_and_what_is_behind_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(python_state, "MOST_OBJECTS", 3)
    inner: list[list[int]] = [[] for _ in range(5)]
    attributes = {f"list {number}": [] for number in range(9)} | {"inner": inner}
    snapshot = AttributeSnapshot([attributes])
    for entry in (*inner, *attributes.values()):
        entry.append(1)
    snapshot.restore()
    assert all(attributes[f"list {number}"] == [] for number in range(9))
    assert inner == [[], [], [], [1], [1]]


def test_arrays_are_kept_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_state, "MOST_ARRAY_BYTES", 24)
    small, large, table = np.zeros(2), np.zeros(4), np.zeros(1)
    table.flags.writeable = False
    snapshot = AttributeSnapshot([{"large": large, "table": table, "small": small}])
    small += 1
    large += 1
    snapshot.restore()
    assert (small.tolist(), large.tolist()) == ([0, 0], [1, 1, 1, 1])


@st.composite
def things(draw: st.DrawFn) -> list[Any]:
    """Draw containers and objects that hold each other in any way, cycles included."""
    made: list[Any] = [
        draw(st.sampled_from([list, dict, deque, OrderedDict, State, Slotted]))()
        for _ in range(draw(st.integers(1, 6)))
    ]
    for holder in made:
        for _ in range(draw(st.integers(0, 3))):
            put(draw, holder, made)
    return made


def put(draw: st.DrawFn, holder: Any, made: list[Any]) -> None:
    """Put one of ``made``, or a number, into ``holder``, perhaps inside a tuple."""
    entry = draw(st.sampled_from([*made, 1, 2]))
    entry = (entry,) if draw(st.booleans()) else entry
    name = draw(st.sampled_from(["count", "history"]))
    if isinstance(holder, (list, deque)):
        holder.append(entry)
    elif isinstance(holder, dict):
        holder[name] = entry
    else:
        setattr(holder, name, entry)


def take(draw: st.DrawFn, holder: Any) -> None:
    """Take something out of ``holder``."""
    if isinstance(holder, (list, deque)):
        if holder:
            del holder[draw(st.integers(0, len(holder) - 1))]
    elif isinstance(holder, dict):
        if holder:
            del holder[draw(st.sampled_from(list(holder)))]
    elif hasattr(holder, "count"):
        del holder.count


@given(st.data())
def test_whatever_is_done_to_objects_that_hold_each_other_is_undone(data: st.DataObject) -> None:
    made = data.draw(things())
    attributes = {"all": made[0]}
    before = looked_at(attributes)
    snapshot = AttributeSnapshot([attributes])
    for _ in range(data.draw(st.integers(0, 6))):
        do = data.draw(st.sampled_from([put, take]))
        holder = data.draw(st.sampled_from(made))
        if do is put:
            put(data.draw, holder, made)
        else:
            take(data.draw, holder)
    has_changed = looked_at(attributes) != before
    assert snapshot.has_changed() or not has_changed
    snapshot.restore()
    assert looked_at(attributes) == before
    assert not snapshot.has_changed()
