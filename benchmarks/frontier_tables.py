"""Tables of the results of frontier.py: two for the performance page, and a page for each model.

`documentation.py` writes them; `frontier_plots.py` draws the pictures that they link.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from frontier_criteria import (
    beside_torchs_budgets,
    criteria_of,
    half_of_memory,
    overhead_error,
    peak_error,
    required_compiled,
    smallest_in_words,
    symbol,
    verdict_beside,
)
from frontier_results import FULL_CHECKPOINTING, GIB, PLAIN_AGAIN, ModelResult, PlanResult
from rows import Row

_COLUMNS = {
    "every block": FULL_CHECKPOINTING,
    "every 2nd block": "torch: checkpoint every 2nd block",
    "selective": "torch: selective, save matmuls + attention",
}


def page_of(model: ModelResult, images: Path | None = None) -> str:
    """Return the page of one model. ``images`` is where its picture may lie."""
    picture = f"frontier-{model.name}.png"
    lines = [f"# {model.name}", "", "Written by `benchmarks/documentation.py`. [All models](../performance.md)", ""]
    lines += [
        f"{model.machine_and_frameworks}. {model.facts['num_ops']} ops, profiled in "
        f"{model.facts['profiling_seconds']:.1f} s. Plain step: {model.plain.median_ms:.0f} ms, "
        f"{_gib(model.plain)} GiB of activations; run again: {_time(model.rows[PLAIN_AGAIN])}. "
        f"{smallest_in_words(model)}",
        "",
    ]
    if model.note:
        lines += [f"*{model.note}*", ""]
    if images is not None and (images / picture).exists():
        lines += [f"![Time over activation memory of {model.name}](../images/{picture})", ""]
    lines += ["## Acceptance criteria", ""]
    lines += [f"- {symbol(each.is_met)} {each.name}: {each.summary}" for each in criteria_of(model)]
    lines += ["", "## Beside torch's methods", "", *_baselines(model), "", *_plans(model.plans)]
    if model.strategies is not None:
        lines += ["", "## Beside memfit's layer strategies", "", *_baselines(model.strategies)]
    if model.offloading is not None:
        lines += [*_group("With the host's memory", model.offloading), "", *_plans(model.offloading.plans)]
        lines += ["", _link_in_words(model.offloading)] if model.offloading.facts.get("link") else []
    if model.captured is not None:
        lines += _group("Captured into CUDA graphs", model.captured)
    if model.compiled:
        lines += ["", "## torch.compile per block", "", *_compiled(model)]
    if model.compiled_plans:
        lines += ["", "## Plans for compiled blocks", "", *_compiled_plans(model)]
    return "\n".join([*lines, ""])


def summary(models: Sequence[ModelResult]) -> str:
    """Return the table of all models: times at the memory of torch's methods, and what half of the memory costs."""
    columns = [f"{name}: torch | memfit" for name in _COLUMNS]
    lines = [
        f"| model | plain step | {' | '.join(columns)} | half of the activations | with the host's memory | missed |"
    ]
    lines += ["|---|---:|" + "---:|---:|" * len(_COLUMNS) + "---:|---:|---|"]
    for model in models:
        cells = [f"[{model.name}](results/{model.name}.md)", f"{model.plain.median_ms:.0f} ms, {_gib(model.plain)} GiB"]
        for baseline in _COLUMNS.values():
            ours = model.memfit_at_peak_of(baseline) if baseline in model.rows else None
            theirs = model.rows.get(baseline)
            cells += ["" if theirs is None else _time(theirs), "" if ours is None else _time(ours)]
        cells.append(_half(model))
        cells.append("" if model.offloading is None else _half(model.offloading))
        cells.append(", ".join(each.name for each in criteria_of(model) if each.is_met is False) or "none")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _half(model: ModelResult) -> str:
    return half_of_memory(model).summary.partition(" at ")[0]


def predictions(models: Sequence[ModelResult]) -> str:
    """Return the table of how far predicted peaks and times are from measured ones."""
    lines = [
        "| model | plans | over budget | peak: median error | largest "
        "| time: median error, points | largest | gap, median |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model in models:
        plans = [plan for plan in model.plans if plan.measured_overhead is not None]
        peaks = [abs(peak_error(plan)) for plan in plans]
        times = [100 * abs(overhead_error(plan)) for plan in plans]
        over = sum((plan.budget_bytes or plan.measured_peak_bytes) < plan.measured_peak_bytes for plan in plans)
        gap = median(100 * plan.optimality_gap for plan in plans)
        lines.append(
            f"| {model.name} | {len(plans)} | {over} | {median(peaks):.2%} | {max(peaks):.2%} "
            f"| {median(times):.1f} | {max(times):.1f} | {gap:.2f} |"
        )
    return "\n".join(lines)


def _group(title: str, group: ModelResult) -> list[str]:
    """Return a group of its own beside its baselines, relative to its own plain step."""
    return [
        "",
        f"## {title}",
        "",
        f"Plain: {group.plain.median_ms:.0f} ms; half of the memory: {half_of_memory(group).summary}.",
        "",
        *([f"*{group.note}*", ""] if group.note else []),
        *_baselines(group),
    ]


def _link_in_words(group: ModelResult) -> str:
    link = group.facts["link"]
    return (
        f"The link, as profiled: {link['out_bytes_per_second'] / 1e9:.1f} GB/s out, "
        f"{link['back_bytes_per_second'] / 1e9:.1f} back, and {link['slowdown']:.1%} slower computing meanwhile."
    )


def _baselines(model: ModelResult) -> list[str]:
    lines = [
        "| method | time | activations GiB | memfit at its peak | activations GiB | memfit is |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for peer in model.peers():
        ours = model.memfit_at_peak_of(peer.method)
        ours_cells = " | " if ours is None else f"{_time(ours)} | {_gib(ours)}"
        lines.append(f"| {peer.method} | {_time(peer)} | {_gib(peer)} | {ours_cells} | {verdict_beside(model, peer)} |")
    failed = [
        f"- {row.method}: {row.error}" for row in model.rows.values() if row.error is not None and not row.same_as
    ]
    return [*lines, "", *failed] if failed else lines


def _plans(plans: Sequence[PlanResult]) -> list[str]:
    lines = [
        "<details><summary>All plans: whole peaks; overhead: lower bound, predicted, measured</summary>",
        "",
        "| plan | budget GiB | predicted GiB | measured GiB | lower bound | predicted | measured |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    with_host = any(plan.host_bytes for plan in plans)
    if with_host:
        lines[-2:] = [f"{lines[-2]} host GiB |", f"{lines[-1]}---:|"]
    for plan in plans:
        sizes = (plan.budget_bytes, plan.predicted_peak_bytes, plan.measured_peak_bytes)
        shares = (plan.overhead_bound, plan.predicted_overhead, plan.measured_overhead)
        cells = ["" if size is None else f"{size / GIB:.2f}" for size in sizes]
        cells += ["" if share is None else f"{share:.1%}" for share in shares]
        cells += [f"{plan.host_bytes / GIB:.2f}"] if with_host else []
        lines.append(f"| {plan.label} | {' | '.join(cells)} |")
    return [*lines, "", "</details>"]


def _compiled(model: ModelResult) -> list[str]:
    lines = ["| method | time | activations GiB |", "|---|---:|---:|"]
    lines += [f"| {row.method} | {_time(row)} | {_gib(row)} |" for row in model.compiled.values()]
    failed = [f"- {row.method}: {row.error}" for row in model.compiled.values() if row.error is not None]
    return [*lines, "", *failed] if failed else lines


def _compiled_plans(model: ModelResult) -> list[str]:
    first = next(iter(model.compiled_plans.values()))
    lines = [
        f"{first.machine}. Relative to this run's plain step: {first.plain.median_ms:.0f} ms, "
        f"{_gib(first.plain)} GiB of activations; run again: {_time(first.rows[PLAIN_AGAIN])}.",
    ]
    lines += ["", f"*{first.note}*"] if first.note else []
    beside = beside_torchs_budgets(model)
    if beside:
        lines += ["", "| at the memory of | torch | memfit | activations GiB | memfit is |", "|---|---:|---:|---:|---|"]
    for theirs, ours, verdict in beside:
        ours_cells = " | " if ours is None else f"{_time(ours)} | {_gib(ours)}"
        lines.append(f"| {theirs.method} | {_time(theirs)} | {ours_cells} | {verdict} |")
    required = required_compiled(model)
    if required:
        lines += ["", "| plans | activations GiB | required | measured |", "|---|---:|---:|---:|"]
    for name, gib, limit, ratio in required:
        lines.append(f"| {name} | {gib} | {limit:g}× | {'not measured' if ratio is None else f'{ratio:.3f}×'} |")
    for name, group in model.compiled_plans.items():
        smallest_bytes = group.smallest_budget_bytes - group.plain.peak_bytes + group.plain.activation_peak_bytes
        lines += ["", f"**{name}**: smallest plan {smallest_bytes / GIB:.2f} GiB of activations.", ""]
        lines += _plans(group.plans)
        lines += ["", *(f"- {label}: {why}" for label, why in group.infeasible.items())] if group.infeasible else []
    return lines


def compiled_summary(models: Sequence[ModelResult]) -> str:
    """Return the table of the models whose plans for compiled blocks were measured."""
    lines = ["| model | plans | activations GiB, time | peak: largest error | time: largest error, points |"]
    lines += ["|---|---|---|---:|---:|"]
    for model in models:
        for name, group in model.compiled_plans.items():
            rows = sorted(group.memfit_rows(), key=lambda row: -row.activation_peak_bytes)
            points = ", ".join(f"{_gib(row)}: {_time(row)}" for row in rows)
            plans = [plan for plan in group.plans if plan.measured_overhead is not None]
            peak = max((abs(peak_error(plan)) for plan in plans), default=0.0)
            time = max((100 * abs(overhead_error(plan)) for plan in plans), default=0.0)
            link = f"[{model.name}](results/{model.name}.md)"
            lines.append(f"| {link} | {name} | {points} | {peak:.2%} | {time:.1f} |")
    for model in models:
        for name, group in list(model.compiled_plans.items())[:1]:
            took = ", ".join(f"{what} took {seconds:.0f} s" for what, seconds in group.facts["seconds"].items())
            lines += ["", f"{model.name}, {name}: {took}; of these, compiling {group.facts['compile_seconds']:.0f} s."]
    return "\n".join(lines)


def _time(row: Row) -> str:
    return "" if row.ratio is None else f"{row.ratio:.3f}×"


def _gib(row: Row) -> str:
    return "" if row.activation_peak_bytes is None else f"{row.activation_peak_bytes / GIB:.1f}"
