"""Predicts what the step takes at each batch size, and searches the sizes that train fastest within a budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

from memfit.budgets import BudgetLike, HostBudgetLike, budget_in_bytes
from memfit.errors import InfeasibleBudgetError, InvalidParameterError, MemfitError
from memfit.graph.model_profile import ModelProfile
from memfit.planning.planner import plan as plan_step
from memfit.profiling import ProfileMode
from memfit.progress import Progress
from memfit.sizes.scaled_profiles import ScaledProfiles
from memfit.tuning.tuned import TunedSize
from memfit.units import format_bytes

# Sizes that are looked for are at most this factor apart around the best one.
_CLOSEST_FACTOR = 1.1
_MOST_DOUBLINGS = 24
# The search begins with the first of these that the model takes: batch normalization takes no batch of 1.
_FIRST_SIZES = (1, 2, 4, 8)


class SizeSearch:
    """Searches sizes of batches. ``profiled(size, mode)`` returns its profile: a fake one where it does not fit."""

    def __init__(
        self,
        profiled: Callable[[int, ProfileMode], ModelProfile],
        budget: BudgetLike,
        host_budget: HostBudgetLike,
        progress: Progress,
    ) -> None:
        self._profiled = profiled
        self._budget = budget
        self._host_budget = host_budget
        self._progress = progress
        self._rows: dict[int, TunedSize] = {}
        self._errors: dict[int, Exception] = {}
        self._fake = cache(lambda size: profiled(size, "fake"))

    def rows(self, sizes: list[int] | None, *, stops_at_first_too_large: bool = False) -> dict[int, TunedSize]:
        """Return what is predicted of the ``sizes``, ascending; without, of the sizes that were searched."""
        self._progress.stage("profiling batches")
        self._measure(sizes)
        self._progress.stage("planning for sizes")
        if sizes is None:
            self._search()
        else:
            for size in sizes:
                if self._row(size).plan is None and stops_at_first_too_large:
                    break
        if all(row.plan is None for row in self._rows.values()):
            raise self._none_fits()
        return dict(sorted(self._rows.items()))

    def _none_fits(self) -> MemfitError:
        for size, error in sorted(self._errors.items()):
            if isinstance(error, InfeasibleBudgetError):
                return InfeasibleBudgetError(
                    f"not even a batch of size {size} can be kept within {format_bytes(self._budget_bytes)}: {error}",
                    minimum_bytes=error.minimum_bytes,
                )
        smallest = min(self._errors)
        return MemfitError(f"the step runs at none of the sizes; at size {smallest}: {self._errors[smallest]}")

    def _measure(self, sizes: list[int] | None) -> None:
        """Measure the step at the smallest size, and at one whose plain step is about as large as the budget."""
        first, measured_first = self._first_measured(_FIRST_SIZES if sizes is None else tuple(sizes))
        measured = {first: measured_first}
        self._first_size = first
        self._budget_bytes = budget_in_bytes(self._budget, measured_first)
        second = self._second_size(measured_first, sizes)
        if second != first:
            try:
                measured[second] = self._real_or_fake(second)
            except InvalidParameterError:
                raise
            except Exception as error:
                self._rows[second] = self._refused(second, error)
        self._profiles = ScaledProfiles(measured, self._fake, self._real_or_fake)

    def _first_measured(self, sizes: tuple[int, ...]) -> tuple[int, ModelProfile]:
        failed: Exception | None = None
        for size in sizes:
            try:
                self._refuse_above_budget(size)
                return size, self._real_or_fake(size)
            except MemfitError:
                raise
            except Exception as error:
                # The model does not take a batch of this size.
                failed = failed or error
                self._rows[size] = self._refused(size, error)
        assert failed is not None
        raise failed

    def _refuse_above_budget(self, size: int) -> None:
        """Raise where no plan keeps the smallest size within the budget, before its plain step is run."""
        fake = self._plain(size)
        if fake is None or fake.peak_bytes <= budget_in_bytes(self._budget, fake):
            return
        self._budget_bytes = budget_in_bytes(self._budget, fake)
        try:
            plan_step(fake, budget=self._budget_bytes, host_budget=self._host_budget)
        except InfeasibleBudgetError as error:
            self._refused(size, error)
            raise self._none_fits() from None

    def _second_size(self, profile: ModelProfile, sizes: list[int] | None) -> int:
        """Return the last size to which doubling leads that runs plain within the budget, or else the next one.

        The first one, whose ``profile`` is given, where that does not run plain within the device's memory.
        """
        first = self._first_size
        doubled = (first << number for number in range(1, _MOST_DOUBLINGS + 1))
        free_bytes = profile.peak_bytes if profile.free_bytes is None else profile.free_bytes
        size, most_bytes = first, max(self._budget_bytes, free_bytes)
        for larger in doubled if sizes is None else sizes[sizes.index(first) + 1 :]:
            plain = self._plain(larger)
            if plain is None or plain.peak_bytes > most_bytes:
                break
            size, most_bytes = larger, self._budget_bytes
        return size

    def _plain(self, size: int) -> ModelProfile | None:
        """Return the profile of the plain step from fake tensors; None where it does not run on them."""
        try:
            return self._fake(size)
        except InvalidParameterError:
            raise
        except MemfitError:
            return None

    def _real_or_fake(self, size: int) -> ModelProfile:
        fake = self._plain(size)
        # A host that runs out of memory ends the process, without an error to catch.
        if fake is not None and fake.device == "cpu" and fake.peak_bytes > (fake.free_bytes or fake.peak_bytes):
            return fake
        return self._profiled(size, "real")

    def _row(self, size: int) -> TunedSize:
        if size not in self._rows:
            self._rows[size] = self._planned(size)
        return self._rows[size]

    def _planned(self, size: int) -> TunedSize:
        try:
            profile = self._profiles.at(size)
            plan = plan_step(profile, budget=self._budget_bytes, host_budget=self._host_budget)
        except InvalidParameterError:
            # What make_batch returned, which is wrong for all sizes.
            raise
        except Exception as error:
            return self._refused(size, error)
        seconds = profile.step_seconds * (1 + plan.predicted_overhead)
        return TunedSize(size, plan.predicted_peak_bytes, seconds, size / seconds if seconds else 0.0, plan)

    def _refused(self, size: int, error: Exception) -> TunedSize:
        self._errors[size] = error
        is_too_large = isinstance(error, InfeasibleBudgetError)
        problem = "not within the budget" if is_too_large else f"the step does not run: {error}"
        return TunedSize(size, None, None, 0.0, None, problem=problem)

    def _search(self) -> None:
        """Double the size until none fits, then look more closely around the best."""
        size = self._first_size
        for _ in range(_MOST_DOUBLINGS):
            if self._row(size).plan is None:
                break
            size *= 2
        while True:
            best = max(self._rows.values(), key=lambda row: row.throughput)
            gaps = [
                (low, high)
                for low, high in pairwise(sorted(self._rows))
                if best.size in (low, high) and high > _CLOSEST_FACTOR * low and high - low > 1
            ]
            if not gaps or best.plan is None:
                return
            low, high = max(gaps, key=lambda gap: gap[1] / gap[0])
            self._row((low + high) // 2)
