"""What a plan did when it was tried, as data: the plain and the planned step side by side. No torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Annotated, Any, NamedTuple, TypeAlias

from memfit.documents import write_text
from memfit.graph.records import NumberRange
from memfit.graph.summaries import text_summary
from memfit.units import format_bytes, format_overhead, format_seconds

# On devices whose kernels sum in no fixed order, the plain step differs from itself. How much is known from a few runs
# only, and the largest of a few draws is easily passed by the next one; a wrong gradient is off by orders of magnitude.
_NOISE_FACTOR = 4.0
# A few units in the last place of bfloat16, which has the largest: what is farther off is so by more than rounding.
_MOST_NOISE = 2e-2


# Of fields that may differ from process to process.
_WORST_IS_LARGEST = (
    "max_gradient_error",
    "plain_gradient_error",
    "plain_gradient_distance",
    "gradient_distance",
    "plain_peak_bytes",
    "peak_bytes",
)


GradientError: TypeAlias = Annotated[float, NumberRange("a number", -sys.float_info.max, sys.float_info.max)]
"""How far gradients are apart: infinite where only one of two is a number."""


class Quartiles(NamedTuple):
    """The lower and the upper quartile of repeated measurements."""

    low: float
    high: float


def quartiles_of(numbers: Sequence[float]) -> Quartiles:
    """Return the quartiles of ``numbers``, the least and the largest of them included."""
    low, _, high = quantiles(numbers, n=4, method="inclusive")
    return Quartiles(low, high)


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """The plain and the planned step, run in interleaved rounds from the same state.

    ``gradients_equal`` is whether all gradients have the same bits, ``max_gradient_error`` the largest difference
    relative to the largest plain gradient of the same tensor, over all tensors, ``num_gradients`` how many gradients
    were compared (None in files from before they were counted). ``plain_reproducible`` is whether the
    plain step has the same bits twice, ``plain_gradient_error`` by how much it differs from itself, and
    ``plain_gradient_distance`` how far all its gradients together are from themselves, as a share of their length.
    Peaks are measured; ``predicted_peak_bytes`` is the plan's prediction, and so is ``host_bytes``, the host
    memory of offloaded values. Seconds are medians over ``num_rounds`` rounds; ``overhead`` is the ratio of the medians
    less 1, and its quartiles are those of the rounds' own ratios.

    A plan with a chunked loss sums in another order than the plain step. Its gradients hold where ``gradient_distance``
    is at most ``gradient_tolerance``: the largest distance of a tensor from the plain one as a share of its length (or
    of the length that it would have if all gradients were of about the same size, where that is larger). The tolerance
    is the square root of the rounding unit of the logits' type, and None for other plans, whose bits must agree. The
    same holds for compiled blocks, with the rounding unit of the coarsest type that they compute in: on a CPU their
    bits agree nearly always, and on a GPU kernels that recompute a value sum in another order.

    Where the plain step does not fit the device, its fields and those computed from it are None. ``compared_with`` is
    the step that the gradients are compared with, and whose gradients the fields on the plain step's are of: for
    compiled blocks, the compiled step that saves everything. ``not_as_planned`` says in words which op did not run as
    often as the plan expects, where one did not.
    """

    gradients_equal: bool | None
    max_gradient_error: GradientError | None
    plain_reproducible: bool | None
    plain_gradient_error: GradientError | None
    differing_parameters: tuple[str, ...]
    plain_peak_bytes: int | None
    peak_bytes: int
    predicted_peak_bytes: int
    budget_bytes: int | None
    plain_step_seconds: float | None
    step_seconds: float
    overhead: float | None
    plain_step_quartiles_seconds: Quartiles | None
    step_quartiles_seconds: Quartiles
    overhead_quartiles: Quartiles | None
    num_rounds: int
    device: str
    device_name: str
    torch_version: str
    fingerprint: str
    plain_gradient_distance: GradientError | None = None
    host_bytes: int = 0
    gradient_distance: GradientError | None = None
    gradient_tolerance: float | None = None
    num_gradients: int | None = None
    compared_with: str = "plain step"
    not_as_planned: str | None = None

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is at most the plan's budget; True for a plan without one."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def gradients_hold(self) -> bool:
        """Whether the gradients are as good as the plain step's: the same bits, or as close as that comes to itself.

        With a chunked loss, whether they are within the tolerance. True too where there is no plain step to compare
        with.
        """
        if self.gradients_equal is None or self.gradients_equal:
            return True
        if self.gradient_tolerance is not None and self.gradient_distance is not None and not self.plain_differs:
            return self.gradient_distance <= self.gradient_tolerance
        if self.plain_reproducible or self.max_gradient_error is None or self.plain_gradient_error is None:
            return False
        return not self.plain_differs and self.max_gradient_error <= _NOISE_FACTOR * self.plain_gradient_error

    @property
    def plain_differs(self) -> bool:
        """Whether the plain step differs from itself by more than rounding, so that nothing can be compared with it."""
        return self.plain_gradient_distance is not None and self.plain_gradient_distance > _MOST_NOISE

    @property
    def holds(self) -> bool:
        """Whether the gradients hold and the measured peak is within the budget."""
        return self.gradients_hold and self.within_budget

    @property
    def peak_miss(self) -> float:
        """How far the measured peak is above the predicted one, as a share of it; negative where it is below."""
        return self.peak_bytes / self.predicted_peak_bytes - 1 if self.predicted_peak_bytes else 0.0

    def summary_lines(self) -> dict[str, str]:
        """Return what was measured, a few words for each."""
        plain_peak = self.plain_peak_bytes
        plain = "the plain step does not fit" if plain_peak is None else f"{format_bytes(plain_peak)} plain"
        lines = {
            "gradients": self._gradients_in_words(),
            "peak": f"{format_bytes(self.peak_bytes)} ({plain}, {format_bytes(self.predicted_peak_bytes)} predicted)",
        }
        if self.budget_bytes is not None:
            side = "within" if self.within_budget else "over"
            lines["budget"] = f"{side} {format_bytes(self.budget_bytes)}"
        lines["time"] = f"{format_overhead(self.overhead)}, {format_seconds(self.step_seconds)} per step"
        return lines

    def _gradients_in_words(self) -> str:
        if self.gradients_equal is None:
            return "not compared"
        if self.gradients_equal:
            return "equal"
        if self.gradient_tolerance is not None and self.gradient_distance is not None:
            side = "within" if self.gradients_hold else "outside"
            return f"{side} the tolerance of {self.gradient_tolerance:.1e} ({self.gradient_distance:.1e} apart)"
        if self.gradients_hold:
            return (
                f"as the plain step's ({self.max_gradient_error:.1e} apart; the plain step differs from itself by "
                f"{self.plain_gradient_error:.1e})"
            )
        return "not equal"

    def __repr__(self) -> str:
        return text_summary("Verification", self.summary_lines())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the verification to ``path`` as JSON."""
        from memfit.graph.verification_file import verification_document

        write_text(path, json.dumps(verification_document(self), indent=2, ensure_ascii=False) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Verification:
        """Return the verification in the file at ``path``; what is wrong with it is a ``PlanFileError``."""
        from memfit.graph.verification_file import load_verification

        return load_verification(path)


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


def worst_of(verifications: Sequence[Verification]) -> Verification:
    """Return what holds for all processes that ran a step together: the largest peaks and errors.

    Seconds are those of the first: a step that contains collectives takes equally long everywhere.
    """

    def all_of(name: str) -> bool | None:
        found = [value for each in verifications if (value := getattr(each, name)) is not None]
        return all(found) if found else None

    def most_of(name: str) -> Any:
        return max((value for each in verifications if (value := getattr(each, name)) is not None), default=None)

    names = dict.fromkeys(name for each in verifications for name in each.differing_parameters)
    worst: dict[str, Any] = {name: all_of(name) for name in ("gradients_equal", "plain_reproducible")}
    worst |= {name: most_of(name) for name in _WORST_IS_LARGEST}
    return replace(verifications[0], differing_parameters=tuple(names), **worst)
