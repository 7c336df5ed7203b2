"""The page as people use it, in headless Chromium: what it shows is what the JSON says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.compiled.test_partition_mix import drawn_profile, model_profile
from tests.planning.model_families import gpt
from tests.report.chromium import Tab, browser_path, running_browser
from tests.report.planned_steps import point_recomputing
from tests.report.test_page import hostile_report
from tests.report.test_page_document import index_of, two_blocks

from memfit.graph.model_profile import Link
from memfit.graph.plan import Decision
from memfit.graph.plan_file import plan_text
from memfit.planning.planner import frontier
from memfit.planning.step import Step
from memfit.report.page import write_page
from memfit.report.page_data import Mark, ReportData, SizeCurve, SizeRow
from memfit.report.page_document import page_document
from memfit.report.strategy_marks import strategy_marks

_PATH = browser_path()
pytestmark = pytest.mark.skipif(
    _PATH is None, reason="no Chromium is installed (apt-get install chromium): the page is not tried in a browser"
)
ARROW_RIGHT, ARROW_LEFT, HOME, END = ("ArrowRight", 39), ("ArrowLeft", 37), ("Home", 36), ("End", 35)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert _PATH is not None
    with running_browser(_PATH, tmp_path_factory.mktemp("browser")) as browser_tab:
        yield browser_tab


@pytest.fixture(scope="module")
def report() -> ReportData:
    profile = gpt(num_blocks=6)
    marks = (*strategy_marks(profile), Mark("measured", 10 * 2**30, 0.02, is_measured=True, note="gradients equal"))
    return ReportData(profile, frontier(profile), marks=marks, budget_bytes=12 * 2**30)


@pytest.fixture(scope="module")
def address(report: ReportData, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, report)
    return path.as_uri()


@pytest.fixture(scope="module")
def offloading_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    profile = replace(gpt(num_blocks=2), link=Link(50e9, 40e9, 1e-5, 64 * 2**30))
    path = tmp_path_factory.mktemp("offloading") / "page.html"
    write_page(path, ReportData(profile, frontier(profile, points=4, host_budget="auto")))
    return path.as_uri()


def shown_blocks(tab: Tab) -> list[list[int]]:
    """Read saved, recomputed and offloaded bytes back from the rows."""
    return tab.evaluate(
        "[...document.querySelectorAll('#blocks-body tr')].map(row =>"
        " [...row.querySelectorAll('[data-bytes]')].map(cell => Number(cell.dataset.bytes)))"
    )


def check_shown(tab: Tab, entry: dict[str, Any]) -> None:
    assert tab.evaluate("Number(document.getElementById('peak').dataset.bytes)") == entry["peak_bytes"]
    assert tab.evaluate("Number(document.getElementById('slower').dataset.overhead)") == entry["overhead"]
    assert shown_blocks(tab) == [row[:3] for row in entry["blocks"]]
    recomputed = sum(row[1] for row in entry["blocks"])
    assert tab.evaluate("Number(document.getElementById('recomputed').dataset.bytes)") == recomputed
    live = tab.evaluate("[...document.querySelectorAll('#live li')].map(row => Number(row.dataset.bytes))")
    assert live == [num_bytes for _, num_bytes in entry["live_at_peak"]][: len(live)]
    assert len(live) == min(9, entry["num_live_modules"])


def test_the_slider_moved_by_keys_shows_the_numbers_of_each_plan(tab: Tab, report: ReportData, address: str) -> None:
    entries = page_document(report)["points"]
    tab.open(address)
    check_shown(tab, entries[page_document(report)["selected"]])
    tab.evaluate("document.getElementById('budget').focus()")
    tab.press(*HOME)
    for entry in entries:
        check_shown(tab, entry)
        tab.press(*ARROW_RIGHT)
    check_shown(tab, entries[-1])
    tab.press(*ARROW_LEFT)
    check_shown(tab, entries[-2])
    tab.press(*END)
    check_shown(tab, entries[-1])
    assert tab.problems == []


def test_a_plan_can_be_opened_by_its_address_and_by_its_point(tab: Tab, report: ReportData, address: str) -> None:
    entries = page_document(report)["points"]
    tab.open(f"{address}#point=3")
    check_shown(tab, entries[3])
    tab.evaluate("document.querySelector('[data-place=\"5\"]').dispatchEvent(new MouseEvent('click'))")
    check_shown(tab, entries[5])
    assert tab.evaluate("document.getElementById('budget').value") == "5"
    tab.evaluate("document.querySelector('[data-place=\"2\"]').focus()")
    tab.press("Enter", 13)
    check_shown(tab, entries[2])
    assert tab.evaluate("document.activeElement.dataset.place") == "2"


def test_the_address_carries_the_budget(tab: Tab, report: ReportData, address: str) -> None:
    entries = page_document(report)["points"]
    tab.open(f"{address}#budget={entries[4]['peak_bytes'] + 1}")
    check_shown(tab, entries[4])
    tab.evaluate("document.getElementById('budget').focus()")
    tab.press(*ARROW_RIGHT)
    assert tab.evaluate("location.hash") == f"#budget={entries[5]['peak_bytes']}"
    tab.open(f"{address}#budget=1")
    check_shown(tab, entries[0])


def test_the_plan_of_the_sliders_position_is_shown_as_code_and_can_be_downloaded(
    tab: Tab, report: ReportData, address: str
) -> None:
    place = 3
    plan = sorted(report.points, key=lambda point: point.peak_bytes)[place].plan
    tab.open(f"{address}#point={place}")
    code = tab.evaluate("document.getElementById('code').textContent")
    assert f"memfit.fit(model, batch, budget={plan.predicted_peak_bytes})" in code
    report_data = "JSON.parse(document.getElementById('report-data').textContent)"
    assert tab.evaluate(f"planText({report_data}, {place})") == plan_text(plan)
    tab.evaluate("URL.createObjectURL = (blob) => { window.saved = blob; return 'data:,'; }")
    tab.evaluate(f"downloadPlan({report_data}, {place})")
    assert tab.evaluate("window.saved.text()") == plan_text(plan)
    assert tab.problems == []


def test_the_capacity_is_a_line_and_measurements_have_their_quartiles(
    tab: Tab, report: ReportData, tmp_path: Path
) -> None:
    profile = replace(report.profile, device_bytes=int(1.2 * report.points[0].peak_bytes))
    marks = [Mark("torch: every block", 10 * 2**30, 0.2, is_measured=True, overhead_quartiles=(0.15, 0.25))]
    path = tmp_path / "page.html"
    write_page(path, replace(report, profile=profile, marks=marks))
    tab.open(path.as_uri())
    assert tab.evaluate("document.querySelectorAll('.capacity-line').length") == 1
    assert "has" in tab.evaluate("document.querySelector('.capacity-label').textContent")
    assert tab.evaluate("document.querySelectorAll('#curve .quartiles').length") == 1
    tab.evaluate("document.querySelector('#curve .mark.measured').focus()")
    assert "25th to 75th percentile +15 % to +25 %" in tab.evaluate("document.querySelector('.tip').textContent")
    write_page(path, replace(report, profile=replace(profile, device_bytes=10 * report.points[0].peak_bytes)))
    tab.open(path.as_uri())
    assert tab.evaluate("document.querySelectorAll('.capacity-line').length") == 0


def test_the_timeline_is_stacked_and_names_what_is_live_at_an_op(tab: Tab, report: ReportData, address: str) -> None:
    document = page_document(report)
    tab.open(address)
    kinds = "[...document.querySelectorAll('#timeline path[class^=kind-]')].map(path => path.getAttribute('class'))"
    assert tab.evaluate(kinds) == [
        "kind-weights",
        "kind-batch",
        "kind-optimizer",
        "kind-gradients",
        "kind-activations",
    ]
    tab.evaluate(
        "(() => { const svg = document.querySelector('#timeline svg');"
        " const box = svg.getBoundingClientRect();"
        " const clientX = box.left + box.width / 2;"
        " svg.dispatchEvent(new PointerEvent('pointermove', { clientX })); })()"
    )
    tip = tab.evaluate("document.querySelector('#timeline .tip').textContent")
    assert "weights" in tip
    assert "activations and workspaces" in tip
    samples = document["points"][document["selected"]]["live_samples"]
    assert any(f"live at op {op}:" in tip and names[0][0] in tip for op, names in samples)


def test_many_blocks_are_folded_by_kind_and_all_can_be_shown(tab: Tab, tmp_path: Path) -> None:
    profile = gpt(num_blocks=48)
    path = tmp_path / "page.html"
    data = ReportData(profile, [point_recomputing(profile, set())])
    write_page(path, data)
    tab.open(path.as_uri())
    labels = "[...document.querySelectorAll('#blocks-body th')].map(head => head.textContent)"
    assert tab.evaluate(labels) == ["blocks.0 – 47 (48 blocks)", "outside the blocks"]
    (row, _) = shown_blocks(tab)
    assert row[0] == sum(entry[0] for entry in page_document(data)["points"][0]["blocks"][:48])
    tab.evaluate("document.getElementById('blocks-fold').click()")
    assert len(tab.evaluate(labels)) == 49
    assert shown_blocks(tab) == [entry[:3] for entry in page_document(data)["points"][0]["blocks"]]
    assert tab.evaluate("document.getElementById('blocks-fold').textContent") == "Fold equal blocks"


def test_no_two_labels_of_the_chart_collide(tab: Tab, report: ReportData, address: str) -> None:
    tab.open(address)
    assert (
        tab.evaluate(
            "(() => { const boxes = [...document.querySelectorAll('#curve .mark-label')].map(text =>"
            " text.getBoundingClientRect()); return boxes.some((one, index) => boxes.slice(index + 1).some(other =>"
            " one.left < other.right && other.left < one.right"
            " && one.top < other.bottom && other.top < one.bottom)); })()"
        )
        is False
    )


def test_every_mark_says_its_numbers_when_focused(tab: Tab, report: ReportData, address: str) -> None:
    tab.open(address)
    assert tab.evaluate("document.querySelectorAll('#curve .mark').length") == len(report.marks)
    tab.evaluate("document.querySelector('#curve .mark.measured').focus()")
    tip = tab.evaluate("document.querySelector('.tip').textContent")
    assert tip == "measured10.0 GiB peak (10,737,418,240 bytes)+2.0 % time, measuredgradients equal"


def test_nothing_is_asked_of_the_network(tab: Tab, address: str) -> None:
    tab.open(address)
    tab.evaluate("document.getElementById('budget').dispatchEvent(new Event('input'))")
    assert tab.requests == [address]
    assert tab.problems == []


def test_what_is_offloaded_has_its_figure_its_words_and_its_counts(tab: Tab, tmp_path: Path) -> None:
    profile = replace(two_blocks(), link=Link(50e9, 40e9, 1e-5, 2**30))
    first, second = (index_of(profile, f"blocks.{number}.act::aten.tanh#0") for number in range(2))
    both = point_recomputing(profile, {second}, {first: Decision.OFFLOAD})
    plain = point_recomputing(profile, set())
    path = tmp_path / "page.html"
    write_page(path, ReportData(profile, [plain, both], chosen=both))
    tab.open(path.as_uri(), width=360)
    figure = "document.getElementById('offloaded')"
    assert tab.evaluate(f"{figure}.offsetParent !== null")
    assert tab.evaluate(f"Number({figure}.dataset.bytes)") == 200
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    summary = tab.evaluate("document.getElementById('summary').textContent")
    assert "200 B of activations are recomputed in the backward pass" in summary
    assert "; 200 B of activations are offloaded to host memory" in summary
    cells = "[...document.querySelectorAll('#blocks-body [data-outcome=offloaded]')]"
    assert tab.evaluate(f"{cells}.map(cell => cell.title)") == [
        "200 bytes in 1 value",
        "0 bytes in 0 values",
        "0 bytes in 0 values",
    ]
    facts = tab.evaluate("document.getElementById('facts').textContent")
    assert "50.0 GB/s to the host, 40.0 GB/s to the device, 1.00 GiB of host memory free" in facts
    assert "memfit's plan (200 B on the host)" in tab.evaluate("document.getElementById('all-points').textContent")
    assert tab.problems == []


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_figures_have_room_beside_one_another(tab: Tab, offloading_address: str, width: int) -> None:
    tab.open(f"{offloading_address}#point=1", width=width)
    figures = "[...document.querySelectorAll('.figures dd')]"
    assert tab.evaluate(f"{figures}.every(figure => figure.textContent.length >= 4)")
    assert tab.evaluate(f"{figures}.every(figure => figure.scrollWidth <= figure.clientWidth)")
    assert tab.evaluate("document.documentElement.scrollWidth") == width


def test_the_plain_step_peaks_where_it_was_measured_to(tab: Tab, tmp_path: Path) -> None:
    profile = replace(gpt(num_blocks=2), peak_bytes=3 * 2**40)
    path = tmp_path / "page.html"
    write_page(path, ReportData(profile, frontier(profile, points=3)))
    tab.open(path.as_uri())
    assert tab.evaluate("document.getElementById('subtitle').textContent").endswith("and peaks at 3.00 TiB.")


def test_where_no_plan_offloads_there_is_no_figure_for_it(tab: Tab, address: str) -> None:
    tab.open(address)
    assert tab.evaluate("document.getElementById('recomputed').offsetParent !== null")
    assert tab.evaluate("document.getElementById('offloaded').offsetParent === null")
    assert "Link to the host" not in tab.evaluate("document.getElementById('facts').textContent")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_follows_the_theme_of_the_system_until_the_button_is_pressed(
    tab: Tab, address: str, dark: bool
) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    colours = {False: "rgb(244, 246, 248)", True: "rgb(14, 17, 22)"}
    tab.open(address, dark=dark)
    assert tab.evaluate(background) == colours[dark]
    tab.evaluate("document.getElementById('theme').click()")
    assert tab.evaluate(background) == colours[not dark]


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_sticks_out_sideways(tab: Tab, address: str, width: int) -> None:
    tab.open(address, width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate("document.querySelector('#curve svg').clientWidth") <= width


def test_hostile_names_are_shown_as_text(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, hostile_report())
    tab.open(path.as_uri(), width=360)
    assert tab.evaluate("document.images.length") == 0
    assert tab.evaluate("document.querySelector('#blocks-body th').textContent").startswith("</script><img src=x")
    assert tab.evaluate("document.querySelector('h1').textContent").startswith("</script><img src=x")
    assert tab.problems == []


def test_5000_values_are_searched_sorted_and_paged_quickly(tab: Tab, tmp_path: Path) -> None:
    profile = gpt(num_blocks=265)
    step = Step(profile)
    half = set(step.plannable[: len(step.plannable) // 2])
    path = tmp_path / "page.html"
    data = ReportData(profile, [point_recomputing(profile, chosen) for chosen in (set(), half)])
    write_page(path, data)
    document = page_document(data)
    tab.open(f"{path.as_uri()}#point=0")
    sizes = document["values"]["num_bytes"]
    outcomes = document["points"][0]["outcomes"]
    kept = sorted((size for size, outcome in zip(sizes, outcomes, strict=True) if outcome != "-"), reverse=True)
    rows = "[...document.querySelectorAll('#values-body tr')].map(row => Number(row.dataset.bytes))"
    assert tab.evaluate(rows) == kept[:25]
    tab.evaluate("document.getElementById('next-page').click()")
    assert tab.evaluate(rows) == kept[25:50]
    tab.evaluate("document.querySelector('[data-key=num_bytes] button').click()")
    assert tab.evaluate(rows) == kept[::-1][:25]
    search = "const box = document.getElementById('search'); box.value = {!r}; box.dispatchEvent(new Event('input'))"
    tab.evaluate("{" + search.format("BLOCKS.7.mlp::aten.gelu") + "}")
    assert tab.evaluate("document.querySelectorAll('#values-body tr').length") == 1
    decision = "document.getElementById('decision')"
    tab.evaluate("{" + search.format("") + "}")
    tab.evaluate(f"{decision}.value = 'r'; {decision}.dispatchEvent(new Event('input'))")
    text = tab.evaluate("document.getElementById('values-count').textContent")
    assert text.startswith(f"{outcomes.count('r'):,} of 5,041 values")
    milliseconds = tab.evaluate(
        "(() => { const start = performance.now(); const slider = document.getElementById('budget');"
        " for (let turn = 0; turn < 10; turn += 1)"
        " { slider.value = turn % 2; slider.dispatchEvent(new Event('input')); }"
        " return (performance.now() - start) / 10; })()"
    )
    # A tenth of a second is where a slider begins to feel slow; five times that for a loaded machine.
    assert milliseconds < 500
    assert tab.problems == []


@pytest.mark.parametrize("width", [360, 1280])
def test_sizes_are_curves_with_the_chosen_one_and_the_budget(tab: Tab, tmp_path: Path, width: int) -> None:
    profile = two_blocks()
    peaks = {1: 100, 2: 150, 4: 250, 8: 460, 16: 510, 32: None}
    rows = [SizeRow(size, peak, size**0.5 if peak else None, is_measured=size > 4) for size, peak in peaks.items()]
    path = tmp_path / "page.html"
    write_page(path, ReportData(profile, frontier(profile), sizes=SizeCurve(rows, 16, 512, is_throughput=True)))
    tab.open(path.as_uri(), width=width)
    for chart in ("sizes-speed", "sizes-peak"):
        sizes = f"[...document.querySelectorAll('#{chart} .size')].map(dot => Number(dot.dataset.size))"
        assert tab.evaluate(sizes) == [1, 2, 4, 8, 16]
        assert tab.evaluate(f"document.querySelectorAll('#{chart} .size.measured').length") == 2
        assert tab.evaluate(f"document.querySelector('#{chart} .size.chosen').dataset.size") == "16"
    assert tab.evaluate("document.querySelectorAll('#sizes-peak .budget-line').length") == 1
    assert "16 trains the most samples per second within 512 B: 4" in tab.evaluate(
        "document.getElementById('sizes-lead').textContent"
    )
    tab.evaluate("document.querySelector('#sizes-speed [data-size=\"8\"]').focus()")
    assert tab.evaluate("document.querySelector('#sizes-speed .tip').textContent") == "size 82.83 samples/s, measured"
    assert (
        tab.evaluate("document.querySelector('#sizes-body tr[data-size=\"32\"]').textContent") == "32above the budget"
    )
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.problems == []


def test_plans_by_length_are_curves_and_other_pages_have_none(tab: Tab, address: str, tmp_path: Path) -> None:
    profile = two_blocks()
    rows = [SizeRow(512, 300, 0.0), SizeRow(2048, 500, 0.25)]
    path = tmp_path / "page.html"
    write_page(path, ReportData(profile, frontier(profile), sizes=SizeCurve(rows, 2048, 512, is_throughput=False)))
    tab.open(path.as_uri())
    tips = "[...document.querySelectorAll('#sizes-speed .size')].map(dot => dot.getAttribute('aria-label'))"
    assert tab.evaluate(tips) == ["512: 0 % time, predicted", "2048: +25 % time, predicted"]
    assert tab.evaluate("document.getElementById('sizes').offsetParent !== null")
    tab.open(address)
    assert tab.evaluate("document.getElementById('sizes').offsetParent === null")


def test_compiled_blocks_have_their_partitions_and_the_step_its_segments(tab: Tab, tmp_path: Path) -> None:
    profile = model_profile(drawn_profile(1))
    data = ReportData(profile, frontier(profile, points=6))
    entries = page_document(data)["points"]
    path = tmp_path / "page.html"
    write_page(path, data)
    tab.open(f"{path.as_uri()}#point=0")
    heads = "[...document.querySelectorAll('#blocks-body th')].map(head => head.textContent)"
    names = [
        f"{block} {name}" for block, name in zip(page_document(data)["blocks"], entries[0]["partitions"], strict=True)
    ]
    assert tab.evaluate(heads) == names
    check_shown(tab, entries[0])
    assert tab.evaluate("document.getElementById('values-panel').offsetParent === null")
    assert "compile=True" in tab.evaluate("document.getElementById('code').textContent")
    assert "by segment" in tab.evaluate("document.getElementById('timeline-title').textContent")
    assert "gradients" not in tab.evaluate(
        "[...document.querySelectorAll('#timeline path')].map(p => p.className.baseVal)"
    )
    report_data = "JSON.parse(document.getElementById('report-data').textContent)"
    assert tab.evaluate(f"planText({report_data}, 0)") == plan_text(data.points[-1].plan)
    assert tab.problems == []


def test_no_label_of_a_block_is_cut_off_on_a_phone(tab: Tab, tmp_path: Path) -> None:
    profile = gpt(num_blocks=24)
    path = tmp_path / "page.html"
    write_page(path, ReportData(profile, [point_recomputing(profile, set())]))
    tab.open(path.as_uri(), width=360)
    heads = "[...document.querySelectorAll('#blocks-body th')]"
    assert tab.evaluate(f"{heads}.every(head => head.scrollWidth <= head.clientWidth)")
