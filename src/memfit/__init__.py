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
    from memfit.errors import VerificationError as VerificationError
    from memfit.fitted import Fitted as Fitted
    from memfit.fitting import fit as fit
    from memfit.graph.layer_profile import LayerMemoryProfile as LayerMemoryProfile
    from memfit.graph.layer_profile import LayerTypeHint as LayerTypeHint
    from memfit.graph.model_profile import ModelProfile as ModelProfile
    from memfit.graph.plan import Decision as Decision
    from memfit.graph.plan import FrontierPoint as FrontierPoint
    from memfit.graph.plan import Plan as Plan
    from memfit.graph.verification import Verification as Verification
    from memfit.layers.checkpoint_plan import ActivationStats as ActivationStats
    from memfit.layers.checkpoint_plan import CheckpointPlan as CheckpointPlan
    from memfit.layers.checkpoint_plan import activation_stats as activation_stats
    from memfit.layers.checkpoint_plan import build_checkpoint_plan as build_checkpoint_plan
    from memfit.layers.checkpoint_plan import estimate_memory_with_plan as estimate_memory_with_plan
    from memfit.layers.checkpoint_plan import estimate_total_recompute_flops as estimate_total_recompute_flops
    from memfit.layers.checkpointing.checkpointer import ActivationCheckpointer as ActivationCheckpointer
    from memfit.layers.checkpointing.checkpointer import CheckpointConfig as CheckpointConfig
    from memfit.layers.strategies import AttentionOnly as AttentionOnly
    from memfit.layers.strategies import Budget as Budget
    from memfit.layers.strategies import EveryNthLayer as EveryNthLayer
    from memfit.layers.strategies import FfnOnly as FfnOnly
    from memfit.layers.strategies import Full as Full
    from memfit.layers.strategies import LargestLayers as LargestLayers
    from memfit.layers.strategies import NoCheckpointing as NoCheckpointing
    from memfit.layers.strategies import Selective as Selective
    from memfit.layers.strategies import SqrtLayers as SqrtLayers
    from memfit.planning.planner import frontier as frontier
    from memfit.planning.planner import plan as plan
    from memfit.profiling import profile as profile
    from memfit.runtime.applying.apply import Applied as Applied
    from memfit.runtime.applying.apply import apply as apply
    from memfit.runtime.applying.apply import remove as remove
    from memfit.runtime.chunked_loss.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from memfit.tuning.tune import tune as tune
    from memfit.tuning.tuned import Tuned as Tuned
    from memfit.tuning.tuned import TunedSize as TunedSize
    from memfit.verification.verifying import verify as verify

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
        "VerificationError",
    ),
    "memfit.graph.layer_profile": ("LayerMemoryProfile", "LayerTypeHint"),
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
    "memfit.layers.checkpoint_plan": (
        "ActivationStats",
        "CheckpointPlan",
        "activation_stats",
        "build_checkpoint_plan",
        "estimate_memory_with_plan",
        "estimate_total_recompute_flops",
    ),
    "memfit.runtime.chunked_loss.linear_cross_entropy": ("linear_cross_entropy",),
    "memfit.layers.checkpointing.checkpointer": ("ActivationCheckpointer", "CheckpointConfig"),
    "memfit.graph.model_profile": ("ModelProfile",),
    "memfit.graph.plan": ("Decision", "FrontierPoint", "Plan"),
    "memfit.planning.planner": ("frontier", "plan"),
    "memfit.profiling": ("profile",),
    "memfit.runtime.applying.apply": ("Applied", "apply", "remove"),
    "memfit.graph.verification": ("Verification",),
    "memfit.verification.verifying": ("verify",),
    "memfit.fitted": ("Fitted",),
    "memfit.fitting": ("fit",),
    "memfit.tuning.tune": ("tune",),
    "memfit.tuning.tuned": ("Tuned", "TunedSize"),
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
