"""One measured method of running a step, as the results hold it. No torch, so that tables are made anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Row:
    """A ``method`` of running the step. ``ratio`` is to the first one of the run; peaks are whole and above the model.

    For a method that raised, or was too slow to be timed, ``error`` says why; what was not measured is None.
    ``same_as`` names the method whose measurement this is, where two methods do exactly the same.
    """

    method: str
    median_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    activation_peak_bytes: int | None = None
    gradients_equal: bool | None = None
    gradient_error: float | None = None
    num_timed_steps: int | None = None
    error: str | None = None
    same_as: str | None = None

    @property
    def is_measured(self) -> bool:
        """Whether both its memory and its time are known."""
        return self.ratio is not None and self.activation_peak_bytes is not None

    @property
    def quartile_ratios(self) -> tuple[float, float]:
        """The quartiles relative to the first method of the run, as ``ratio`` is."""
        assert self.quartiles_ms is not None
        assert self.median_ms is not None
        assert self.ratio is not None
        low, high = self.quartiles_ms
        return low / self.median_ms * self.ratio, high / self.median_ms * self.ratio

    def as_data(self) -> dict[str, Any]:
        """Return the row as the JSON holds it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Row:
        """Return the row that ``data`` of this or an earlier version of the results describes."""
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        if known.get("quartiles_ms") is not None:
            known["quartiles_ms"] = tuple(known["quartiles_ms"])
        return cls(**known)
