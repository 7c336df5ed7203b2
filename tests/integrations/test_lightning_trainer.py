"""`MemfitCallback` in Lightning: losses as without, peaks within the budget, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as lightning
from examples.lightning_module import Regression, train
from tests.integrations.step_peaks import StepPeaks

from memfit.errors import InvalidParameterError
from memfit.integrations.lightning import MemfitCallback

# torch and the frameworks warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")
BUDGET = "270KiB"


class Watched(lightning.Callback):
    """The peak of each step."""

    def __init__(self) -> None:
        self.step_peaks = StepPeaks()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step_peaks.begin(pl_module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.step_peaks.end_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.step_peaks.end()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ten_steps_are_those_of_plain_training_and_each_is_within_the_budget(accumulate: int) -> None:
    options = {"max_steps": 10, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0, "max_epochs": -1}
    plain_peaks = Watched()
    plain = train(Regression(), [plain_peaks], **options)
    budget_bytes = 85 * max(plain_peaks.step_peaks.peaks) // 100
    callback, watched = MemfitCallback(budget_bytes), Watched()
    fitted = train(Regression(), [callback, watched], **options)
    assert fitted.losses == plain.losses
    assert len(fitted.losses) == 10 * accumulate
    assert callback.fitted is not None
    assert callback.fitted.verification.gradients_equal
    assert max(watched.step_peaks.peaks) <= budget_bytes


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2)
    train(Regression(), [MemfitCallback(BUDGET), checkpoint], max_steps=2, enable_checkpointing=True)
    (saved,) = tmp_path.glob("*.ckpt")
    resumed = train(Regression(), [MemfitCallback(BUDGET)], checkpoint=str(saved), max_steps=4)
    plain = train(Regression(), [], checkpoint=str(saved), max_steps=4)
    assert resumed.losses == plain.losses
    assert len(plain.losses) == 2


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidParameterError, match=r"step=\.\.\."):
        train(ByHand(), [MemfitCallback(BUDGET)])
