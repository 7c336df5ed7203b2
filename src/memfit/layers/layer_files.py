"""Files for lists of layers and for plans over them. ``docs/layers-format.md`` describes the format for users."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from memfit.documents import check_fields, contents_of, read_document, write_text
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.graph.layer_profile import LayerMemoryProfile, checked_profiles
from memfit.graph.records import Records
from memfit.layers.checkpoint_plan import CheckpointPlan
from memfit.validation import shown

LAYERS_FORMAT = "memfit-layers"
LAYERS_VERSION = 1
PLAN_FORMAT = "memfit-layer-plan"
PLAN_VERSION = 1

_PLAN_COUNTS = (
    "total_activation_memory_bytes",
    "total_recompute_flops",
    "dropped_activation_bytes",
    "saved_activation_bytes",
)
# Written for readers and other tools; read back, they follow from the rest.
_PLAN_EXTRAS = ("strategy", "peak_memory_bytes", "forward_flops")


def load_layers(path: str | os.PathLike[str]) -> tuple[LayerMemoryProfile, ...]:
    """Return the layers in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    return layers_from_document(read_document(path), path)


def layers_from_document(document: dict[str, Any], path: str | os.PathLike[str]) -> tuple[LayerMemoryProfile, ...]:
    """Return the layers of a document already read; ``path`` is for messages."""
    contents_of(document, path, LAYERS_FORMAT, LAYERS_VERSION)
    check_fields(document, f"{path}", required=frozenset({"format", "version", "layers"}))
    entries = document["layers"]
    if not isinstance(entries, list):
        raise PlanFileError(f'{path}: "layers" must be a list of layers; got {shown(entries)}')
    read = Records().reader_of(LayerMemoryProfile)
    layers = [read(entry, f"{path}: layers[{position}]") for position, entry in enumerate(entries)]
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
    contents = contents_of(read_document(path), path, PLAN_FORMAT, PLAN_VERSION)
    fields = {name: entry for name, entry in contents.items() if name not in _PLAN_EXTRAS}
    read = Records().record(CheckpointPlan, required=(*_PLAN_COUNTS, "optimality_gap"))
    plan: CheckpointPlan = read(fields, f"{path}")
    return plan


def _entry_of(layer: LayerMemoryProfile) -> dict[str, object]:
    return {name: value for name, value in asdict(layer).items() if value is not None}
