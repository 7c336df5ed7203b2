"""``memfit plan``: decide what to recompute for a file, by a strategy or a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memfit.cli.output import console, print_json
from memfit.cli.strategy_text import WRITTEN_STRATEGIES, parse_strategy
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.layers.document import read_document
from memfit.layers.files import LAYERS_FORMAT, layers_from_document, plan_document, save_layer_plan
from memfit.layers.plan import build_checkpoint_plan
from memfit.layers.strategies import Budget, LayerStrategy
from memfit.layers.validation import shown
from memfit.units import parse_bytes


def plan(
    file: Annotated[Path, typer.Argument(help="A list of layers (layers.json).", show_default=False)],
    strategy: Annotated[
        str | None,
        typer.Option(help=f"What to recompute: {', '.join(WRITTEN_STRATEGIES)}.", show_default=False),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help='The bytes that must be enough, such as "2GiB" or "900MB".', show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the plan to this file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON for machines.")] = False,
) -> None:
    """Decide which layers to recompute, by a strategy or a budget, and show what that saves and costs."""
    if (strategy is None) == (budget is None):
        given = "neither" if strategy is None else "both"
        raise InvalidParameterError(f"give exactly one of --strategy and --budget; got {given}")
    if strategy is not None:
        chosen, label = parse_strategy(strategy), strategy
    else:
        chosen, label = Budget.from_bytes(parse_bytes(budget or "")), f"budget {budget}"
    document = read_document(file)
    _planner_of(document, file)(document, file, chosen, label, output, as_json)


def _planner_of(document: dict[str, Any], file: Path) -> Any:
    """Return what plans files of the document's format: the one place that tells the formats apart."""
    planner_of_format = {LAYERS_FORMAT: _plan_layers}
    kind = document.get("format")
    if not isinstance(kind, str) or kind not in planner_of_format:
        raise PlanFileError(f'{file}: "format" must be one of {", ".join(planner_of_format)}; got {shown(kind)}')
    return planner_of_format[kind]


def _plan_layers(
    document: dict[str, Any], file: Path, strategy: LayerStrategy, label: str, output: Path | None, as_json: bool
) -> None:
    layers = layers_from_document(document, file)
    layer_plan = build_checkpoint_plan(layers, strategy)
    extras = {"strategy": label, "forward_flops": sum(layer.recompute_flops for layer in layers)}
    if output is not None:
        save_layer_plan(layer_plan, output, **extras)
    if as_json:
        print_json(plan_document(layer_plan, **extras))
        return
    # Tables are only needed here; `--json` and `--help` start faster without them.
    from memfit.report.layer_table import plan_summary, plan_table

    screen = console()
    screen.print(plan_table(layers, layer_plan, title=f"{file.name}: {label}"))
    screen.print(plan_summary(layers, layer_plan, is_budget=isinstance(strategy, Budget)))
    if output is not None:
        screen.print(f"Saved to {output}.", markup=False)
