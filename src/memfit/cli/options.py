"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from memfit.cli.strategy_text import WRITTEN_STRATEGIES
from memfit.errors import InvalidParameterError

TargetText: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:function or path/file.py:function; the function returns (model, batch), "
        "(model, batch, loss), (model, batch, loss, optimizer) or a dict of the arguments of memfit.profile.",
        show_default=False,
    ),
]
Arguments: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="NAME=VALUE", help="An argument of the TARGET's function; repeatable."),
]
_BUDGET_OPTION = typer.Option(
    help='The largest allowed peak: "2GiB", "900MB", a share of the device such as "90%" or "0.9", or "auto".',
    show_default=False,
)
BudgetText: TypeAlias = Annotated[str, _BUDGET_OPTION]
OptionalBudgetText: TypeAlias = Annotated[str | None, _BUDGET_OPTION]
HostBudgetText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--host-budget",
        help='Also offload values, to at most this much host memory: "64GiB", or "auto" for half of what was free. '
        "Needs a GPU.",
        show_default=False,
    ),
]
StrategyText: TypeAlias = Annotated[
    str | None,
    typer.Option(help=f"What to recompute: {', '.join(WRITTEN_STRATEGIES)}.", show_default=False),
]
ProfileFile: TypeAlias = Annotated[
    Path, typer.Argument(help="A profile, as `memfit profile` writes it.", show_default=False)
]


def _output(what: str) -> Any:
    return typer.Option("--output", "-o", help=f"Save the {what} to this file.", show_default=False)


PlanOutput: TypeAlias = Annotated[Path | None, _output("plan")]
ProfileOutput: TypeAlias = Annotated[Path | None, _output("profile")]
VerificationOutput: TypeAlias = Annotated[Path | None, _output("verification")]
Compile: TypeAlias = Annotated[
    bool, typer.Option("--compile", help="Compile the repeated blocks, and plan what they save.")
]
ChunkLoss: TypeAlias = Annotated[
    bool, typer.Option("--chunk-loss", help="Let plans compute a language model's head and loss in chunks of tokens.")
]
PageFile: TypeAlias = Annotated[
    Path | None, typer.Option("--html", help="Write the report page to this file.", show_default=False)
]

_JSON_IS_WANTED = "memfit.json_is_wanted"


def _note_json(context: typer.Context, wanted: bool) -> bool:
    # A command's context shares this with the one around it, where errors are reported.
    context.meta[_JSON_IS_WANTED] = wanted
    return wanted


def is_json_wanted(context: Any) -> bool:
    """Return whether the command that ran in ``context`` was given ``--json``."""
    return bool(context.meta.get(_JSON_IS_WANTED))


AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for machines.", callback=_note_json)]


def parse_host_budget(text: str | None) -> int | str:
    """Return the budget of host memory as `memfit.plan` takes it: 0 where none is given; a bare number is bytes."""
    from memfit.budgets import checked_host_budget

    if text is None:
        return 0
    checked = checked_host_budget(int(text) if text.isdecimal() else text)
    # What was written says more in messages than bytes do.
    return checked if text.isdecimal() or checked == "auto" else text


def parse_budget(text: str) -> int | float | str:
    """Return the budget as `memfit.plan` takes it; a bare number is bytes, or up to 1 a share of the device."""
    from memfit.budgets import checked_budget

    budget: int | float | str = text
    with suppress(ValueError):
        budget = float(text)
        budget = int(text) if text.isdecimal() and budget > 1 else budget
    try:
        checked = checked_budget(budget)
    except InvalidParameterError:
        raise InvalidParameterError(
            f"{text!r} is not a budget; write a size with a unit (kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, "
            "TiB powers of 1024) such as 20GiB or 900MB, a share of the device's memory above 0 and at most 1 such as "
            "90% or 0.9, or auto"
        ) from None
    return checked if checked == "auto" else budget
