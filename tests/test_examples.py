"""The examples run as they stand, the notebook cell by cell, twice."""

from __future__ import annotations

import json
import runpy
import warnings
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "lora": ("transformers", "peft"),
    "transformers_trainer": ("transformers", "accelerate"),
    "trl_trainers": ("trl",),
    "accelerate_loop": ("accelerate",),
    "lightning_module": ("lightning",),
}
# torchtitan needs a GPU, or tests/integrations/test_torchtitan.py, which gives it the CPU as one.
ELSEWHERE = {"torchtitan_trainer"}
# What torchrun sets for a process that is alone.
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


# The size that tunes best may be one whose plain step fits.
@pytest.mark.filterwarnings("ignore:the plan changes nothing")
@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - ELSEWHERE))
def test_the_example_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith("_torchrun"):
        for variable, value in TORCHRUN.items():
            monkeypatch.setenv(variable, value)
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    with warnings.catch_warnings():
        # torch and the frameworks warn of each other.
        if name in NEEDS or name.endswith("_torchrun"):
            warnings.simplefilter("ignore")
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    if "memfit.fit(" in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"):
        assert "gradients  equal" in printed
        assert "budget     within" in printed


def test_the_notebook_runs_and_every_cell_can_be_run_again() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            source = compile("".join(cell["source"]), cell["id"], "exec")
            # A plan that was removed may be removed again; a fitted model may be fitted again.
            for _ in range(2 if "backward" not in "".join(cell["source"]) else 1):
                exec(source, names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    assert not any("forward" in vars(module) for module in model.modules())


def test_every_example_is_listed() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"]
    assert [name for name in files if f"`{name}`" not in readme] == []
