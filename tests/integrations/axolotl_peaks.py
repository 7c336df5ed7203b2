"""A plugin of axolotl that writes the peak of each step to ``peaks.json`` in the folder of the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from tests.integrations.trainer_peaks import Watched


class PeaksPlugin(BasePlugin):
    def __init__(self) -> None:
        super().__init__()
        self._watched = Watched()

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Watched]:
        return [self._watched]

    def post_train(self, cfg: Any, model: Any) -> None:
        (Path(cfg.output_dir) / "peaks.json").write_text(json.dumps(self._watched.step_peaks.peaks))
