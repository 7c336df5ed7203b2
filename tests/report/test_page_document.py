"""The numbers on the page, against small steps worked out by hand and the simulator on drawn ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compiled.test_partition_mix import drawn_profile, model_profile
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.model_families import chain, gpt
from tests.planning.step_builder import StepBuilder
from tests.report.planned_steps import point_recomputing

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import Link, ModelProfile, Phase
from memfit.graph.plan import Decision, FrontierPoint
from memfit.planning.planner import frontier
from memfit.planning.simulate.simulator import simulate
from memfit.planning.step import Step
from memfit.report.memory_kinds import memory_kinds
from memfit.report.page import page_text
from memfit.report.page_data import Mark, ReportData, SizeCurve, SizeRow
from memfit.report.page_document import MOST_LIVE_MODULES, MOST_TIMELINE_POINTS, page_document
from memfit.report.strategy_marks import strategy_marks


def two_blocks() -> ModelProfile:
    """Each block adds, which autograd does not save, then takes tanh, which it does; a head outside them saves too."""
    b = StepBuilder()
    x = b.batch(64)
    for number in range(2):
        path = b.block(f"blocks.{number}")
        (x,) = b.op(path, "add", [x], 100)
        (x,) = b.op(f"{path}.act", "tanh", [x], 200, saves_outputs=[0])
    (x,) = b.op("head", "sigmoid", [x], 50, saves_outputs=[0])
    b.op(None, "sum", [x], 4)
    return b.finish("two-blocks")


def index_of(profile: ModelProfile, name: str) -> int:
    return next(index for index, value in enumerate(profile.values) if value.name == name)


def test_blocks_show_the_bytes_that_are_saved_and_recomputed_in_each() -> None:
    profile = two_blocks()
    plain = point_recomputing(profile, set())
    tanh = index_of(profile, "blocks.0.act::aten.tanh#0")
    planned = point_recomputing(profile, {tanh})
    document = page_document(ReportData(profile, [plain], chosen=planned))
    assert document["blocks"] == ["blocks.0", "blocks.1", "outside the blocks"]
    entry_of_plan = document["points"][document["selected"]]
    # The sum that nobody kept is now what the replay of tanh starts from.
    assert entry_of_plan["blocks"] == [[100, 200, 0, 0], [200, 0, 0, 0], [50, 0, 0, 0]]
    assert entry_of_plan["outcomes"] == "sr-ss"
    (entry_of_plain,) = (entry for entry in document["points"] if entry["overhead"] == 0)
    assert entry_of_plain["blocks"] == [[200, 0, 0, 0], [200, 0, 0, 0], [50, 0, 0, 0]]
    assert entry_of_plain["outcomes"] == "-s-ss"


def test_offloaded_and_compressed_values_are_counted_apart() -> None:
    profile = two_blocks()
    moved = {
        index_of(profile, "blocks.0.act::aten.tanh#0"): Decision.OFFLOAD,
        index_of(profile, "blocks.1.act::aten.tanh#0"): Decision.COMPRESS,
    }
    document = page_document(ReportData(profile, [point_recomputing(profile, set(), moved)]))
    assert document["points"][0]["blocks"] == [[0, 0, 200, 0], [0, 0, 0, 200], [50, 0, 0, 0]]
    assert document["points"][0]["outcomes"] == "-o-cs"
    assert document["points"][0]["host_bytes"] == 200


def test_what_is_offloaded_is_off_the_device_between_the_passes() -> None:
    profile = two_blocks()
    tanh = index_of(profile, "blocks.0.act::aten.tanh#0")
    plain = point_recomputing(profile, set())
    planned = point_recomputing(profile, set(), {tanh: Decision.OFFLOAD}, window_bytes=0)
    document = page_document(ReportData(profile, [planned, plain]))
    by_host_bytes = {entry["host_bytes"]: entry["timeline_bytes"] for entry in document["points"]}
    assert set(by_host_bytes) == {0, 200}
    assert by_host_bytes[0] == document["timeline"]["plain_bytes"]
    gone = [before - after for before, after in zip(by_host_bytes[0], by_host_bytes[200], strict=True)]
    # The add after it still reads it; from the next tanh on, until its own backward, it is on the host.
    assert gone == [0] * 3 + [200] * 7 + [0] * 2


def test_a_value_that_a_replay_starts_from_can_wait_on_the_host() -> None:
    profile = two_blocks()
    add, tanh = (index_of(profile, f"blocks.0{name}#0") for name in ("::aten.add", ".act::aten.tanh"))
    document = page_document(ReportData(profile, [point_recomputing(profile, {tanh}, {add: Decision.OFFLOAD})]))
    assert document["points"][0]["outcomes"] == "or-ss"
    assert document["points"][0]["blocks"][0] == [0, 200, 100, 0]


def test_the_way_to_the_host_is_among_the_facts_where_it_is_known() -> None:
    profile = two_blocks()
    assert page_document(ReportData(profile, [point_recomputing(profile, set())]))["profile"]["link"] is None
    linked = replace(profile, link=Link(50e9, 40e9, 1e-5, 77, slowdown=0.02, host_seconds=1e-4))
    document = page_document(ReportData(linked, [point_recomputing(linked, set())]))
    assert document["profile"]["link"] == {
        "out_bytes_per_second": 50e9,
        "back_bytes_per_second": 40e9,
        "seconds_per_copy": 1e-5,
        "host_free_bytes": 77,
        "slowdown": 0.02,
        "host_seconds": 1e-4,
    }


def test_values_written_in_place_count_their_bytes_once() -> None:
    b = StepBuilder()
    path = b.block("layers.0")
    (y,) = b.op(path, "sigmoid", [b.batch(8)], 300, saves_outputs=[0])
    (y,) = b.op(path, "relu_", [y], in_place=True, saves_outputs=[0])
    b.op(None, "sum", [y], 4)
    profile = b.finish("in-place")
    document = page_document(ReportData(profile, [point_recomputing(profile, set())]))
    assert document["points"][0]["outcomes"] == "ss"
    assert document["points"][0]["blocks"][0] == [300, 0, 0, 0]


def test_a_value_belongs_to_the_innermost_of_nested_blocks() -> None:
    b = StepBuilder()
    b.block("stage")
    b.block("stage.1")
    (y,) = b.op("stage.1.act", "tanh", [b.batch(8)], 30, saves_outputs=[0])
    (y,) = b.op("stage.10.act", "tanh", [y], 40, saves_outputs=[0])
    b.op(None, "sum", [y], 4)
    profile = b.finish("nested")
    document = page_document(ReportData(profile, [point_recomputing(profile, set())]))
    assert [row[0] for row in document["points"][0]["blocks"]] == [40, 30, 0]


@settings(max_examples=150, deadline=None)
@given(drawn_profiles(), st.data())
def test_timeline_peak_and_outcomes_agree_with_the_simulator(profile: ModelProfile, data: st.DataObject) -> None:
    step = Step(profile)
    wanted = {value for value in step.plannable if data.draw(st.booleans())}
    document = page_document(ReportData(profile, [point_recomputing(profile, wanted)]))
    simulation = simulate(profile, wanted)
    (entry,) = document["points"]
    assert entry["peak_bytes"] == simulation.peak_bytes
    assert entry["timeline_bytes"] == list(simulation.timeline_bytes)
    assert document["timeline"]["plain_bytes"] == list(simulate(profile, set()).timeline_bytes)
    assert sum(num_bytes for _, num_bytes in entry["live_at_peak"]) + entry["other_live_bytes"] == sum(
        live.num_bytes for live in simulation.live_at_peak
    )
    recomputed = step.recomputed_of(wanted)
    recomputed_bytes = sum(step.value_bytes[index] for index in recomputed if profile.values[index].is_saved)
    assert sum(row[1] for row in entry["blocks"]) == recomputed_bytes
    json.dumps(document, allow_nan=False)


def test_what_the_allocator_counts_beyond_the_buffers_is_live_at_the_peak_too() -> None:
    profile = two_blocks()
    point = point_recomputing(profile, set())
    counted = replace(point, peak_bytes=point.peak_bytes + 10**6)
    (plain,) = page_document(ReportData(profile, [point]))["points"]
    (entry,) = page_document(ReportData(profile, [counted]))["points"]
    assert entry["live_at_peak"] == [("(allocator overhead)", 10**6), *plain["live_at_peak"]]
    assert entry["num_live_modules"] == plain["num_live_modules"] + 1


def test_long_steps_are_drawn_in_at_most_600_points_and_keep_their_peak() -> None:
    profile = chain(num_layers=1000)
    point = point_recomputing(profile, set())
    document = page_document(ReportData(profile, [point]))
    drawn = document["points"][0]["timeline_bytes"]
    assert document["profile"]["num_ops"] == 2002
    assert len(drawn) == len(document["timeline"]["first_ops"]) == 501 <= MOST_TIMELINE_POINTS
    assert max(drawn) == point.peak_bytes
    bucket = document["points"][0]["peak_op_index"] // 4
    assert drawn[bucket] == point.peak_bytes
    assert len(document["points"][0]["live_at_peak"]) == MOST_LIVE_MODULES


def test_a_model_of_5000_values_stays_below_a_megabyte_with_32_plans() -> None:
    profile = gpt(num_blocks=265)
    step = Step(profile)
    assert len(step.plannable) == 5041
    plans = [point_recomputing(profile, set(step.plannable[: 600 * number])) for number in range(8)]
    few, more = (len(page_text(ReportData(profile, each))) for each in (plans[::4], plans[1::2]))
    # Each plan adds about as much: of the two plans more here, fifteen times as much.
    assert few + 15 * (more - few) < 1_000_000


def test_points_are_ordered_by_peak_whatever_their_order_was() -> None:
    profile = gpt(num_blocks=4)
    points = frontier(profile)
    document = page_document(ReportData(profile, points))
    assert [entry["peak_bytes"] for entry in document["points"]] == sorted(point.peak_bytes for point in points)
    assert document == page_document(ReportData(profile, points[::-1]))


def test_the_page_opens_on_the_chosen_plan_else_on_the_fastest_within_the_budget() -> None:
    profile = gpt(num_blocks=4)
    points = frontier(profile)
    chosen = points[2]
    document = page_document(ReportData(profile, points, chosen=chosen, budget_bytes=points[-1].peak_bytes))
    assert document["points"][document["selected"]]["peak_bytes"] == chosen.peak_bytes
    document = page_document(ReportData(profile, points, budget_bytes=points[3].peak_bytes + 1))
    assert document["points"][document["selected"]]["peak_bytes"] == points[3].peak_bytes


def test_without_a_budget_the_page_opens_on_the_knee() -> None:
    profile = two_blocks()
    plan = point_recomputing(profile, set()).plan
    points = [FrontierPoint(*numbers, plan) for numbers in ((100, 0.0), (60, 0.01), (50, 0.2), (40, 0.3))]
    document = page_document(ReportData(profile, points))
    assert document["points"][document["selected"]]["peak_bytes"] == 60


def test_plans_for_other_models_and_no_plans_are_refused() -> None:
    profile = two_blocks()
    point = point_recomputing(profile, set())
    other = replace(point, plan=replace(point.plan, fingerprint="another"))
    with pytest.raises(InvalidParameterError, match="for the model 'another', the profile is of 'two-blocks'"):
        page_document(ReportData(profile, [other]))
    partial = replace(point, plan=replace(point.plan, decisions={}))
    with pytest.raises(InvalidParameterError, match=r"has no decision for the value 'blocks\.0::aten\.add#0'"):
        page_document(ReportData(profile, [partial]))
    with pytest.raises(InvalidParameterError, match="at least one plan"):
        page_document(ReportData(profile, []))


def test_strategies_are_marked_where_the_simulator_puts_them() -> None:
    profile = gpt(num_blocks=8)
    marks = {mark.label: mark for mark in strategy_marks(profile)}
    # Blocks of no known kind: attention and feed-forward choose none of them, which is no mark of its own.
    assert list(marks) == ["save everything", "every block (full)", "every 4th block", "every 2nd block", "√n blocks"]
    assert marks["save everything"] == Mark("save everything", simulate(profile, set()).peak_bytes, 0.0)
    assert marks["every block (full)"].peak_bytes < marks["every 2nd block"].peak_bytes
    fastest_within = min(
        point.overhead
        for point in frontier(profile, points=200)
        if point.peak_bytes <= marks["every 2nd block"].peak_bytes
    )
    assert fastest_within < marks["every 2nd block"].overhead


def test_a_model_without_blocks_has_saving_everything_as_its_only_mark() -> None:
    b = StepBuilder()
    (y,) = b.op("act", "tanh", [b.batch(8)], 30, saves_outputs=[0])
    b.op(None, "sum", [y], 4)
    assert [mark.label for mark in strategy_marks(b.finish("no-blocks"))] == ["save everything"]


def test_the_memory_is_divided_into_kinds_that_no_plan_changes() -> None:
    b = StepBuilder()
    x = b.batch(64)
    (x,) = b.op("layer", "mm", [x], 100, saves_outputs=[0])
    profile = b.finish("kinds")
    ops, values = len(profile.ops), list(profile.values)
    weight = replace(values[0], name="layer.weight", storage=90, num_bytes=40)
    state = replace(values[0], name="optimizer state#0", storage=91, num_bytes=80)
    batch = replace(values[0], name="batch#0")
    backward = next(index for index, op in enumerate(profile.ops) if op.phase is Phase.BACKWARD)
    gradient = replace(
        values[-1], name="gradient", storage=92, num_bytes=40, op_index=backward, dies_after=None, saves=()
    )
    kinds = memory_kinds(replace(profile, values=(batch, *values[1:], weight, state, gradient)), range(ops))
    assert (kinds["weights"], kinds["batch"]) == (40, 64)
    assert kinds["optimizer_state"] == [80] * ops
    assert kinds["gradients"][: backward + 1] == [0] * backward + [40]


def test_a_compiled_step_is_drawn_by_segments_up_to_its_predicted_peak() -> None:
    profile = model_profile(drawn_profile(1))
    document = page_document(ReportData(profile, frontier(profile, points=6)))
    assert document["is_compiled"]
    assert len(document["points"]) > 3
    assert profile.compiled is not None
    everything = [block.measured[0].held_bytes for block in profile.compiled.blocks]
    for entry in document["points"]:
        assert max(entry["timeline_bytes"]) == entry["peak_bytes"] == sum(size for _, size in entry["live_at_peak"])
        assert (
            len(entry["timeline_bytes"]) == len(document["timeline"]["plain_bytes"]) == len(profile.compiled.segments)
        )
        saved, recomputed = ([row[place] for row in entry["blocks"]] for place in range(2))
        assert [one + other for one, other in zip(saved, recomputed, strict=True)] == everything
        assert all(name == "everything" for name, size in zip(entry["partitions"], recomputed, strict=True) if not size)


def test_sizes_are_listed_with_what_fits() -> None:
    rows = [SizeRow(4, 100, 10.0, is_measured=True), SizeRow(8, None, None)]
    data = ReportData(two_blocks(), frontier(two_blocks()), sizes=SizeCurve(rows, 4, 120, is_throughput=True))
    assert page_document(data)["sizes"] == {
        "rows": [(4, 100, 10.0, True), (8, None, None, False)],
        "chosen_size": 4,
        "budget_bytes": 120,
        "is_throughput": True,
    }


def test_of_a_compiled_step_the_plain_one_is_the_only_baseline() -> None:
    assert strategy_marks(model_profile(drawn_profile(1))) == (
        Mark("plain step, not compiled", 400, 0.0, is_measured=True),
    )
