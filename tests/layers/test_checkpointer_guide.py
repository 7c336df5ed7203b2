"""The guide for other array libraries: its code runs as it stands, and its table is what the example prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "non-torch-chains.md").read_text()


def test_the_guides_code_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/non-torch-chains.md", "exec"), names)
    plain = np.ones((8, 32))
    for layer in range(8):
        plain = names["forward"](plain, layer)
    np.testing.assert_array_equal(names["seventh"], plain)


def test_the_guides_table_is_what_the_example_prints() -> None:
    example = ROOT / "examples" / "chain_numpy.py"
    printed = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True).stdout
    assert len(printed.splitlines()) == 10
    assert printed in GUIDE
