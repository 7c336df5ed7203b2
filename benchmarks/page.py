"""The page of one GPT with everything measured, and the README's picture of it.

    python benchmarks/page.py page.html [--picture docs/images/page.png]

The GPT is profiled and planned; then memfit at three budgets and torch's own checkpointing of every block train it in
turn, beside the plain step, and become the page's measured marks. The picture wants Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from entrant import Method
from gpt import GPT, tokens
from measuring import machine, measure, print_rows
from peers import eager_peers

import memfit
from memfit.environment import environment_facts
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import FrontierPoint
from memfit.planning.planner import frontier
from memfit.report.page import write_page
from memfit.report.page_data import Mark, ReportData
from memfit.report.strategy_marks import strategy_marks
from memfit.units import format_bytes


@dataclass(frozen=True)
class Size:
    num_blocks: int
    width: int
    batch: int
    length: int
    vocabulary: int
    dtype: torch.dtype
    num_rounds: int


CPU = Size(8, 128, 8, 256, 1_000, torch.float32, num_rounds=7)
GPU = Size(24, 2048, 8, 2048, 32_000, torch.bfloat16, num_rounds=12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="the HTML file to write")
    parser.add_argument("--picture", type=Path, help="a PNG of the page's upper part")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # One thread: on a machine that others use too, threads that wait for one another would be what is measured.
    torch.set_num_threads(1)
    write_page(options.page, measured_report(GPU if device.type == "cuda" else CPU, device))
    if options.picture is not None:
        take_picture(options.page, options.picture)


def measured_report(size: Size, device: torch.device) -> ReportData:
    torch.manual_seed(0)
    model = GPT(size.num_blocks, size.width, size.vocabulary).to(device=device, dtype=size.dtype)
    batch = tokens(size.batch, size.length, device, size.vocabulary)
    profile = memfit.profile(model, batch)
    points = frontier(profile, points=32)
    methods: dict[str, Method] = {"save everything": contextlib.nullcontext}
    for budget_bytes in three_budgets(points):
        plan = memfit.plan(profile, budget=budget_bytes)
        methods[f"memfit at {format_bytes(budget_bytes)}"] = partial(memfit.apply, model, plan)
    methods["torch checkpoint, every block"] = eager_peers(list(model.blocks))["torch: checkpoint every block"]
    rows = measure(
        methods,
        lambda: (loss := model(batch), loss),
        model,
        [batch],
        num_rounds=size.num_rounds,
        steps_per_round=2,
        keep_gradients=False,
    )
    print_rows(machine(), rows)
    notes = {True: "gradients equal, bit for bit", False: "gradients differ"}
    measured = [Mark(row.method, row.peak_bytes, row.ratio - 1, True, notes[row.gradients_equal]) for row in rows[1:]]
    return ReportData(
        profile,
        points,
        marks=(*strategy_marks(profile), *measured),
        title=f"GPT with {size.num_blocks} blocks of width {size.width}, batch {size.batch} × {size.length}",
        facts={**gpu_fact(profile), **environment_facts(), "Threads": "1"},
    )


def three_budgets(points: tuple[FrontierPoint, ...]) -> list[int]:
    least, most = points[-1].peak_bytes, points[0].peak_bytes
    return [least + (most - least) * quarters // 4 for quarters in (1, 2, 3)]


def gpu_fact(profile: ModelProfile) -> dict[str, str]:
    return {"GPU": torch.cuda.get_device_name()} if profile.device.startswith("cuda") else {}


def take_picture(page: Path, picture: Path) -> None:
    """Write the page's upper part to ``picture``, as a person with a light theme sees it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("a picture of the page wants Chromium; install it, or leave --picture away")
    picture.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-sync", "--window-size=1200,1440"]
    with tempfile.TemporaryDirectory() as user_data:
        subprocess.run(
            [browser, *flags, f"--user-data-dir={user_data}", f"--screenshot={picture}", page.resolve().as_uri()],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    main()
