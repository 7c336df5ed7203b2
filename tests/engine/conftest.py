"""Runs the engine's tests with both engines."""

from __future__ import annotations

import shutil

import pytest

from memfit.runtime.engine import native_tape
from memfit.runtime.native import native_library

# Slow, or not about the engine alone: these are run once, with the engine that users get.
RUN_ONCE = {
    "test_applied_model",
    "test_conformance",
    "test_cuda_graphs",
    "test_distributed",
    "test_first_steps",
    "test_fusing",
    "test_fusing_on_gpu",
    "test_native_engine",
    "test_on_gpu",
    "test_other_inputs",
    "test_predicted_peaks",
    "test_profile_keeps_the_model",
    "test_step_comparison",
    "test_unfit_plans",
    "test_saved_tensor_hooks",
    "test_where_fused",
    "test_fast_path",
}
ENGINES = ("C++", "Python")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in RUN_ONCE:
        metafunc.parametrize("engine", ENGINES, indirect=True)


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
