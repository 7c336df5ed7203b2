"""The error for a budget that no plan keeps: the smallest one that works, what holds the peak, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memfit.errors import InfeasibleBudgetError
from memfit.graph.model_profile import ModelProfile, Phase, RecordedValue
from memfit.graph.names import kind_from_before
from memfit.units import format_bytes

BEFORE_THE_STEP = "(weights, optimizer state and batch)"
LOSS = "(loss)"
BACKWARD_PASS = "(backward pass)"
OPTIMIZER_STEP = "(optimizer step)"
"""In place of a module, what made something that is live."""


class LiveBytes(NamedTuple):
    """How much of what is live at some point was made in ``module``."""

    module: str
    num_bytes: int


class SmallestPlan(NamedTuple):
    """What the error says of the plan with the smallest peak: its peak, as it is counted, where, and what is live.

    ``not_replayable`` are the values that autograd saves inside the model and that no plan recomputes.
    """

    peak_bytes: int
    peak_op_index: int
    live_at_peak: Sequence[LiveBytes]
    not_replayable: Iterable[int]


# From this share of the smallest peak on, the logits and the optimizer state are named.
_LARGE_SHARE = 0.05
_MOST_NAMED = 5
_MOST_OPS_NAMED = 2
_HELD_IN_WORDS = {
    BACKWARD_PASS: "gradients and other results of the backward pass",
    LOSS: "what the loss computes",
    OPTIMIZER_STEP: "what the optimizer makes",
}


def infeasible_budget(
    profile: ModelProfile, facts: SmallestPlan, least_peak_bytes: int, budget_bytes: int, host_budget_bytes: int
) -> InfeasibleBudgetError:
    """Return the error for a budget. No plan that replays each op at most once has less than ``least_peak_bytes``."""
    smallest_bytes = facts.peak_bytes
    at_peak = "an empty step"
    if profile.ops:
        op = profile.ops[facts.peak_op_index]
        place = f"the {op.phase} pass" if op.module is None else _module_in_words(op.module)
        at_peak = f"{op.op} in {place}"
    held = ", ".join(_held_in_words(profile, live) for live in facts.live_at_peak[:_MOST_NAMED])
    advice = ["a smaller batch or model"]
    optimizer_bytes = bytes_from_before(profile)["optimizer state"]
    if optimizer_bytes >= _LARGE_SHARE * smallest_bytes:
        advice.append(f"an optimizer with less state ({format_bytes(optimizer_bytes)} here), such as an 8-bit one")
    if profile.link is not None and not host_budget_bytes:
        advice.insert(0, 'offloading to the host\'s memory (host_budget="auto")')
    logits = _logits(profile)
    if logits is not None and logits.num_bytes >= _LARGE_SHARE * smallest_bytes:
        maker = _module_in_words(_made_in(profile, logits) or "")
        held += f"; with the logits, {format_bytes(logits.num_bytes)}, which {maker} makes"
        advice.insert(0, "computing the loss in chunks (chunk_loss=True)")
    return InfeasibleBudgetError(
        f"the smallest budget found for this step is {format_bytes(smallest_bytes)} "
        f"({_bound(profile, facts, least_peak_bytes, host_budget_bytes)}), and the given one is "
        f"{format_bytes(budget_bytes)} ({budget_bytes} bytes). What holds the peak: {held}; it is reached at "
        f"{at_peak}. Give at least budget={smallest_bytes}; what lowers the peak further: {', '.join(advice)}"
        f"{_limits(profile)}",
        minimum_bytes=smallest_bytes,
    )


def _limits(profile: ModelProfile) -> str:
    return f". What limits plans for this step: {'; '.join(profile.notes)}" if profile.notes else ""


def bytes_from_before(profile: ModelProfile) -> Counter[str]:
    """Return the bytes that exist before the step, by kind: weights, optimizer state, batch, gradients."""
    num_bytes: Counter[str] = Counter()
    # Of several values in one storage, the first.
    for value in {value.storage: value for value in reversed(profile.values) if value.op_index is None}.values():
        num_bytes[kind_from_before(value.name)] += value.num_bytes
    return num_bytes


def _bound(profile: ModelProfile, facts: SmallestPlan, least_peak_bytes: int, host_budget_bytes: int) -> str:
    if host_budget_bytes:
        return f"with {format_bytes(host_budget_bytes)} of the host's memory"
    bound = "no plan that replays each op at most once needs less"
    if least_peak_bytes < facts.peak_bytes:
        bound += f" than {format_bytes(least_peak_bytes)}"
    if profile.link is not None:
        bound += " without the host's memory"
    # Several values in one storage take its bytes once.
    storages = {profile.values[index].storage: profile.values[index] for index in facts.not_replayable}
    num_bytes: Counter[str] = Counter()
    for value in storages.values():
        if _made_in(profile, value) is not None and value.op_index is not None:
            num_bytes[profile.ops[value.op_index].op] += value.num_bytes
    if not num_bytes:
        return bound
    ops = ", ".join(f"{format_bytes(each)} of {op}" for op, each in num_bytes.most_common(_MOST_OPS_NAMED))
    return f"{bound}; what cannot be replayed stays saved: {ops}"


def _held_in_words(profile: ModelProfile, live: LiveBytes) -> str:
    if live.module == BEFORE_THE_STEP:
        kinds = bytes_from_before(profile).most_common()
        return ", ".join(f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in kinds if num_bytes)
    words = _HELD_IN_WORDS.get(live.module) or f"activations of {_module_in_words(live.module)}"
    return f"{words} {format_bytes(live.num_bytes)}"


def _module_in_words(path: str) -> str:
    # The root module's path is empty.
    return path or "the model itself"


def _made_in(profile: ModelProfile, value: RecordedValue) -> str | None:
    return None if value.op_index is None else profile.ops[value.op_index].module


def _logits(profile: ModelProfile) -> RecordedValue | None:
    """Return the largest value that the model makes and the loss reads."""
    of_loss = [op for op in profile.ops if op.module is None and op.phase is Phase.FORWARD]
    read = sorted({index for op in of_loss for index in op.inputs}, reverse=True)
    of_model = [value for index in read if _made_in(profile, value := profile.values[index]) is not None]
    return max(of_model, key=lambda value: value.num_bytes, default=None)
