"""Runs the engine's tests with both engines."""

from __future__ import annotations

import shutil

import pytest

from memfit.runtime.engine import native_tape
from memfit.runtime.native import native_library

# Modules whose tests run once, with the reason.
RUN_ONCE = {
    "test_conformance": "runs each test with both engines itself",
    "test_first_steps": "runs each test with both engines itself",
    "test_native_engine": "is about building and loading the engine in C++",
    "test_fast_path": "is about how the engine in C++ enters modules without Python",
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
