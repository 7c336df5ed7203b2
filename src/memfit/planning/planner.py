"""``plan`` and ``frontier``: decide for every value of a profiled step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Set

from memfit.budgets import (
    BudgetLike,
    HostBudgetLike,
    budget_in_bytes,
    checked_host_budget,
    host_budget_in_bytes,
)
from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Decision, FrontierPoint, Plan
from memfit.infeasible_budget import SmallestPlan, infeasible_budget
from memfit.layers.checkpoint_plan import build_checkpoint_plan
from memfit.layers.strategies import LayerStrategy, NoCheckpointing
from memfit.planning.candidates.pool import Candidate
from memfit.planning.forced import NOTHING_FORCED, Forced, forced_values
from memfit.planning.known_steps import KnownStep, known_step
from memfit.planning.offload.offloadable import host_bytes_of, most_offloaded_bytes
from memfit.planning.partitions.compiled_plans import frontier_of_compiled, plan_of_compiled
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues
from memfit.planning.step.passes import are_told_apart
from memfit.validation import whole_number


def plan(
    profile: ModelProfile,
    *,
    budget: BudgetLike | None = None,
    strategy: LayerStrategy | None = None,
    force_save: Iterable[str] = (),
    force_recompute: Iterable[str] = (),
    host_budget: HostBudgetLike = 0,
) -> Plan:
    """Return what to do with each value of the profiled step. Give exactly one of ``budget`` and ``strategy``.

    ``budget`` bounds the peak of the whole step, parameters included: an int of bytes, a text such as "20GiB", a float
    in (0, 1] of the device's memory, or "auto". The plan is the fastest one found that keeps it, and its
    ``optimality_gap`` bounds how far from the fastest possible it is; ``InfeasibleBudgetError`` names the smallest
    budget where there is none. Where the plain step fits, nothing is recomputed. A smaller budget never gets a faster
    or a larger plan.

    ``host_budget`` is how much of the host's pinned memory a plan for a budget may use, to offload values as well: an
    int of bytes, a text, or "auto" for half of what was free there. It takes a profile of a GPU. With 0, the
    default, nothing is offloaded.

    ``strategy`` chooses among the model's blocks; every value inside a chosen block is recomputed from what enters the
    block. Selectors (``MODULE_GLOB::op``) overrule both; a value that both name is saved. What cannot be replayed is
    saved, whoever asks, and so are the small statistics that an op returns beside its result.
    """
    _refuse_other_profiles(profile)
    if (budget is None) == (strategy is None):
        given = "neither" if budget is None else f"budget={budget!r} and strategy={strategy!r}"
        raise InvalidParameterError(
            f'plan() takes exactly one of budget ("20GiB") and strategy (memfit.EveryNthLayer(2)); got {given}'
        )
    if profile.compiled is not None and profile.compiled.kinds:
        if budget is None or [*force_save, *force_recompute]:
            raise InvalidParameterError(
                "this profile is of a step with compiled blocks, for which partitions are planned: give a budget, and "
                "neither a strategy nor selectors; or profile with compile=False"
            )
        return plan_of_compiled(profile, budget_in_bytes(budget, profile), host_budget_in_bytes(host_budget, profile))
    if strategy is not None and checked_host_budget(host_budget) != 0:
        raise InvalidParameterError(
            f"host_budget={host_budget!r} needs a budget; layer strategies recompute, and offload nothing. Leave "
            "it out, or give budget instead of strategy"
        )
    known = known_step(profile)
    step = known.step
    forced = forced_values(step, force_save, force_recompute)
    if strategy is not None:
        alike = step.alike
        wanted = alike.with_others(_values_of_chosen_blocks(step, strategy) | forced.recomputed)
        wanted -= alike.with_others(forced.saved)
        return plan_recomputing(profile, lambda step: step.recomputed_of(wanted))
    assert budget is not None
    budget_bytes = budget_in_bytes(budget, profile)
    host_bytes = host_budget_in_bytes(host_budget, profile)
    plain = _judged_candidate(known, frozenset())
    if not forced.recomputed and known.peak_bytes(plain) <= budget_bytes:
        return _plan_of(known, plain, budget_bytes, plain.added_seconds)
    choices = _Choices(known, forced, host_bytes)
    place = choices.first_within(budget_bytes)
    if place is None:
        smallest = choices.smallest()
        simulation = known.simulation(smallest.recomputed, smallest.offloading)
        peak_bytes, place_of_peak = known.peak_bytes(smallest), simulation.peak_op_index
        facts = SmallestPlan(peak_bytes, place_of_peak, simulation.live_at_peak, step.saved - step.may_be_recomputed)
        raise infeasible_budget(profile, facts, choices.exploration.least_peak_bytes, budget_bytes, host_bytes)
    return choices.plan_at(place, budget_bytes)


def frontier(profile: ModelProfile, *, points: int = 16, host_budget: HostBudgetLike = 0) -> tuple[FrontierPoint, ...]:
    """Return at most ``points`` plans from the fastest to the smallest, each smaller and slower than the one before.

    The first is the plain step where that is the fastest, the last the smallest that was found; the others are spread
    evenly over the memory between. ``host_budget`` is as for `plan`.
    """
    _refuse_other_profiles(profile)
    num_points = whole_number(points, "points", minimum=1)
    if profile.compiled is not None and profile.compiled.kinds:
        return frontier_of_compiled(profile, num_points, host_budget_in_bytes(host_budget, profile))
    known = known_step(profile)
    choices = _Choices(known, NOTHING_FORCED, host_budget_in_bytes(host_budget, profile))
    high, low = known.peak_bytes(choices.entries[0]), known.peak_bytes(choices.smallest())
    budgets = [high - (high - low) * k // max(num_points - 1, 1) for k in range(num_points)]
    places = {choices.first_within(budget_bytes) for budget_bytes in budgets}
    plans = [choices.plan_at(place, None) for place in sorted(place for place in places if place is not None)]
    return tuple(FrontierPoint(made.predicted_peak_bytes, made.predicted_overhead, made) for made in plans)


def plan_recomputing(profile: ModelProfile, chosen: Callable[[Step], Set[int]], *, is_trial: bool = False) -> Plan:
    """Return the plan that drops the ``chosen`` values, as far as the engine can replay them, needed or not.

    The peak of a trial is not counted as the allocator does, which takes longer than all else.
    """
    known = known_step(profile)
    choice = _judged_candidate(known, known.step.droppable_among(chosen(known.step)))
    return _plan_of(known, choice, None, choice.added_seconds, choice.peak_bytes if is_trial else None)


def _judged_candidate(known: KnownStep, recomputed: Set[int]) -> Candidate:
    chosen = frozenset(recomputed)
    simulation = known.simulation(chosen)
    return Candidate(chosen, simulation.peak_bytes, simulation.recompute_seconds, simulation.added_seconds)


class _Choices:
    """The plans that budgets choose between, fastest first, each with smaller buffers than the one before."""

    def __init__(self, known: KnownStep, forced: Forced, host_bytes: int) -> None:
        self._known, self._host_bytes = known, host_bytes
        self.exploration = known.exploration(forced)
        entries = known.frontier(forced, host_bytes)
        # Where plans are counted with a margin, the plain step, which is not, may be the smallest after all.
        plain = _judged_candidate(known, frozenset())
        is_left_out = known.margin_bytes > 0 and not forced.recomputed and entries[0].peak_bytes < plain.peak_bytes
        self.entries = (plain, *entries) if is_left_out else entries

    def first_within(self, budget_bytes: int) -> int | None:
        """Return the place of the first, and so fastest, plan whose peak is within the budget, as it is counted."""
        # Nothing is counted as less than its buffers take, but for the plain step, which is counted as measured.
        possible = (i for i, entry in enumerate(self.entries) if entry.peak_bytes <= budget_bytes or i == 0)
        return next((i for i in possible if self._known.peak_bytes(self.entries[i]) <= budget_bytes), None)

    def smallest(self) -> Candidate:
        """Return the plan of the smallest peak, as it is counted; of equal ones the fastest."""
        peak_bytes = self._known.peak_bytes
        # The first may be the plain step, which may have measured less than its buffers take.
        smallest = min(self.entries[0], self.entries[-1], key=peak_bytes)
        for entry in reversed(self.entries):
            if entry.peak_bytes > peak_bytes(smallest):
                break
            smallest = min(entry, smallest, key=peak_bytes)
        return smallest

    def plan_at(self, place: int, budget_bytes: int | None) -> Plan:
        """Return the plan at this place, with its gap to the fastest that a budget allows, or its own peak."""
        choice = self.entries[place]
        if not choice.recomputed and not choice.offloading.values:
            return _plan_of(self._known, choice, budget_bytes, 0.0)
        known, exploration = self._known, self.exploration
        # Whatever is counted within that takes no more than this.
        bound_bytes = (known.peak_bytes(choice) if budget_bytes is None else budget_bytes) - known.margin_bytes
        if exploration.is_exact and not self._host_bytes:
            least = next(entry for entry in exploration.frontier if entry.peak_bytes <= bound_bytes).added_seconds
        else:
            step = known.step
            if self._host_bytes:
                bound_bytes += most_offloaded_bytes(step, choice.added_seconds, self._host_bytes)
            # Also at the peak of the next faster plan, which did not fit.
            both = {choice, self.entries[max(place - 1, 0)]}
            peaks = {known.simulation(each.recomputed, each.offloading).peak_op_index for each in both}
            least = step.time.at_least(exploration.bound.seconds(bound_bytes, peaks | exploration.likely_peaks))
        return _plan_of(known, choice, budget_bytes, max(choice.added_seconds - least, 0.0))


def _plan_of(
    known: KnownStep, choice: Candidate, budget_bytes: int | None, gap_seconds: float, peak_bytes: int | None = None
) -> Plan:
    step, profile = known.step, known.step.profile
    simulation = known.simulation(choice.recomputed, choice.offloading)
    decision_of = dict.fromkeys(choice.recomputed, Decision.RECOMPUTE)
    decision_of |= dict.fromkeys(choice.offloading.values, Decision.OFFLOAD)
    step_seconds = profile.step_seconds or 1.0
    chosen = step.recording.modules_for(decision_of.keys())
    if step.alike and not are_told_apart(profile, step.outline, chosen.recorded_modules, decision_of):
        # Passes that differ: calls of ops are counted in the smallest modules.
        chosen = chosen._replace(recorded_modules=step.recording.paths)
    return Plan(
        decisions={profile.values[index].name: decision_of.get(index, Decision.SAVE) for index in step.plannable},
        recorded_modules=chosen.recorded_modules,
        hooked_modules=chosen.hooked_modules,
        recompute_flops=simulation.recompute_flops,
        fingerprint=profile.fingerprint,
        predicted_peak_bytes=known.peak_bytes(choice) if peak_bytes is None else peak_bytes,
        predicted_overhead=simulation.added_seconds / step_seconds,
        optimality_gap=gap_seconds / step_seconds,
        budget_bytes=budget_bytes,
        inputs=profile.inputs,
        chunks_loss=profile.chunks_loss,
        host_bytes=host_bytes_of(step, choice.offloading.values),
        window_bytes=choice.offloading.window_bytes,
        outline=step.outline,
    )


def _values_of_chosen_blocks(step: Step, strategy: LayerStrategy) -> set[int]:
    profile = step.profile
    chosen_layers = set(build_checkpoint_plan(profile.layers, strategy).checkpointed_layers)
    if not profile.blocks and not isinstance(strategy, NoCheckpointing):
        warnings.warn(
            f"the model has no repeated blocks for {strategy!r} to choose from, so it changes nothing; "
            "force_recompute=['*::aten.gelu'] names ops directly",
            stacklevel=3,
        )
    numbers = [number for number, block in enumerate(profile.blocks) if block.layer.layer_idx in chosen_layers]
    return BlockValues(step).inside(numbers)


def _refuse_other_profiles(profile: object) -> None:
    if not isinstance(profile, ModelProfile):
        raise InvalidParameterError(f"profile is a ModelProfile as memfit.profile() returns it, got {profile!r}")
