"""Runs axolotl's training command without triton, which it imports for kernels that no test runs: they need a GPU."""

from __future__ import annotations

import runpy
import sys
from unittest.mock import MagicMock

sys.modules["axolotl.monkeypatch.trainer.utils"] = MagicMock()
runpy.run_module("axolotl.cli.train", run_name="__main__")
