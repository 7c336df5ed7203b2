"""The search for the plans of a step from which every budget is served. The budget plays no part here.

So a smaller budget never gets a faster or a larger plan: both choose from one and the same frontier. Small steps are
enumerated, and their frontier is exact. For others, each of `PROPOSERS` in turn adds plans to one pool of candidates,
which are simulated; the Pareto-optimal ones are the frontier. `benchmarks/ablation.py` shows what each one earns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from memfit.planning.beam.beam_search import low_peaks
from memfit.planning.bounds.lower_bound import LowerBound
from memfit.planning.candidates.densify import densify
from memfit.planning.candidates.enumeration import MOST_ENUMERATED_VALUES, all_choices, values_that_matter
from memfit.planning.candidates.launches import prune_launches
from memfit.planning.candidates.pool import Candidate, Pool
from memfit.planning.candidates.price_sweep import price_sweeps
from memfit.planning.candidates.slack import use_slack
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues

# Yields sets of values to recompute, and may look at what is in the pool already.
Proposer = Callable[[Pool], Iterable[Set[int]]]

PROPOSERS: tuple[Proposer, ...] = (
    price_sweeps,
    prune_launches,
    low_peaks,
    prune_launches,
    densify,
    use_slack,
)
"""In this order: later ones improve on what is in the pool. Plans of the beam displace those that are pruned before."""

# At the peaks of how many plans of the frontier the lower bound looks at the step.
_NUM_PLANS_LOOKED_AT = 24


@dataclass(frozen=True, slots=True, eq=False)
class Exploration:
    """The Pareto-optimal candidates, fastest first, and lower bounds for all plans that are free to recompute the same.

    The bounds are taken at ``likely_peaks``, op indices. No plan that replays each op at most once has a smaller peak
    than ``least_peak_bytes``. ``is_exact`` says that no plan was left out that could be Pareto-optimal.
    """

    frontier: tuple[Candidate, ...]
    bound: LowerBound
    likely_peaks: frozenset[int]
    least_peak_bytes: int
    is_exact: bool


def explored(
    step: Step,
    *,
    forced: Set[int] = frozenset(),
    kept: Set[int] = frozenset(),
    proposers: Sequence[Proposer] = PROPOSERS,
) -> Exploration:
    """Return the plans for ``step``; ``forced`` values are recomputed in all of them, ``kept`` ones in none."""
    pool = Pool(step, forced=forced, kept=kept)
    pool.add(set())
    is_exact = len(values_that_matter(pool)) <= MOST_ENUMERATED_VALUES
    for propose in (all_choices,) if is_exact else proposers:
        pool.add_all(propose(pool))
    # So that no budget which checkpointing of every block keeps is refused. Last, since proposers spend their tries on
    # what lies around the plans that are there: on one profile this took 0.2 points when it came first.
    pool.add(BlockValues(step).inside(range(len(step.profile.blocks))))
    frontier = tuple(pool.frontier())
    bound = LowerBound(step, pool.may_be_recomputed)
    peaks = frozenset() if is_exact else _likely_peaks(step, frontier)
    least = frontier[-1].peak_bytes if is_exact else min(bound.peak_bytes(peaks), frontier[-1].peak_bytes)
    return Exploration(frontier, bound, peaks, least, is_exact)


def _likely_peaks(step: Step, frontier: Sequence[Candidate]) -> frozenset[int]:
    """Return the ops at the peaks of plans of the frontier, and those before the backward pass reads anything."""
    turn = step.last_time_before_reads
    stride = max(len(frontier) // _NUM_PLANS_LOOKED_AT, 1)
    peaks = {Walk(step, entry.recomputed).peak_op_index for entry in frontier[::-stride]}
    return frozenset({turn, min(turn + 1, max(step.num_ops - 1, 0)), *peaks})
