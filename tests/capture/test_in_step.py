"""What ops and the host take in the midst of training, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.calibration.host_costs import runs_ahead, with_back_to_back_host_costs
from memfit.capture.measuring.throttling import throttled_ops, unthrottled_share
from memfit.graph.model_profile import HostCosts, ModelProfile, Phase, RecordedOp, Replay

HOST = HostCosts(
    forward=2.0, backward=3.0, recorded_op=0.4, dropped_op=0.3, module_entry=0.2, hooked_save=0.1, replayed_op=0.5
)


def ops(*seconds_and_flops: tuple[float, int], phase: Phase = Phase.FORWARD) -> list[RecordedOp]:
    return [
        RecordedOp("", "aten.mm", number, (), (), (), flops, Replay.YES, phase, seconds=seconds)
        for number, (seconds, flops) in enumerate(seconds_and_flops)
    ]


def profile_of(device: list[RecordedOp], host: HostCosts, step_seconds: float) -> ModelProfile:
    return ModelProfile(tuple(device), (), (), 0, step_seconds, "cuda:0", "f", host=host)


def test_what_the_step_takes_longer_goes_to_the_ops_that_compute() -> None:
    scaled = throttled_ops(ops((4.0, 7), (2.0, 0), (6.0, 9)), HOST, step_seconds=13.0)
    assert [op.seconds for op in scaled] == pytest.approx([4.4, 2.0, 6.6])


@pytest.mark.parametrize(
    ("step_seconds", "host"),
    [
        (11.0, HOST),  # ops that run faster in the step than alone are left as they are
        (13.0, replace(HOST, forward=7.0)),  # the host may set the pace
    ],
)
def test_ops_are_left_alone_where_the_device_is_not_short_of_time(step_seconds: float, host: HostCosts) -> None:
    measured = ops((4.0, 7), (2.0, 0), (6.0, 9))
    assert list(throttled_ops(measured, host, step_seconds)) == measured


def test_a_device_that_rests_takes_what_the_ops_took_apart() -> None:
    apart = ops((4.0, 7), (2.0, 0), (6.0, 9))
    assert unthrottled_share(apart, throttled_ops(apart, HOST, step_seconds=14.0)) == pytest.approx(12 / 14)
    assert unthrottled_share(apart, throttled_ops(apart, HOST, step_seconds=11.0)) == 1.0
    assert unthrottled_share([], []) == 1.0


def test_a_step_without_matrix_products_is_left_as_it_is() -> None:
    measured = ops((4.0, 0), (2.0, 0))
    assert list(throttled_ops(measured, HOST, step_seconds=13.0)) == measured


def test_clocks_are_not_blamed_for_everything() -> None:
    scaled = throttled_ops(ops((4.0, 7), (2.0, 0)), HOST, step_seconds=100.0)
    assert [op.seconds for op in scaled] == [5.0, 2.0]


@pytest.mark.parametrize(
    ("device_seconds", "step_seconds", "factor"),
    [
        (4.0, 6.0, 1.2),  # 5 seconds to launch, and a step takes 6
        (5.5, 6.0, 6.0 / 5.5),  # the device explains a part of it
        (4.0, 4.5, 1.0),  # never faster than at its best
        (4.0, 5.0, 1.0),
        (1.0, 50.0, 1.0),  # whatever the step waits for, launching it takes a tenth of that
    ],
)
def test_a_host_that_sets_the_pace_takes_as_long_as_the_step_shows(
    device_seconds: float, step_seconds: float, factor: float
) -> None:
    host = replace(HOST, runs_ahead=True)
    slowed = with_back_to_back_host_costs(profile_of(ops((device_seconds, 1)), host, step_seconds)).host
    assert slowed is not None
    assert slowed.runs_ahead
    assert slowed.forward + slowed.backward == pytest.approx(5.0 * factor)
    assert slowed.replayed_op == pytest.approx(0.5 * factor)


@pytest.mark.parametrize(
    ("forward", "backward", "synchronized_seconds", "step_seconds", "expected"),
    [
        # The device computes for 3 and 6 seconds.
        (5.0, 5.0, 11.0, 10.0, True),  # in a row as long as it takes to launch
        (5.0, 5.0, 11.0, 10.9, False),  # the device begins its 6 seconds when the forward pass is launched
        (5.0, 5.0, 14.0, 13.2, True),  # disturbed, but faster in a row all the same
        (5.0, 1.0, 11.0, 9.1, True),
        (5.0, 1.0, 11.0, 11.2, False),
        (1.0, 1.0, 9.0, 9.5, True),  # waiting for the forward pass would cost nothing
    ],
)
def test_whether_the_host_runs_ahead_shows_in_steps_that_follow_each_other(
    forward: float, backward: float, synchronized_seconds: float, step_seconds: float, expected: bool
) -> None:
    device = [
        *ops((3.0, 0)),
        *ops((4.0, 0), phase=Phase.BACKWARD),
        *ops((2.0, 0), phase=Phase.OPTIMIZER),
    ]
    host = replace(HOST, forward=forward, backward=backward)
    profile = profile_of(device, host, step_seconds)
    assert runs_ahead(profile, synchronized_seconds, forward_waits=False) is expected


def test_a_forward_pass_that_waits_for_a_result_does_not_run_ahead() -> None:
    profile = profile_of(ops((4.0, 0), (4.0, 0)), HOST, step_seconds=8.0)
    assert runs_ahead(profile, 10.0, forward_waits=False)
    assert not runs_ahead(profile, 10.0, forward_waits=True)
