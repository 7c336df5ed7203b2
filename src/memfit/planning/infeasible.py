"""The error for a budget that no plan keeps: the smallest one that works, what holds the peak, and what would help."""

from __future__ import annotations

from collections import Counter

from memfit.errors import InfeasibleBudgetError
from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.names import kind_from_before
from memfit.planning.candidates.pool import Candidate
from memfit.planning.known_steps import KnownStep
from memfit.planning.simulate.walk import BACKWARD_PASS, BEFORE_THE_STEP, LOSS, OPTIMIZER_STEP, LiveBytes
from memfit.planning.step import Step
from memfit.units import format_bytes

# From this share of the smallest peak on, the logits and the optimizer state are named.
_LARGE_SHARE = 0.05
_MOST_NAMED = 5
_HELD_IN_WORDS = {
    BACKWARD_PASS: "gradients and other results of the backward pass",
    LOSS: "what the loss computes",
    OPTIMIZER_STEP: "what the optimizer makes",
}


def infeasible(
    known: KnownStep, smallest: Candidate, least_peak_bytes: int, budget_bytes: int, host_budget_bytes: int
) -> InfeasibleBudgetError:
    """Return the error for ``budget_bytes``, where ``smallest`` is the plan with the smallest peak that was found.

    No plan that replays each op at most once has a peak below ``least_peak_bytes``.
    """
    smallest_bytes = known.peak_bytes(smallest)
    step, simulation = known.step, known.simulation(smallest.recomputed, smallest.offloading)
    at_peak = "an empty step"
    if step.num_ops:
        op = step.profile.ops[simulation.peak_op_index]
        place = f"the {op.phase} pass" if op.module is None else _module_in_words(op.module)
        at_peak = f"{op.op} in {place}"
    held = ", ".join(_held_in_words(step.profile, live) for live in simulation.live_at_peak[:_MOST_NAMED])
    advice = ["a smaller batch or model"]
    optimizer_bytes = bytes_from_before(step.profile)["optimizer state"]
    if optimizer_bytes >= _LARGE_SHARE * smallest_bytes:
        advice.append(f"an optimizer with less state ({format_bytes(optimizer_bytes)} here), such as an 8-bit one")
    if step.profile.link is not None and not host_budget_bytes:
        advice.insert(0, 'offloading to the host\'s memory (host_budget="auto")')
    logits = _logits(step)
    if logits is not None and step.value_bytes[logits] >= _LARGE_SHARE * smallest_bytes:
        maker = _module_in_words(step.profile.ops[step.value_op[logits]].module or "")
        held += f"; with the logits, {format_bytes(step.value_bytes[logits])}, which {maker} makes"
        advice.insert(0, "computing the loss in chunks (chunk_loss=True)")
    return InfeasibleBudgetError(
        f"the smallest budget found for this step is {format_bytes(smallest_bytes)} "
        f"({_bound(step, smallest_bytes, least_peak_bytes, host_budget_bytes)}), and the given one is "
        f"{format_bytes(budget_bytes)} ({budget_bytes} bytes). What holds the peak: {held}; it is reached at "
        f"{at_peak}. Give at least budget={smallest_bytes}; what lowers the peak further: {', '.join(advice)}"
        f"{_limits(step.profile)}",
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


def _bound(step: Step, smallest_bytes: int, least_peak_bytes: int, host_budget_bytes: int) -> str:
    if host_budget_bytes:
        return f"with {format_bytes(host_budget_bytes)} of the host's memory"
    bound = "no plan that replays each op at most once needs less"
    if least_peak_bytes < smallest_bytes:
        bound += f" than {format_bytes(least_peak_bytes)}"
    return bound if step.profile.link is None else f"{bound} without the host's memory"


def _held_in_words(profile: ModelProfile, live: LiveBytes) -> str:
    if live.module == BEFORE_THE_STEP:
        kinds = bytes_from_before(profile).most_common()
        return ", ".join(f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in kinds if num_bytes)
    words = _HELD_IN_WORDS.get(live.module) or f"activations of {_module_in_words(live.module)}"
    return f"{words} {format_bytes(live.num_bytes)}"


def _module_in_words(path: str) -> str:
    # The root module's path is empty.
    return path or "the model itself"


def _logits(step: Step) -> int | None:
    """Return the largest value that the model makes and the loss reads."""
    ops = step.profile.ops
    read = {value for op in ops if op.module is None and op.phase is Phase.FORWARD for value in op.inputs}
    of_model = [value for value in read if step.value_op[value] >= 0 and ops[step.value_op[value]].module is not None]
    return max(of_model, key=lambda value: (step.value_bytes[value], value), default=None)
