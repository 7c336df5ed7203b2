"""Plan files: what is written is what is read, in order; everything else is an error with the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import PlanFileError
from memfit.graph.inputs import Input
from memfit.graph.names import ValueName
from memfit.graph.plan import Decision, Plan

SAVE, RECOMPUTE = Decision.SAVE, Decision.RECOMPUTE

PLAN = Plan(
    decisions={
        "layers.0.mlp::aten.silu#0": RECOMPUTE,
        "layers.0.mlp::aten.mul#0": SAVE,
        "layers.0::aten.add#1": SAVE,
        "layers.0.mlp::aten.native_layer_norm#0.1": SAVE,
    },
    recorded_modules=("layers.0.mlp",),
    hooked_modules=("layers.0",),
    recompute_flops=12,
    fingerprint="f00d",
    predicted_peak_bytes=21_000,
    predicted_overhead=0.02,
    optimality_gap=0.001,
    budget_bytes=22_000,
    inputs=(Input("input_ids", "int64", (8, 128)), Input("scale", "float32", ())),
)

TEXT = """{
  "format": "memfit-plan",
  "version": 1,
  "fingerprint": "f00d",
  "inputs": {"input_ids": "int64[8, 128]", "scale": "float32[]"},
  "budget_bytes": 22000,
  "predicted_peak_bytes": 21000,
  "predicted_overhead": 0.02,
  "optimality_gap": 0.001,
  "recompute_flops": 12,
  "recorded_modules": ["layers.0.mlp"],
  "hooked_modules": ["layers.0"],
  "groups": [
    {"module": "layers.0.mlp", "values": {
      "aten.silu#0": "recompute",
      "aten.mul#0": "save"
    }},
    {"module": "layers.0", "values": {
      "aten.add#1": "save"
    }},
    {"module": "layers.0.mlp", "values": {
      "aten.native_layer_norm#0.1": "save"
    }}
  ]
}
"""

names = st.builds(
    ValueName,
    module=st.sampled_from(["", "layers.0", "layers.0.mlp", "été.«1»"]),
    op=st.sampled_from(["aten.mm", "aten.silu", "my::op"]),
    call=st.integers(0, 20),
    output=st.integers(0, 3),
)


def test_file_has_one_decision_a_line_grouped_by_module_in_order(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text(encoding="utf-8") == TEXT
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@settings(max_examples=100, deadline=None)
@given(
    decisions=st.dictionaries(names.map(str), st.sampled_from(Decision), max_size=12),
    recorded_modules=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    hooked_modules=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    flops=st.integers(0, 2**80),
    overhead=st.floats(0, 1e6),
    gap=st.floats(0, 1),
    budget_bytes=st.none() | st.integers(0, 2**60),
    offloading=st.just((0, 0)) | st.tuples(st.integers(0, 2**60), st.integers(0, 2**60)),
)
def test_a_loaded_plan_equals_the_saved_one(
    tmp_path_factory: pytest.TempPathFactory,
    decisions: dict[str, Decision],
    recorded_modules: tuple[str, ...],
    hooked_modules: tuple[str, ...],
    flops: int,
    overhead: float,
    gap: float,
    budget_bytes: int | None,
    offloading: tuple[int, int],
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn-plan.json"
    host_bytes, window_bytes = offloading
    plan = Plan(
        decisions,
        recorded_modules,
        hooked_modules,
        flops,
        "f",
        7,
        overhead,
        gap,
        budget_bytes,
        host_bytes=host_bytes,
        window_bytes=window_bytes,
    )
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert list(loaded.decisions) == list(decisions)


def test_a_file_that_tells_nothing_of_inputs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(changed(lambda d: d.pop("inputs")), encoding="utf-8")
    assert Plan.load(path) == replace(PLAN, inputs=())


@pytest.mark.parametrize("length", [0, 1, 40, 200, len(TEXT) - 3])
def test_a_cut_off_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "plan.json"
    path.write_text(TEXT[:length], encoding="utf-8")
    with pytest.raises(PlanFileError, match="line"):
        Plan.load(path)


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(TEXT)
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (changed(lambda d: d.update(version=2)), "version 2 of memfit-plan is newer"),
        (changed(lambda d: d.update(format="memfit-layers")), 'must be "memfit-plan"'),
        (changed(lambda d: d.pop("groups")), '"groups" is missing'),
        (changed(lambda d: d.update(colour="red")), '"colour" is unknown'),
        (changed(lambda d: d.update(recorded_modules="layers")), "recorded_modules must be a list; got 'layers'"),
        (changed(lambda d: d.update(fingerprint=1)), "fingerprint must be a text"),
        (changed(lambda d: d.update(inputs=[])), "inputs must be an object of names with types and shapes"),
        (changed(lambda d: d["inputs"].update(scale="float32")), r"such as .*; got 'float32' \(str\) for 'scale'"),
        (changed(lambda d: d["inputs"].update(scale=[1])), "inputs must have a type and a shape each"),
        (changed(lambda d: d.update(budget_bytes=-1)), "budget_bytes"),
        (changed(lambda d: d.update(predicted_peak_bytes=1.5)), "predicted_peak_bytes"),
        (changed(lambda d: d.update(optimality_gap=-0.1)), "optimality_gap must be a number, at least 0"),
        (changed(lambda d: d.update(groups={})), '"groups" must be a list'),
        (changed(lambda d: d["groups"][1].pop("values")), r'groups\[1\]: "values" is missing'),
        (changed(lambda d: d["groups"][1].update(module=3)), r'groups\[1\]: "module" must be a text'),
        (changed(lambda d: d["groups"][0]["values"].update({"aten.mul": "save"})), r"groups\[0\]: a value is named"),
        (changed(lambda d: d["groups"][2]["values"].update({"aten.mul#0": "save"})), "decided twice"),
        (
            changed(lambda d: d["groups"][0]["values"].update({"aten.mul#0": "burn"})),
            "save, recompute, offload, compress",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanFileError, match=told):
        Plan.load(path)


def test_a_file_that_is_not_there_is_a_plan_file_error(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
