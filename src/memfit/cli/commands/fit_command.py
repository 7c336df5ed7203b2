"""``memfit fit``: profile, plan, apply and verify for a TARGET and a budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from memfit.cli.options import (
    Arguments,
    AsJson,
    BudgetText,
    ChunkLoss,
    Compile,
    HostBudgetText,
    PageFile,
    PlanOutput,
    TargetText,
    parse_budget,
    parse_host_budget,
)
from memfit.cli.output import check_outputs, console, print_json, print_written, prints_aside
from memfit.cli.python_code import python_code
from memfit.errors import InvalidParameterError

if TYPE_CHECKING:
    from memfit.fitted import Fitted
    from memfit.graph.verification import MethodResult


def fit(
    target: TargetText,
    budget: BudgetText,
    host_budget: HostBudgetText = None,
    compile: Compile = False,
    chunk_loss: ChunkLoss = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also measure torch's checkpointing of every block, in the same rounds.")
    ] = False,
    output: PlanOutput = None,
    html: PageFile = None,
    arg: Arguments = None,
    as_json: AsJson = False,
) -> None:
    """Fit a training step into a budget: profile, plan, apply, verify.

    [dim]memfit fit memfit.models:gpt --arg layers=12 --budget 300MiB --html page.html[/]
    """
    from memfit.cli.stages import compared, engine_in_words, fitted, target_to_run
    from memfit.cli.target import source_files

    options: dict[str, Any] = {
        "budget": parse_budget(budget),
        "host_budget": parse_host_budget(host_budget),
        "compile": compile,
        "chunk_loss": chunk_loss,
    }
    check_outputs(output, html, inputs=source_files(target))
    with prints_aside(as_json):
        loaded = target_to_run(target, arg, takes_batches=True)
        if compare and loaded.batches is not None:
            raise InvalidParameterError(f"--compare measures one batch, and {target} returned several; leave it out")
        result = fitted(loaded, **options)
        comparison = compared(loaded, result) if compare else ()
    if output is not None:
        result.plan.save(output)
    if html is not None:
        from memfit.cli.pages import write_fitted_page

        write_fitted_page(html, target, result, host_budget=options["host_budget"], comparison=comparison)
    engine = engine_in_words()
    if as_json:
        print_json(_document(result, comparison, engine))
        return
    screen = console()
    _show(screen, target, result, comparison, engine)
    budgets = {name: value for name, value in options.items() if value}
    # A saved plan is for one size.
    plan_file = output if loaded.batches is None else None
    code = python_code(target, arg or (), num_entries=loaded.num_entries, budgets=budgets, plan_file=plan_file)
    screen.print("The same in Python", style="bold")
    screen.print(f"\n{code}\n", markup=False, soft_wrap=True)
    print_written(output, html)


def _show(screen: Console, target: str, result: Fitted, comparison: tuple[MethodResult, ...], engine: str) -> None:
    from memfit.fitted import FittedBySize
    from memfit.report.step_tables import comparison_table, plan_summary, sizes_table, verification_summary

    if isinstance(result, FittedBySize):
        screen.print(sizes_table(result.plans.entries, title=f"{target}: the plans by size"))
        target = f"{target}, largest size"
    screen.print(f"{target}: the plan", style="bold", markup=False, soft_wrap=True)
    screen.print(plan_summary(result.profile, result.plan))
    screen.print(f"{target}: measured", style="bold", markup=False, soft_wrap=True)
    screen.print(verification_summary(result.verification, plan=result.plan, engine=engine))
    if comparison:
        screen.print(comparison_table(comparison, title=f"{target}: methods, in the same interleaved rounds"))


def _document(result: Fitted, comparison: tuple[MethodResult, ...], engine: str) -> dict[str, object]:
    from memfit.graph.verification_file import verification_document

    document: dict[str, object] = {
        "budget_bytes": result.plan.budget_bytes,
        "predicted_peak_bytes": result.plan.predicted_peak_bytes,
        "predicted_overhead": result.plan.predicted_overhead,
        "optimality_gap": result.plan.optimality_gap,
        "recompute_flops": result.plan.recompute_flops,
        "host_bytes": result.plan.host_bytes,
        "engine": engine,
        "verification": verification_document(result.verification),
    }
    return document | ({"comparison": [asdict(method) for method in comparison]} if comparison else {})
