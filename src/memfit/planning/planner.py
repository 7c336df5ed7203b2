"""``plan`` and ``frontier``: decide for every value of a profiled step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Decision, FrontierPoint, Plan
from memfit.layers.checkpoint_plan import build_checkpoint_plan
from memfit.layers.strategies import LayerStrategy, NoCheckpointing
from memfit.planning.budgets import (
    BudgetLike,
    HostBudgetLike,
    budget_in_bytes,
    checked_host_budget,
    host_budget_in_bytes,
)
from memfit.planning.candidates.pool import Candidate
from memfit.planning.forced import Forced, forced_values
from memfit.planning.infeasible import infeasible
from memfit.planning.known_steps import KnownStep, known_step
from memfit.planning.offload.offloadable import host_bytes_of, most_offloaded_bytes
from memfit.planning.partitions.compiled_plans import frontier_of_compiled, plan_of_compiled
from memfit.planning.search import Exploration
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues
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
    ``optimality_gap`` tells how far from the fastest possible it can be; ``InfeasibleBudgetError`` names the smallest
    budget where there is none. Where the plain step fits, nothing is recomputed. A smaller budget never gets a faster
    or a larger plan.

    ``host_budget`` is how much of the host's pinned memory a plan for a budget may use, to offload values as well: an
    int of bytes, a text, or "auto" for half of what was free there. It takes a profile of a GPU. With 0, as it is
    unless told, nothing is offloaded.

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
        return _compiled_plan(profile, budget, strategy, [*force_save, *force_recompute], host_budget)
    if strategy is not None and checked_host_budget(host_budget) != 0:
        raise InvalidParameterError(
            f"host_budget={host_budget!r} goes with a budget; layer strategies recompute, and offload nothing. Leave "
            "it out, or give budget instead of strategy"
        )
    known = known_step(profile)
    step = known.step
    forced = forced_values(step, force_save, force_recompute)
    if strategy is not None:
        wanted = (_values_of_chosen_blocks(step, strategy) | forced.recomputed) - forced.saved
        return plan_recomputing(profile, lambda step: wanted)
    assert budget is not None
    budget_bytes = budget_in_bytes(budget, profile)
    host_bytes = host_budget_in_bytes(host_budget, profile)
    plain = _judged_candidate(known, frozenset())
    if not forced.recomputed and known.peak_bytes(plain) <= budget_bytes:
        return _plan_of(known, plain, budget_bytes=budget_bytes)
    exploration = known.exploration(forced=forced.recomputed, kept=forced.saved)
    entries = _entries(known, forced, host_bytes)
    position = _first_within(known, entries, budget_bytes)
    if position is None:
        raise infeasible(
            known,
            _smallest(known, entries),
            budget_bytes=budget_bytes,
            host_budget_bytes=host_bytes,
            least_peak_bytes=exploration.least_peak_bytes,
        )
    origin = _Origin(exploration, entries[max(position - 1, 0)], host_bytes)
    return _plan_of(known, entries[position], budget_bytes=budget_bytes, origin=origin)


def _compiled_plan(
    profile: ModelProfile,
    budget: BudgetLike | None,
    strategy: LayerStrategy | None,
    selectors: Sequence[str],
    host_budget: HostBudgetLike,
) -> Plan:
    if strategy is not None or selectors:
        raise InvalidParameterError(
            "this profile is of a step with compiled blocks, for which partitions are planned: give a budget, and "
            "neither a strategy nor selectors; or profile with compile=False"
        )
    assert budget is not None
    return plan_of_compiled(profile, budget_in_bytes(budget, profile), host_budget_in_bytes(host_budget, profile))


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
    exploration = known.exploration()
    host_bytes = host_budget_in_bytes(host_budget, profile)
    entries = _entries(known, Forced(set(), set()), host_bytes)
    high, low = known.peak_bytes(entries[0]), known.peak_bytes(_smallest(known, entries))
    budgets = [high - (high - low) * k // max(num_points - 1, 1) for k in range(num_points)]
    positions = {_first_within(known, entries, bound) for bound in budgets}
    chosen = []
    for position in sorted(position for position in positions if position is not None):
        origin = _Origin(exploration, entries[max(position - 1, 0)], host_bytes)
        made = _plan_of(known, entries[position], budget_bytes=None, origin=origin)
        chosen.append(FrontierPoint(made.predicted_peak_bytes, made.predicted_overhead, made))
    return tuple(chosen)


def plan_recomputing(profile: ModelProfile, chosen: Callable[[Step], Set[int]]) -> Plan:
    """Return the plan that recomputes the ``chosen`` values, as far as the engine can."""
    known = known_step(profile)
    return _plan_of(known, _judged_candidate(known, known.step.recomputed_of(chosen(known.step))), budget_bytes=None)


def _judged_candidate(known: KnownStep, recomputed: Set[int]) -> Candidate:
    simulation = known.simulation(recomputed)
    seconds = simulation.recompute_seconds, simulation.added_seconds
    return Candidate(frozenset(recomputed), simulation.peak_bytes, *seconds)


def _entries(known: KnownStep, forced: Forced, host_bytes: int) -> tuple[Candidate, ...]:
    """Return the plans to choose from, fastest first, each with smaller buffers than the one before.

    Where plans are counted with a margin, the plain step, which is not, may be the smallest after all.
    """
    entries = known.frontier(forced=forced.recomputed, kept=forced.saved, host_budget_bytes=host_bytes)
    plain = _judged_candidate(known, frozenset())
    is_left_out = known.margin_bytes > 0 and not forced.recomputed and entries[0].peak_bytes < plain.peak_bytes
    return (plain, *entries) if is_left_out else entries


def _first_within(known: KnownStep, entries: Sequence[Candidate], budget_bytes: int) -> int | None:
    """Return the place of the first, and so fastest, plan whose peak is within the budget, as it is counted."""
    # Nothing is counted as less than its buffers take, but for the plain step, which is counted as it was measured.
    possible = (i for i, entry in enumerate(entries) if entry.peak_bytes <= budget_bytes or i == 0)
    return next((i for i in possible if known.peak_bytes(entries[i]) <= budget_bytes), None)


def _smallest(known: KnownStep, entries: Sequence[Candidate]) -> Candidate:
    """Return the plan of the smallest peak, as it is counted; of equal ones the fastest."""
    # The first may be the plain step, which may have measured less than its buffers take.
    smallest = min(entries[0], entries[-1], key=known.peak_bytes)
    for entry in reversed(entries):
        if entry.peak_bytes > known.peak_bytes(smallest):
            break
        if known.peak_bytes(entry) <= known.peak_bytes(smallest):
            smallest = entry
    return smallest


class _Origin(NamedTuple):
    """Where a plan was chosen from; ``missed`` is the next faster candidate, which did not fit."""

    exploration: Exploration
    missed: Candidate
    host_budget_bytes: int


def _gap_seconds(known: KnownStep, choice: Candidate, budget_bytes: int | None, origin: _Origin) -> float:
    """Return how much faster than the chosen plan another could be at most."""
    step, exploration = known.step, origin.exploration
    simulation = known.simulation(choice.recomputed, choice.offloading)
    if not choice.recomputed and not choice.offloading.values:
        return 0.0
    # Whatever is counted within that takes no more than this.
    bound_bytes = (known.peak_bytes(choice) if budget_bytes is None else budget_bytes) - known.margin_bytes
    if origin.host_budget_bytes:
        bound_bytes += most_offloaded_bytes(step, simulation.added_seconds, origin.host_budget_bytes)
    elif exploration.is_exact:
        fastest = next(entry for entry in exploration.frontier if entry.peak_bytes <= bound_bytes)
        return max(simulation.added_seconds - fastest.added_seconds, 0.0)
    missed = known.simulation(origin.missed.recomputed, origin.missed.offloading)
    times = {simulation.peak_op_index, missed.peak_op_index, *exploration.likely_peaks}
    least = exploration.bound.seconds(bound_bytes, times)
    return max(simulation.added_seconds - step.time.at_least(least), 0.0)


def _plan_of(known: KnownStep, choice: Candidate, *, budget_bytes: int | None, origin: _Origin | None = None) -> Plan:
    """Return the plan for a choice."""
    step = known.step
    profile = step.profile
    simulation = known.simulation(choice.recomputed, choice.offloading)
    gap_seconds = simulation.added_seconds if origin is None else _gap_seconds(known, choice, budget_bytes, origin)
    decision_of = dict.fromkeys(choice.recomputed, Decision.RECOMPUTE)
    decision_of |= dict.fromkeys(choice.offloading.values, Decision.OFFLOAD)
    step_seconds = profile.step_seconds or 1.0
    chosen = step.recording.modules_for(decision_of.keys())
    return Plan(
        decisions={profile.values[index].name: decision_of.get(index, Decision.SAVE) for index in step.plannable},
        recorded_modules=chosen.recorded_modules,
        hooked_modules=chosen.hooked_modules,
        recompute_flops=simulation.recompute_flops,
        fingerprint=profile.fingerprint,
        predicted_peak_bytes=known.peak_bytes(choice),
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
