"""Completes a captured profile by trial runs with plans."""

from __future__ import annotations

from dataclasses import replace

from memfit.calibration.host_costs import with_host_costs
from memfit.calibration.replay_trials import with_inexact_replays_marked
from memfit.capture.measuring.other_memory import outside_value
from memfit.capture.real_step import CapturedStep
from memfit.capture.state.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.graph.model_profile import ModelProfile, RecordedValue
from memfit.planning.simulate.counted_peaks import counted_plain_peak_bytes
from memfit.planning.step import Step

UNACCOUNTED = "(memory that no op accounts for)"


def calibrated(captured: CapturedStep, step: TrainingStep, state: KeptState) -> ModelProfile:
    """Return the profile of ``captured`` with what only plans show, inside ``state.kept_optimizer()``."""
    profile = captured.profile
    profile = replace(profile, values=profile.values + unaccounted_memory(profile))
    profile = with_inexact_replays_marked(profile, step, state)
    return with_host_costs(profile, captured, step, state)


def unaccounted_memory(profile: ModelProfile) -> tuple[RecordedValue, ...]:
    """Return, as a value from outside the step, the measured peak beyond the simulated one; empty where there is none.

    Only the measurement includes storages that no op returns, such as the parts of sparse tensors. The rounding of a
    GPU's allocator is part of the simulated peak.
    """
    unaccounted_bytes = profile.peak_bytes - counted_plain_peak_bytes(Step(profile))
    return (outside_value(profile.values, UNACCOUNTED, unaccounted_bytes),) if unaccounted_bytes > 0 else ()
