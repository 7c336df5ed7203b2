"""Finds the plans of a step from which every budget is served. The budget plays no part here.

So a smaller budget never gets a faster or a larger plan: both choose from one and the same frontier. Small steps are
enumerated, somewhat larger ones swept as a whole (``sweep_search``), and their frontier is exact. Else the candidates
are, in turn:

1. what others would do (``known_rules``),
2. the corners of the hull for a price per byte (``sweep``), with several tilts; where launches take long, also for ops
   that all cost the same (``few_launches``),
3. segments with held borders (``segments``, ``block_borders``), for budgets near the lowest,
4. sweeps again, with the borders of the best segments held: between a plan of the lowest memory and the hull,
5. where the step is small enough to try: the best so far with one value decided otherwise, or two, a few times over,
6. what backward sweeps and linear programs find where the best so far may be far from the best (``refinement``),
7. where launches take long: what launches less than those (``thinning``),
8. what lies between two of the best that are far apart (``filling``), and what saves more where there is room
   (``stuffing``).

Only where a budget lies below all of them is the smallest peak looked for with all effort (``with_least_peak``). What
is found there joins the frontier, and beats what is both larger and slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, combinations

from memfit.planning.bounds.proofs import Proofs
from memfit.planning.bounds.refinement import refined
from memfit.planning.candidates.block_borders import bordered_choices
from memfit.planning.candidates.enumeration import MOST_ENUMERATED_VALUES, all_choices, values_that_matter
from memfit.planning.candidates.few_launches import choices_of_few_launches
from memfit.planning.candidates.filling import fill
from memfit.planning.candidates.known_rules import known_rules
from memfit.planning.candidates.min_cut import HoldOrReplay
from memfit.planning.candidates.stuffing import stuffed_at_budgets
from memfit.planning.candidates.sweep import swept_cuts
from memfit.planning.candidates.thinning import thin
from memfit.planning.candidates.trade_off import Candidate, TradeOff
from memfit.planning.dp.least_peak import least_peak
from memfit.planning.dp.sweep_search import Sweeps
from memfit.planning.step import Step

# How many cuts a step of one op could pay for; a step of 20,000 ops gets 20,000 times fewer, within the limits below.
_EFFORT_OPS = 400_000
_LEAST_CUTS, _MOST_CUTS = 100, 400
# How much dearer the first value of the step is than the last; the share of the cuts that each gets.
_TILTS = ((0.03, 0.4), (0.5, 0.1), (3.0, 0.1))
_ANCHORED_TILTS = (0.5, 3.0)
# How many plans that differ in one value are tried in all, and from how many plans they start in each round.
_MOST_FLIPS, _NUM_FLIP_ROUNDS, _NUM_FLIP_STARTS = 10_000, 6, 16
# How many plans that differ in two values.
_MOST_PAIRS = 4_000
# How many cells sweeps that look for nothing but the least peak may have, and for steps of how many ops they do.
_EFFORT_FOR_LEAST_PEAK, _MOST_OPS_OF_LEAST_PEAK = 135_000_000, 6_000


@dataclass(frozen=True, slots=True, eq=False)
class Exploration:
    """The candidates that none beats, fastest first, which values they were free to recompute, and what is proven.

    ``is_exact`` says that no plan was left out that could matter, ``has_least_peak`` that nothing smaller can be found.
    """

    frontier: tuple[Candidate, ...]
    may_be_recomputed: frozenset[int]
    is_exact: bool
    has_least_peak: bool
    proofs: Proofs


def explored(step: Step, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset()) -> Exploration:
    """Return the plans for ``step``; ``forced`` values are recomputed in all of them, ``kept`` ones in none."""
    trade_off = TradeOff(step, forced=forced, kept=kept)
    _fill(trade_off)
    proofs = Proofs() if trade_off.is_exact else refined(trade_off)
    if not trade_off.is_exact:
        if step.time.launches_may_matter:
            thin(trade_off)
        fill(trade_off)
        _stuff(trade_off, trade_off.frontier())
    frontier = tuple(trade_off.frontier())
    if trade_off.is_exact:
        proofs.least_peak_bytes = frontier[-1].peak_bytes
    has_least_peak = proofs.least_peak_bytes >= frontier[-1].peak_bytes or step.num_ops > _MOST_OPS_OF_LEAST_PEAK
    return Exploration(frontier, trade_off.may_be_recomputed, trade_off.is_exact, has_least_peak, proofs)


def with_least_peak(
    step: Step, exploration: Exploration, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset()
) -> Exploration:
    """Return an exploration with plans below its smallest peak, and what more is proven about that.

    This takes its time: more than all the rest.
    """
    smallest, least_bytes = exploration.frontier[-1], exploration.proofs.least_peak_bytes
    trade_off = TradeOff(step, forced=forced, kept=kept)
    sweeps = Sweeps(step, trade_off.may_be_recomputed)
    smaller, least_bytes = least_peak(trade_off, sweeps, smallest, least_bytes, _EFFORT_FOR_LEAST_PEAK)
    _stuff(trade_off, [smaller])
    below = tuple(plan for plan in trade_off.frontier() if plan.peak_bytes < smallest.peak_bytes)
    unbeaten = tuple(plan for plan in exploration.frontier if not below or plan.added_seconds < below[0].added_seconds)
    proofs = exploration.proofs.with_least_peak(min(least_bytes, smaller.peak_bytes))
    return replace(exploration, frontier=unbeaten + below, has_least_peak=True, proofs=proofs)


def _fill(trade_off: TradeOff) -> None:
    step = trade_off.step
    trade_off.add(set())
    matter = values_that_matter(step, trade_off.may_be_recomputed)
    if len(matter) <= MOST_ENUMERATED_VALUES:
        trade_off.is_exact = True
        trade_off.add_all(all_choices(step, matter))
        return
    if trade_off.is_free and (best := Sweeps(step, trade_off.may_be_recomputed).all_best()) is not None:
        trade_off.is_exact = True
        trade_off.add_all(best)
        return
    num_cuts = min(max(_EFFORT_OPS // step.num_ops, _LEAST_CUTS), _MOST_CUTS)
    trade_off.add_all(known_rules(step))
    graph = HoldOrReplay(step, step.last_time_before_reads, trade_off.may_be_recomputed)
    for tilt, share in _TILTS:
        cuts = swept_cuts(step, graph, tilt=tilt, most_cuts=int(num_cuts * share))
        trade_off.add_all(cut.recomputed for cut in cuts)
    if step.time.launches_may_matter:
        trade_off.add_all(choices_of_few_launches(step, trade_off.may_be_recomputed, num_cuts // 2))
    _add_segmented(trade_off, num_cuts - int(num_cuts * sum(share for _, share in _TILTS)))
    if len(matter) * _NUM_FLIP_ROUNDS * _NUM_FLIP_STARTS <= _MOST_FLIPS:
        for number in range(_NUM_FLIP_ROUNDS):
            _add_flipped(trade_off, matter, number)
    _add_flipped_pairs(trade_off, matter)


def _stuff(trade_off: TradeOff, frontier: Sequence[Candidate]) -> None:
    """Try plans of ``frontier`` with more saved; all that was tried is a candidate."""
    for _ in stuffed_at_budgets(trade_off.step, lambda recomputed, _: trade_off.add(recomputed), frontier):
        pass


def _add_flipped(trade_off: TradeOff, matter: list[int], round_number: int) -> None:
    """Try single changes to plans spread evenly over the frontier, to others in each round."""
    best = trade_off.frontier()
    stride = max(len(best) // _NUM_FLIP_STARTS, 1)
    for start in best[round_number % stride :: stride]:
        trade_off.add_all(start.recomputed ^ {value} for value in matter)


def _add_flipped_pairs(trade_off: TradeOff, matter: list[int]) -> None:
    """Change two values at a time: in the smallest plan for as long as it gets smaller, then in others."""
    num_starts = _MOST_PAIRS // max(math.comb(len(matter), 2), 1)

    def try_pairs(start: Candidate) -> None:
        trade_off.add_all(start.recomputed ^ set(pair) for pair in combinations(matter, 2))

    lowest = None
    while num_starts > 0 and lowest != (smallest := trade_off.frontier()[-1]):
        lowest = smallest
        try_pairs(lowest)
        num_starts -= 1
    if num_starts > 0:
        best = trade_off.frontier()
        for start in best[:: max(len(best) // num_starts, 1)][:num_starts]:
            try_pairs(start)


def _add_segmented(trade_off: TradeOff, num_cuts: int) -> None:
    step = trade_off.step
    choices = chain(trade_off.segmentations, bordered_choices(step, lambda wanted: trade_off.add(wanted).peak_bytes))
    borders_of = {trade_off.add(recomputed).recomputed: held for held, recomputed in choices}
    best = [borders_of[entry.recomputed] for entry in trade_off.frontier() if entry.recomputed in borders_of]
    if not best:
        return
    most_cuts = max(num_cuts // (len(best) * len(_ANCHORED_TILTS)), 8)
    for held in reversed(best):
        if num_cuts <= 0:
            break
        graph = HoldOrReplay(step, step.last_time_before_reads, trade_off.may_be_recomputed - held)
        for tilt in _ANCHORED_TILTS:
            num_cuts -= most_cuts
            trade_off.add_all(cut.recomputed for cut in swept_cuts(step, graph, tilt=tilt, most_cuts=most_cuts))
