"""Tables of plans that offload: offloaded values are shown beside what is saved and recomputed, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from tests.report.planned_steps import point_recomputing
from tests.report.test_page_document import index_of, two_blocks
from tests.verification.test_verification_file import example

from memfit.graph.model_profile import Link
from memfit.graph.plan import Decision, FrontierPoint
from memfit.graph.verification import MethodResult, Quartiles
from memfit.report.step_tables import (
    comparison_table,
    frontier_table,
    plan_summary,
    plan_table,
    profile_summary,
    verification_summary,
)

PROFILE = two_blocks()
FIRST_ADD, FIRST, SECOND = (
    index_of(PROFILE, name)
    for name in ("blocks.0::aten.add#0", "blocks.0.act::aten.tanh#0", "blocks.1.act::aten.tanh#0")
)


def rows_of(table: RenderableType) -> list[list[str]]:
    """Return the cells of each line that is not empty: of a table the title, the headings, a rule and the rows."""
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    lines = [line for line in capture.get().splitlines() if line.strip()]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def plain() -> FrontierPoint:
    return point_recomputing(PROFILE, set())


def recomputing() -> FrontierPoint:
    return point_recomputing(PROFILE, {SECOND})


def offloading() -> FrontierPoint:
    """Recompute the first tanh from the sum before it, which waits on the host with the second tanh."""
    return point_recomputing(PROFILE, {FIRST}, {FIRST_ADD: Decision.OFFLOAD, SECOND: Decision.OFFLOAD})


def test_blocks_show_what_is_offloaded_where_anything_is() -> None:
    title, head, _, *rows = rows_of(plan_table(PROFILE, offloading().plan, title="plan"))
    assert (title, head) == (["plan"], ["block", "saved", "recomputed", "offloaded", "values offloaded"])
    assert rows == [["blocks.0", "0 B", "200 B", "100 B", "1"], ["blocks.1", "0 B", "0 B", "200 B", "1"]]
    _, head, _, *rows = rows_of(plan_table(PROFILE, recomputing().plan, title="plan"))
    assert head == ["block", "saved", "recomputed"]
    # A replay of the second tanh starts from the sum before it, which is therefore held.
    assert rows == [["blocks.0", "200 B", "0 B"], ["blocks.1", "100 B", "200 B"]]


def test_the_summary_says_how_much_goes_to_the_host() -> None:
    lines = dict(rows_of(plan_summary(PROFILE, offloading().plan)))
    assert lines["values"] == "2 saved, 1 recomputed, 2 offloaded"
    assert lines["host"] == "300 B of pinned memory"
    lines = dict(rows_of(plan_summary(PROFILE, recomputing().plan)))
    assert lines["values"] == "4 saved, 1 recomputed"
    assert "host" not in lines


def test_the_frontier_shows_what_is_offloaded_where_anything_is() -> None:
    _, head, _, *rows = rows_of(frontier_table(PROFILE, [plain(), offloading()], title="frontier"))
    assert head == ["peak", "of plain", "time", "values recomputed", "values offloaded", "on the host"]
    assert [row[3:] for row in rows] == [["0", "0", "0 B"], ["1", "2", "300 B"]]
    _, head, _, *rows = rows_of(frontier_table(PROFILE, [plain(), recomputing()], title="frontier"))
    assert head == ["peak", "of plain", "time", "values recomputed"]
    assert [row[3:] for row in rows] == [["0"], ["1"]]


def test_a_verification_says_how_much_goes_to_the_host() -> None:
    assert "host" not in dict(rows_of(verification_summary(example())))
    lines = dict(rows_of(verification_summary(replace(example(), host_bytes=3 * 2**30))))
    assert lines["host"] == "3.00 GiB of pinned memory for offloaded values"


def test_a_profile_shows_the_link_to_the_host() -> None:
    assert "host" not in dict(rows_of(profile_summary(PROFILE)))
    linked = replace(PROFILE, link=Link(54.2e9, 51.77e9, 1e-5, 3 * 2**40))
    lines = dict(rows_of(profile_summary(linked)))
    assert lines["host"] == "54.2 GB/s to the host and 51.8 GB/s to the device, 3.00 TiB free"


RESULTS = [
    MethodResult("plain step", 2**24, 0.1, 0.0, Quartiles(0.0, 0.0), True),
    MethodResult("torch: checkpoint every block", 2**25 - 9999, 0.2, 1.0, Quartiles(-0.181, 1.057), True),
    MethodResult("broken", error="RuntimeError: a message of a dozen words that is longer than the column is wide"),
]


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70, 80, 90, 100, 120])
def test_no_number_is_cut_however_narrow_the_terminal_is(width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(comparison_table(RESULTS, title="methods"))
        console.print(frontier_table(PROFILE, [plain(), offloading()], title="frontier"))
        console.print(plan_table(PROFILE, offloading().plan, title="plan"))
    shown = capture.get()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.split())
    for cell in ("16.0 MiB", "32.0 MiB", "100 ms", "200 ms", "+100.0%", "+105.7%", "300 B", "200 B", "dozen"):
        assert cell in words


def test_where_the_columns_do_not_fit_each_row_is_a_list() -> None:
    console = Console(width=40)
    with console.capture() as capture:
        console.print(comparison_table(RESULTS[:2], title="methods"))
    lines = [line.strip() for line in capture.get().splitlines()]
    assert lines[lines.index("torch: checkpoint every block") + 1].split("  ")[0] == "peak"
    assert " ".join(lines).count("gradients") == 2
