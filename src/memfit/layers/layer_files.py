"""Files for lists of layers and for plans over them. ``docs/layers-format.md`` describes the format for users."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from memfit.documents import check_fields, check_kind, read_document, write_text
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.graph.layer_profile import LayerMemoryProfile, LayerTypeHint, checked_profiles
from memfit.layers.checkpoint_plan import CheckpointPlan
from memfit.validation import shown, whole_number

LAYERS_FORMAT = "memfit-layers"
LAYERS_VERSION = 1
PLAN_FORMAT = "memfit-layer-plan"
PLAN_VERSION = 1

_LAYER_FIELDS = frozenset({"layer_idx", "layer_type", "activation_size_bytes", "recompute_flops"})
_PLAN_COUNTS = (
    "total_activation_memory_bytes",
    "total_recompute_flops",
    "dropped_activation_bytes",
    "saved_activation_bytes",
)
_PLAN_FIELDS = frozenset({"format", "version", "checkpointed_layers", "saved_layers", *_PLAN_COUNTS, "optimality_gap"})
# Written for readers and other tools; read back, they follow from the rest.
_PLAN_EXTRAS = frozenset({"strategy", "peak_memory_bytes", "forward_flops"})


def load_layers(path: str | os.PathLike[str]) -> tuple[LayerMemoryProfile, ...]:
    """Return the layers in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    return layers_from_document(read_document(path), path)


def layers_from_document(document: dict[str, Any], path: str | os.PathLike[str]) -> tuple[LayerMemoryProfile, ...]:
    """Return the layers of a document already read; ``path`` is for messages."""
    check_kind(document, path, expected=LAYERS_FORMAT, version=LAYERS_VERSION)
    check_fields(document, f"{path}", required=frozenset({"format", "version", "layers"}))
    entries = document["layers"]
    if not isinstance(entries, list):
        raise PlanFileError(f'{path}: "layers" must be a list of layers; got {shown(entries)}')
    layers = [_layer_from_entry(entry, f"{path}: layers[{position}]") for position, entry in enumerate(entries)]
    try:
        return tuple(checked_profiles(layers))
    except InvalidParameterError as error:
        raise PlanFileError(f"{path}: {str(error).replace('profiles[', 'layers[')}") from None


def save_layers(profiles: Iterable[LayerMemoryProfile], path: str | os.PathLike[str]) -> None:
    """Write ``profiles`` to ``path``, one layer a line, as ``load_layers`` reads them."""
    lines = [json.dumps(_entry_of(layer), ensure_ascii=False) for layer in checked_profiles(profiles)]
    body = "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"
    write_text(path, f'{{\n  "format": "{LAYERS_FORMAT}",\n  "version": {LAYERS_VERSION},\n  "layers": {body}\n}}\n')


def plan_document(plan: CheckpointPlan, **extras: object) -> dict[str, object]:
    """Return ``plan`` as the JSON object that files and ``--json`` carry, with what ``extras`` adds for readers."""
    return {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        **extras,
        "peak_memory_bytes": plan.saved_activation_bytes + plan.total_activation_memory_bytes,
        **{name: getattr(plan, name) for name in _PLAN_COUNTS},
        "optimality_gap": plan.optimality_gap,
        "checkpointed_layers": list(plan.checkpointed_layers),
        "saved_layers": list(plan.saved_layers),
    }


def save_layer_plan(plan: CheckpointPlan, path: str | os.PathLike[str], **extras: object) -> None:
    """Write ``plan`` to ``path`` as ``load_layer_plan`` reads it."""
    write_text(path, json.dumps(plan_document(plan, **extras), ensure_ascii=False) + "\n")


def load_layer_plan(path: str | os.PathLike[str]) -> CheckpointPlan:
    """Return the plan in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    document = read_document(path)
    check_kind(document, path, expected=PLAN_FORMAT, version=PLAN_VERSION)
    check_fields(document, f"{path}", required=_PLAN_FIELDS, optional=_PLAN_EXTRAS)
    gap = document["optimality_gap"]
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < float("inf"):
        raise PlanFileError(f'{path}: "optimality_gap" must be a number, at least 0; got {shown(gap)}')
    try:
        counts = {name: whole_number(document[name], name, maximum=None) for name in _PLAN_COUNTS}
        dropped, saved = (_layer_indices(document[name], name) for name in ("checkpointed_layers", "saved_layers"))
        return CheckpointPlan(dropped, saved, optimality_gap=float(gap), **counts)
    except (InvalidParameterError, OverflowError) as error:
        raise PlanFileError(f"{path}: {error}") from None


def _layer_indices(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidParameterError(f"{name} must be a list of layer_idx; got {shown(value)}")
    return tuple(whole_number(entry, f"{name}[{position}]") for position, entry in enumerate(value))


def _layer_from_entry(entry: object, place: str) -> LayerMemoryProfile:
    fields = check_fields(entry, place, required=_LAYER_FIELDS, optional=frozenset({"name"}))
    layer_type = fields["layer_type"]
    allowed = [str(hint) for hint in LayerTypeHint]
    if not isinstance(layer_type, str) or layer_type not in allowed:
        raise PlanFileError(f'{place}: "layer_type" must be one of {", ".join(allowed)}; got {shown(layer_type)}')
    try:
        return LayerMemoryProfile(**{**fields, "layer_type": LayerTypeHint(layer_type)})
    except InvalidParameterError as error:
        raise PlanFileError(f"{place}: {error}") from None


def _entry_of(layer: LayerMemoryProfile) -> dict[str, object]:
    entry: dict[str, object] = {
        "layer_idx": layer.layer_idx,
        "layer_type": str(layer.layer_type),
        "activation_size_bytes": layer.activation_size_bytes,
        "recompute_flops": layer.recompute_flops,
    }
    if layer.name is not None:
        entry["name"] = layer.name
    return entry
