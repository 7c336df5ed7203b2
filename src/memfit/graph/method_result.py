"""The measurements of one method of running a step, interleaved with those of others."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.graph.verification import Quartiles


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method: the plain step, a plan, or torch's checkpointing.

    ``overhead`` and its quartiles are relative to the first method of the same rounds. A method that raised has its
    ``error``, and nothing else.
    """

    label: str
    peak_bytes: int | None = None
    step_seconds: float | None = None
    overhead: float | None = None
    overhead_quartiles: Quartiles | None = None
    gradients_equal: bool | None = None
    error: str | None = None
