"""Builds CUDA kernels from their source while the program runs, by NVIDIA's own libraries: NVRTC and the driver.

torch builds kernels with them, too, and comes with a library that finds them.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from memfit.runtime.fusing.fused_kernels import KERNEL_NAME, THREADS_OF_BLOCK, VECTORS_OF_BLOCK


@functools.cache
def cuda_libraries() -> ctypes.CDLL | None:
    """Return a library that has the functions of NVRTC and of the driver, None where there is none."""
    library = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    try:
        libraries = ctypes.CDLL(str(library))
        # Looked up in all that it depends on.
        for name in ("nvrtcCompileProgram", "nvrtcGetCUBIN", "cuModuleLoadData", "cuLaunchKernel"):
            getattr(libraries, name)
    except (OSError, AttributeError):
        return None
    return libraries


def launcher_address() -> int:
    """Return where `cuLaunchKernel` is."""
    address = ctypes.cast(_known_libraries().cuLaunchKernel, ctypes.c_void_p).value
    assert address is not None
    return address


def built_function(source: str, device: torch.device) -> int:
    """Return the address of the kernel in ``source`` on ``device``."""
    libraries = _known_libraries()
    with torch.cuda.device(device):
        # What loads a module needs the context that torch makes with its first tensor.
        torch.cuda.current_stream().synchronize()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        binary = _compiled(libraries, source, device)
        _check(libraries.cuModuleLoadData(ctypes.byref(module), binary), "cuModuleLoadData")
        name = KERNEL_NAME.encode()
        _check(libraries.cuModuleGetFunction(ctypes.byref(function), module, name), "cuModuleGetFunction")
    assert function.value is not None
    return function.value


def launch_now(function: int, tensors: list[Tensor], num_vectors: int) -> None:
    """Run the kernel on ``tensors`` and wait for it."""
    libraries = _known_libraries()
    values = [*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), ctypes.c_uint(num_vectors)]
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    num_blocks = -(-num_vectors // VECTORS_OF_BLOCK)
    with torch.cuda.device(tensors[0].device):
        stream = torch.cuda.current_stream()
        launched = libraries.cuLaunchKernel(
            *(ctypes.c_void_p(function), num_blocks, 1, 1, THREADS_OF_BLOCK, 1, 1, 0),
            *(ctypes.c_void_p(stream.cuda_stream), addresses, None),
        )
        _check(launched, "cuLaunchKernel")
        stream.synchronize()


def _known_libraries() -> ctypes.CDLL:
    """Return the functions of a machine that has them."""
    libraries = cuda_libraries()
    assert libraries is not None
    return libraries


def _compiled(libraries: ctypes.CDLL, source: str, device: torch.device) -> ctypes.Array[ctypes.c_char]:
    program = ctypes.c_void_p()
    created = libraries.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"memfit.cu", 0, None, None)
    _check(created, "nvrtcCreateProgram")
    try:
        major, minor = torch.cuda.get_device_capability(device)
        options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
        built = libraries.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if built != 0:
            size = ctypes.c_size_t()
            libraries.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            libraries.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"nvrtcCompileProgram: {log.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        _check(libraries.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        binary = ctypes.create_string_buffer(size.value)
        _check(libraries.nvrtcGetCUBIN(program, binary), "nvrtcGetCUBIN")
        return binary
    finally:
        libraries.nvrtcDestroyProgram(ctypes.byref(program))


def _check(error: int, function: str) -> None:
    if error != 0:
        raise RuntimeError(f"{function} failed: {error}")
