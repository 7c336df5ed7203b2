"""The peak of every training step of transformers' Trainer, and of axolotl, whose trainer is one."""

from __future__ import annotations

from typing import Any

from tests.integrations.step_peaks import StepPeaks
from transformers import TrainerCallback


class Watched(TrainerCallback):
    """The peak of each step."""

    def __init__(self) -> None:
        self.step_peaks = StepPeaks()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_peaks.begin(kwargs["model"], kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_peaks.end_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_peaks.leave_out()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_peaks.end()
