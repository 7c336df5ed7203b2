"""Which values to hold and which to replay, at given prices: one minimum cut. Numbers in, numbers out.

For a time ``t`` of the step, every value that is needed after ``t`` (the backward pass reads it, or a replay that is
still to come starts from it) either takes memory at ``t`` or is replayed after ``t``. With a price on each held value,
the cheapest choice is a minimum cut (after Goldberg and Tarjan's project selection; PyTorch's partitioner cuts the
same graph with bytes alone)::

    source ── seconds of the op ──▶ op ── price of the value ──▶ value ── ∞ ──▶ the ops that read it
                                                                  value ── ∞ ──▶ sink, where backward reads it

An op on the sink's side is replayed; a value on the sink's side whose op is on the source's side is held. What is live
at ``t`` whatever one decides is not in the graph: parameters, the batch, what the program itself still refers to, and
what is being read. A value that backward reads and that may not be replayed is held, at its price, and not in the graph
either; other values of ops that may not be replayed hang on the source. An op in place is replayed only where what it
rewrites is (the engine's rule): op ── ∞ ──▶ op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from memfit.cuts.minimum_cut import SINK, SOURCE, hull, maximum_flow_from
from memfit.planning.step import Step

Numbers = npt.NDArray[np.float64]

# SciPy's flows are whole numbers of 32 bits. All seconds together are this many units.
_TOTAL_UNITS = 2**28
_INFINITE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Cut:
    """A choice: what is recomputed, the seconds of its replays, and a lower bound on seconds plus prices paid.

    ``bound`` is at most the least that any choice costs, rounding included.
    """

    recomputed: frozenset[int]
    seconds: float
    held: tuple[int, ...]
    bound: float


class HoldOrReplay:
    """The graph for one time of the step. ``cut`` may then be called with any prices.

    ``op_seconds`` is what running each op again costs, if that is other than the op's own seconds.
    """

    def __init__(
        self, step: Step, time: int, may_be_recomputed: Set[int], op_seconds: Sequence[float] | None = None
    ) -> None:
        self._step = step
        self._op_seconds = step.replay_seconds if op_seconds is None else op_seconds
        self._droppable = step.droppable_of(may_be_recomputed)
        read_later = [
            value
            for value, saves in enumerate(step.saves_of_value)
            if any(time < save.read_before < step.num_ops for save in saves) and not self._is_free(value, time)
        ]
        self._always_held = tuple(value for value in read_later if value not in self._droppable)
        self._read_later = [value for value in read_later if value in self._droppable]
        self._node_of_value: dict[int, int] = {}
        self._node_of_op: dict[int, int] = {}
        self._set_edges(self._edges(time))

    @property
    def highest_price(self) -> float:
        """A price per byte beyond which nothing is held for the sake of any op's seconds."""
        return self._seconds_per_unit * _TOTAL_UNITS * 2

    @property
    def values(self) -> list[int]:
        """The values of the graph."""
        return list(self._node_of_value)

    def _edges(self, time: int) -> list[tuple[int, int, int]]:
        """Return (tail, head, kind) with kind -1 for infinite, 2·op for seconds, 2·value + 1 for a price."""
        step, always_held, op_nodes = self._step, set(self._always_held), self._node_of_op
        is_before_reads = time < min(step.read_times, default=time + 1)
        edges: list[tuple[int, int, int]] = []
        rewrites: list[tuple[int, int]] = []
        queue: list[int] = []

        def value_node(value: int) -> int | None:
            """Return the value's node, or None where it takes memory at that time in any case."""
            if value not in self._node_of_value:
                if value in always_held or self._is_free(value, time):
                    return None
                self._node_of_value[value] = self._num_nodes
                queue.append(value)
            return self._node_of_value[value]

        edges += [(node, SINK, -1) for value in self._read_later if (node := value_node(value)) is not None]
        while queue:
            value = queue.pop()
            op, node = step.value_op[value], self._node_of_value[value]
            if value not in self._droppable:
                edges.append((SOURCE, node, 2 * value + 1))
                continue
            if op not in op_nodes:
                op_nodes[op] = self._num_nodes
                edges.append((SOURCE, op_nodes[op], 2 * op))
                inputs = (value_node(read) for read in step.op_inputs[op])
                edges += [(node_read, op_nodes[op], -1) for node_read in inputs if node_read is not None]
                # Later, what it rewrites may have been restored already.
                if step.rewritten_input_of_op[op] >= 0 and is_before_reads:
                    rewrites.append((step.value_op[step.rewritten_input_of_op[op]], op))
            edges.append((op_nodes[op], node, 2 * value + 1))
        return edges + [(op_nodes[before], op_nodes[op], -1) for before, op in rewrites if before in op_nodes]

    @property
    def _num_nodes(self) -> int:
        return 2 + len(self._node_of_value) + len(self._node_of_op)

    def _is_free(self, value: int, time: int) -> bool:
        step = self._step
        if step.value_op[value] < 0 or step.natural_end_of_storage[step.value_storage[value]] >= time:
            return True
        return any(save.read_before <= time <= save.released_after for save in step.saves_of_value[value])

    def _set_edges(self, edges: list[tuple[int, int, int]]) -> None:
        tails, self._heads, kinds = np.array(sorted(edges), dtype=np.int32).reshape(-1, 3).T.copy()
        self._row_starts = np.searchsorted(tails, np.arange(self._num_nodes + 1)).astype(np.int32)
        seconds = np.array(self._op_seconds)
        self._seconds_per_unit = max(float(seconds[list(self._node_of_op)].sum()), 1e-12) / _TOTAL_UNITS
        self._capacities = np.full(len(edges), _INFINITE, dtype=np.int32)
        is_seconds = (kinds >= 0) & (kinds % 2 == 0)
        # Rounded down, here and below: then the flow is a lower bound.
        self._capacities[is_seconds] = np.floor(seconds[kinds[is_seconds] // 2] / self._seconds_per_unit)
        self._is_price = (kinds >= 0) & (kinds % 2 == 1)
        self._priced_values = kinds[self._is_price] // 2
        # More than all seconds is as good as infinite. What hangs on the source must not overflow the flow's sum.
        hangs_on_source = tails[self._is_price] == SOURCE
        num_hanging = max(int(hangs_on_source.sum()), 1)
        self._most_units = np.where(hangs_on_source, min(2**30 // num_hanging, 2 * _TOTAL_UNITS), 2 * _TOTAL_UNITS)

    def cut(self, prices: Numbers) -> Cut:
        """Return the cheapest choice; ``prices`` are the seconds that holding each value of the step is worth."""
        always_paid = float(prices[list(self._always_held)].sum())
        if not self._node_of_value:
            return Cut(frozenset(), 0.0, self._always_held, always_paid)
        units = np.floor(prices[self._priced_values] / self._seconds_per_unit)
        self._capacities[self._is_price] = np.minimum(units, self._most_units)
        shape = (self._num_nodes, self._num_nodes)
        flow, is_reached = maximum_flow_from(csr_array((self._capacities, self._heads, self._row_starts), shape=shape))
        may_run = {op for op, node in self._node_of_op.items() if not is_reached[node]}
        recomputed, replayed, held = self._walked(may_run)
        return Cut(
            recomputed=frozenset(recomputed),
            seconds=sum(self._op_seconds[op] for op in replayed),
            held=(*self._always_held, *held),
            bound=always_paid + flow * self._seconds_per_unit,
        )

    def corners(self, weights: Numbers, most_cuts: int) -> Iterator[tuple[float, Cut]]:
        """Yield prices per unit of weight and their cuts, at most so many; ``weights`` has one for each value."""

        def weight_of(cut: Cut) -> float:
            return float(weights[list(cut.held)].sum())

        highest = self.highest_price
        return hull(lambda price: self.cut(price * weights), lambda cut: cut.seconds, weight_of, highest, most_cuts)

    def _walked(self, may_run: set[int]) -> tuple[set[int], set[int], list[int]]:
        """Return what is recomputed, which ops run for it, and what is held, from what backward reads on.

        An edge that costs nothing may be cut without need; what nothing asks for is neither replayed nor held.
        """
        value_op, op_inputs, nodes = self._step.value_op, self._step.op_inputs, self._node_of_value
        recomputed: set[int] = set()
        replayed: set[int] = set()
        held: list[int] = []
        seen, stack = set(self._read_later), list(self._read_later)
        while stack:
            value = stack.pop()
            op = value_op[value]
            if op not in may_run or value not in self._droppable:
                held.append(value)
                continue
            recomputed.add(value)
            if op not in replayed:
                replayed.add(op)
                new = [read for read in op_inputs[op] if read not in seen and read in nodes]
                seen.update(new)
                stack += new
        return recomputed, replayed, held
