"""Files of profiles and plans with anything changed in them are read, or refused with a PlanFileError."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import MemfitError, ModelProfile, Plan, PlanFileError

NUM_MUTATIONS = 400
REPLACEMENTS: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**400, 1.5, 1e308, 5e-324),
    *("", "x", "::", "a::b", "a::b#", "a::b#x", f"a::b#{2**70}", "\ud800", "0", "float32[9999999999999999999999]"),
    *([], {}, [1], {"a": 1}, [[]], [None]),
)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.fixture(scope="module")
def model() -> Chain:
    torch.manual_seed(0)
    return Chain()


@pytest.fixture(scope="module")
def profile(model: Chain) -> ModelProfile:
    return memfit.profile(model, torch.randn(4, 8))


def places_in(document: Any, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, entry in entries:
        yield (*start, key)
        if isinstance(entry, (dict, list)):
            yield from places_in(entry, (*start, key))


def mutated(document: Any, seed: int) -> Any:
    draw = random.Random(seed)
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(places_in(document))
        if not places:
            break
        # Few of the places are near the top, and those mean most.
        depth = draw.randint(1, 5)
        *way, last = draw.choice([place for place in places if len(place) <= depth])
        parent = document
        for key in way:
            parent = parent[key]
        entry, kind = parent[last], draw.random()
        if kind < 0.6:
            parent[last] = copy.deepcopy(draw.choice(REPLACEMENTS))
        elif kind < 0.8 and type(entry) in (int, float):
            parent[last] = entry * draw.choice((-1, 2, 1000, 2**40, 2**62))
        elif kind < 0.9 and isinstance(parent, list):
            parent.append(copy.deepcopy(draw.choice(parent)))
        else:
            del parent[last]
    return document


def test_mutated_profiles_are_planned_for_or_refused(profile: ModelProfile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    document = json.loads(path.read_text())
    num_read = 0
    for seed in range(NUM_MUTATIONS):
        path.write_text(json.dumps(mutated(document, seed)))
        try:
            read = ModelProfile.load(path)
        except PlanFileError:
            continue
        num_read += 1
        try:
            repr(memfit.plan(read, strategy=memfit.Full()))
            memfit.plan(read, budget="70%").save(tmp_path / "plan.json")
        except MemfitError:
            pass
    assert 0 < num_read < NUM_MUTATIONS


def test_mutated_plans_are_applied_or_refused(model: Chain, profile: ModelProfile, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    memfit.plan(profile, strategy=memfit.Full()).save(path)
    document = json.loads(path.read_text())
    num_read = 0
    for seed in range(NUM_MUTATIONS):
        path.write_text(json.dumps(mutated(document, seed)))
        try:
            read = Plan.load(path)
        except PlanFileError:
            continue
        num_read += 1
        try:
            repr(read)
            memfit.apply(model, read).remove()
        except MemfitError:
            pass
    assert 0 < num_read < NUM_MUTATIONS


@pytest.mark.parametrize(
    ("place", "entry", "message"),
    [
        (
            ("values", -1, "num_bytes"),
            2**62,
            r"workspace_bytes must be at most 4611686018427387904 in all",
        ),
        (("ops", 0, "flops"), 10**400, r"ops\[0\]: flops must be a whole number, at most"),
        (
            ("ops", 0, "seconds"),
            10**400,
            r"ops\[0\]: seconds must be a number of seconds, at least 0",
        ),
        (("values", -1, "name"), "no number", r"name must be module\.path::op#call .* got 'no number'"),
    ],
)
def test_what_is_refused_is_named(
    profile: ModelProfile, tmp_path: Path, place: tuple[Any, ...], entry: Any, message: str
) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    document = json.loads(path.read_text())
    parent = document[place[0]]
    made = [value for value in parent if place[0] == "ops" or value.get("op_index") is not None]
    made[place[1]][place[2]] = entry
    path.write_text(json.dumps(document))
    with pytest.raises(memfit.PlanFileError, match=message):
        ModelProfile.load(path)
