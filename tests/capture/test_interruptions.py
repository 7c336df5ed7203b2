"""Profiling that breaks off, wherever it does, leaves everything as it was."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.engine.step_comparison import assert_same, leaves, look
from torch import Tensor, nn

import memfit


class Countdown:
    """Counts calls down."""

    def __init__(self) -> None:
        self.calls_left = 0

    def is_over(self) -> bool:
        self.calls_left -= 1
        return self.calls_left == -1


# Global, so that it is no state that modules reach, which is put back.
COUNTDOWN = Countdown()


class Fragile(nn.Module):
    """Counts, draws, updates statistics, and stops at one of its calls: in forward, or in the backward that follows."""

    def __init__(self, error: BaseException, stops_in: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.num_calls = 0
        self.error = error
        self.stops_in = stops_in

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        output = self.layers(x)
        if COUNTDOWN.is_over():
            if self.stops_in == "forward":
                raise self.error
            output.register_hook(self.stop)
        return output

    def stop(self, gradient: Tensor) -> None:
        raise self.error


RUNS = ("warm-up", "record", "record without saves", "peak", "timed", "timed", "timed", "timed ops", "calibration")
# The run without saves is a forward pass alone.
PLACES = [(run, "forward") for run in range(len(RUNS))] + [(run, "backward") for run in range(len(RUNS)) if run != 2]


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize(("run", "stops_in"), PLACES)
def test_profile_that_breaks_off_puts_everything_back(error: BaseException, stops_in: str, run: int) -> None:
    COUNTDOWN.calls_left = run
    model = Fragile(error, stops_in)
    batch = torch.linspace(-1, 1, 8).view(2, 4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = look("it", model, batch) | dict(leaves("weight", dict(model.state_dict())))
    with pytest.raises(type(error)):
        memfit.profile(model, batch)
    assert COUNTDOWN.calls_left == -1
    COUNTDOWN.calls_left = run
    assert_same(before, look("it", model, batch) | dict(leaves("weight", dict(model.state_dict()))))
    assert gc.isenabled()
    assert "forward" not in vars(model)
