"""What is told of the way to the host's memory, from how long copies take; how they are timed is tested on GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.measuring.link import CopySeconds, link_of, measured_link
from memfit.graph.model_profile import Link

LARGE, SMALL = 64 * 2**20, 2**20


def seconds_on(bytes_per_second: float, seconds_per_copy: float) -> CopySeconds:
    return CopySeconds(LARGE / bytes_per_second + seconds_per_copy, SMALL / bytes_per_second + seconds_per_copy)


def test_bytes_and_copies_are_told_apart_by_two_sizes() -> None:
    # Powers of two, so that floats are exact.
    out, back = seconds_on(2.0**35, 2.0**-16), seconds_on(2.0**34, 2.0**-17)
    assert link_of(out, back, 77) == Link(2.0**35, 2.0**34, seconds_per_copy=2.0**-16, host_free_bytes=77)
    assert link_of(back, out, 77) == Link(2.0**34, 2.0**35, seconds_per_copy=2.0**-16, host_free_bytes=77)


def test_the_larger_slowdown_counts_and_never_one_below_nothing() -> None:
    sound = seconds_on(2.0**35, 2.0**-16)
    for slowdowns, told in (((0.25, 0.5), 0.5), ((-0.25, -0.5), 0.0)):
        out, back = (sound._replace(slowdown=slowdown) for slowdown in slowdowns)
        link = link_of(out, back, 77)
        assert link is not None
        assert link.slowdown == told


def test_copies_take_nothing_for_themselves_rather_than_less() -> None:
    # Small copies at twice the rate of large ones.
    quick = CopySeconds(1.0, 2.0**-7)
    link = link_of(quick, quick, 77)
    assert link is not None
    assert link.seconds_per_copy == 0.0


@pytest.mark.parametrize("nonsense", [(1.0, 1.0), (1.0, 2.0), (1.0, 0.0), (0.0, 0.0)])
def test_times_that_tell_nothing_give_no_link(nonsense: tuple[float, float]) -> None:
    sound = seconds_on(2.0**35, 2.0**-16)
    assert link_of(CopySeconds(*nonsense), sound, 77) is None
    assert link_of(sound, CopySeconds(*nonsense), 77) is None


def test_a_cpu_is_its_own_host() -> None:
    assert measured_link(torch.device("cpu")) is None


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_profiles_have_the_link_of_their_device(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(50e9, 40e9, 1e-5, 77)
    asked: list[torch.device] = []

    def answer(device: torch.device) -> Link:
        asked.append(device)
        return link

    for module in ("real_step", "fake_step"):
        monkeypatch.setattr(f"memfit.capture.{module}.measured_link", answer)
    assert memfit.profile(nn.Linear(2, 2), torch.ones(1, 2), mode=mode).link == link  # type: ignore[arg-type]
    assert asked == [torch.device("cpu")]
