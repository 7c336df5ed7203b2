"""The report as the page's script reads it: plain lists and numbers, small enough for models of thousands of values."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from memfit.errors import InvalidParameterError
from memfit.graph.names import parse_value_name
from memfit.graph.plan import FrontierPoint
from memfit.graph.plan_file import plan_text
from memfit.infeasible_budget import LiveBytes
from memfit.planning.simulate.simulator import simulated
from memfit.planning.step import Bytes, Step
from memfit.report.compiled_document import CompiledStep
from memfit.report.memory_kinds import memory_kinds, named_samples
from memfit.report.page_data import ReportData
from memfit.report.plan_effect import LETTERS, BlockTable, bytes_by_block, plan_effect

MOST_TIMELINE_POINTS = 600
MOST_LIVE_MODULES = 32
_VALUE_COLUMNS = ("module_names", "op_names", "module", "op", "call", "output", "num_bytes", "block")


def page_document(data: ReportData) -> dict[str, Any]:
    """Return everything that the page shows, ready for JSON. Points are in the order of their peak, smallest first."""
    points = _ordered_points(data)
    step = Step(data.profile)
    compiled = data.profile.compiled
    is_compiled = compiled is not None and bool(compiled.kinds)
    return {
        "title": data.title,
        "profile": _profile_head(data, step),
        "facts": [[str(name), str(fact)] for name, fact in data.facts.items()],
        "budget_bytes": data.budget_bytes,
        "selected": _selected(data, points),
        "is_compiled": is_compiled,
        **(_in_segments(data, step, points) if is_compiled else _in_values(data, step, points)),
        "plans": _packed([plan_text(point.plan) for point in points]),
        "sizes": data.sizes and asdict(data.sizes),
        "marks": [asdict(mark) for mark in data.marks],
    }


def _in_values(data: ReportData, step: Step, points: Sequence[FrontierPoint]) -> dict[str, Any]:
    """Return the step op by op, planned value by value."""
    blocks = BlockTable(step)
    first_ops = _bucket_starts(step.num_ops)
    return {
        "blocks": blocks.labels,
        "block_kinds": blocks.kinds,
        "values": _value_columns(step, blocks.of_value),
        "timeline": {
            "unit": "op",
            "first_ops": first_ops,
            "phases": _phases(step),
            "plain_bytes": _downsampled(simulated(step, set()).timeline_bytes, first_ops),
            "kinds": memory_kinds(data.profile, first_ops),
        },
        "points": [_point_entry(step, point, blocks, first_ops) for point in points],
    }


def _in_segments(data: ReportData, step: Step, points: Sequence[FrontierPoint]) -> dict[str, Any]:
    """Return the step by segments between compiled blocks, planned partition by partition."""
    assert data.profile.compiled is not None
    compiled = CompiledStep(data.profile.compiled)
    return {
        "blocks": compiled.labels,
        "block_kinds": compiled.kinds,
        "values": {column: [] for column in _VALUE_COLUMNS},
        "timeline": compiled.timeline(memory_kinds(data.profile, [0][: step.num_ops])),
        "points": [compiled.point_entry(point, step.resident_bytes) for point in points],
    }


def _ordered_points(data: ReportData) -> list[FrontierPoint]:
    points = {(point.peak_bytes, point.overhead): point for point in data.points}
    if data.chosen is not None:
        points[data.chosen.peak_bytes, data.chosen.overhead] = data.chosen
    if not points:
        raise InvalidParameterError("a page needs at least one plan; give it memfit.frontier(profile) as points")
    return [points[key] for key in sorted(points)]


def _selected(data: ReportData, points: Sequence[FrontierPoint]) -> int:
    if data.chosen is not None:
        return next(place for place, point in enumerate(points) if point is data.chosen)
    if data.budget_bytes is not None:
        within = [place for place, point in enumerate(points) if point.peak_bytes <= data.budget_bytes]
        return min(within, key=lambda place: points[place].overhead, default=0)
    # The knee: the farthest below the line from the smallest plan to the fastest one.
    smallest, fastest = points[0], points[-1]
    width, height = fastest.peak_bytes - smallest.peak_bytes, smallest.overhead - fastest.overhead

    def gain(place: int) -> float:
        point = points[place]
        across = (point.peak_bytes - smallest.peak_bytes) / width if width else 0.0
        down = (smallest.overhead - point.overhead) / height if height else 0.0
        return down - across

    return max(range(len(points)), key=gain)


def _profile_head(data: ReportData, step: Step) -> dict[str, Any]:
    profile = data.profile
    return {
        "device": profile.device,
        "fingerprint": profile.fingerprint,
        "measured_with": profile.measured_with,
        "step_seconds": profile.step_seconds,
        "peak_bytes": profile.peak_bytes,
        "device_bytes": profile.device_bytes,
        "resident_bytes": step.resident_bytes,
        "num_ops": step.num_ops,
        "link": None if profile.link is None else asdict(profile.link),
    }


def _value_columns(step: Step, block_of_value: list[int]) -> dict[str, Any]:
    names = [parse_value_name(step.profile.values[index].name) for index in step.plannable]
    modules, module_places = _string_table(name.module for name in names)
    ops, op_places = _string_table(name.op for name in names)
    return {
        "module_names": modules,
        "op_names": ops,
        "module": module_places,
        "op": op_places,
        "call": [name.call for name in names],
        "output": [name.output for name in names],
        "num_bytes": [step.value_bytes[index] for index in step.plannable],
        "block": block_of_value,
    }


def _string_table(texts: Iterable[str]) -> tuple[list[str], list[int]]:
    place_of: dict[str, int] = {}
    places = [place_of.setdefault(text, len(place_of)) for text in texts]
    return list(place_of), places


def _phases(step: Step) -> list[list[Any]]:
    """Return where each part of the step begins: its name and its first op."""
    phases: list[list[Any]] = []
    for index, op in enumerate(step.profile.ops):
        if not phases or phases[-1][0] != str(op.phase):
            phases.append([str(op.phase), index])
    return phases


def _bucket_starts(num_ops: int) -> list[int]:
    ops_per_point = max(1, -(-num_ops // MOST_TIMELINE_POINTS))
    return list(range(0, num_ops, ops_per_point))


def _packed(texts: Sequence[str]) -> dict[str, Any]:
    """Return the ``texts`` compressed, for the page to unpack when one is downloaded.

    Plans of one step differ in few lines. Their lines stand side by side, aligned at the end, so that equal ones are
    near enough for the compression to find them.
    """
    lines = [text.split("\n") for text in texts]
    most = max(map(len, lines))
    padded = [[""] * (most - len(each)) + each for each in lines]
    columns = "\n".join(line for column in zip(*padded, strict=True) for line in column)
    # What is not Unicode, a module's name may hold it, becomes an escape that JSON reads.
    packed = zlib.compress(columns.encode(errors="backslashreplace"), 9)
    return {"num_lines": [len(each) for each in lines], "packed": base64.b64encode(packed).decode("ascii")}


def _downsampled(timeline_bytes: Bytes, first_ops: list[int]) -> list[int]:
    """Return the most that is live in each bucket of ops, so that no peak is lost."""
    if not first_ops:
        return []
    most: list[int] = np.maximum.reduceat(timeline_bytes, first_ops).tolist()
    return most


def _point_entry(step: Step, point: FrontierPoint, blocks: BlockTable, first_ops: list[int]) -> dict[str, Any]:
    effect = plan_effect(step, point.plan)
    simulation = effect.simulation
    live = list(simulation.live_at_peak)
    if point.peak_bytes > simulation.peak_bytes:
        live.append(LiveBytes("(allocator overhead)", point.peak_bytes - simulation.peak_bytes))
        live.sort(key=lambda entry: -entry.num_bytes)
    ops = step.profile.ops
    return {
        **point.facts(),
        "outcomes": "".join(LETTERS[outcome] for outcome in effect.outcomes),
        "blocks": bytes_by_block(step, effect, blocks),
        "timeline_bytes": _downsampled(simulation.timeline_bytes, first_ops),
        "peak_op_index": simulation.peak_op_index,
        "peak_op": ops[simulation.peak_op_index].op if ops else "",
        "num_live_modules": len(live),
        "live_at_peak": live[:MOST_LIVE_MODULES],
        "other_live_bytes": sum(entry.num_bytes for entry in live[MOST_LIVE_MODULES:]),
        "live_samples": named_samples(step, point.plan),
    }
