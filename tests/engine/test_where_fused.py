"""Where kernels that replay several ops at once are to be had, and what is done where one is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.runtime.engine import native_tape
from memfit.runtime.fusing import fusing
from memfit.runtime.native import native_library

PROGRAM = "bf16 flat;aten._to_copy f32 kept i0;"


class Native:
    """Notes what is fused."""

    def __init__(self) -> None:
        self.fused: list[str] = []

    def fuse_on(self, device_type: str, _launch: int, _kernel_of: Any) -> None:
        self.fused.append(device_type)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a machine with a GPU whose libraries are there; nothing is built."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fusing, "cuda_libraries", lambda: object())
    monkeypatch.setattr(fusing, "launcher_address", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    return monkeypatch


def fused_on() -> list[str]:
    native = Native()
    fusing.start_fusing(native)
    return native.fused


def test_it_is_on_where_torch_is_for_cuda_and_its_libraries_are_there(gpu: pytest.MonkeyPatch) -> None:
    assert fused_on() == ["cuda"]
    gpu.setattr(fusing, "cuda_libraries", lambda: None)
    assert fused_on() == []


def test_it_is_off_where_torch_is_not_for_cuda(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "cuda", None)
    assert fused_on() == []


def test_it_can_be_switched_off(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("MEMFIT_FUSE", "0")
    assert fused_on() == []


def test_no_device_is_woken_to_find_out(gpu: pytest.MonkeyPatch) -> None:
    def woken() -> bool:
        raise AssertionError

    gpu.setattr(torch.cuda, "is_available", woken)
    gpu.setattr(torch.cuda, "device_count", woken)
    assert fused_on() == ["cuda"]


def test_nothing_is_built_to_find_out_that_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def built() -> Any:
        raise AssertionError

    monkeypatch.setattr(native_library, "configured_module", built)
    assert not native_tape.fuses_on(torch.device("cpu"))


class Kernels:
    """The kernels of a device on which building ends with ``error``, if that is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def kernel_of(self, _program: str) -> int:
        if self._error is not None:
            raise self._error
        return 42


def test_a_kernel_is_that_of_the_device(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(fusing, "_kernels_on", lambda device_index: Kernels() if device_index == 1 else None)
    assert fusing._kernel_of(1, PROGRAM) == 42


def test_none_is_built_into_a_graph_that_is_being_captured_and_it_is_asked_for_again(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(fusing, "_kernels_on", lambda _index: Kernels())
    gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fusing._kernel_of(0, PROGRAM) is None


def test_gpus_without_bf16_have_kernels_without_it(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(fusing, "_kernels_on", lambda _index: Kernels())
    gpu.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    assert fusing._kernel_of(0, PROGRAM) == 0
    assert fusing._kernel_of(0, PROGRAM.replace("bf16", "f16")) == 42


def test_what_cannot_be_built_is_told_and_replayed_op_by_op(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(fusing, "_kernels_on", lambda _index: Kernels(RuntimeError("nvrtcCompileProgram: no such target")))
    with pytest.warns(UserWarning, match=r"no such target\); they are replayed one by one"):
        assert fusing._kernel_of(0, PROGRAM) == 0
