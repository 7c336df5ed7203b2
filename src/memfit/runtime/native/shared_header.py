"""The header that the engine in C++ is built with: the enums and constants of the engine in Python."""

from __future__ import annotations

from enum import Enum

from memfit.runtime.engine.op_rules import Treatment
from memfit.runtime.engine.planned_modules import Fate
from memfit.runtime.fusing.fused_kernels import THREADS_OF_BLOCK, VECTORS_OF_BLOCK
from memfit.runtime.fusing.pointwise_ops import VECTOR, ArgumentRule

SHARED_HEADER = "shared.h"
_ENUMS: tuple[type[Enum], ...] = (Fate, Treatment, ArgumentRule)
_CONSTANTS = {"WIDTH": VECTOR, "THREADS": THREADS_OF_BLOCK, "VECTORS_OF_BLOCK": VECTORS_OF_BLOCK}


def shared_header() -> str:
    """Return the header. Members of enums are numbered in their order."""
    enums = [f"enum class {enum.__name__} {{ {', '.join(member.name for member in enum)} }};" for enum in _ENUMS]
    constants = [f"constexpr int64_t {name} = {number};" for name, number in _CONSTANTS.items()]
    lines = ["#pragma once", "#include <cstdint>", "namespace memfit {", *enums, *constants, "}  // namespace memfit"]
    return "\n".join(lines) + "\n"
