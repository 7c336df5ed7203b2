"""Runs the engine's tests with both engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memfit.runtime.engine import native_tape
from memfit.runtime.native import native_library

# Modules whose tests run once, with the reason.
RUN_ONCE = {
    "test_conformance": "runs each test with both engines itself",
    "test_first_steps": "runs each test with both engines itself",
    "test_native_engine": "is about building and loading the engine in C++",
    "test_saved_tensor_hooks": "is about where the engine in C++ installs hooks; the one in Python always does",
    "test_fusing": "is about kernels that only the engine in C++ launches",
    "test_where_fused": "is about kernels that only the engine in C++ launches",
    "test_fusing_on_gpu": "is about kernels that only the engine in C++ launches",
    "test_cuda_graphs": "needs a GPU, and the engine in C++ to be captured",
    "test_on_gpu": "needs a GPU; the engine in C++ is what runs there",
    "test_distributed": "starts processes, which choose the engine themselves",
    "test_predicted_peaks": "takes a minute; the engines are compared by test_conformance and test_first_steps",
    "test_profile_keeps_the_model": "is about profiling; its one plan is applied to see that nothing is left of it",
    "test_step_comparison": "is about the comparison that other tests use; no plan is applied",
}
ENGINES = ("C++", "Python")

# What makes a pass of a test run other calls than its plan expects, which is warned of. All other tests fail by that.
RUNS_OTHERWISE_IN = {
    "test_steps_in_eval_mode_are_those_of_the_plain_model": "the plan is for training",
    "test_hooks_that_change_what_passes_through_are_obeyed": "its hooks call ops in the model's modules",
    "test_tensors_without_memory_stay_where_they_are": "ops on meta tensors are not recorded",
}
MODELS_THAT_RUN_OTHERWISE = {
    "early-exit": "how many blocks run depends on what they compute",
    "mixture-of-experts": "which experts run depends on the weights, which are trained",
    "stochastic-depth": "skips blocks at random",
    "samples": "torch.compile, in another test, switches the validation of distributions off for the process",
    "reparametrised-sampling": "torch.compile, in another test, switches the validation of distributions off",
}
SCENARIOS_THAT_RUN_OTHERWISE = {"switch_modes": "the plan is for training"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in RUN_ONCE:
        metafunc.parametrize("engine", ENGINES, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent and runs_otherwise(item):
            item.add_marker(pytest.mark.filterwarnings("ignore:a forward pass is not as planned"))


def runs_otherwise(item: pytest.Function) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    model = next((str(parameters[name]) for name in ("example", "case", "name") if name in parameters), None)
    scenario = getattr(parameters.get("scenario"), "__name__", None)
    return (
        item.originalname in RUNS_OTHERWISE_IN
        or model in MODELS_THAT_RUN_OTHERWISE
        or scenario in SCENARIOS_THAT_RUN_OTHERWISE
        # Profiles of the zoo are recorded with the engine in C++ (`plans.profile_of`). Under the dispatch mode of the
        # one in Python, torch runs a few other ops.
        or (model is not None and parameters.get("engine") == "Python")
    )


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test by the engine that is asked for."""
    name: str = getattr(request, "param", "C++")
    if name == "Python":
        monkeypatch.setattr(native_library, "configured_module", lambda: None)
    elif shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    assert native_tape.engine_name() == name
    return name
