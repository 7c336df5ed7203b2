"""What newcomers get wrong: each a line that says what to do, an exit code, and no trace."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import TINY
from tests.cli.running import memfit

GPT = "memfit.models:gpt"
PREAMBLE = """
import torch
from torch import nn

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])

    def forward(self, x):
        return self.blocks(x)

"""


def assert_one_line(result: tuple[int, str, str], code: int, pattern: str) -> None:
    found, shown, errors = result
    assert (found, shown) == (code, "")
    # An infeasible budget has one more line, which says what would fit.
    assert errors.count("\n") == 1 + errors.count("\nhint: ")
    assert "Traceback" not in errors
    assert re.search(pattern, errors), errors


@pytest.mark.parametrize(
    ("target", "pattern"),
    [
        ("gpt", "'gpt' is not a valid TARGET; write package.module:function or path/file.py:function"),
        ("memfit.models:", "'memfit.models:' is not a valid TARGET"),
        ("memfit.modles:gpt", "there is no module 'memfit.modles'"),
        ("nowhere:gpt", "there is no module 'nowhere', here or among the installed packages"),
        ("..:gpt", "is not a module name"),
        ("memfit.models:gtp", "the module has no function 'gtp'; there is gpt"),
        ("memfit.models:__all__", "'__all__' is a list, not a function"),
        ("missing/train.py:build", "missing/train.py: there is no such file"),
    ],
)
def test_a_target_that_is_not_there(target: str, pattern: str) -> None:
    assert_one_line(memfit("profile", target), 2, pattern)


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("def build():\n    return 3\n", r"must return \(model, batch\), .* or a dict .*; got 3 \(int\)"),
        ("def build():\n    return ()\n", r"got \(\) \(tuple\) of 0"),
        ("def build():\n    return 1, 2\n", r"must return a torch.nn.Module first, as in \(model, batch\); got 1"),
        (
            PREAMBLE + "def build():\n    return Chain(), torch.ones(2, 8), 0.5\n",
            "loss is a function of the model's output .*; got 0.5",
        ),
        (
            PREAMBLE + "def build():\n    return Chain(), torch.ones(2, 8), None, 'adam'\n",
            "optimizer is a torch.optim.Optimizer, .*; got str",
        ),
        (
            "def build():\n    return 1 / 0\n",
            r"train.py, line 2, in build \(return 1 / 0\): ZeroDivisionError: division",
        ),
        (
            "x = 1\nimport nothing_like_it\n",
            r"was imported: .*train.py, line 2, .*ModuleNotFoundError: No module named",
        ),
        ("def build(:\n", r"train.py, line 1: SyntaxError: invalid syntax"),
        ("raise SystemExit(3)\n", r"it called sys.exit\(3\); let the function return instead"),
        ("def build(layers):\n    return layers\n", "missing a required argument: 'layers'; it takes layers"),
        (
            PREAMBLE + "def build():\n    return Chain(), torch.ones(2, 9)\n",
            r"while the model ran: .*train.py, line 11, in forward \(return self.blocks\(x\)\): RuntimeError: mat1 and",
        ),
        (
            PREAMBLE + "def build():\n    return nn.Linear(8, 8), torch.ones(2, 9)\n",
            "while the model ran: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        ),
        (
            PREAMBLE + "def build():\n    return Chain(), torch.ones(2, 8), lambda output: output\n",
            r"the loss is a tensor of shape \(2, 8\); it must be a tensor with one element",
        ),
        (
            PREAMBLE + "def build():\n    return Chain(), torch.ones(2, 8), lambda output: 3.0\n",
            "the loss is a float; it must be a tensor with one element",
        ),
        (
            PREAMBLE + "def build():\n    return Chain(), torch.ones(2, 8), lambda output, targets: output.mean()\n",
            r"loss is called as loss\(output\), and it takes \(output, targets\); .* a dict: .*'targets': targets",
        ),
        (
            PREAMBLE + "def build():\n    return Chain(), lambda size: torch.ones(size, 8), torch.sum\n",
            "the batch is a function; that is for `memfit tune`, other commands need a batch",
        ),
        (
            PREAMBLE + "def build():\n    return {'model': Chain(), 'batch': torch.ones(2, 8), 'batchsize': 3}\n",
            r"must return .* a dict with 'model' and any of batch, loss, .* with batchsize",
        ),
        (
            PREAMBLE + "def build():\n    return {'batch': torch.ones(2, 8)}\n",
            r"must return .* without 'model'",
        ),
        (
            PREAMBLE + "def build():\n    model = Chain()\n    model.blocks[0].to('meta')\n    return model, 1\n",
            "has parameters on cpu and meta; a budget is for one device",
        ),
    ],
)
@pytest.mark.parametrize("command", ["profile", "fit"])
def test_a_target_that_goes_wrong_is_shown_as_the_users(
    target_file: Callable[[str], str], command: str, source: str, pattern: str
) -> None:
    options = ["--budget", "1MiB"] if command == "fit" else []
    assert_one_line(memfit(command, target_file(source) + ":build", *options), 2, pattern)


def test_debug_shows_the_trace_of_the_users_error(target_file: Callable[[str], str]) -> None:
    path = target_file("def build():\n    return 1 / 0\n")
    code, _, errors = memfit("--debug", "profile", f"{path}:build")
    assert code == 2
    assert re.search(r"^ZeroDivisionError: .*^memfit\.errors\.MemfitError: ", errors, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("argument", "pattern"),
    [
        ("layers", "--arg is name=value, such as --arg layers=12; got 'layers'"),
        ("=3", "--arg is name=value"),
        (
            "depth=3",
            r"gpt\(\) cannot be called with these --arg: got an unexpected keyword argument 'depth'; it takes layers",
        ),
        ("layers=many", "layers must be a whole number, at least 1; got 'many'"),
        ("layers=0", "layers must be a whole number, at least 1"),
    ],
)
def test_an_argument_that_cannot_be(argument: str, pattern: str) -> None:
    assert_one_line(memfit("profile", GPT, "--arg", argument), 2, pattern)


def test_an_argument_given_twice() -> None:
    assert_one_line(memfit("profile", GPT, "--arg", "layers=1", "--arg", "layers=2"), 2, "--arg layers is given twice")


@pytest.mark.parametrize(
    ("budget", "code", "pattern"),
    [
        ("20 bananas", 2, "'20 bananas' is not a budget; write a size with a unit .* a share .* or auto"),
        ("-1GiB", 2, "'-1GiB' is not a budget"),
        ("1.5", 2, "'1.5' is not a budget; .* a share of the device's memory above 0 and at most 1"),
        ("6 PiB", 2, "'6 PiB' is not a budget; .* TiB"),
        ("2,5GiB", 2, "'2,5GiB' is not a budget"),
        ("0x10", 2, "'0x10' is not a budget"),
        ("inf", 2, "'inf' is not a budget"),
        ("7", 1, r"and the given one is 7 B \(7 bytes\)"),
        ("0", 2, "'0' is not a budget"),
        ("nan", 2, "'nan' is not a budget"),
        ("1kB", 1, r"the smallest budget found for this step is .* the given one is 1000 B"),
    ],
)
def test_a_budget_that_cannot_be(budget: str, code: int, pattern: str) -> None:
    assert_one_line(memfit("fit", GPT, *TINY, f"--budget={budget}"), code, pattern)


@pytest.mark.parametrize(("command", "option"), [("profile", "-o"), ("fit", "-o"), ("fit", "--html"), ("verify", "-o")])
def test_a_file_that_cannot_be_written_is_told_before_the_target_runs(
    tmp_path: Path, target_file: Callable[[str], str], plan_file: Path, command: str, option: str
) -> None:
    needed = {"profile": [], "fit": ["--budget=1GiB"], "verify": [str(plan_file)]}[command]
    target = target_file("raise RuntimeError('it ran')")
    result = memfit(command, f"{target}:build", *needed, option, str(tmp_path / "missing" / "file"))
    assert_one_line(result, 2, "missing/file: cannot be written: No such file or directory")


@pytest.mark.parametrize("option", ["--html", "--plot"])
def test_a_page_that_cannot_be_written_is_told_before_planning(
    tmp_path: Path, profile_file: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("memfit.cli.stages.frontier_of", lambda *_: pytest.fail("it planned"))
    result = memfit("frontier", str(profile_file), option, str(tmp_path / "missing" / "page.svg"))
    assert_one_line(result, 2, "page.svg: cannot be written: No such file or directory")


@pytest.mark.parametrize("command", ["plan", "verify", "frontier", "report"])
def test_a_file_cut_in_half_says_where(tmp_path: Path, profile_file: Path, plan_file: Path, command: str) -> None:
    half = tmp_path / "half.json"
    text = (plan_file if command == "verify" else profile_file).read_text(encoding="utf-8")
    half.write_text(text[: len(text) // 2], encoding="utf-8")
    arguments = {
        "plan": ["plan", str(half), "--strategy", "full"],
        "verify": ["verify", GPT, str(half), *TINY],
        "frontier": ["frontier", str(half)],
        "report": ["report", str(half), "--html", str(tmp_path / "page.html")],
    }[command]
    assert_one_line(memfit(*arguments), 2, r"half.json: line \d+, column \d+: not JSON")


def test_a_plan_for_another_model_is_refused(plan_file: Path) -> None:
    assert_one_line(
        memfit("verify", GPT, str(plan_file), *TINY, "--arg", "vocabulary=7"), 2, "this plan is for another model"
    )


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ("plan FOLDER --strategy full", "cannot be read: Is a directory"),
        ("plan EMPTY --strategy full", "line 1, column 1: not JSON: Expecting value; the file ends too early"),
        ("plan BINARY --strategy full", "line 1: byte 0 is not UTF-8 text"),
        ("plan LIST --strategy full", r"must hold a JSON object with a format and a version; got \[1\]"),
        ("plan LATER --strategy full", "version 99 of memfit-profile is newer than this memfit.*upgrade memfit"),
        ("plan PLAN --strategy full", '"format" must be one of memfit-layers, memfit-profile; got .memfit-plan'),
        ("verify memfit.models:gpt PROFILE", '"format" must be "memfit-plan"; got .memfit-profile'),
        ("frontier PLAN", '"format" must be "memfit-profile"; got .memfit-plan'),
        ("plan PROFILE --budget 101%", "'101%' is not a budget"),
        ("plan PROFILE --budget 0%", "'0%' is not a budget"),
        ("plan PROFILE --budget=", "'' is not a budget"),
        ("plan PROFILE --budget 6X", "'6X' is not a budget"),
        ("plan PROFILE --budget 1e9", "'1e9' is not a budget"),
        ("plan PROFILE --budget 1MiB --host-budget 5%", "'5%' is not a size; write a number and a unit"),
        (
            "plan PROFILE --budget 1MiB --host-budget 1GiB",
            "a CPU's memory is the host's, so there is nowhere",
        ),
        ("plan PROFILE --strategy full --host-budget 1GiB", "--host-budget needs --budget"),
        ("plan PROFILE --strategy fulll", "'fulll' is not a strategy; write one of none, full, attention"),
        ("plan PROFILE --strategy every-nth:1.5", "'every-nth:1.5' is not a strategy"),
        ("plan PROFILE --strategy selective:2", "checkpoint_ratio must be a number from 0 to 1"),
        ("tune memfit.models:gpt --budget 1MiB --sizes 8,,9", "--sizes is a list of batch sizes such as 4,8,16"),
        ("tune memfit.models:gpt --budget 1MiB --sizes 4", "make_batch is a function .* got Tensor of shape"),
        ("report PLAN --html FOLDER/page.html", "a page is about one profile, .* got 0 among 1 files"),
        ("plan PROFILE", "give exactly one of --strategy and --budget; got neither"),
        ("plan PROFILE --budget 1MiB --strategy none", "give exactly one of --strategy and --budget; got both"),
        ("plan PROFILE --strategy full --force-save blocks.9", "matches none of the 55 values.*the nearest are"),
        ("plan PROFILE --strategy full --force-save=", "a selector is a text such as"),
        ("report PROFILE --html FOLDER", "cannot be written: Is a directory"),
        ("frontier PROFILE --plot FOLDER/x", "a plot is written as .png, .svg, .pdf"),
        ("profile memfit.models:gpt --arg batch=0", "batch must be a whole number, at least 1; got 0"),
        ("profile memfit.models:gpt -o FOLDER/no/profile.json", "cannot be written: No such file or directory"),
        ("demo --out PROFILE", "cannot be made a folder: File exists"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_what_can(
    tmp_path: Path, profile_file: Path, plan_file: Path, arguments: str, pattern: str
) -> None:
    later = json.loads(profile_file.read_text(encoding="utf-8")) | {"version": 99}
    contents = {"EMPTY": b"", "BINARY": b"\xff\xfe\x00", "LIST": b"[1]", "LATER": json.dumps(later).encode()}
    paths = {"FOLDER": tmp_path, "PROFILE": profile_file, "PLAN": plan_file}
    for name, content in contents.items():
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_bytes(content)
    for name, path in paths.items():
        arguments = arguments.replace(name, str(path))
    assert_one_line(memfit(*arguments.split(" ")), 2, pattern)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["plan"], "Missing argument 'file'"),
        (["fit", GPT], "Missing option '--budget'"),
        (["fit", GPT, "--budget", "4MiB", "--bananas"], "No such option: --bananas"),
        (["frontier", "p.json", "--points", "0"], "Invalid value for '--points'"),
    ],
)
def test_what_is_no_command_shows_the_usage(arguments: list[str], words: str) -> None:
    code, shown, errors = memfit(*arguments)
    assert (code, shown) == (2, "")
    assert errors.startswith("Usage: memfit")
    assert words in errors


def test_an_infeasible_budget_says_which_one_would_fit(profile_file: Path) -> None:
    code, _, errors = memfit("plan", str(profile_file), "--budget", "100kB")
    smallest = re.search(r"^hint: the smallest budget is --budget (\S+)$", errors, re.MULTILINE)
    assert code == 1
    assert smallest is not None
    assert memfit("plan", str(profile_file), "--budget", smallest[1])[0] == 0


DIFFERS = (
    PREAMBLE
    + """
class Differs(Chain):
    def forward(self, x):
        planned = any("forward" in vars(module) for module in self.modules())
        return self.blocks(x).sum() * (2 if planned else 1)

def build():
    return Differs(), torch.ones(64, 8)
"""
)


def test_a_check_that_does_not_hold_exits_1_and_shows_why(tmp_path: Path, target_file: Callable[[str], str]) -> None:
    target = target_file(DIFFERS)
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    assert memfit("profile", f"{target}:build", "-o", profile)[0] == 0
    memfit("plan", profile, "--strategy", "full", "-o", plan)
    code, shown, _ = memfit("verify", f"{target}:build", plan)
    assert code == 1
    assert "6 differ (blocks.0.0.weight, blocks.0.0.bias, blocks.1.0.weight)" in shown


def test_a_fit_that_changes_gradients_exits_1(tmp_path: Path, target_file: Callable[[str], str]) -> None:
    target, profile = f"{target_file(DIFFERS)}:build", str(tmp_path / "profile.json")
    memfit("profile", target, "-o", profile)
    smallest = json.loads(memfit("frontier", profile, "--json")[1])["points"][-1]["peak_bytes"]
    assert_one_line(memfit("fit", target, f"--budget={smallest}"), 1, "changed the gradients of blocks")


def test_ctrl_c_in_the_middle_exits_130_with_one_line(tmp_path: Path, target_file: Callable[[str], str]) -> None:
    target = target_file(
        PREAMBLE
        + """
import signal

class Interrupted(Chain):
    num_calls = 0

    def forward(self, x):
        Interrupted.num_calls += 1
        if Interrupted.num_calls == 4:
            signal.raise_signal(signal.SIGINT)
        return self.blocks(x)

def build():
    return Interrupted(), torch.ones(2, 8), torch.sum
"""
    )
    output = tmp_path / "profile.json"
    # Where the tests run in the background of a shell, the signal is ignored from birth.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = memfit("profile", f"{target}:build", "-o", str(output))
    finally:
        signal.signal(signal.SIGINT, before)
    assert result == (130, "", "error: interrupted; the model is restored, and no file is half written\n")
    assert not output.exists()


def test_ctrl_c_while_the_command_line_is_imported_exits_130_with_one_line() -> None:
    script = """
import sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from memfit.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted before anything was done\n"
