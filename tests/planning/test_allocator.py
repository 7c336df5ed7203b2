"""Bytes as CUDA's allocator may count them: a margin for odd sizes, and none for the step that was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planning.test_listening import profile_of

from memfit.graph.model_profile import ModelProfile
from memfit.planning.allocator import counted_bytes, step_margin_bytes
from memfit.planning.simulator import judged
from memfit.planning.step import Step

MIB = 2**20
MARGIN = MIB * 6 // 10


@pytest.mark.parametrize("num_bytes", [0, 512, MIB, 5 * MIB, 64 * MIB])
def test_small_and_even_sizes_are_what_they_are(num_bytes: int) -> None:
    assert counted_bytes(num_bytes) == num_bytes


@pytest.mark.parametrize("num_bytes", [MIB + 512, 49 * MIB + MIB // 4])
def test_odd_large_sizes_may_come_with_what_was_left_over(num_bytes: int) -> None:
    assert counted_bytes(num_bytes) == num_bytes + MARGIN


def test_a_step_that_makes_odd_large_sizes_has_a_margin_of_its_own() -> None:
    assert step_margin_bytes([]) == step_margin_bytes([512, MIB + MIB, MIB - 1]) == 2 * MIB
    assert step_margin_bytes([512, MIB + 512]) == 4 * MIB
    assert step_margin_bytes([MIB + 512, 2 * MIB, 3 * MIB + 512]) == 6 * MIB
    assert step_margin_bytes([MIB + 512] * 10) == step_margin_bytes([MIB + 512] * 500) == 22 * MIB


def with_sizes(profile: ModelProfile, num_bytes: int) -> ModelProfile:
    values = tuple(replace(value, num_bytes=num_bytes) for value in profile.values)
    return replace(profile, values=values)


def test_only_plans_are_counted_with_the_margin() -> None:
    size = 3 * MIB + 512
    profile = replace(with_sizes(profile_of(["a", "b", "c"]), size), peak_bytes=12_345_678)
    step = Step(profile)
    assert judged(step, set()).peak_bytes == 12_345_678
    # While "c" runs: the batch, which was there before, what "a" made, for the replay of "b", what "b" made, and "c".
    margin = step_margin_bytes([size for value in profile.values if value.op_index is not None])
    assert judged(step, {2}).peak_bytes == margin + size + 3 * (size + MARGIN)


def test_a_step_that_never_ran_on_a_device_is_counted_as_it_is() -> None:
    size = 3 * MIB + 512
    for profile in (profile_of(["a", "b", "c"], host=None), replace(profile_of(["a", "b", "c"]), device="cpu")):
        assert judged(Step(with_sizes(profile, size)), {2}).peak_bytes == 4 * size
