"""Finds plans that also offload: what a plan without offloading holds may go to the host, as far as the link carries.

Offloading beside the computation costs nothing, recomputing always does. So for a budget the best plan is often that of
a larger budget, with enough of what it holds offloaded. Starting from plans of the frontier without offloading, and
from such that replay each block from what enters it, values are sent in the order in which they are made: the first
ones are read last. Two rounds look for the best:

1. from a few plans, with windows of several sizes, sending what the link can take at that moment, or all, which waits;
   how many values, is tried in steps;
2. at peaks spread evenly over what that found: from more plans, as many values as it takes to stay within that peak.
   First from the plans next to the one that was best there in the first round, and from those that come down to the
   peak by what the link carries, the fastest of them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain, zip_longest
from typing import NamedTuple

from memfit.planning.candidates.pool import Candidate, pareto_optimal, spread
from memfit.planning.offload.offloadable import held_by, host_bytes_of, may_be_offloaded
from memfit.planning.simulate.simulator import judged
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues, is_statistic
from memfit.planning.step.link_time import out_seconds, with_reserve
from memfit.planning.step.offload_rules import Offloading

# Where the device need not wait anyway, smaller values take the host more time than they are worth, and so do
# statistics that ops return beside their results.
_LARGE_BYTES = 2**20
# How many simulations a step of one op could pay for in each of the two rounds, and the limits to their number.
_FIRST_EFFORT_OPS, _SECOND_EFFORT_OPS = 300_000, 700_000
_LEAST_TRIES, _MOST_TRIES = 240, 2_000
# As multiples of the size in the middle of the large values that a plan holds, or, for what may have to wait, in the
# middle of their bytes.
_WINDOWS = (1, 2, 4, 8, 16)
_MOST_AMOUNTS, _FEWEST_STARTS = 8, 3
# Of what is sent, so many may stay that are made last: those are read first, and back again before the peak.
_MOST_LEFT_OUT = 2
# In the second round: at how many peaks, and from how many plans beside the best, at most.
_NUM_PEAKS, _MOST_NEIGHBOURS = 36, 12


def with_offloading(
    step: Step,
    frontier: Sequence[Candidate],
    host_budget_bytes: int,
    *,
    forced: frozenset[int] = frozenset(),
    kept: frozenset[int] = frozenset(),
) -> tuple[Candidate, ...]:
    """Return the plans of ``frontier`` and such that also offload: the Pareto-optimal ones, fastest first.

    None of the ``kept`` values is offloaded or recomputed, the ``forced`` ones always are the latter, and never is more
    offloaded than the host has room for.
    """

    forced, kept = step.alike.with_others(forced), step.alike.with_others(kept)

    def judge(wanted: frozenset[int], offloading: Offloading) -> Candidate:
        recomputed = frozenset(step.recomputed_of((wanted | forced) - kept))
        offloading = offloading._replace(values=step.alike.without_parts(offloading.values))
        return Candidate(recomputed, *judged(step, recomputed, offloading), offloading)

    of_blocks = [judge(frozenset(wanted), Offloading(frozenset(), 0)) for wanted in _whole_blocks(step)]
    search = _Search(step, frontier, of_blocks, kept, host_budget_bytes, judge)
    search.send_in_steps()
    search.send_just_enough()
    return tuple(pareto_optimal([*frontier, *search.found]))


class _Order(NamedTuple):
    """An order of values to send: from which plan, with what window, whether it may have to wait, and which sizes."""

    start: int
    window_bytes: int
    may_wait: bool
    least_bytes: int


class _Search:
    """The two rounds over one step. ``found`` has every plan that was judged, with the order that led to it."""

    def __init__(
        self,
        step: Step,
        frontier: Sequence[Candidate],
        of_blocks: Sequence[Candidate],
        kept: frozenset[int],
        host_budget_bytes: int,
        judge: Callable[[frozenset[int], Offloading], Candidate],
    ) -> None:
        assert step.profile.link is not None
        self.found: dict[Candidate, _Order] = {}
        self._step, self._host_budget_bytes = step, host_budget_bytes
        self._link, self._computed_at = with_reserve(step.profile.link), list(accumulate(step.op_seconds))
        self._eligible = [value for value in may_be_offloaded(step) if value not in kept]
        self._num_first_tries, self._num_second_tries = (
            min(max(effort // max(step.num_ops, 1), _LEAST_TRIES), _MOST_TRIES)
            for effort in (_FIRST_EFFORT_OPS, _SECOND_EFFORT_OPS)
        )
        starts = [*spread(frontier, max(self._num_second_tries // _MOST_NEIGHBOURS, 2)), *of_blocks]
        self._starts = sorted(starts, key=lambda start: -start.peak_bytes)
        self._of_blocks = {self._starts.index(start) for start in of_blocks}
        # Each is computed once.
        self._judged = cache(judge)
        self._held = cache(lambda start: held_by(step, self._starts[start].recomputed, self._eligible))
        self._orders_from = cache(self._found_orders_from)
        self._sent_by = cache(self._found_sent_by)

    def send_in_steps(self) -> None:
        """The first round."""
        tries_of_start = self._num_first_tries // (2 * len(_WINDOWS))
        num_amounts = min(max(tries_of_start // (len(self._of_blocks) + _FEWEST_STARTS), 1), _MOST_AMOUNTS)
        num_starts = max(tries_of_start // num_amounts - len(self._of_blocks), _FEWEST_STARTS)
        chosen = {len(self._starts) * k // num_starts for k in range(num_starts)} | {len(self._starts) - 1}
        for order in chain.from_iterable(self._orders_from(start) for start in sorted(chosen | self._of_blocks)):
            num_values = len(self._sent_by(order))
            counts = {-(-num_values * part // num_amounts) for part in range(1, num_amounts + 1)}
            for count in sorted(counts.union(range(max(num_values - _MOST_LEFT_OUT, 1), num_values))):
                self._try(order, count)

    def send_just_enough(self) -> None:
        """The second round."""
        if not self.found:
            return
        first_round = sorted(self.found.items(), key=lambda entry: entry[0].added_seconds)
        high, low = (choose(candidate.peak_bytes for candidate in self.found) for choose in (max, min))
        most_tries = len(self.found)
        for peak_bytes in (high - (high - low) * k // _NUM_PEAKS for k in range(_NUM_PEAKS + 1)):
            # What one peak does not need, the next may have.
            most_tries += self._num_second_tries // (_NUM_PEAKS + 1)
            fitting = [candidate.added_seconds for candidate in self.found if candidate.peak_bytes <= peak_bytes]
            fastest = min(fitting, default=math.inf)
            beside_the_best = self._beside_the_best(first_round, peak_bytes)
            for order in chain.from_iterable(zip_longest(beside_the_best, self._likely(peak_bytes))):
                if len(self.found) >= most_tries:
                    break
                # Sending never makes a plan faster.
                if order is not None and self._starts[order.start].added_seconds < fastest:
                    fastest = min(fastest, self._send_until(peak_bytes, order))

    def _beside_the_best(self, first_round: Sequence[tuple[Candidate, _Order]], peak_bytes: int) -> Iterator[_Order]:
        """Yield orders like the one that was the fastest within a peak, from the plans beside its own."""
        best = next((order for candidate, order in first_round if candidate.peak_bytes <= peak_bytes), None)
        for number in range(_MOST_NEIGHBOURS):
            offset = (number + 1) // 2 * (-1 if number % 2 else 1)
            if best is not None and 0 <= best.start + offset < len(self._starts):
                yield best._replace(start=best.start + offset)

    def _likely(self, peak_bytes: int) -> Iterator[_Order]:
        """Yield orders that come down to a peak without waiting, if all that is sent counts there, fastest first."""
        num_likely, value_bytes = 0, self._step.value_bytes
        for start, candidate in enumerate(self._starts):
            if candidate.peak_bytes <= peak_bytes or num_likely == _MOST_NEIGHBOURS:
                return
            least_bytes = candidate.peak_bytes - peak_bytes
            orders = [order for order in self._orders_from(start) if not order.may_wait]
            likely = [
                order for order in orders if sum(value_bytes[value] for value in self._sent_by(order)) >= least_bytes
            ]
            num_likely += bool(likely)
            yield from likely

    def _found_orders_from(self, start: int) -> list[_Order]:
        sizes = sorted(self._step.value_bytes[value] for value in self._large(start))
        if not sizes:
            return []
        in_the_middle = sizes[len(sizes) // 2]
        half_bytes, so_far = sum(sizes) / 2, accumulate(sizes)
        of_half_the_bytes = next(size for size, num_bytes in zip(sizes, so_far, strict=True) if num_bytes >= half_bytes)
        kinds = [(in_the_middle, False, _LARGE_BYTES), (of_half_the_bytes, True, 0)]
        if self._step.time.launches_may_matter:
            # Each value takes the host as long, whatever its size: only large ones may be sent, too.
            kinds += [(size, False, size) for size in sorted({of_half_the_bytes, sizes[-1]}) if size > in_the_middle]
        return [_Order(start, multiple * size, wait, least) for multiple in _WINDOWS for size, wait, least in kinds]

    def _send_until(self, peak_bytes: int, order: _Order) -> float:
        """Find the fewest values that are enough, for more of them hardly ever take more memory; return what it adds.

        That is infinitely much where all of them are not enough.
        """
        # What is sent is mostly what the peak is lower by: begin there, and right below.
        missing_bytes = self._starts[order.start].peak_bytes - peak_bytes
        sent_bytes = accumulate(self._step.value_bytes[value] for value in self._sent_by(order))
        likely = next((count for count, num_bytes in enumerate(sent_bytes, 1) if num_bytes >= missing_bytes), 0)
        low, high = 0, len(self._sent_by(order)) + 1
        guesses = [high - 1, likely - 1, likely]
        while low < high:
            count = guesses.pop() if guesses else (low + high) // 2
            if not low <= count < high:
                continue
            candidate = self._try(order, count)
            if candidate is None or candidate.peak_bytes <= peak_bytes:
                high = count
            else:
                low = count + 1
        candidate = self._try(order, low) if low <= len(self._sent_by(order)) else None
        return math.inf if candidate is None else candidate.added_seconds

    def _try(self, order: _Order, count: int) -> Candidate | None:
        """Judge the plan that sends the first ``count`` values; None where the host has no room for them."""
        sent = frozenset(self._sent_by(order)[:count])
        if host_bytes_of(self._step, sent) > self._host_budget_bytes:
            return None
        plan = self._judged(self._starts[order.start].recomputed, Offloading(sent, order.window_bytes if count else 0))
        self.found.setdefault(plan, order)
        return plan

    def _large(self, start: int) -> list[int]:
        """Return the large ones among what the plan holds, or all where none is large."""
        held, value_bytes = self._held(start), self._step.value_bytes
        large = [value for value in held if value_bytes[value] >= _LARGE_BYTES and not is_statistic(self._step, value)]
        return large or held

    def _found_sent_by(self, order: _Order) -> list[int]:
        """Return the values to send, the first first: all, or those that the link takes without a full window."""
        if order.may_wait:
            return self._held(order.start)
        step, sent, free_at = self._step, [], 0.0
        for value in self._large(order.start):
            if step.value_bytes[value] >= order.least_bytes:
                made_at = self._computed_at[step.value_op[value]]
                seconds = out_seconds(self._link, step.value_bytes[value])
                if max(free_at - made_at, 0.0) + seconds <= out_seconds(self._link, order.window_bytes):
                    free_at = max(free_at, made_at) + seconds
                    sent.append(value)
        return sent


def _whole_blocks(step: Step) -> Iterator[set[int]]:
    """Yield what is recomputed where every block is replayed from what enters it, and where attention is spared.

    Also where the first blocks are not replayed: when the backward pass comes to them, the gradients of all others are
    there, and replays have the least room.
    """
    blocks, num_blocks = BlockValues(step), len(step.profile.blocks)
    everything = blocks.inside(range(num_blocks))
    if everything:
        yield everything
        yield {value for value in everything if "attention" not in step.profile.ops[step.value_op[value]].op}
    yield from (blocks.inside(range(num_first, num_blocks)) for num_first in (1, 2, 4, 8) if num_first < num_blocks)
