"""Compiled blocks in plan and profile files: what is written is read, and what is wrong with a file is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.running import memfit as run_memfit
from tests.compiled.test_partition_mix import drawn_profile, model_profile

import memfit


@pytest.fixture
def profile() -> memfit.ModelProfile:
    return model_profile(drawn_profile(1))


@pytest.fixture
def plan(profile: memfit.ModelProfile) -> memfit.Plan:
    return memfit.plan(profile, budget=10_000)


def test_plans_and_profiles_are_read_as_they_were_written(
    profile: memfit.ModelProfile, plan: memfit.Plan, tmp_path: Path
) -> None:
    profile.save(tmp_path / "profile.json")
    assert memfit.ModelProfile.load(tmp_path / "profile.json") == profile
    plan.save(tmp_path / "plan.json")
    assert memfit.Plan.load(tmp_path / "plan.json") == plan


def changed(document: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    entry: Any = document
    for key in keys[:-1]:
        entry = entry[key]
    if value is None:
        del entry[keys[-1]]
    else:
        entry[keys[-1]] = value
    return document


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("choice", "blocks.0"), "another", "must use one of its kind's partitions"),
        (("choice", "blocks.9"), "everything", "choice must have a partition for each block"),
        (("choice", "blocks.0"), None, "choice must have a partition for each block"),
        (("kinds", 0, "partitions"), [], "partitions must not be empty"),
        (("kinds", 0, "partitions", 0, "price"), "high", "must be a number"),
        (("kinds", 0, "partitions", 0, "saved"), [], "must be an object"),
        (("kinds", 0, "blocks", 1), "blocks.0", "is listed twice"),
        (("kinds", 0, "blocks", 1), 7, "must be a text"),
        (("kinds",), None, "is missing"),
        (("colour",), "red", "is unknown"),
    ],
)
def test_what_is_wrong_with_a_plan_file_is_named(
    plan: memfit.Plan, tmp_path: Path, keys: tuple[Any, ...], value: Any, words: str
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    document = json.loads(path.read_text())
    changed(document["compiled"], keys, value)
    path.write_text(json.dumps(document))
    with pytest.raises(memfit.PlanFileError, match=words):
        memfit.Plan.load(path)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("blocks", 0, "kind"), 4, "kind must be the place"),
        (("blocks", 0, "measured"), [], "an entry for each partition"),
        (("blocks", 0, "path"), "head", "must be those of the kinds"),
        (("segments", 0, "num_held"), 99, "there are only 5 blocks"),
        (("segments", 0, "kind"), "sideways", "must be one of forward, backward, outside"),
        (("segments", 0, "base_bytes"), 2**63 - 1, "workspace_bytes must be at most 4611686018427387904 in all"),
        (("plain_seconds",), float("nan"), "must be a number|not valid JSON|NaN"),
        (("plain_seconds",), 10**400, "plain_seconds must be a number; got 1000"),
    ],
)
def test_what_is_wrong_with_a_profile_file_is_named(
    profile: memfit.ModelProfile, tmp_path: Path, keys: tuple[Any, ...], value: Any, words: str
) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    document = json.loads(path.read_text())
    changed(document["compiled"], keys, value)
    path.write_text(json.dumps(document))
    with pytest.raises(memfit.PlanFileError, match=words):
        memfit.ModelProfile.load(path)


def test_the_command_line_profiles_compiled_blocks_and_plans_them(tmp_path: Path) -> None:
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    code, shown, _ = run_memfit("profile", "tests.compiled.compiled_models:small_model", "--compile", "-o", profile)
    assert code == 0
    assert re.search(r"compiled +3 blocks \(SmallBlock\) by \d+ partitions, which took .+ to compile", shown)
    assert "3 blocks: " in run_memfit("frontier", profile)[1]
    assert run_memfit("plan", profile, "--budget", "100%", "-o", plan)[0] == 0
    assert memfit.Plan.load(plan).compiled is not None
