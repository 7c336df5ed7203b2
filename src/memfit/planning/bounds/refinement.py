"""Better plans, and proofs of how good they are, where the candidates leave something to be desired.

The gap at a budget is what the fastest candidate takes beyond what is proven to be the least. Again and again, the
budget with the largest gap is attempted, by what the size of the step allows:

- Prices (`time_prices`) give a line that is a proof for all budgets, and plans that were met in looking for them. Where
  the gap stays large, a sweep (`backward_sweep`) looks for faster plans, and proves that there are none.
- All steps get linear programs (`replay_program`), those with too many states for prices only these: their lines are
  proofs, too, and their fractional solutions, rounded at several thresholds, give new candidates. Where the simulator
  says that one of them is too large, the op of its peak joins the times that programs look at. Programs in which the
  borders of good segments are held prove nothing, but their solutions have no long bursts of replays: at low budgets
  they round better.

Sweeps also look for the least peak, of the whole step or of its first ops. What is still slow then is polished
(`polish`). The budgets, their order and the effort follow from the step alone, in counts: one and the same step is
planned in the same way everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set

from memfit.planning.bounds.bound import least_live_peak, single_time_lines
from memfit.planning.bounds.proofs import Floor, Proofs
from memfit.planning.bounds.replay_program import ReplayProgram
from memfit.planning.bounds.replay_rows import Program
from memfit.planning.candidates.polish import polished
from memfit.planning.candidates.trade_off import Candidate, TradeOff
from memfit.planning.dp.least_peak import FIRST_ROWS, GROWTH, can_be_swept, least_peak
from memfit.planning.dp.sweep_search import Sweeps
from memfit.planning.simulate.simulator import peak_op_index
from memfit.planning.step.block_values import BlockValues

# Solving takes time as about the rows to the power of 1.5; a million is about half a second.
_EFFORT = 1_000_000
# Larger steps get no programs at all.
_MOST_OPS = 6_000
# Shares of the step: gaps that are left alone by linear programs, by prices, and by sweeps and polishing.
_SMALL_GAP = 0.002
_SMALL_GAP_OF_PRICED = 0.004
_SMALL_GAP_OF_SWEPT = 0.007
_MOST_ROWS_OF_NEAR = 6_000
_MOST_ROWS_OF_GROWING = 2_000
_MOST_UNDECIDED = 40
# How many budgets get prices.
_MOST_PRICED = 16
# How many cells sweeps for the least peak may have, more where there are few ops to decide on: there it is often found
# and proven. Those that look for nothing else have many more (`search`).
_EFFORT_FOR_LEAST_PEAK, _EFFORT_FOR_LEAST_PEAK_OF_FEW, _FEW_OPS = 2_000_000, 8_000_000, 200
# How many cells sweeps may have that prove what a budget costs at least, in the same way.
_EFFORT_FOR_SECONDS, _EFFORT_FOR_SECONDS_OF_FEW = 2_000_000, 4_000_000
# How many rows a step of one op could pay for in the first sweep that looks for faster plans at a budget. Each further
# one there has eight times the rows, if the one before made the gap this much smaller. What all of them may have falls
# with the square of the ops: larger steps have larger states, too.
_FIRST_SWEEPING_EFFORT, _SWEEPING_EFFORT = 10_000, 24_000_000
_MOST_SWEEPS = 3
_WORTHWHILE = 0.9
_NUM_BUDGETS = 16
_NUM_SEGMENTATIONS = 5
_NUM_PLANS_LOOKED_AT = 24
_NUM_BORDERS_TRIED = 8
_THRESHOLDS = (0.02, 0.25, 0.5, 0.75, 0.98)
_MOST_VISITS = 8
# How many single changes a step of one op could pay for.
_POLISHING_EFFORT = 400_000
# What of the effort goes into lower peaks, and how near below the lowest they are looked for: 1 is the lowest itself.
_SHARE_FOR_PEAKS = 0.25
_AIM = 0.9
_MOST_CHANGES = 12
_MOST_VALUES_CHANGED = 40
# In how many plans, where the step has only one op, and where it has few.
_CHANGED_PLANS_OPS, _MOST_CHANGED_PLANS = 2_400, 6


def refined(trade_off: TradeOff) -> Proofs:
    """Add candidates to ``trade_off``, and return what is proven about all plans of its step."""
    refinement = _Refinement(trade_off)
    refinement.run()
    return refinement.proofs


class _View:
    """Programs that look at a growing number of times."""

    def __init__(self, model: ReplayProgram, times: Set[int]) -> None:
        self.model = model
        self._times = set(times)
        self._program: Program | None = None

    def program(self) -> Program:
        if self._program is None:
            self._program = self.model.program(self._times)
        return self._program

    def add(self, time: int) -> bool:
        """Return whether it is new."""
        is_new = time not in self._times
        if is_new:
            self._times.add(time)
            self._program = None
        return is_new


class _Refinement:
    """The candidates and proofs of one step in the making."""

    def __init__(self, trade_off: TradeOff) -> None:
        self._trade_off = trade_off
        self._step = step = trade_off.step
        self.proofs = Proofs()
        self._step_seconds = step.profile.step_seconds or 1.0
        self._effort = _EFFORT
        self._entries = trade_off.frontier()

    def run(self) -> None:
        """Try all there is, within the effort."""
        step, may_be_recomputed = self._step, self._trade_off.may_be_recomputed
        self.proofs.least_peak_bytes = least_live_peak(step)
        self._first_times = self._likely_peaks()
        self.proofs.lines += single_time_lines(step, may_be_recomputed, self._first_times)
        if step.num_ops > _MOST_OPS:
            return
        sweeps = self._sweeps = Sweeps(step, may_be_recomputed)
        has_prices = sweeps.find_prices(self._first_times)
        effort_for_peak = _EFFORT_FOR_LEAST_PEAK_OF_FEW if sweeps.num_ops <= _FEW_OPS else _EFFORT_FOR_LEAST_PEAK
        if has_prices:
            self._prove_peak(sweeps.priced_least_peak)
        if not has_prices and not can_be_swept(sweeps, effort_for_peak):
            self._try_all(sweeps.small(self._entries[-1].peak_bytes))
        if self.proofs.least_peak_bytes < self._entries[-1].peak_bytes:
            plans, least_bytes = sweeps.smallest_of_parts(self._entries[-1].recomputed)
            self._try_all(plans)
            self._prove_peak(least_bytes)
        if self.proofs.least_peak_bytes < self._entries[-1].peak_bytes:
            smallest, least_bytes = least_peak(
                self._trade_off, sweeps, self._entries[-1], self.proofs.least_peak_bytes, effort_for_peak
            )
            self._tried(smallest.recomputed)
            self._prove_peak(least_bytes)
        if has_prices:
            self._effort = _MOST_PRICED
            self._close_gaps(self._try_priced, _SMALL_GAP_OF_PRICED)
            self._effort = _SWEEPING_EFFORT // sweeps.num_ops**2
            self._close_gaps(self._try_swept, _SMALL_GAP_OF_SWEPT)
            self._change_one_by_one()
        self._solve_programs()
        self._effort = _EFFORT_FOR_SECONDS_OF_FEW if sweeps.num_ops <= _FEW_OPS else _EFFORT_FOR_SECONDS
        self._close_gaps(self._try_swept_together, _SMALL_GAP_OF_SWEPT)
        self._effort = _POLISHING_EFFORT // step.num_ops
        self._close_gaps(self._try_polished, _SMALL_GAP_OF_SWEPT)

    def _solve_programs(self) -> None:
        """Close gaps by linear programs that look at few times of the step."""
        step, may_be_recomputed = self._step, self._trade_off.may_be_recomputed
        self._free = _View(ReplayProgram(step, may_be_recomputed, leave_out_statistics=True), self._first_times)
        if not self._free.model.recipes or _cost(self._free.program().num_rows) > _EFFORT:
            return
        anchored = (
            _View(ReplayProgram(step, may_be_recomputed - held, leave_out_statistics=True), self._first_times)
            for held in self._borders()
        )
        self._views = [self._free, *(view for view in anchored if view.model.recipes)]
        self._effort = int(_EFFORT * _SHARE_FOR_PEAKS)
        if self.proofs.least_peak_bytes < self._entries[-1].peak_bytes:
            relaxed = self._free.model.relaxed_least_peak(self._free.program())
            if relaxed is not None:
                self._prove_peak(relaxed.least_peak_bytes)
        self._lower_peaks()
        self._change_one_by_one()
        self._effort += int(_EFFORT * (1 - _SHARE_FOR_PEAKS))
        self._close_gaps(self._try_relaxed, _SMALL_GAP)

    def _prove_peak(self, least_peak_bytes: int) -> None:
        # The plain step counts as it was measured, and may be smaller than anything that is made up of its parts.
        least = min(least_peak_bytes, self._entries[-1].peak_bytes)
        self.proofs.least_peak_bytes = max(self.proofs.least_peak_bytes, least)

    def _likely_peaks(self) -> set[int]:
        """Return the ops of peaks of plans so far: all before the backward pass reads, which are cheap to look at."""
        last = self._step.last_time_before_reads
        at_the_turn = {last, min(last + 1, self._step.num_ops - 1)}
        if self._step.num_ops > _MOST_OPS:
            return at_the_turn
        stride = max(len(self._entries) // _NUM_PLANS_LOOKED_AT, 1)
        peaks = {peak_op_index(self._step, entry.recomputed) for entry in self._entries[::-stride]}
        plain = peak_op_index(self._step, self._entries[0].recomputed)
        return {*at_the_turn, plain, *(time for time in peaks if time < last)}

    def _borders(self) -> list[set[int]]:
        """Return what to hold in programs that shall have no long bursts."""
        by_peak = sorted(
            (
                (self._trade_off.add(recomputed).peak_bytes, number, held)
                for number, (held, recomputed) in enumerate(self._trade_off.segmentations)
            ),
            key=lambda entry: entry[:2],
        )
        self._all_borders = [held for _, _, held in by_peak[:_NUM_BORDERS_TRIED]] + [BlockValues(self._step).leaving()]
        return [BlockValues(self._step).leaving()] + [held for _, _, held in by_peak[:_NUM_SEGMENTATIONS]]

    def _close_gaps(self, attempt: Callable[[int, int], bool], small_gap: float) -> None:
        """Attempt the budget with the largest gap, until all are small, nothing is new, or no effort is left."""
        num_visits: dict[int, int] = {}
        entries = self._entries
        high, low = entries[0].peak_bytes, entries[-1].peak_bytes
        budgets = {int(low + (high - low) * (number / _NUM_BUDGETS) ** 1.5) for number in range(_NUM_BUDGETS)}
        while self._effort > 0 and budgets:
            gaps = {budget: self._gap(budget) for budget in budgets}
            budgets = {budget for budget in budgets if gaps[budget] > small_gap * self._step_seconds}
            if not budgets:
                return
            # Each visit makes the next one less promising.
            worst = max(budgets, key=lambda budget: (gaps[budget] / 2 ** num_visits.get(budget, 0), budget))
            number = num_visits.get(worst, 0)
            num_visits[worst] = number + 1
            if not attempt(worst, number) or number + 1 == _MOST_VISITS:
                budgets.discard(worst)

    def _gap(self, budget_bytes: int) -> float:
        return self._fastest(budget_bytes) - self._step.time.at_least(self.proofs.seconds(budget_bytes))

    def _fastest(self, budget_bytes: int) -> float:
        return next((entry.added_seconds for entry in self._entries if entry.peak_bytes <= budget_bytes), 0.0)

    def _try_relaxed(self, budget_bytes: int, visit: int) -> bool:
        """Solve for one budget; return whether another try there would be a different one."""
        view = self._views[visit % len(self._views)]
        program = view.program()
        self._effort -= _cost(program.num_rows)
        relaxed = view.model.relaxed(program, budget_bytes)
        if relaxed is None or relaxed.line is None:
            return visit < len(self._views)
        if view is self._free:
            self.proofs.lines.append(relaxed.line)
        tried = [self._tried({v for v, share in relaxed.share_dropped.items() if share >= t}) for t in _THRESHOLDS]
        if relaxed.num_undecided <= _MOST_UNDECIDED and program.num_rows <= _MOST_ROWS_OF_NEAR:
            self._effort -= _cost(program.num_rows)
            near = view.model.whole_near(program, budget_bytes, relaxed)
            if near is not None:
                tried = [self._tried(near)]
        middle = tried[len(tried) // 2]
        for held in self._all_borders:
            self._tried(middle.recomputed - held)
        is_new = False
        # Each time makes all later programs larger; held borders are the cheaper way where they do.
        is_cheap = program.num_rows <= _MOST_ROWS_OF_GROWING or view is not self._free or visit >= len(self._views)
        if middle.peak_bytes > budget_bytes and is_cheap:
            is_new = view.add(peak_op_index(self._step, middle.recomputed))
        return is_new or visit < len(self._views)

    def _try_all(self, plans: Iterable[Set[int]]) -> None:
        for dropped in plans:
            self._tried(dropped)

    def _tried(self, dropped: Set[int]) -> Candidate:
        """Judge a plan, and keep it where none is at least as good."""
        tried = self._trade_off.add(dropped)
        faster = [entry for entry in self._entries if entry.added_seconds <= tried.added_seconds]
        if not faster or faster[-1].peak_bytes > tried.peak_bytes:
            slower = self._entries[len(faster) :]
            self._entries = [*faster, tried, *(entry for entry in slower if entry.peak_bytes < tried.peak_bytes)]
        return tried

    def _lower_peaks(self) -> None:
        """Try budgets below the lowest peak, in each view, for as long as that gives a lower one."""
        lowest = math.inf
        while self._entries[-1].peak_bytes < lowest:
            lowest = self._entries[-1].peak_bytes
            for visit in range(2 * len(self._views)):
                aim = _AIM * self._entries[-1].peak_bytes + (1 - _AIM) * self.proofs.least_peak_bytes
                if self._effort > 0:
                    self._try_relaxed(int(aim), visit)

    def _change_one_by_one(self) -> None:
        """Decide otherwise for one value that is live at the peak of a small plan, whichever lowers it most; and again.

        Not only in the smallest: one that is hardly larger may be much faster, and as easy to make smaller.
        """
        num_starts = min(max(_CHANGED_PLANS_OPS // self._step.num_ops, 1), _MOST_CHANGED_PLANS)
        for start in self._entries[-num_starts:]:
            self._change(start)

    def _change(self, current: Candidate) -> None:
        step = self._step
        for _ in range(_MOST_CHANGES):
            time = peak_op_index(step, current.recomputed)
            live = [
                value
                for value in sorted(
                    self._trade_off.may_be_recomputed, key=lambda value: (-step.value_bytes[value], value)
                )
                if step.value_op[value] <= time <= step.last_release_of_value[value]
                or (value in current.recomputed and not step.saves_of_value[value])
            ]
            changed = [self._tried(current.recomputed ^ {value}) for value in live[:_MOST_VALUES_CHANGED]]
            best = min(changed, key=lambda candidate: (candidate.peak_bytes, candidate.added_seconds), default=current)
            if best.peak_bytes >= current.peak_bytes:
                return
            current = best

    def _try_priced(self, budget_bytes: int, visit: int = 0) -> bool:
        """Look for prices, once for each budget, and try the plans that are met on the way."""
        self._effort -= 1
        plans, line = self._sweeps.priced(budget_bytes)
        self.proofs.lines.append(line)
        self._try_all(plans)
        return False

    def _try_swept(self, budget_bytes: int, visit: int) -> bool:
        """Sweep within one budget, with more rows each time."""
        num_rows = min(_FIRST_SWEEPING_EFFORT // self._sweeps.num_ops * 8**visit, self._effort)
        self._effort -= num_rows
        if not self._sweeps.has_prices_for(budget_bytes):
            self._try_priced(budget_bytes)
        gap = self._gap(budget_bytes)
        fastest = next((e.recompute_seconds for e in self._entries if e.peak_bytes <= budget_bytes), math.inf)
        plans, least_seconds = self._sweeps.faster(budget_bytes, fastest, num_rows)
        self.proofs.floors.append(Floor(budget_bytes, least_seconds))
        self._try_all(plans)
        return visit + 1 < _MOST_SWEEPS and self._gap(budget_bytes) <= _WORTHWHILE * gap

    def _try_swept_together(self, budget_bytes: int, visit: int) -> bool:
        """Sweep within one budget with partial plans taken together, with more rows as long as that proves more.

        Near the smallest peak few partial plans are possible, and what is proven there is often all there is.
        """
        num_rows = FIRST_ROWS * GROWTH**visit
        if not can_be_swept(self._sweeps, self._effort, num_rows):
            return False
        gap = self._gap(budget_bytes)
        fastest = next((e.recompute_seconds for e in self._entries if e.peak_bytes <= budget_bytes), math.inf)
        plans, least_seconds, num_cells = self._sweeps.least_seconds(budget_bytes, fastest, num_rows)
        self._effort -= num_cells
        self.proofs.floors.append(Floor(budget_bytes, least_seconds))
        self._try_all(plans)
        return self._gap(budget_bytes) <= _WORTHWHILE * gap

    def _try_polished(self, budget_bytes: int, visit: int) -> bool:
        """Polish the fastest plan for one budget; where it is the fastest still, that was all."""
        start = next((entry for entry in self._entries if entry.peak_bytes <= budget_bytes), None)
        if start is None:
            return False
        most_tries = min(self._effort, _POLISHING_EFFORT // _NUM_BUDGETS * 4 // self._step.num_ops)
        self._effort -= most_tries
        better = polished(self._trade_off, start, budget_bytes, most_tries)
        self._tried(better.recomputed)
        return better is not start


def _cost(num_rows: int) -> int:
    return int(num_rows**1.5)
