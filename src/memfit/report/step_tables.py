"""Profiles, plans, frontiers and verifications of real steps as terminal tables. Nothing is decided here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.graph.model_profile import Link, ModelProfile
from memfit.graph.plan import Decision, FrontierPoint, Plan
from memfit.graph.size_plans import SizedPlan
from memfit.graph.verification import MethodResult, Verification
from memfit.infeasible_budget import bytes_from_before
from memfit.planning.step import Step
from memfit.report.layer_table import MOST_ROWS, format_flops
from memfit.report.plan_effect import BlockTable, bytes_by_block, plan_effect
from memfit.report.terminal_table import TerminalTable, summary_grid
from memfit.units import format_bytes, format_overhead, format_seconds

# Overheads that differ by less are not explained.
_NEAR_OVERHEAD = 0.05


def profile_table(profile: ModelProfile, *, title: str) -> Table:
    """Return one row per block: what it holds for the backward pass, and what its forward pass costs."""
    table = TerminalTable(title)
    table.add_column("block", overflow="ellipsis")
    table.add_column("type", no_wrap=True)
    table.add_numbers("holds", "cost")
    for block in profile.blocks[:MOST_ROWS]:
        layer = block.layer
        cells = (format_bytes(layer.activation_size_bytes), format_flops(layer.recompute_flops))
        table.add_row(Text(block.path), str(layer.layer_type), *cells)
    if len(profile.blocks) > MOST_ROWS:
        table.caption = f"… and {len(profile.blocks) - MOST_ROWS} blocks more; --json has all"
    return table


def profile_summary(profile: ModelProfile) -> Padding:
    """Return the step in a few lines: memory, time, ops, device."""
    lines = profile.summary_lines()
    before = format_bytes(bytes_from_before(profile).total())
    lines["peak"] += f", {before} of it weights, optimizer state and batch"
    if profile.link is not None:
        lines["host"] = _link_in_words(profile.link)
    return summary_grid(lines)


def _link_in_words(link: Link) -> str:
    out, back = (f"{rate / 1e9:.3g} GB/s" for rate in (link.out_bytes_per_second, link.back_bytes_per_second))
    return f"{out} to the host and {back} to the device, {format_bytes(link.host_free_bytes)} free"


def plan_table(profile: ModelProfile, plan: Plan, *, title: str) -> Table:
    """Return one row per block: how many of its bytes for the backward pass are saved, recomputed and offloaded."""
    table = TerminalTable(title)
    table.add_column("block", overflow="ellipsis")
    step = Step(profile)
    effect, blocks = plan_effect(step, plan), BlockTable(step)
    num_offloaded = Counter(
        block for block, outcome in zip(blocks.of_value, effect.outcomes, strict=True) if outcome is Decision.OFFLOAD
    )
    # Most plans offload nothing, and their tables have no column for it.
    is_offloading = _num_decided(plan, Decision.OFFLOAD) > 0
    table.add_numbers("saved", "recomputed", *(("offloaded", "values offloaded") if is_offloading else ()))
    rows = bytes_by_block(step, effect, blocks)
    for number, block in enumerate(profile.blocks[:MOST_ROWS]):
        num_bytes = dict(zip(Decision, rows[number], strict=True))
        cells = [format_bytes(num_bytes[decision]) for decision in (Decision.SAVE, Decision.RECOMPUTE)]
        if is_offloading:
            cells += [format_bytes(num_bytes[Decision.OFFLOAD]), str(num_offloaded[number])]
        table.add_row(Text(block.path), *cells)
    if len(profile.blocks) > MOST_ROWS:
        table.caption = f"… and {len(profile.blocks) - MOST_ROWS} blocks more"
    return table


def plan_summary(profile: ModelProfile, plan: Plan) -> Padding:
    """Return the plan in a few lines: memory, time, values, and for a budget how good the plan is."""
    lines = plan.summary_lines()
    saved_share = 1 - plan.predicted_peak_bytes / profile.peak_bytes if profile.peak_bytes else 0.0
    instead = f"instead of {format_bytes(profile.peak_bytes)} ({100 * saved_share:.1f}% less)"
    lines["peak"] = f"{format_bytes(plan.predicted_peak_bytes)} {instead}"
    overhead = format_overhead(plan.predicted_overhead)
    if plan.compiled is None:
        lines["time"] = f"{overhead} ({format_flops(plan.recompute_flops)} recomputed)"
    else:
        lines["time"] = f"{overhead} on the plain step, which is not compiled"
        if profile.compiled is not None:
            lines["partitions"] = profile.compiled.in_words()
    if plan.budget_bytes is not None:
        lines["optimality"] = _optimality_in_words(plan)
    return summary_grid(lines)


def _optimality_in_words(plan: Plan) -> str:
    if plan.compiled is not None:
        return "no mixture of the measured partitions within this budget is predicted to be faster"
    of_class = "that replays each op at most once"
    if plan.optimality_gap:
        return f"at most {100 * plan.optimality_gap:.2g}% of the step slower than the fastest plan {of_class}"
    return f"no plan within this budget {of_class} is predicted to be faster"


def frontier_table(profile: ModelProfile, points: Sequence[FrontierPoint], *, title: str) -> Table:
    """Return one row per plan, from the fastest to the smallest."""
    table = TerminalTable(title)
    is_offloading = any(_num_decided(point.plan, Decision.OFFLOAD) for point in points)
    offloading_headings = ("values offloaded", "on the host") if is_offloading else ()
    is_compiled = any(point.plan.compiled is not None for point in points)
    table.add_numbers(
        "peak", "of plain", "time", "partitions" if is_compiled else "values recomputed", *offloading_headings
    )
    for point in points:
        share = point.peak_bytes / profile.peak_bytes if profile.peak_bytes else 1.0
        cells = [format_bytes(point.peak_bytes), f"{share:.1%}", format_overhead(point.overhead)]
        compiled = point.plan.compiled
        num_recomputed = str(_num_decided(point.plan, Decision.RECOMPUTE))
        cells.append(num_recomputed if compiled is None else compiled.in_words())
        if is_offloading:
            cells += [str(_num_decided(point.plan, Decision.OFFLOAD)), format_bytes(point.plan.host_bytes)]
        table.add_row(*cells)
    return table


def sizes_table(entries: Sequence[SizedPlan], *, title: str) -> Table:
    """Return one row per plan, from the fastest to the slowest; a batch runs by the first that is as large."""
    table = TerminalTable(title)
    table.add_numbers("size up to", "peak", "time")
    for entry in entries:
        plan = entry.plan
        table.add_row(
            entry.size_in_words, format_bytes(plan.predicted_peak_bytes), format_overhead(plan.predicted_overhead)
        )
    return table


def verification_summary(verification: Verification, *, plan: Plan | None = None, engine: str | None = None) -> Padding:
    """Return what was measured in a few lines, each with its verdict.

    With the ``plan``, its predicted time is compared with the measured one; ``engine`` is the one that ran.
    """
    words = verification.summary_lines()
    lines: dict[str, str | Text] = {**words, "gradients": _gradients_in_words(verification)}
    if verification.budget_bytes is not None:
        lines["budget"] = Text(words["budget"], style="green" if verification.within_budget else "bold red")
    lines["time"] = _time_in_words(verification)
    if verification.host_bytes:
        lines["host"] = f"{format_bytes(verification.host_bytes)} of pinned memory for offloaded values"
    if plan is not None and (difference := time_difference_in_words(plan, verification)) is not None:
        lines["predicted"] = difference
    if engine is not None:
        lines["engine"] = engine
    lines["measured"] = f"on {verification.device_name}, torch {verification.torch_version}, " + (
        f"medians of {verification.num_rounds} interleaved rounds"
    )
    return summary_grid(lines)


def comparison_table(results: Sequence[MethodResult], *, title: str) -> Table:
    """Return one row per method that was measured in the same rounds."""
    table = TerminalTable(title)
    table.add_column("method", overflow="fold")
    table.add_numbers("peak", "step", "time", "25th to 75th\npercentile")
    table.add_column("gradients", overflow="fold")
    for result in results:
        if result.peak_bytes is None or result.step_seconds is None or result.overhead_quartiles is None:
            table.add_row(Text(result.label), "", "", "", "", Text(result.error or "", style="yellow"))
            continue
        low, high = result.overhead_quartiles
        table.add_row(
            Text(result.label),
            format_bytes(result.peak_bytes),
            format_seconds(result.step_seconds),
            format_overhead(result.overhead),
            f"{format_overhead(low)} to {format_overhead(high)}",
            Text("equal", style="green") if result.gradients_equal else Text("differ", style="bold red"),
        )
    return table


def time_difference_in_words(plan: Plan, verification: Verification) -> str | None:
    """Return why the measured overhead is far from the predicted one; None where it is near, or not known."""
    measured, quartiles = verification.overhead, verification.overhead_quartiles
    if measured is None or quartiles is None or abs(measured - plan.predicted_overhead) < _NEAR_OVERHEAD:
        return None
    words = f"{format_overhead(plan.predicted_overhead)}; "
    if quartiles[0] <= plan.predicted_overhead <= quartiles[1]:
        return f"{words}the difference is within the spread of the rounds: other work on this machine adds noise"
    if measured < plan.predicted_overhead:
        return (
            f"{words}less was measured: ops are timed one by one, which costs more than in the step, or other work "
            "slowed the plain step down; repeat with `memfit verify`"
        )
    if verification.device == "cpu":
        return (
            f"{words}recording costs a few μs for each op in recorded modules, which predictions on a CPU leave out. "
            "It matters in steps as short as this one, and less in larger ones; other work on this machine adds noise"
        )
    return f"{words}the host or the GPU was slower than while profiling, such as by other work; repeat `memfit verify`"


def _gradients_in_words(verification: Verification) -> Text:
    if verification.gradients_equal is None:
        return Text("not compared, because the plain step does not fit the device", style="yellow")
    if verification.gradients_equal:
        return Text("equal, bit for bit", style="green")
    if verification.gradient_tolerance is not None and verification.gradients_hold:
        return Text(verification.summary_lines()["gradients"], style="green")
    words = f"largest relative error {verification.max_gradient_error:.2g}"
    if verification.gradients_hold:
        return Text(f"{words}; the plain step differs from itself by {verification.plain_gradient_error:.2g}")
    if verification.plain_differs:
        itself = f"the plain step's gradients differ from themselves by {verification.plain_gradient_distance:.2g}"
        return Text(f"{words}; {itself} of their length, so nothing can be compared", style="bold red")
    names = ", ".join(verification.differing_parameters[:3])
    return Text(f"{len(verification.differing_parameters)} differ ({names}), {words}", style="bold red")


def _time_in_words(verification: Verification) -> str:
    words = f"{format_seconds(verification.step_seconds)} a step"
    if verification.plain_step_seconds is None or verification.overhead_quartiles is None:
        return words
    low, high = verification.overhead_quartiles
    return (
        f"{words}, {format_overhead(verification.overhead)} on {format_seconds(verification.plain_step_seconds)} "
        f"(25th to 75th percentile {format_overhead(low)} to {format_overhead(high)})"
    )


def _num_decided(plan: Plan, decision: Decision) -> int:
    return sum(each is decision for each in plan.decisions.values())
