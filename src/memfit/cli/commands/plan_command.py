"""``memfit plan``: decide what to recompute for a file, by a strategy or a budget."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from memfit.cli.options import (
    AsJson,
    HostBudgetText,
    OptionalBudgetText,
    PlanOutput,
    StrategyText,
    parse_budget,
    parse_host_budget,
)
from memfit.cli.output import check_outputs, console, print_json, print_written
from memfit.cli.strategy_text import parse_strategy
from memfit.documents import kind_of, read_document
from memfit.errors import InvalidParameterError
from memfit.layers.checkpoint_plan import build_checkpoint_plan
from memfit.layers.layer_files import LAYERS_FORMAT, layers_from_document, plan_document, save_layer_plan
from memfit.layers.strategies import Budget
from memfit.progress import progress_of_command
from memfit.units import parse_bytes

# The format of profiles, written out: importing its module would slow down plans over layers.
_PROFILE_FORMAT = "memfit-profile"

_Selectors = list[str] | None


class _Wish(NamedTuple):
    """What was asked for, as it was written: a strategy or budgets, and selectors that overrule it."""

    strategy: str | None
    budget: str | None
    host_budget: str | None
    force_save: list[str]
    force_recompute: list[str]

    @property
    def label(self) -> str:
        if self.strategy is not None:
            return self.strategy
        return f"budget {self.budget}" + (f", {self.host_budget} on the host" if self.host_budget is not None else "")


def plan(
    file: Annotated[
        Path, typer.Argument(help="A profile (profile.json) or a list of layers (layers.json).", show_default=False)
    ],
    strategy: StrategyText = None,
    budget: OptionalBudgetText = None,
    host_budget: HostBudgetText = None,
    force_save: Annotated[
        _Selectors, typer.Option(metavar="SELECTOR", help="Save these values, whatever is planned; repeatable.")
    ] = None,
    force_recompute: Annotated[
        _Selectors,
        typer.Option(metavar="SELECTOR", help='Recompute these values, such as "*::aten.gelu"; repeatable.'),
    ] = None,
    output: PlanOutput = None,
    as_json: AsJson = False,
) -> None:
    """Decide what to save and what to recompute, by a budget or a strategy, and show what that saves and costs.

    [dim]memfit plan profile.json --budget 2GiB -o plan.json[/]
    """
    if (strategy is None) == (budget is None):
        given = "neither" if strategy is None else "both"
        raise InvalidParameterError(f"give exactly one of --strategy and --budget; got {given}")
    if strategy is not None and host_budget is not None:
        raise InvalidParameterError(
            f"--host-budget needs --budget; --strategy {strategy} recomputes whole blocks and offloads nothing"
        )
    wish = _Wish(strategy, budget, host_budget, force_save or [], force_recompute or [])
    document = read_document(file)
    check_outputs(output, inputs=[file])
    # The one place that distinguishes the formats.
    planner_of_format = {LAYERS_FORMAT: _plan_layers, _PROFILE_FORMAT: _plan_profile}
    planner_of_format[kind_of(document, file, planner_of_format)](document, file, wish, output, as_json)


def _plan_layers(document: dict[str, Any], file: Path, wish: _Wish, output: Path | None, as_json: bool) -> None:
    if wish.force_save or wish.force_recompute:
        raise InvalidParameterError(f"selectors name values, and {file} has layers only; they need a profile")
    if wish.host_budget is not None:
        raise InvalidParameterError(f"--host-budget offloads values, and {file} has layers only; it needs a profile")
    if wish.strategy is not None:
        strategy = parse_strategy(wish.strategy)
    else:
        strategy = Budget.from_bytes(parse_bytes(wish.budget or ""))
    layers = layers_from_document(document, file)
    layer_plan = build_checkpoint_plan(layers, strategy)
    extras = {"strategy": wish.label, "forward_flops": sum(layer.recompute_flops for layer in layers)}
    if output is not None:
        save_layer_plan(layer_plan, output, **extras)
    if as_json:
        print_json(plan_document(layer_plan, **extras))
        return
    # Tables are only needed here; `--json` and `--help` start faster without them.
    from memfit.report.layer_table import plan_summary, plan_table

    screen = console()
    screen.print(plan_table(layers, layer_plan, title=f"{file.name}: {wish.label}"))
    screen.print(plan_summary(layers, layer_plan, is_budget=isinstance(strategy, Budget)))
    if not layer_plan.checkpointed_layers:
        _say_unchanged(screen, is_budget=isinstance(strategy, Budget))
    print_written(output)


def _plan_profile(document: dict[str, Any], file: Path, wish: _Wish, output: Path | None, as_json: bool) -> None:
    from memfit.graph.model_profile import ModelProfile
    from memfit.graph.plan_file import plan_text
    from memfit.planning.planner import plan as plan_step

    measured = ModelProfile.load(file)
    with progress_of_command() as progress:
        # Seconds as a rule; a minute where the budget is too small and the smallest one is looked for.
        progress.stage("planning")
        value_plan = plan_step(
            measured,
            budget=None if wish.budget is None else parse_budget(wish.budget),
            strategy=None if wish.strategy is None else parse_strategy(wish.strategy),
            force_save=wish.force_save,
            force_recompute=wish.force_recompute,
            host_budget=parse_host_budget(wish.host_budget),
        )
    if output is not None:
        value_plan.save(output)
    if as_json:
        sys.stdout.write(plan_text(value_plan))
        return
    from memfit.report.step_tables import plan_summary, plan_table

    screen = console()
    if measured.blocks and value_plan.compiled is None:
        screen.print(plan_table(measured, value_plan, title=f"{file.name}: {wish.label}"))
    screen.print(plan_summary(measured, value_plan))
    if not value_plan.changes_anything:
        _say_unchanged(screen, is_budget=value_plan.budget_bytes is not None)
    print_written(output)


def _say_unchanged(screen: Console, *, is_budget: bool) -> None:
    fits = "The plain step fits: the plan" if is_budget else "The plan"
    screen.print(f"{fits} saves every value and changes nothing.", soft_wrap=True)
