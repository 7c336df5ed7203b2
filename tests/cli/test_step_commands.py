"""The commands over real steps: profile, plan, frontier, verify, fit, report. What they print, write and return."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cli.conftest import TINY
from tests.cli.running import memfit

from memfit import ModelProfile, Plan, Verification

GPT = "memfit.models:gpt"


def halfway_bytes(profile_file: Path) -> int:
    code, shown, _ = memfit("frontier", str(profile_file), "--json")
    assert code == 0
    points = json.loads(shown)["points"]
    return (points[0]["peak_bytes"] + points[-1]["peak_bytes"]) // 2


def test_profile_shows_each_block_and_the_peak(profile_file: Path) -> None:
    code, shown, errors = memfit("profile", GPT, *TINY)
    assert (code, errors) == (0, "")
    assert all(f"blocks.{number} " in shown for number in range(3))
    assert "peak" in shown
    assert "3 blocks" in shown


def test_profile_as_json_has_what_the_file_has(profile_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    code, shown, _ = memfit("profile", GPT, *TINY, "--json", "-o", str(path))
    document, measured = json.loads(shown), ModelProfile.load(path)
    assert code == 0
    assert document["peak_bytes"] == measured.peak_bytes == ModelProfile.load(profile_file).peak_bytes
    assert document["num_ops"] == len(measured.ops)
    # A CPU is its own host.
    assert document["link"] is measured.link is None
    assert [block["path"] for block in document["blocks"]] == ["blocks.0", "blocks.1", "blocks.2"]


def test_profile_on_fake_tensors_has_the_same_peak_and_says_so(profile_file: Path) -> None:
    code, shown, _ = memfit("profile", GPT, *TINY, "--fake", "--json")
    document = json.loads(shown)
    assert code == 0
    assert document["peak_bytes"] == ModelProfile.load(profile_file).peak_bytes
    assert document["measured_with"].startswith("fake tensors")


def test_a_budget_is_planned_saved_and_verified(profile_file: Path, tmp_path: Path) -> None:
    budget_bytes = halfway_bytes(profile_file)
    plan_file, verification_file = tmp_path / "plan.json", tmp_path / "verification.json"
    code, shown, _ = memfit("plan", str(profile_file), "--budget", f"{budget_bytes}B", "-o", str(plan_file))
    assert code == 0
    assert f"Wrote {plan_file}." in shown
    assert "optimality" in shown
    plan = Plan.load(plan_file)
    assert plan.predicted_peak_bytes <= plan.budget_bytes == budget_bytes

    code, shown, _ = memfit("verify", GPT, str(plan_file), *TINY, "-o", str(verification_file))
    assert code == 0
    assert "equal, bit for bit" in shown
    verification = Verification.load(verification_file)
    assert verification.peak_bytes == plan.predicted_peak_bytes
    assert verification.gradients_equal

    page = tmp_path / "page.html"
    files = [str(profile_file), str(plan_file), str(verification_file)]
    code, shown, _ = memfit("report", *files, "--html", str(page), "--json")
    assert code == 0
    assert json.loads(shown)["html"] == str(page)
    assert "</html>" in page.read_text(encoding="utf-8")


@pytest.mark.filterwarnings("default:planned for")
def test_verify_says_that_a_plan_was_made_for_a_smaller_batch(profile_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    assert memfit("plan", str(profile_file), "--strategy", "full", "-o", str(plan_file))[0] == 0
    code, _, errors = memfit("verify", GPT, str(plan_file), *(text.replace("batch=4", "batch=5") for text in TINY))
    assert code == 0
    assert errors.startswith("warning: planned for ")
    assert "gradients are right, the predicted peak does not hold" in errors


def test_plan_as_json_is_the_plan_file(profile_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, shown, _ = memfit("plan", str(profile_file), "--strategy", "every-nth:2", "--json", "-o", str(path))
    assert code == 0
    assert shown == path.read_text(encoding="utf-8")
    assert json.loads(shown)["format"] == "memfit-plan"


def test_selectors_overrule_a_strategy(profile_file: Path) -> None:
    options = ["--strategy", "none", "--force-recompute", "*::aten.gelu", "--force-save", "blocks.1.*"]
    code, shown, _ = memfit("plan", str(profile_file), *options, "--json")
    groups = json.loads(shown)["groups"]
    recomputed = [group["module"] for group in groups if "recompute" in group["values"].values()]
    assert code == 0
    assert recomputed == ["blocks.0.mlp.1", "blocks.2.mlp.1"]


def test_selectors_need_a_profile() -> None:
    layers = str(Path(__file__).parents[2] / "examples" / "layers.json")
    code, _, errors = memfit("plan", layers, "--strategy", "full", "--force-save", "*")
    assert code == 2
    assert "selectors name values" in errors


def test_frontier_is_a_table_from_the_fastest_to_the_smallest(profile_file: Path) -> None:
    code, shown, _ = memfit("frontier", str(profile_file), "--points", "4")
    rows = [line.split() for line in shown.splitlines() if "%" in line]
    assert code == 0
    assert 2 <= len(rows) <= 4
    assert rows[0][2:4] == ["100.0%", "+0.0%"]


def test_frontier_writes_a_page_and_a_plot(profile_file: Path, tmp_path: Path) -> None:
    page, plot = tmp_path / "page.html", tmp_path / "frontier.svg"
    code, shown, _ = memfit("frontier", str(profile_file), "--html", str(page), "--plot", str(plot))
    assert code == 0
    assert f"Wrote {page}." in shown
    assert "</html>" in page.read_text(encoding="utf-8")
    assert "</svg>" in plot.read_text(encoding="utf-8")


def test_fit_shows_plan_and_proof_and_writes_both(profile_file: Path, tmp_path: Path) -> None:
    page, plan_file = tmp_path / "page.html", tmp_path / "plan.json"
    budget = f"{halfway_bytes(profile_file)}B"
    code, shown, errors = memfit(
        "fit", GPT, *TINY, "--budget", budget, "--html", str(page), "-o", str(plan_file), columns=80
    )
    assert (code, errors) == (0, "")
    assert "equal, bit for bit" in shown
    tables = shown.partition("The same in Python")[0]
    assert max(len(line) for line in tables.splitlines()) <= 80
    assert "</html>" in page.read_text(encoding="utf-8")
    assert Plan.load(plan_file).recorded_modules


def test_fit_as_json_is_one_object_with_the_proof(profile_file: Path) -> None:
    budget_bytes = halfway_bytes(profile_file)
    code, shown, _ = memfit("fit", GPT, *TINY, "--budget", f"{budget_bytes}B", "--json")
    document = json.loads(shown)
    assert code == 0
    assert document["budget_bytes"] == budget_bytes
    assert document["verification"]["holds"] is True
    assert document["verification"]["peak_bytes"] == document["predicted_peak_bytes"] <= budget_bytes


CHATTY = """
import torch
from torch import nn

print("imported")

class Chain(nn.Sequential):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def loss(output):
    print("loss")
    return output.sum()

def build():
    print("built")
    return Chain(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]), torch.ones(64, 8), loss
"""


@pytest.mark.parametrize("command", ["profile", "verify", "fit"])
@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_what_the_targets_code_prints_is_kept_out_of_the_json(
    tmp_path: Path, target_file: Callable[[str], str], command: str
) -> None:
    target, profile, plan = f"{target_file(CHATTY)}:build", str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    code, shown, _ = memfit("profile", target, "-o", profile)
    assert (code, shown.splitlines()[:4]) == (0, ["imported", "built", "forward", "loss"])
    memfit("plan", profile, "--strategy", "full", "-o", plan)
    needed = {"profile": [], "verify": [plan], "fit": ["--budget=1GiB"]}[command]
    code, shown, errors = memfit(command, target, *needed, "--json")
    assert (code, type(json.loads(shown))) == (0, dict)
    assert set(errors.splitlines()) == {"imported", "built", "forward", "loss"}


def test_a_target_may_return_a_dict_of_step_arguments(target_file: Callable[[str], str]) -> None:
    source = """
import torch
from torch import nn

def build():
    return {
        "model": nn.Linear(4, 3),
        "batch": torch.ones(2, 4),
        "targets": torch.tensor([0, 1]),
        "loss": nn.CrossEntropyLoss(),
    }
"""
    code, shown, _ = memfit("profile", f"{target_file(source)}:build", "--json")
    assert code == 0
    assert json.loads(shown)["num_ops"] > 2
    code, _, errors = memfit("profile", f"{target_file(source.replace('targets', 'target'))}:build")
    assert code == 2
    assert "must return (model, batch)" in errors
    assert "with target" in errors


@pytest.mark.parametrize("command", ["frontier", "report"])
def test_planning_shows_progress(
    profile_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    stages: list[str] = []
    progress = SimpleNamespace(stage=stages.append)
    monkeypatch.setattr("memfit.cli.stages.progress_of_command", lambda: nullcontext(progress))
    assert memfit(command, str(profile_file), "--html", str(tmp_path / "page.html"))[0] == 0
    assert set(stages) == {"planning"}


@pytest.mark.filterwarnings("default:the plan changes nothing")
def test_a_budget_that_is_large_enough_is_a_warning_in_one_line() -> None:
    code, _, errors = memfit("fit", GPT, *TINY, "--budget", "1GiB")
    assert code == 0
    assert errors.startswith("warning: the plan changes nothing: the plain step peaks at ")
    assert errors.count("\n") == 1


def test_report_refuses_what_does_not_belong_together(profile_file: Path, tmp_path: Path) -> None:
    other, page = tmp_path / "other.json", str(tmp_path / "page.html")
    assert memfit("profile", GPT, *TINY, "--arg", "vocabulary=9", "-o", str(other))[0] == 0
    code, _, errors = memfit("report", str(profile_file), str(other), "--html", page)
    assert (code, "a page is about one profile" in errors) == (2, True)
    plan_file = tmp_path / "plan.json"
    memfit("plan", str(other), "--strategy", "full", "-o", str(plan_file))
    code, _, errors = memfit("report", str(plan_file), "--html", page)
    assert (code, "got 0 among 1 files" in errors) == (2, True)
    code, _, errors = memfit("report", str(profile_file), str(plan_file), "--html", page)
    assert (code, f"{plan_file} is about another model" in errors) == (2, True)
    layers = str(Path(__file__).parents[2] / "examples" / "layers.json")
    code, _, errors = memfit("report", layers, "--html", page)
    assert (code, '"format" must be one of memfit-profile, memfit-plan' in errors) == (2, True)
