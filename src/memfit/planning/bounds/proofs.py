"""What is proven about the plans of a step, for every budget: how fast and how small they can be at most."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """Seconds that no plan within a budget can stay below, for every budget."""

    seconds_at_zero: float
    seconds_per_byte: float

    def seconds(self, budget_bytes: int) -> float:
        """Return the bound for a budget."""
        return self.seconds_at_zero + self.seconds_per_byte * budget_bytes


class Floor(NamedTuple):
    """Seconds that no plan within ``budget_bytes`` can stay below, and so none within less."""

    budget_bytes: int
    seconds: float


class Proofs:
    """Collected bounds. ``least_peak_bytes`` is a peak that no plan can stay below."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.floors: list[Floor] = []
        self.least_peak_bytes = 0

    def with_least_peak(self, least_peak_bytes: int) -> Proofs:
        """Return the same with a peak that no plan can stay below."""
        proofs = Proofs()
        proofs.lines, proofs.floors, proofs.least_peak_bytes = self.lines, self.floors, least_peak_bytes
        return proofs

    def seconds(self, budget_bytes: int) -> float:
        """Return seconds that no plan within the budget can stay below."""
        of_lines = (line.seconds(budget_bytes) for line in self.lines)
        of_floors = (floor.seconds for floor in self.floors if budget_bytes <= floor.budget_bytes)
        return max(0.0, *of_lines, *of_floors) if self.lines or self.floors else 0.0
