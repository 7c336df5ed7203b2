"""Generates kernels that replay several pointwise ops at once, from ops whose results are bit-identical to torch's.

`native/fusing.h` describes a kernel as text: its inputs, each with its type and its layout in memory, and its ops in
order, each with the type of its result, whether that is kept or only passed on, and what it is made from:

    bf16 flat;f32 one 2;aten._to_copy f32 kept i0;aten.mul f32 passed v0 i1;aten._to_copy bf16 kept v1;

``flat`` lies as the results do; of a ``row`` the elements of a vector lie in a row; of a ``one`` they are all the same.
The number after these is that of the dimensions that it takes to find them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memfit.runtime.fusing.pointwise_ops import POINTWISE_OPS, TYPES, TYPES_TRIED_WHOLE, VECTOR, PointwiseOp

KERNEL_NAME = "memfit_replay"
THREADS_OF_BLOCK = 256
VECTORS_OF_BLOCK = 2 * THREADS_OF_BLOCK

Launcher = Callable[[int, list[Tensor], int], None]
"""Runs (function, tensors that it reads and writes, number of vectors) now."""


class Dialect(NamedTuple):
    """The source that precedes a kernel: for all kernels, and for each type that the kernel uses.

    ``from_TYPE`` and ``to_TYPE`` turn the bits of a number into a float, and round a float to them; ``bits_of_TYPE`` is
    for floats that are rounded already.
    """

    beginning: str
    of_type: dict[str, str]


CUDA = Dialect(
    """
struct __align__(8) Four16 { unsigned short at[4]; };
struct __align__(16) Four32 { float at[4]; };
__device__ __forceinline__ unsigned quotient(unsigned number, unsigned magic, unsigned shift) {
  return (__umulhi(number, magic) + number) >> shift;
}
""",
    {
        "f32": """
__device__ __forceinline__ float from_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float bits_of_f32(float x) { return x; }
""",
        "bf16": """
__device__ __forceinline__ float from_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ unsigned short to_bf16(float x) {
  unsigned short bits; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits;
}
__device__ __forceinline__ unsigned short bits_of_bf16(float x) { return __float_as_uint(x) >> 16; }
""",
        "f16": """
__device__ __forceinline__ float from_f16(unsigned short bits) {
  float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x;
}
__device__ __forceinline__ unsigned short to_f16(float x) {
  unsigned short bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits;
}
__device__ __forceinline__ unsigned short bits_of_f16(float x) { return to_f16(x); }
""",
    },
)

_ACCESSES = """
__device__ __forceinline__ void load_TYPE(const void* from, unsigned offset, float* to) {
  FOUR all = *(const FOUR*)((const ELEMENT*)from + offset);
  for (int i = 0; i < 4; ++i) to[i] = from_TYPE(all.at[i]);
}
__device__ __forceinline__ void load_one_TYPE(const void* from, unsigned offset, float* to) {
  float x = from_TYPE(((const ELEMENT*)from)[offset]);
  for (int i = 0; i < 4; ++i) to[i] = x;
}
__device__ __forceinline__ void store_TYPE(void* to, unsigned offset, const float* from) {
  FOUR all;
  for (int i = 0; i < 4; ++i) all.at[i] = bits_of_TYPE(from[i]);
  *(FOUR*)((ELEMENT*)to + offset) = all;
}
__device__ __forceinline__ float round_TYPE(float x) { return from_TYPE(to_TYPE(x)); }
"""


def _accesses(type_name: str) -> str:
    """Return the functions by which vectors of a type are read and written."""
    four, element = ("Four32", "float") if type_name == "f32" else ("Four16", "unsigned short")
    return _ACCESSES.replace("TYPE", type_name).replace("FOUR", four).replace("ELEMENT", element)


class _Input(NamedTuple):
    type: str
    access: str
    num_dimensions: int


class _Op(NamedTuple):
    name: str
    type: str
    is_kept: bool
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelProgram:
    """What one kernel does."""

    inputs: tuple[_Input, ...]
    ops: tuple[_Op, ...]

    @staticmethod
    def read(text: str) -> KernelProgram:
        """Return the program that ``text`` describes."""
        inputs: list[_Input] = []
        ops: list[_Op] = []
        for line in text.strip(";").split(";"):
            first, *others = line.split()
            if first in TYPES:
                inputs.append(_Input(first, others[0], int(others[1]) if len(others) > 1 else 1))
            else:
                ops.append(_Op(first, others[0], others[1] == "kept", tuple(others[2:])))
        return KernelProgram(tuple(inputs), tuple(ops))

    def type_of(self, operand: str) -> str:
        """Return the type of an input ("i0") or of an op's result ("v0")."""
        number = int(operand[1:])
        return self.inputs[number].type if operand[0] == "i" else self.ops[number].type

    def source(self, dialect: Dialect = CUDA) -> str:
        """Return the kernel.

        Each thread works on two vectors of four elements, which lie as far apart as a block has threads: neighbours
        read and write neighbouring vectors, and both loads are in flight together.
        """
        types = {one.type for one in self.inputs} | {op.type for op in self.ops}
        parameters = [f"const void* __restrict__ i{number}" for number in range(len(self.inputs))]
        parameters += [f"void* __restrict__ o{number}" for number, op in enumerate(self.ops) if op.is_kept]
        parameters.append("unsigned num_vectors")
        loads: list[str] = []
        for number, one in enumerate(self.inputs):
            offset = "first"
            if one.access != "flat":
                parameters += self._parameters_of_access(number)
                loads += self._offset(number)
                offset = f"offset{number}"
            kind = "load_one" if one.access == "one" else "load"
            loads.append(f"{kind}_{one.type}(i{number}, {offset}, i{number}s[part]);")
        stores = [
            f"store_{op.type}(o{number}, first, v{number}s[part]);" for number, op in enumerate(self.ops) if op.is_kept
        ]
        lines = [
            dialect.beginning,
            *(dialect.of_type[name] + _accesses(name) for name in TYPES if name in types),
            f'extern "C" __global__ void __launch_bounds__({THREADS_OF_BLOCK})',
            f"{KERNEL_NAME}({', '.join(parameters)}) {{",
            f"unsigned vector = blockIdx.x * {VECTORS_OF_BLOCK}u + threadIdx.x;",
            *(f"float i{number}s[2][4];" for number in range(len(self.inputs))),
            *(f"float v{number}s[2][4];" for number in range(len(self.ops))),
            *_for_both_parts(loads),
            '_Pragma("unroll") for (int part = 0; part < 2; ++part)',
            '_Pragma("unroll") for (int i = 0; i < 4; ++i) {',
            *(self._computation(number) for number in range(len(self.ops))),
            "}",
            *_for_both_parts(stores),
            "}",
        ]
        return "\n".join(lines)

    def _parameters_of_access(self, number: int) -> list[str]:
        outer = range(1, self.inputs[number].num_dimensions)
        names = ("size", "magic", "shift", "stride")
        return [f"unsigned {name}{number}_{i}" for i in outer for name in names]

    def _offset(self, number: int) -> list[str]:
        one = self.inputs[number]
        lines = [f"unsigned rest{number} = first, offset{number} = 0;"]
        for i in range(1, one.num_dimensions):
            # The innermost dimension, of which a row has neighbours and a one nothing, and then those around it. Each
            # size is that of the dimension just inside.
            place = f"{number}_{i}"
            lines.append(f"unsigned around{place} = quotient(rest{number}, magic{place}, shift{place});")
            within = f"rest{number} - around{place} * size{place}"
            if i > 1:
                lines.append(f"offset{number} += ({within}) * stride{number}_{i - 1};")
            elif one.access == "row":
                lines.append(f"offset{number} = {within};")
            lines.append(f"rest{number} = around{place};")
        if one.num_dimensions > 1:
            lines.append(f"offset{number} += rest{number} * stride{number}_{one.num_dimensions - 1};")
        return lines

    def _computation(self, number: int) -> str:
        op = self.ops[number]
        known, text = _known(op.name)
        named = ", ".join(f"{name} = {operand}s[part][i]" for name, operand in zip("ab", op.operands, strict=False))
        return f"{{ float {named}; v{number}s[part][i] = round_{op.type}({known.expressions[text]}); }}"


def _for_both_parts(lines: list[str]) -> list[str]:
    return [
        '_Pragma("unroll") for (int part = 0; part < 2; ++part) {',
        f"unsigned first = (vector + part * {THREADS_OF_BLOCK}u) * {VECTOR}u;",
        f"if (vector + part * {THREADS_OF_BLOCK}u < num_vectors) {{",
        *lines,
        "} }",
    ]


def _known(name: str) -> tuple[PointwiseOp, str]:
    """Return the op behind a name in a program, and the text that is part of it."""
    if name in POINTWISE_OPS:
        return POINTWISE_OPS[name], ""
    op_name, _, text = name.rpartition(".")
    return POINTWISE_OPS[op_name], text


class FusedKernels:
    """The kernels of one device, built by ``build`` (source to function) and tried by ``launch``."""

    def __init__(self, device: torch.device, build: Callable[[str], int], launch: Launcher, dialect: Dialect) -> None:
        self._device = device
        self._build = build
        self._launch = launch
        self._dialect = dialect
        self._is_right: dict[tuple[str, ...], bool] = {}
        self._functions: dict[str, int] = {}

    def kernel_of(self, text: str) -> int:
        """Return the function for the program ``text``, 0 if one of its ops is not bit-identical to torch's."""
        if text not in self._functions:
            self._functions[text] = self._new_kernel(KernelProgram.read(text))
        return self._functions[text]

    def _new_kernel(self, program: KernelProgram) -> int:
        for op in program.ops:
            kind = (op.name, op.type, *(program.type_of(operand) for operand in op.operands))
            if kind not in self._is_right:
                self._is_right[kind] = self._gives_the_same(kind)
            if not self._is_right[kind]:
                return 0
        return self._build(program.source(self._dialect))

    def _gives_the_same(self, kind: tuple[str, ...]) -> bool:
        name, result_type, *types = kind
        if not _known(name)[0].is_exact and (result_type not in TYPES_TRIED_WHOLE or types != [result_type]):
            return False
        inputs = "".join(f"{of_type} flat;" for of_type in types)
        operands = " ".join(f"i{number}" for number in range(len(types)))
        function = self._build(
            KernelProgram.read(f"{inputs}{name} {result_type} kept {operands}").source(self._dialect)
        )
        arguments = _arguments_to_try([TYPES[of_type] for of_type in types], self._device)
        found = torch.empty(arguments[0].shape, dtype=TYPES[result_type], device=self._device)
        self._launch(function, [*arguments, found], found.numel() // VECTOR)
        expected = _by_torch(name, arguments, found.dtype)
        is_same = (found == expected) & (found.signbit() == expected.signbit()) | (found.isnan() & expected.isnan())
        return bool(is_same.all())


def _by_torch(name: str, arguments: list[Tensor], result_type: torch.dtype) -> Tensor:
    known, text = _known(name)
    if known.casts:
        return arguments[0].to(result_type, copy=True)
    short_name = name.split(".")[1]
    op: Any = getattr(getattr(torch.ops.aten, short_name), known.overload or "default")
    result: Tensor = op(*arguments, **({"approximate": text} if text else {}))
    return result


def _arguments_to_try(types: list[torch.dtype], device: torch.device) -> list[Tensor]:
    """Return all numbers of a 16-bit type; of wider types, and of pairs, a sample with all special cases."""
    if len(types) == 1 and types[0].itemsize == 2:
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu")
        return [bits.to(torch.int16).view(types[0]).to(device)]
    some = [_telling_numbers(of_type, 256 if len(types) == 2 else 2**16) for of_type in types]
    if len(some) == 1:
        return [some[0].to(device)]
    first, second = some
    return [first.repeat_interleave(256).to(device), second.repeat(256).to(device)]


def _telling_numbers(of_type: torch.dtype, how_many: int) -> Tensor:
    """Return zeros, infinities, the least and the largest numbers, ones half way between two of 16 bits, and others."""
    limits = torch.finfo(of_type)
    named = [0.0, 1.0, 1.5, limits.tiny, limits.tiny * 2**-3, limits.max, limits.eps, 1 + limits.eps, float("inf")]
    named += [1 + 2.0**-8, 1 + 2.0**-9, 1 + 3 * 2.0**-9, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, float("nan")]
    both_signs = [sign * number for sign, number in itertools.product((1, -1), named)]
    # On the host, whatever the user's default is, and from a generator that is not the user's.
    signed = torch.tensor(both_signs, dtype=torch.float64, device="cpu").to(of_type)
    random = torch.Generator("cpu").manual_seed(0)
    integers = torch.int16 if of_type.itemsize == 2 else torch.int32
    limits_of_bits = torch.iinfo(integers)
    others = torch.randint(
        limits_of_bits.min, limits_of_bits.max, (how_many - len(signed),), generator=random, device="cpu"
    )
    return torch.cat([signed, others.to(integers).view(of_type)])
