"""Plans for steps that wait for the host: what counts there is how many ops are recorded and run again, not which.

To the host every op costs about the same. So the hull is swept once more with that cost for each op, alone and together
with the op's own seconds, and in the first blocks only: then the others need no listening at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from memfit.planning.candidates.min_cut import HoldOrReplay
from memfit.planning.candidates.sweep import swept_cuts
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues
from memfit.planning.step.regions import USUAL_COSTS

_TILT = 0.03
# Into so many equal parts are the blocks divided of which the first ones are listened to.
_NUM_PARTS = 8


def choices_of_few_launches(step: Step, may_be_recomputed: Set[int], num_cuts: int) -> Iterator[frozenset[int]]:
    """Yield what to recompute, for about ``num_cuts`` minimum cuts."""
    costs = step.profile.host or USUAL_COSTS
    host_seconds = costs.recorded_op + costs.dropped_op + costs.module_entry + costs.hooked_save + costs.replayed_op
    on_host = [host_seconds] * step.num_ops
    on_both = [host_seconds + seconds for seconds in step.replay_seconds]
    candidates = [frozenset(may_be_recomputed), *_in_first_blocks(step, may_be_recomputed)]
    most_cuts = max(num_cuts // (2 * len(candidates)), 6)
    for values in candidates:
        for op_seconds in (on_host, on_both):
            graph = HoldOrReplay(step, step.last_time_before_reads, values, op_seconds)
            yield from (cut.recomputed for cut in swept_cuts(step, graph, tilt=_TILT, most_cuts=most_cuts))


def _in_first_blocks(step: Step, may_be_recomputed: Set[int]) -> Iterator[frozenset[int]]:
    num_blocks = len(step.profile.blocks)
    blocks = BlockValues(step)
    for num_first in sorted({num_blocks * part // _NUM_PARTS for part in range(1, _NUM_PARTS)} - {0}):
        yield frozenset(blocks.made_in(range(num_first)) & may_be_recomputed)
