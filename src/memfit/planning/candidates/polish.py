"""Makes one plan faster within its budget, by small changes that the simulator judges.

First what each op makes is saved instead of recomputed, the dearest op first, where there is room for it. Where there
is for none, a value that is held is dropped in exchange for a dearer one, and so on, until nothing helps.
"""

from __future__ import annotations

from memfit.planning.candidates.trade_off import Candidate, TradeOff

# How many of the dearest values are offered in exchange for one that is held.
_NUM_DEAREST = 12
# Less than this share faster is rounding.
_ROUNDING = 1e-9


def polished(trade_off: TradeOff, start: Candidate, budget_bytes: int, most_tries: int) -> Candidate:
    """Return the fastest plan within the budget that was found from ``start``; all that was tried is a candidate."""
    polish = _Polish(trade_off, start, budget_bytes, most_tries)
    while polish.num_left > 0 and (polish.save_more() or polish.exchange_one()):
        pass
    return polish.best


class _Polish:
    def __init__(self, trade_off: TradeOff, start: Candidate, budget_bytes: int, most_tries: int) -> None:
        self._trade_off = trade_off
        self._step = trade_off.step
        self._budget_bytes = budget_bytes
        self.best = start
        self.num_left = most_tries

    def save_more(self) -> bool:
        """Save what each op makes that there is room for; return whether there was any."""
        ops = dict.fromkeys(self._step.value_op[value] for value in self._dearest_first())
        # An op runs again for any of its values, so that only all of them together save its time.
        tried = [self._is_better(self.best.recomputed.difference(self._step.op_outputs[op])) for op in ops]
        return any(tried)

    def exchange_one(self) -> bool:
        """Drop a value that autograd holds, the cheapest for its size first, for a dearer one."""
        held = [
            value
            for value in self._trade_off.may_be_recomputed - self.best.recomputed
            if self._step.saves_of_value[value]
        ]
        held.sort(key=lambda value: (self._seconds(value) / max(self._step.value_bytes[value], 1), value))
        dearest = self._dearest_first()[:_NUM_DEAREST]
        return any(
            self._is_better((self.best.recomputed | {cheap}) - {dear})
            for cheap in held
            for dear in dearest
            if self._seconds(dear) > self._seconds(cheap)
        )

    def _dearest_first(self) -> list[int]:
        return sorted(self.best.recomputed, key=lambda value: (-self._seconds(value), value))

    def _seconds(self, value: int) -> float:
        return self._step.replay_seconds[self._step.value_op[value]]

    def _is_better(self, recomputed: frozenset[int]) -> bool:
        """Take the plan where it is faster and fits."""
        if self.num_left <= 0:
            return False
        self.num_left -= 1
        tried = self._trade_off.add(recomputed)
        is_faster = tried.added_seconds < self.best.added_seconds * (1 - _ROUNDING)
        if is_faster and tried.peak_bytes <= self._budget_bytes:
            self.best = tried
            return True
        return False
