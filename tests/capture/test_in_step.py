"""Seconds of ops in the midst of a step, by hand."""

from __future__ import annotations

import pytest

from memfit.capture.in_step import as_in_the_step
from memfit.graph.model_profile import RecordedOp, Replay


def ops(*seconds_and_flops: tuple[float, int]) -> list[RecordedOp]:
    return [
        RecordedOp("", "aten.mm", number, (), (), (), flops, Replay.YES, seconds=seconds)
        for number, (seconds, flops) in enumerate(seconds_and_flops)
    ]


def test_what_the_step_takes_longer_goes_to_the_ops_that_compute() -> None:
    scaled = as_in_the_step(ops((4.0, 7), (2.0, 0), (6.0, 9)), step_seconds=13.0, launching_seconds=5.0)
    assert [op.seconds for op in scaled] == pytest.approx([4.4, 2.0, 6.6])


@pytest.mark.parametrize(
    ("step_seconds", "launching_seconds"),
    [
        (11.0, 1.0),  # ops that run faster in the step than alone are left as they are
        (13.0, 12.0),  # the host sets the pace
    ],
)
def test_nothing_is_known_where_the_device_is_not_short_of_time(step_seconds: float, launching_seconds: float) -> None:
    measured = ops((4.0, 7), (2.0, 0), (6.0, 9))
    assert list(as_in_the_step(measured, step_seconds=step_seconds, launching_seconds=launching_seconds)) == measured


def test_a_step_without_matrix_products_is_left_as_it_is() -> None:
    measured = ops((4.0, 0), (2.0, 0))
    assert list(as_in_the_step(measured, step_seconds=13.0, launching_seconds=1.0)) == measured


def test_clocks_are_not_blamed_for_everything() -> None:
    scaled = as_in_the_step(ops((4.0, 7), (2.0, 0)), step_seconds=100.0, launching_seconds=1.0)
    assert [op.seconds for op in scaled] == [5.0, 2.0]
