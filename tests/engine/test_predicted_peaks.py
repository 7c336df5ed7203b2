"""The whole promise, on every model of the zoo: plans from save-all to the smallest peak, measured.

A prediction is the simulator's; the measurement is the ledger of live storages over a real step under the plan.
"""

from __future__ import annotations

import pytest
from tests.engine.plans import profile_of
from tests.engine.zoo import ZOO, Example

import memfit
from memfit.capture.step import TrainingStep
from memfit.verification.trials import Trials
from memfit.verification.ways import planned

# How far over its budget the measured peak may be, for the two models of 118 whose predictions are too low.
# `fit` measures, and plans again with the difference as a margin.
KNOWN_EXCESS = {
    "hidden-writes": 0.15,  # writes through .data, which no version tells of, make copies that the profile did not see
    "sparse-graph": 0.05,  # the parts of sparse tensors are storages that no op returns
}
# Save-all, recompute as far as it goes, and six budgets between.
NUM_POINTS = 8


@pytest.mark.filterwarnings("ignore:the plan saves every value")
@pytest.mark.parametrize("example", ZOO, ids=str)
def test_measured_peaks_are_the_predicted_ones_and_within_budget(example: Example) -> None:
    profile = profile_of(example)
    model, batch, loss = example.build()
    misses = []
    excess = KNOWN_EXCESS.get(example.name, 0.0)
    with example.context():
        trials = Trials(TrainingStep(model, batch, loss, None))
        for point in memfit.frontier(profile, points=NUM_POINTS):
            plan = memfit.plan(profile, budget=point.peak_bytes)
            assert plan.predicted_peak_bytes <= point.peak_bytes
            measured = trials.measured(planned(plan)).peak_bytes
            # Plans follow measured times, so each run tries others. Peaks may be predicted too high by a little (the
            # U-Net's by 1 % for some plans), which is the safe side; nearly all are exact.
            is_over = measured > (1 + excess) * point.peak_bytes
            is_too_low = measured > (1 + max(0.005, excess)) * plan.predicted_peak_bytes
            is_too_high = measured < 0.98 * plan.predicted_peak_bytes
            if is_over or is_too_low or is_too_high:
                misses.append((point.peak_bytes, plan.predicted_peak_bytes, measured))
    assert not misses, f"(budget, predicted, measured): {misses}"
