"""The benchmark of peaks, tried on a CPU: there, predicted peaks are the measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import peaks


def test_predicted_peaks_are_written_beside_the_measured_ones(tmp_path: Path) -> None:
    path = tmp_path / "peaks.json"
    peaks.main(["unet", "--small", "--points", "4", "--out", str(path)])
    document = json.loads(path.read_text())
    rows = document["models"]["unet"]
    assert len(rows) == 3
    assert [row["predicted_mib"] for row in rows] == [row["measured_mib"] for row in rows]
    assert all(row["measured_mib"] <= row["budget_mib"] for row in rows)
    assert "torch" in document["machine"]
