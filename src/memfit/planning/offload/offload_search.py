"""Finds plans that also offload: what a plan without offloading holds may go to the host, as far as the link carries.

Offloading beside the computing costs nothing, recomputing always does. So for a budget the best plan is often that of a
larger budget, with enough of what it holds sent away. Starting from plans of the frontier without offloading, and from
such that replay each block from what enters it, values are sent in the order in which they are made: the first ones are
wanted back last. Two rounds look for the best:

1. from plans spread over the whole frontier, with windows of several sizes, sending only what the link can take at that
   moment, or all, which waits; how many values, is tried in steps;
2. at peaks spread evenly over what that found: from many more plans, exactly as many values as it takes to stay within
   that peak. Looked at first are the plans next to where the first round was best there, and those that come down to
   the peak by no more than the link carries, the fastest of them first.

At last, what there is room for neither goes nor is recomputed (``slack``).

As everywhere, all that is tried is judged by the simulator, and the budget plays no part: a smaller one never gets a
faster or a larger plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate, chain, zip_longest
from typing import NamedTuple

from memfit.graph.model_profile import Link
from memfit.planning.candidates.pool import Candidate
from memfit.planning.candidates.slack import slack_used_at_budgets
from memfit.planning.offload.offloadable import held_by, host_bytes_of, may_be_offloaded
from memfit.planning.simulate.simulator import judged
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues, is_statistic
from memfit.planning.step.link_time import out_seconds, with_reserve
from memfit.planning.step.offload_rules import Offloading

# Where the device need not wait anyway, smaller values take the host more time than they are worth, and so do
# statistics that ops return beside their results.
_LARGE_BYTES = 2**20
# How many simulations a step of one op could pay for in each of the two rounds, and how many there are at least.
_FIRST_EFFORT_OPS, _SECOND_EFFORT_OPS = 600_000, 1_000_000
_LEAST_TRIES, _MOST_FIRST_TRIES = 240, 1_500
# As multiples of the size in the middle of the large values that a plan holds, or, for what may have to wait, in the
# middle of their bytes.
_WINDOWS = (1, 2, 4, 8, 16)
_MOST_AMOUNTS, _FEWEST_STARTS = 8, 3
# Of what is sent, so many may stay that are made last: those are read first, and back again before the peak.
_MOST_LEFT_OUT = 2
# In the second round: at how many peaks, from the best in how many ways, and from how many plans beside each, at most.
_NUM_PEAKS, _MOST_WAYS, _MOST_NEIGHBOURS = 72, 2, 12


def with_offloading(
    step: Step,
    frontier: Sequence[Candidate],
    host_budget_bytes: int,
    *,
    forced: Set[int] = frozenset(),
    kept: Set[int] = frozenset(),
) -> tuple[Candidate, ...]:
    """Return the plans of ``frontier`` and such that also offload: the Pareto-optimal ones, fastest first.

    None of the ``kept`` values is offloaded or recomputed, the ``forced`` ones always are the latter, and never is more
    offloaded than the host has room for.
    """
    wanted = [step.recomputed_of((choice | forced) - kept) for choice in whole_blocks(step)]
    of_blocks = [Candidate(frozenset(recomputed), *judged(step, recomputed)) for recomputed in wanted]
    search = _Search(step, frontier, of_blocks, kept, host_budget_bytes)
    search.send_in_steps()
    search.send_just_enough()
    unbeaten = _unbeaten([*frontier, *search.found])

    def judge(recomputed: frozenset[int], offloading: Offloading) -> Candidate:
        really = frozenset(step.recomputed_of((recomputed | forced) - kept))
        return Candidate(really, *judged(step, really, offloading), offloading)

    return tuple(_unbeaten([*unbeaten, *slack_used_at_budgets(step, judge, unbeaten)]))


def _unbeaten(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that none beats, fastest first."""
    unbeaten: list[Candidate] = []
    for candidate in sorted(
        candidates,
        key=lambda c: (c.added_seconds, c.peak_bytes, len(c.offloading.values), sorted(c.offloading.values)),
    ):
        if not unbeaten or candidate.peak_bytes < unbeaten[-1].peak_bytes:
            unbeaten.append(candidate)
    return unbeaten


class _Way(NamedTuple):
    """How to send: from which plan of the spread ones, with what window, whether it may have to wait, and what size."""

    start: int
    window_bytes: int
    may_wait: bool
    least_bytes: int


class _Search:
    """The two rounds over one step. ``found`` has every plan that was judged, with the way that led to it."""

    def __init__(
        self,
        step: Step,
        frontier: Sequence[Candidate],
        of_blocks: Sequence[Candidate],
        kept: Set[int],
        host_budget_bytes: int,
    ) -> None:
        assert step.profile.link is not None
        self.found: dict[Candidate, _Way] = {}
        self._step = step
        self._link = step.profile.link
        self._host_budget_bytes = host_budget_bytes
        self._eligible = [value for value in may_be_offloaded(step) if value not in kept]
        self._num_first_tries = min(max(_FIRST_EFFORT_OPS // max(step.num_ops, 1), _LEAST_TRIES), _MOST_FIRST_TRIES)
        self._num_second_tries = max(_SECOND_EFFORT_OPS // max(step.num_ops, 1), _LEAST_TRIES)
        spread = _spread(frontier, max(self._num_second_tries // _MOST_NEIGHBOURS, 2))
        self._starts = sorted([*spread, *of_blocks], key=lambda start: -start.peak_bytes)
        self._of_blocks = {self._starts.index(start) for start in of_blocks}
        self._held_by_start: dict[int, list[int]] = {}
        self._ways_by_start: dict[int, list[_Way]] = {}
        self._sent: dict[_Way, list[int]] = {}
        self._judged: dict[tuple[int, Offloading], Candidate] = {}

    def send_in_steps(self) -> None:
        """The first round."""
        tries_of_start = self._num_first_tries // (2 * len(_WINDOWS))
        num_amounts = min(max(tries_of_start // (len(self._of_blocks) + _FEWEST_STARTS), 1), _MOST_AMOUNTS)
        num_starts = max(tries_of_start // num_amounts - len(self._of_blocks), _FEWEST_STARTS)
        chosen = {len(self._starts) * k // num_starts for k in range(num_starts)} | {len(self._starts) - 1}
        for start in sorted(chosen | self._of_blocks):
            for way in self._ways_from(start):
                num_values = len(self._sent_by(way))
                counts = {-(-num_values * part // num_amounts) for part in range(1, num_amounts + 1)}
                counts.update(range(max(num_values - _MOST_LEFT_OUT, 1), num_values))
                for count in sorted(counts):
                    self._try(way, count)

    def send_just_enough(self) -> None:
        """The second round."""
        if not self.found:
            return
        first_round = sorted(self.found.items(), key=lambda entry: entry[0].added_seconds)
        high, low = (choose(candidate.peak_bytes for candidate in self.found) for choose in (max, min))
        most_tries = len(self._judged)
        for peak_bytes in (high - (high - low) * k // _NUM_PEAKS for k in range(_NUM_PEAKS + 1)):
            # What one peak does not need, the next may have.
            most_tries += self._num_second_tries // (_NUM_PEAKS + 1)
            fitting = [candidate.added_seconds for candidate in self.found if candidate.peak_bytes <= peak_bytes]
            fastest = min(fitting, default=math.inf)
            beside_the_best = self._beside_the_best(first_round, peak_bytes)
            for way in chain.from_iterable(zip_longest(beside_the_best, self._likely(peak_bytes))):
                if len(self._judged) >= most_tries:
                    break
                # Sending never makes a plan faster.
                if way is not None and self._starts[way.start].added_seconds < fastest:
                    fastest = min(fastest, self._send_until(peak_bytes, way))

    def _beside_the_best(self, first_round: Sequence[tuple[Candidate, _Way]], peak_bytes: int) -> Iterator[_Way]:
        """Yield ways beside those that were the fastest to come down to a peak, with each window, nearest first."""
        best: dict[tuple[int, bool, int], _Way] = {}
        for candidate, way in first_round:
            if candidate.peak_bytes <= peak_bytes:
                best.setdefault(way[1:], way)
        for number in range(_MOST_NEIGHBOURS):
            offset = (number + 1) // 2 * (-1 if number % 2 else 1)
            for way in list(best.values())[:_MOST_WAYS]:
                if 0 <= way.start + offset < len(self._starts):
                    yield way._replace(start=way.start + offset)

    def _likely(self, peak_bytes: int) -> Iterator[_Way]:
        """Yield ways that come down to a peak without waiting, if all that is sent counts there, fastest first."""
        num_likely = 0
        for start, candidate in enumerate(self._starts):
            if candidate.peak_bytes <= peak_bytes or num_likely == _MOST_NEIGHBOURS:
                return
            ways = [way for way in self._ways_from(start) if not way.may_wait]
            likely = [way for way in ways if candidate.peak_bytes - self._bytes_sent_by(way) <= peak_bytes]
            num_likely += bool(likely)
            yield from likely

    def _ways_from(self, start: int) -> list[_Way]:
        if start not in self._ways_by_start:
            self._ways_by_start[start] = self._found_ways_from(start)
        return self._ways_by_start[start]

    def _found_ways_from(self, start: int) -> list[_Way]:
        sizes = sorted(self._step.profile.values[value].num_bytes for value in self._large(start))
        if not sizes:
            return []
        in_the_middle = sizes[len(sizes) // 2]
        half_bytes, so_far = sum(sizes) / 2, accumulate(sizes)
        of_half_the_bytes = next(size for size, num_bytes in zip(sizes, so_far, strict=True) if num_bytes >= half_bytes)
        kinds = [(in_the_middle, False, _LARGE_BYTES), (of_half_the_bytes, True, 0)]
        if self._step.time.launches_may_matter:
            # Each value takes the host as long, whatever its size: only large ones may be sent, too.
            kinds += [(size, False, size) for size in sorted({of_half_the_bytes, sizes[-1]}) if size > in_the_middle]
        return [
            _Way(start, multiple * size, may_wait, least_bytes)
            for multiple in _WINDOWS
            for size, may_wait, least_bytes in kinds
        ]

    def _send_until(self, peak_bytes: int, way: _Way) -> float:
        """Find the fewest values that are enough, for more of them hardly ever take more memory; return what it adds.

        That is infinitely much where all of them are not enough.
        """
        # What is sent is mostly what the peak is lower by: begin there, and right below.
        missing_bytes = self._starts[way.start].peak_bytes - peak_bytes
        sent_bytes = accumulate(self._step.profile.values[value].num_bytes for value in self._sent_by(way))
        likely = next((count for count, num_bytes in enumerate(sent_bytes, 1) if num_bytes >= missing_bytes), 0)
        low, high = 0, len(self._sent_by(way)) + 1
        guesses = [high - 1, likely - 1, likely]
        while low < high:
            count = guesses.pop() if guesses else (low + high) // 2
            if not low <= count < high:
                continue
            candidate = self._try(way, count)
            if candidate is None or candidate.peak_bytes <= peak_bytes:
                high = count
            else:
                low = count + 1
        candidate = self._try(way, low) if low <= len(self._sent_by(way)) else None
        return math.inf if candidate is None else candidate.added_seconds

    def _try(self, way: _Way, count: int) -> Candidate | None:
        """Judge the plan that sends the first ``count`` values; None where the host has no room for them."""
        offloading = Offloading(frozenset(self._sent_by(way)[:count]), way.window_bytes if count else 0)
        if host_bytes_of(self._step, offloading.values) > self._host_budget_bytes:
            return None
        key = way.start, offloading
        if key not in self._judged:
            recomputed = self._starts[way.start].recomputed
            judgement = judged(self._step, recomputed, offloading)
            self._judged[key] = Candidate(recomputed, *judgement, offloading)
            self.found[self._judged[key]] = way
        return self._judged[key]

    def _held(self, start: int) -> list[int]:
        if start not in self._held_by_start:
            self._held_by_start[start] = held_by(self._step, self._starts[start].recomputed, self._eligible)
        return self._held_by_start[start]

    def _large(self, start: int) -> list[int]:
        """Return the large ones among what the plan holds, or all where none is large."""
        held, values = self._held(start), self._step.profile.values
        large = [
            value for value in held if values[value].num_bytes >= _LARGE_BYTES and not is_statistic(self._step, value)
        ]
        return large or held

    def _bytes_sent_by(self, way: _Way) -> int:
        return sum(self._step.profile.values[value].num_bytes for value in self._sent_by(way))

    def _sent_by(self, way: _Way) -> list[int]:
        """Return the values to send, the first first."""
        if way not in self._sent:
            if way.may_wait:
                self._sent[way] = self._held(way.start)
            else:
                values, link = self._step.profile.values, with_reserve(self._link)
                large = [value for value in self._large(way.start) if values[value].num_bytes >= way.least_bytes]
                self._sent[way] = _as_the_link_carries(self._step, link, large, way.window_bytes)
        return self._sent[way]


def _spread(frontier: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return so many plans, spread evenly over the memory between the largest and the smallest."""
    high, low = frontier[0].peak_bytes, frontier[-1].peak_bytes
    bounds = [high - (high - low) * k // max(most - 1, 1) for k in range(most)]
    places = {next(i for i, entry in enumerate(frontier) if entry.peak_bytes <= bound) for bound in bounds}
    return [frontier[place] for place in sorted(places)]


def _as_the_link_carries(step: Step, link: Link, held: list[int], window_bytes: int) -> list[int]:
    """Return the values that the link can take when they are made without more than the window piling up."""
    sent: list[int] = []
    now, free_at, op = 0.0, 0.0, 0
    for value in held:
        now += sum(step.op_seconds[op : step.value_op[value] + 1])
        op = step.value_op[value] + 1
        seconds = out_seconds(link, step.profile.values[value].num_bytes)
        if max(free_at - now, 0.0) + seconds <= out_seconds(link, window_bytes):
            free_at = max(free_at, now) + seconds
            sent.append(value)
    return sent


def whole_blocks(step: Step) -> Iterator[set[int]]:
    """Yield what is recomputed where every block is replayed from what enters it, and where attention is spared.

    Also where the first blocks are not replayed: when the backward pass comes to them, the gradients of all others are
    there, and replays have the least room.
    """
    blocks, num_blocks = BlockValues(step), len(step.profile.blocks)
    everything = blocks.inside(range(num_blocks))
    if everything:
        yield everything
        yield {value for value in everything if "attention" not in step.profile.ops[step.value_op[value]].op}
    for num_first in (1, 2, 4, 8):
        if num_first < num_blocks:
            yield blocks.inside(range(num_first, num_blocks))
