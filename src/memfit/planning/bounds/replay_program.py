"""Solves the linear programs of `replay_rows`, in fractions, and tells what that proves.

In fractions, the bound is taken from the dual solution, and is a straight line over all budgets: for any multipliers
``y ≤ 0`` of rows ``A x ≤ b``, a point with ``0 ≤ x ≤ 1`` costs at least ``y·b`` plus what is negative in
``cost - A'y``, and ``b`` is linear in the budget. That holds for whatever multipliers the solver returns, exact or not.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from memfit.planning.bounds.proofs import Line
from memfit.planning.bounds.replay_rows import Numbers, Program, ReplayModel
from memfit.planning.step import Step

# How far from whole a share may be and still count as such.
_NEARLY_WHOLE = 1e-6
# What floating point may add to sums of this many terms, as a share of all seconds or bytes.
_ROUNDING = 1e-9
# When to stop looking for whole decisions.
_MOST_NODES, _WITHIN_SHARE = 50, 0.01


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A fractional solution: how much each value is dropped, and what it proves. ``line`` is None for peaks."""

    share_dropped: dict[int, float]
    line: Line | None
    least_peak_bytes: int

    @property
    def num_undecided(self) -> int:
        """How many values are dropped in part only."""
        return sum(_NEARLY_WHOLE <= share <= 1 - _NEARLY_WHOLE for share in self.share_dropped.values())


class ReplayProgram(ReplayModel):
    """The programs of one step, and their solutions."""

    def __init__(self, step: Step, may_be_recomputed: Set[int], *, leave_out_statistics: bool = False) -> None:
        super().__init__(step, may_be_recomputed, leave_out_statistics=leave_out_statistics)
        self._all_seconds = sum(step.replay_seconds[op] for op in self.recipes)
        self._all_bytes = step.resident_bytes + sum(step.storage_bytes)

    def relaxed(self, program: Program, budget_bytes: int) -> Relaxed | None:
        """Return the fractional solution of least seconds within the budget, None where there is none."""
        budget_units = budget_bytes / self.unit_bytes
        scale = float(program.seconds.max(initial=0.0)) or 1.0
        limits = program.fixed + program.per_budget_unit * budget_units
        solved = linprog(program.seconds / scale, A_ub=program.matrix, b_ub=limits, bounds=(0, 1), method="highs")
        if solved.x is None or solved.status != 0:
            return None
        multipliers = np.minimum(solved.ineqlin.marginals, 0.0)
        unpaid = program.seconds / scale - program.matrix.T @ multipliers
        at_zero = float(multipliers @ program.fixed + np.minimum(unpaid, 0.0).sum()) * scale
        per_byte = float(multipliers @ program.per_budget_unit) * scale / self.unit_bytes
        line = Line(at_zero - _ROUNDING * (self._all_seconds - per_byte * budget_bytes), per_byte)
        return Relaxed(self._shares(program, solved.x), line, 0)

    def relaxed_least_peak(self, program: Program) -> Relaxed | None:
        """Return the fractional solution of the least peak."""
        num_variables = program.matrix.shape[1]
        cost = np.zeros(num_variables + 1)
        cost[-1] = 1.0
        matrix = _with_budget_as_variable(program)
        bounds = [(0.0, 1.0)] * num_variables + [(0.0, None)]
        solved = linprog(cost, A_ub=matrix, b_ub=program.fixed, bounds=bounds, method="highs")
        if solved.x is None or solved.status != 0:
            return None
        multipliers = np.minimum(solved.ineqlin.marginals, 0.0)
        # The budget has no upper bound: its own multiplier must not ask for one.
        asked = -float(multipliers @ program.per_budget_unit)
        if asked > 1.0:
            multipliers = multipliers / asked
        unpaid = -(program.matrix.T @ multipliers)
        least = float(multipliers @ program.fixed + np.minimum(unpaid, 0.0).sum()) * self.unit_bytes
        return Relaxed(self._shares(program, solved.x), None, int(np.ceil(least - _ROUNDING * self._all_bytes)))

    def whole_near(self, program: Program, budget_bytes: int, near: Relaxed) -> frozenset[int] | None:
        """Return what to drop where whole decisions are sought only for what is not whole in a fractional solution.

        That proves nothing and is fast. It ends near the best, or after a number of nodes.
        """
        lowest, highest = np.zeros(program.matrix.shape[1]), np.ones(program.matrix.shape[1])
        for value, at in program.dropped.items():
            share = near.share_dropped[value]
            lowest[at] = 1.0 if share > 1 - _NEARLY_WHOLE else 0.0
            highest[at] = 0.0 if share < _NEARLY_WHOLE else 1.0
        scale = float(program.seconds.max(initial=0.0)) or 1.0
        limits = program.fixed + program.per_budget_unit * (budget_bytes / self.unit_bytes)
        solved = milp(
            program.seconds / scale,
            constraints=LinearConstraint(program.matrix, -np.inf, limits),
            integrality=np.ones(program.matrix.shape[1]),
            bounds=Bounds(lowest, highest),
            options={"node_limit": _MOST_NODES, "mip_rel_gap": _WITHIN_SHARE},
        )
        if solved.x is None:
            return None
        return frozenset(value for value, share in self._shares(program, solved.x).items() if share > 0.5)

    def _shares(self, program: Program, solution: Numbers) -> dict[int, float]:
        """Return how much each value is dropped; what was left out is so with what is made beside it."""
        shares = {value: float(solution[at]) for value, at in program.dropped.items()}
        for value in self.left_out:
            beside = self.step.op_outputs[self.step.value_op[value]]
            shares[value] = max(shares[other] for other in beside if other in program.dropped)
        return shares


def _with_budget_as_variable(program: Program) -> csr_array:
    num_rows, num_variables = program.matrix.shape
    coo = program.matrix.tocoo()
    has_budget = np.flatnonzero(program.per_budget_unit)
    data = np.concatenate([coo.data, -program.per_budget_unit[has_budget]])
    rows = np.concatenate([coo.row, has_budget])
    columns = np.concatenate([coo.col, np.full(len(has_budget), num_variables)])
    return csr_array((data, (rows, columns)), shape=(num_rows, num_variables + 1))
