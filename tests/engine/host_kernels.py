"""The kernels that replay several ops at once, built for the host: the same source, by the C++ compiler.

So all but the few lines of `fused_kernels.CUDA` are tried where there is no GPU. The host's own functions (``expf``)
are not those of torch's kernels for the host, so the ops that need them are not fused there.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.runtime.fusing.fused_kernels import KERNEL_NAME, VECTORS_OF_BLOCK, Dialect, FusedKernels

HOST = Dialect(
    """
#include <cmath>
#include <cstdint>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)
static struct { unsigned x; } blockIdx, threadIdx;
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
struct __align__(8) Four16 { unsigned short at[4]; };
struct __align__(16) Four32 { float at[4]; };
static unsigned quotient(unsigned number, unsigned magic, unsigned shift) {
  return ((unsigned)((unsigned long long)number * magic >> 32) + number) >> shift;
}
""",
    {
        "f32": """
static float from_f32(float x) { return x; }
static float to_f32(float x) { return x; }
static float bits_of_f32(float x) { return x; }
""",
        "bf16": """
static float from_bf16(unsigned short bits) {
  uint32_t wide = (uint32_t)bits << 16; float x; memcpy(&x, &wide, 4); return x;
}
static unsigned short to_bf16(float x) {
  if (x != x) return 0x7fc0;
  uint32_t bits; memcpy(&bits, &x, 4); return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static unsigned short bits_of_bf16(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits >> 16; }
""",
        "f16": """
static float from_f16(unsigned short bits) { _Float16 x; memcpy(&x, &bits, 2); return x; }
static unsigned short to_f16(float x) { _Float16 y = x; unsigned short bits; memcpy(&bits, &y, 2); return bits; }
static unsigned short bits_of_f16(float x) { return to_f16(x); }
""",
    },
)

LAUNCHER = """
extern "C" int launch(void* function, unsigned num_blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void*, void** parameters, void**) {
  ((void (*)(void**, unsigned))function)(parameters, num_blocks);
  return 0;
}
"""

_PARAMETERS = re.compile(rf"{KERNEL_NAME}\((.*)\) {{")


def _with_entry(source: str) -> str:
    """Add a function that runs all threads of the kernel, one after the other."""
    found = _PARAMETERS.search(source)
    assert found is not None
    types = [parameter.rpartition(" ")[0].replace("__restrict__", "") for parameter in found[1].split(",")]
    arguments = ", ".join(f"*({of_type}*)parameters[{place}]" for place, of_type in enumerate(types))
    return f"""{source}
extern "C" void entry(void** parameters, unsigned num_blocks) {{
  for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x) {KERNEL_NAME}({arguments});
}}"""


class HostKernels:
    """Lets an engine fuse what it replays on the host. ``programs`` are those asked for, ``built`` those there are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: list[ctypes.CDLL] = []
        self._addresses: dict[str, int] = {}
        self._launcher = self._address(LAUNCHER, "launch")
        self._kernels = FusedKernels(torch.device("cpu"), self._built, self._launch_now, HOST)
        self.programs: list[str] = []
        self.built: list[str] = []

    def start(self, native: Any) -> None:
        """Fuse on the host from now on."""
        self.programs.clear()
        native.fuse_on("cpu", self._launcher, self._kernel_of)

    def _kernel_of(self, _device_index: int, program: str) -> int:
        self.programs.append(program)
        function = self._kernels.kernel_of(program)
        if function:
            self.built.append(program)
        return function

    def _built(self, source: str) -> int:
        return self._address(_with_entry(source), "entry")

    def _address(self, source: str, name: str) -> int:
        if source not in self._addresses:
            path = self._folder / f"kernel{len(self._libraries)}.cpp"
            path.write_text(source)
            compiler = shutil.which("c++")
            assert compiler is not None
            options = ("-O1", "-std=c++20", "-ffp-contract=off", "-shared", "-fPIC", "-w")
            subprocess.run([compiler, *options, str(path), "-o", str(path.with_suffix(".so"))], check=True)
            library = ctypes.CDLL(str(path.with_suffix(".so")))
            self._libraries.append(library)
            address = ctypes.cast(library[name], ctypes.c_void_p).value
            assert address is not None
            self._addresses[source] = address
        return self._addresses[source]

    def _launch_now(self, function: int, tensors: list[Tensor], num_vectors: int) -> None:
        values = [*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), ctypes.c_uint(num_vectors)]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint)(function)
        run(ctypes.addressof(addresses), -(-num_vectors // VECTORS_OF_BLOCK))
