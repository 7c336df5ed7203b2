"""memfit fits a PyTorch training step into the memory you have, at the lowest slowdown the hardware allows.

Every public name is importable from here. Importing memfit loads neither torch, NumPy nor SciPy: a name's
home module is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memfit._version import __version__

if TYPE_CHECKING:
    from memfit.errors import CheckpointCapacityError as CheckpointCapacityError
    from memfit.errors import CheckpointMissingError as CheckpointMissingError
    from memfit.errors import EmptyProfilesError as EmptyProfilesError
    from memfit.errors import InfeasibleBudgetError as InfeasibleBudgetError
    from memfit.errors import InvalidParameterError as InvalidParameterError
    from memfit.errors import LayerIndexError as LayerIndexError
    from memfit.errors import MemfitError as MemfitError
    from memfit.errors import PlanFileError as PlanFileError
    from memfit.errors import StaleValueError as StaleValueError

_HOME_OF = {
    "memfit.errors": (
        "CheckpointCapacityError",
        "CheckpointMissingError",
        "EmptyProfilesError",
        "InfeasibleBudgetError",
        "InvalidParameterError",
        "LayerIndexError",
        "MemfitError",
        "PlanFileError",
        "StaleValueError",
    ),
    "memfit.layers.profile": ("LayerMemoryProfile", "LayerTypeHint"),
    "memfit.layers.strategies": (
        "AttentionOnly",
        "Budget",
        "EveryNthLayer",
        "FfnOnly",
        "Full",
        "LargestLayers",
        "NoCheckpointing",
        "Selective",
        "SqrtLayers",
    ),
    "memfit.layers.plan": (
        "ActivationStats",
        "CheckpointPlan",
        "activation_stats",
        "build_checkpoint_plan",
        "estimate_memory_with_plan",
        "estimate_total_recompute_flops",
    ),
    "memfit.layers.checkpointer": ("ActivationCheckpointer", "CheckpointConfig"),
    "memfit.graph.model_profile": ("ModelProfile",),
    "memfit.graph.plan": ("Decision", "Plan"),
    "memfit.planning.planner": ("plan",),
    "memfit.capture.profiling": ("profile",),
    "memfit.runtime.apply": ("Applied", "apply"),
}
_MODULE_OF = {name: module for module, names in _HOME_OF.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
