"""All plans of a step as the paths of a graph, for prices on the memory at each time of the step.

The states of `sweep_rows` are the nodes, level by level, and what is decided at an op is an edge, with its seconds and
the bytes it adds while each op of the step runs. There are far fewer states than plans: two partial plans lead to one
state if they leave the same for the ops before. With a price for a byte at each time, the cheapest plan of all is a
shortest path, and what remains to be paid from each state on is known with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, vstack

from memfit.planning.dp.sweep_rows import Decisions, Rows, joined
from memfit.planning.dp.sweep_timeline import OP, Ints, SweepTimeline

Numbers = npt.NDArray[np.float64]


class Level(NamedTuple):
    """The edges of one op, from the states of the level before, in their order, to those of this level.

    ``first_edges`` is where those of each state before begin. ``states`` are sorted hashes.
    """

    choices: list[tuple[int, ...]]
    first_edges: Ints
    after: Ints
    choice: Ints
    seconds: Numbers
    added_bytes: csr_array
    states: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class CheapestPlan:
    """The plan that costs least at some prices. ``remaining`` has, for each level, what each state has yet to pay.

    ``cost`` is of the seconds and of ``memory_bytes``, which is what is live at each time.
    """

    cost: float
    dropped: frozenset[int]
    seconds: float
    memory_bytes: Numbers
    remaining: list[Numbers]


class StateGraph:
    """The plans of a step, seen at some of its ops."""

    def __init__(self, times: list[int], first_bytes: Numbers, levels: list[Level]) -> None:
        self.times = times
        self._first_bytes = first_bytes
        self.levels = levels
        self._added_bytes = csr_array(vstack([level.added_bytes for level in levels]))
        self._seconds = np.concatenate([level.seconds for level in levels])
        self._first_edge = np.cumsum([0, *(len(level.seconds) for level in levels)])

    def cheapest(self, prices: Numbers, seconds_weight: float = 1.0) -> CheapestPlan:
        """Return the plan of least seconds, times their weight, and bytes at each time, times their price."""
        costs = seconds_weight * self._seconds + self._added_bytes @ prices
        remaining = [np.zeros(len(self.levels[-1].states))]
        for number in range(len(self.levels) - 1, -1, -1):
            level = self.levels[number]
            edges = slice(self._first_edge[number], self._first_edge[number + 1])
            costs[edges] += remaining[-1][level.after]
            remaining.append(np.minimum.reduceat(costs[edges], level.first_edges))
        remaining.reverse()
        state, dropped, path = 0, set[int](), []
        for number, level in enumerate(self.levels):
            first = level.first_edges[state]
            end = level.first_edges[state + 1] if state + 1 < len(level.first_edges) else len(level.after)
            start = int(self._first_edge[number])
            edge = int(first + np.argmin(costs[start + first : start + end]))
            path.append(start + edge)
            dropped.update(level.choices[int(level.choice[edge])])
            state = int(level.after[edge])
        memory_bytes = self._first_bytes + self._added_bytes[path].sum(axis=0)
        cost_of_all = float(remaining[0][0] + prices @ self._first_bytes)
        return CheapestPlan(cost_of_all, frozenset(dropped), float(self._seconds[path].sum()), memory_bytes, remaining)


def state_graph(timeline: SweepTimeline, times: list[int], most_states: int) -> StateGraph | None:
    """Return the graph of a step, None where there are more states than so many."""
    decisions = Decisions(timeline)
    keys = np.array([timeline.op_key(time) for time in times], dtype=np.int64)
    kinds = np.full(len(times), OP)
    rows = Rows(keys, kinds, np.zeros((1, len(times)), dtype=np.int64), np.zeros(1))
    levels: list[Level] = []
    num_states = 0
    for op in timeline.ops_to_decide():
        decisions.begin(rows, op)
        choices = decisions.choices(op)
        parts = [decisions.decided(rows, op, dropped, with_runs=False) for dropped in choices]
        rows = joined([part for part, _ in parts])
        decisions.finish(rows, op)
        states, representative, after = np.unique(rows.states(), return_index=True, return_inverse=True)
        choice = np.repeat(np.arange(len(parts)), [part.num_rows for part, _ in parts])
        before = np.concatenate([which for _, which in parts])
        order = np.argsort(before, kind="stable")
        first_edges = np.searchsorted(before[order], np.arange(before.max() + 1))
        added = csr_array(rows.memory[order].astype(np.float64))
        levels.append(Level(choices, first_edges, after[order], choice[order], rows.seconds[order], added, states))
        num_states += len(states)
        if num_states > most_states:
            return None
        rows = rows.taken(representative)
        # Edges carry what they add, and no more.
        rows.memory, rows.seconds = np.zeros_like(rows.memory), np.zeros_like(rows.seconds)
    if not levels:
        return None
    columns = [timeline.column_of_op(time) for time in times]
    return StateGraph(times, timeline.first_memory[columns].astype(np.float64), levels)
