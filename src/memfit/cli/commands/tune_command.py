"""``memfit tune``: the batch size that trains fastest within a budget."""

from __future__ import annotations

from typing import Annotated

import typer

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
from memfit.errors import InvalidParameterError


def tune(
    target: TargetText,
    budget: BudgetText,
    sizes: Annotated[
        str | None,
        typer.Option(help="The batch sizes to try, such as 4,8,16; by default they are searched.", show_default=False),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Samples per optimizer step; sizes that divide it are tried.", min=1, show_default=False),
    ] = None,
    host_budget: HostBudgetText = None,
    compile: Compile = False,
    chunk_loss: ChunkLoss = False,
    output: PlanOutput = None,
    html: PageFile = None,
    arg: Arguments = None,
    as_json: AsJson = False,
) -> None:
    """Find the batch size that trains fastest; the TARGET returns (model, make_batch), and make_batch(size) a batch.

    [dim]memfit tune training.py:model_and_batches --budget 20GiB[/]
    """
    from memfit.cli.stages import target_to_run, tuned
    from memfit.cli.target import source_files

    wanted, wanted_on_host = parse_budget(budget), parse_host_budget(host_budget)
    wanted_sizes = None if sizes is None else _parsed_sizes(sizes)
    check_outputs(output, html, inputs=source_files(target))
    with prints_aside(as_json):
        result = tuned(
            target_to_run(target, arg, takes_sizes=True),
            wanted,
            sizes=wanted_sizes,
            global_batch=global_batch,
            host_budget=wanted_on_host,
            compile=compile,
            chunk_loss=chunk_loss,
        )
    if output is not None:
        result.fitted.plan.save(output)
    if html is not None:
        from memfit.cli.pages import sizes_of_tuned, write_fitted_page

        curve = sizes_of_tuned(result)
        write_fitted_page(html, target, result.fitted, host_budget=wanted_on_host, sizes=curve)
    if as_json:
        print_json(result.document())
        return
    screen = console()
    screen.print(f"{target}: the batch size", style="bold", markup=False, soft_wrap=True)
    screen.print(repr(result), markup=False, soft_wrap=True)
    print_written(output, html)


def _parsed_sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InvalidParameterError(f"--sizes is a list of batch sizes such as 4,8,16; got {text!r}")
    return [int(part) for part in parts]
