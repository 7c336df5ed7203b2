"""Plans over layers as terminal tables and sentences. Numbers come from the plans; nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.graph.layer_profile import LayerMemoryProfile
from memfit.layers.checkpoint_plan import CheckpointPlan, activation_stats
from memfit.report.terminal_table import TerminalTable, summary_grid
from memfit.units import format_bytes

MOST_ROWS = 60
"""Longer lists are cut to this many rows in a table; JSON always has all."""

_FLOPS_UNITS = ("", "k", "M", "G", "T", "P", "E")


def format_flops(flops: int) -> str:
    """Return ``flops`` for a reader, in powers of 1000: "51.5 GFLOP"."""
    size, unit = float(flops), 0
    while size >= 999.5 and unit < len(_FLOPS_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_FLOPS_UNITS[unit]}FLOP"


def plan_table(layers: Sequence[LayerMemoryProfile], plan: CheckpointPlan, *, title: str) -> Table:
    """Return one row per layer: what it holds, what it costs, and whether it is saved or recomputed."""
    dropped = set(plan.checkpointed_layers)
    has_names = any(layer.name for layer in layers)
    table = TerminalTable(title)
    table.add_numbers("layer")
    if has_names:
        # The one column that may shrink on a narrow terminal.
        table.add_column("name", overflow="ellipsis")
    table.add_column("type", no_wrap=True)
    table.add_numbers("bytes", "cost")
    table.add_column("plan", no_wrap=True)
    for layer in layers[:MOST_ROWS]:
        is_dropped = layer.layer_idx in dropped
        cells: list[str | Text] = [
            str(layer.layer_idx),
            *([Text(layer.name or "")] if has_names else []),
            str(layer.layer_type),
            format_bytes(layer.activation_size_bytes),
            format_flops(layer.recompute_flops),
            Text("recompute", style="yellow") if is_dropped else Text("save", style="green"),
        ]
        table.add_row(*cells)
    if len(layers) > MOST_ROWS:
        table.caption = f"… and {len(layers) - MOST_ROWS} layers more; --json has all"
    return table


def plan_summary(layers: Sequence[LayerMemoryProfile], plan: CheckpointPlan, *, is_budget: bool) -> Padding:
    """Return the plan in four lines: memory, recompute, layers, and for a budget how good the plan is."""
    stats = activation_stats(layers, plan)
    forward_flops = sum(layer.recompute_flops for layer in layers)
    lines = {
        "peak": f"{format_bytes(stats.peak_memory_bytes)} instead of {format_bytes(stats.total_activation_bytes)} "
        f"({_percent(stats.peak_reduction_percent)} less)",
        "recompute": f"{format_flops(plan.total_recompute_flops)}, "
        f"{_share_of(plan.total_recompute_flops, forward_flops)} of the forward pass",
        "layers": f"{stats.checkpointed_layers} of {stats.total_layers} recomputed",
    }
    if is_budget:
        lines["optimality"] = _optimality(plan.optimality_gap)
    return summary_grid(lines)


def strategy_table(layers: Sequence[LayerMemoryProfile], plans: Mapping[str, CheckpointPlan], *, title: str) -> Table:
    """Return one row per plan: peak, what that saves, recompute, and how many layers are dropped."""
    forward_flops = sum(layer.recompute_flops for layer in layers)
    table = TerminalTable(title)
    table.add_column("strategy", no_wrap=True)
    table.add_numbers("peak", "saved", "recompute", "of forward", "layers dropped")
    for label, plan in plans.items():
        stats = activation_stats(layers, plan)
        table.add_row(
            Text(label, style="bold" if label.startswith("budget") else ""),
            format_bytes(stats.peak_memory_bytes),
            _percent(stats.peak_reduction_percent),
            format_flops(plan.total_recompute_flops),
            _share_of(plan.total_recompute_flops, forward_flops),
            f"{stats.checkpointed_layers} of {stats.total_layers}",
        )
    return table


def comparison_in_words(
    layers: Sequence[LayerMemoryProfile], plans: Mapping[str, CheckpointPlan], *, chosen: str
) -> Padding:
    """Return a paragraph on what the ``chosen`` plan wins, and over which other plan."""
    plan = plans[chosen]
    stats = activation_stats(layers, plan)
    forward_flops = sum(layer.recompute_flops for layer in layers)
    sentences = [
        f"With {chosen}, the activations peak at {format_bytes(stats.peak_memory_bytes)} instead of "
        f"{format_bytes(stats.total_activation_bytes)}, for {_share_of(plan.total_recompute_flops, forward_flops)} "
        "of the forward pass computed again."
    ]
    within = {
        label: other
        for label, other in plans.items()
        if label != chosen and activation_stats(layers, other).peak_memory_bytes <= stats.peak_memory_bytes
    }
    if within:
        label, other = min(within.items(), key=lambda item: item[1].total_recompute_flops)
        sentences.append(
            f"The cheapest other strategy that needs no more memory is {label}, with "
            f"{_share_of(other.total_recompute_flops, forward_flops)}."
        )
    sentences.append(
        "No choice of whole layers within this budget costs fewer FLOPs." if not plan.optimality_gap else ""
    )
    return Padding(Text(" ".join(filter(None, sentences))), (0, 1, 0, 1))


def _optimality(gap: float) -> str:
    if gap == 0:
        return "no plan within this budget costs fewer FLOPs"
    return f"at most {100 * gap:.2g}% above the least FLOPs possible"


def _percent(percent: float) -> str:
    return f"{percent:.1f}%"


def _share_of(part: int, whole: int) -> str:
    return _percent(100 * part / whole if whole else 0.0)
