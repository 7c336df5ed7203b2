"""Better plans, and proofs of how good they are, where the candidates leave something to be desired.

The gap at a budget is what the fastest candidate takes beyond what is proven to be the least. Again and again, the
budget with the largest gap gets a linear program (`replay_program`): its line is a proof for all budgets, and its
fractional solution, rounded at several thresholds, gives new candidates. Where the simulator says that one of them is
too large, the op of its peak joins the times that programs look at. Programs in which the borders of good segments are
held prove nothing, but their solutions have no long bursts of replays: at low budgets they round better. On small
steps, whole decisions are searched, also for the least peak. What is still slow then is polished (`polish`).

The budgets and their order follow from the step alone, so that every budget is served from one frontier. So does the
effort, but for the searches for whole decisions: a clock stops those, and a slower machine may find less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from time import perf_counter

from memfit.planning.block_values import BlockValues
from memfit.planning.bound import least_live_peak, single_time_lines
from memfit.planning.polish import polished
from memfit.planning.proofs import Floor, Proofs
from memfit.planning.replay_program import ReplayProgram
from memfit.planning.replay_rows import Burst, Program
from memfit.planning.segments import segmented_choices
from memfit.planning.simulator import peak_place
from memfit.planning.trade_off import Candidate, TradeOff

# Solving takes time as about the rows to the power of 1.5; a million is about half a second.
_EFFORT = 1_200_000
# Larger steps get no programs at all.
_MOST_OPS = 6_000
# Shares of the step: gaps that are left alone by linear programs, and by searches for whole decisions.
_SMALL_GAP = 0.002
_SMALL_GAP_OF_WHOLE = 0.007
# Where the rows are more, whole decisions are not searched for.
_MOST_ROWS_OF_WHOLE = 1_500
_MOST_VALUES_OF_WHOLE = 120
_MOST_ROWS_OF_NEAR = 6_000
_MOST_ROWS_OF_GROWING = 2_000
_MOST_UNDECIDED = 40
_MOST_NODES = 100
# Nodes do not limit what the solver does before the first one, and nothing but a clock does.
_MOST_SECONDS_OF_ONE = 1.0
_MOST_SECONDS_FOR_PEAKS = 1.5
_MOST_SECONDS_FOR_GAPS = 5.0
_MOST_SEARCHES = 8
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
        self.times = set(times)
        self.bursts: list[Burst] = []
        self._program: Program | None = None

    def program(self, least_budget_bytes: int = 0) -> Program:
        if self._program is None or self.bursts:
            self._program = self.model.program(self.times, self.bursts, least_budget_bytes=least_budget_bytes)
        return self._program

    def add(self, times: Iterable[int], bursts: Iterable[Burst] = ()) -> bool:
        """Return whether anything was new."""
        new_times, new_bursts = set(times) - self.times, [burst for burst in bursts if burst not in self.bursts]
        self.times |= new_times
        self.bursts += new_bursts
        if new_times:
            self._program = None
        return bool(new_times or new_bursts)


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
        self._free = _View(ReplayProgram(step, may_be_recomputed, leave_out_statistics=True), self._first_times)
        if not self._free.model.recipes or _cost(self._free.program().num_rows) > self._effort:
            return
        anchored = (
            _View(ReplayProgram(step, may_be_recomputed - held, leave_out_statistics=True), self._first_times)
            for held in self._borders()
        )
        self._views = [self._free, *(view for view in anchored if view.model.recipes)]
        relaxed = self._free.model.relaxed_least_peak(self._free.program())
        if relaxed is not None:
            self.proofs.least_peak_bytes = max(self.proofs.least_peak_bytes, relaxed.least_peak_bytes)
        self._effort = int(_EFFORT * _SHARE_FOR_PEAKS)
        self._lower_peaks()
        self._change_one_by_one()
        self._effort += int(_EFFORT * (1 - _SHARE_FOR_PEAKS))
        self._close_gaps(self._try_relaxed, _SMALL_GAP)
        if len(self._free.model.droppable) <= _MOST_VALUES_OF_WHOLE:
            self._search_until = perf_counter() + _MOST_SECONDS_FOR_PEAKS
            self._search_least_peak()
            self._change_one_by_one()
            self._search_until = perf_counter() + _MOST_SECONDS_FOR_GAPS
            self._effort = _MOST_SEARCHES
            self._close_gaps(self._try_whole, _SMALL_GAP_OF_WHOLE)
        self._effort = _POLISHING_EFFORT // step.num_ops
        self._close_gaps(self._try_polished, _SMALL_GAP_OF_WHOLE)

    def _likely_peaks(self) -> set[int]:
        """Return the ops of peaks of plans so far: all before the backward pass reads, which are cheap to look at."""
        last = self._step.last_time_before_reads
        at_the_turn = {last, min(last + 1, self._step.num_ops - 1)}
        if self._step.num_ops > _MOST_OPS:
            return at_the_turn
        stride = max(len(self._entries) // _NUM_PLANS_LOOKED_AT, 1)
        peaks = {peak_place(self._step, entry.recomputed).op_index for entry in self._entries[::-stride]}
        plain = peak_place(self._step, self._entries[0].recomputed).op_index
        return {*at_the_turn, plain, *(time for time in peaks if time < last)}

    def _borders(self) -> list[set[int]]:
        """Return what to hold in programs that shall have no long bursts."""
        by_peak = sorted(
            (
                (self._trade_off.add(recomputed).peak_bytes, number, held)
                for number, (held, recomputed) in enumerate(segmented_choices(self._step))
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
            near = view.model.whole(program, budget_bytes, within_share=0.01, most_nodes=50, near=relaxed)
            if near.dropped is not None:
                tried = [self._tried(near.dropped)]
        middle = tried[len(tried) // 2]
        for held in self._all_borders:
            self._tried(middle.recomputed - held)
        is_new = False
        # Each time makes all later programs larger; held borders are the cheaper way where they do.
        is_cheap = program.num_rows <= _MOST_ROWS_OF_GROWING or view is not self._free or visit >= len(self._views)
        if middle.peak_bytes > budget_bytes and is_cheap:
            is_new = view.add([peak_place(self._step, middle.recomputed).op_index])
        return is_new or visit < len(self._views)

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
            time = peak_place(step, current.recomputed).op_index
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

    def _seconds_left(self) -> float:
        return self._search_until - perf_counter()

    def _search_least_peak(self) -> None:
        for _ in range(_MOST_SEARCHES):
            lowest = self._entries[-1].peak_bytes
            program = self._free.program()
            if program.num_rows > _MOST_ROWS_OF_WHOLE:
                return
            left = self._seconds_left()
            if left <= 0:
                return
            whole = self._free.model.whole_least_peak(
                program, within_share=1e-3, most_nodes=_MOST_NODES, most_seconds=min(left, _MOST_SECONDS_OF_ONE)
            )
            self.proofs.least_peak_bytes = max(self.proofs.least_peak_bytes, math.ceil(whole.bound))
            if whole.dropped is None or not self._learn(whole.dropped, min(lowest, self.proofs.least_peak_bytes)):
                return

    def _try_whole(self, budget_bytes: int, visit: int) -> bool:
        self._effort -= 1
        program = self._free.program(budget_bytes)
        if program.num_rows > _MOST_ROWS_OF_WHOLE:
            return False
        fastest = self._fastest(budget_bytes)
        within_share = _SMALL_GAP_OF_WHOLE / 2 * self._step_seconds / max(fastest, 1e-30)
        left = self._seconds_left()
        if left <= 0:
            return False
        whole = self._free.model.whole(
            program,
            budget_bytes,
            within_share=within_share,
            most_nodes=_MOST_NODES,
            most_seconds=min(left, _MOST_SECONDS_OF_ONE),
        )
        if whole.bound < math.inf:
            self.proofs.floors.append(Floor(budget_bytes, whole.bound))
        return whole.dropped is not None and self._learn(whole.dropped, budget_bytes)

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

    def _learn(self, dropped: Set[int], budget_bytes: int) -> bool:
        """Add a plan; where it is too large, look at its peak from now on. Return whether that is something new."""
        tried = self._tried(dropped)
        if tried.peak_bytes <= budget_bytes:
            return False
        place = peak_place(self._step, tried.recomputed)
        # After a burst is as good as while it lasts, most of the time, and takes fewer rows.
        if place.recipe is None or place.op_index not in self._free.times:
            return self._free.add({place.op_index})
        return self._free.add((), [Burst(place.op_index, place.recipe)])


def _cost(num_rows: int) -> int:
    return int(num_rows**1.5)
