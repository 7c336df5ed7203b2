"""The benchmarks are scripts that import each other by name, as `python benchmarks/frontier.py` lets them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
