"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from memfit.cli.strategy_text import WRITTEN_STRATEGIES
from memfit.errors import InvalidParameterError
from memfit.units import parse_bytes, parse_share

TargetText: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:function or path/file.py:function; returns (model, batch) or (model, batch, loss).",
        show_default=False,
    ),
]
Arguments: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="NAME=VALUE", help="An argument of the TARGET's function; repeatable."),
]
BudgetText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help='The largest allowed peak: "2GiB", "900MB", a share of the device such as "90%" or "0.9", or "auto".',
        show_default=False,
    ),
]
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
    if text is None:
        return 0
    if text.strip().lower() == "auto":
        return "auto"
    if text.isdecimal():
        return int(text)
    parse_bytes(text)
    return text


def parse_budget(text: str) -> int | float | str:
    """Return the budget as `memfit.plan` takes it; a bare number is bytes, or up to 1 a share of the device."""
    if text.strip().lower() == "auto":
        return "auto"
    if text.isdecimal() and int(text) > 1:
        return int(text)
    try:
        share = float(text)
    except ValueError:
        if parse_share(text) is None:
            parse_bytes(text)
        return text
    if not 0 < share <= 1:
        raise InvalidParameterError(
            f'a budget is a size with a unit such as "20GiB" or "900MB", a share of the device\'s memory above 0 and '
            f'at most 1 such as "0.8", or "auto"; got {text!r}'
        )
    return share
