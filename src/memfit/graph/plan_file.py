"""Plans as files: JSON to read and to compare, grouped by module, one decision a line.

    {
      "format": "memfit-plan",
      "version": 1,
      "fingerprint": "…",
      "inputs": {"input_ids": "int64[8, 128]"},
      "budget_bytes": 21474836480,
      "predicted_peak_bytes": 21470000000,
      "predicted_overhead": 0.021,
      "optimality_gap": 0.0004,
      "recompute_flops": 123,
      "recorded_modules": ["layers.0.mlp.act"],
      "hooked_modules": ["layers.0.mlp.down"],
      "groups": [
        {"module": "layers.0.mlp", "values": {
          "aten.silu#0": "recompute",
          "aten.mul#0": "save"
        }}
      ]
    }

Plans that compile blocks have ``"compiled"`` as well: the kinds of blocks with the partitions that they use, and the
choice of each block.

A group is a run of values made one after the other in one module, so that reading the groups in order gives the
decisions in the order in which the values are made, by which the engine identifies the calls of an op.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import groupby
from typing import Any

from memfit.documents import check_fields, check_kind, read_document, write_text
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.graph.compiled_data.compiled_blocks_file import compiled_document, compiled_plan_from_document
from memfit.graph.inputs import inputs_document, inputs_from_document
from memfit.graph.names import is_value_name
from memfit.graph.plan import Decision, Plan
from memfit.validation import LARGEST_COUNT, shown, whole_number

PLAN_FORMAT = "memfit-plan"
PLAN_VERSION = 1

_COUNTS = ("predicted_peak_bytes", "recompute_flops")
# Only in plans that offload.
_OFFLOADING = ("host_bytes", "window_bytes")
_SHARES = ("predicted_overhead", "optimality_gap")
_MODULES = ("recorded_modules", "hooked_modules")
_FIELDS = frozenset({"format", "version", "fingerprint", "budget_bytes", "groups", *_MODULES, *_COUNTS, *_SHARES})


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to ``path`` as ``load_plan`` reads it."""
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """Return ``plan`` as the text of its file, which ``--json`` prints too."""
    head = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "fingerprint": plan.fingerprint,
        **({"inputs": inputs_document(plan.inputs)} if plan.inputs else {}),
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_overhead": plan.predicted_overhead,
        "optimality_gap": plan.optimality_gap,
        "recompute_flops": plan.recompute_flops,
        "recorded_modules": list(plan.recorded_modules),
        "hooked_modules": list(plan.hooked_modules),
        **({"chunks_loss": True} if plan.chunks_loss else {}),
        **({name: getattr(plan, name) for name in _OFFLOADING} if plan.host_bytes or plan.window_bytes else {}),
    }
    lines = [f"  {_text(name)}: {_text(value)}," for name, value in head.items()]
    if plan.compiled is not None:
        compiled = json.dumps(compiled_document(plan.compiled), ensure_ascii=False, indent=2)
        lines.append('  "compiled": ' + compiled.replace("\n", "\n  ") + ",")
    return "{\n" + "\n".join(lines) + '\n  "groups": ' + _groups_text(plan) + "\n}\n"


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    document = read_document(path)
    check_kind(document, path, expected=PLAN_FORMAT, version=PLAN_VERSION)
    check_fields(
        document, f"{path}", required=_FIELDS, optional=frozenset({"inputs", "chunks_loss", "compiled", *_OFFLOADING})
    )
    budget_bytes = document["budget_bytes"]
    for name in _MODULES:
        paths = document[name]
        if not isinstance(paths, list) or not all(isinstance(module, str) for module in paths):
            raise PlanFileError(f'{path}: "{name}" must be a list of module paths; got {shown(paths)}')
    if not isinstance(document["fingerprint"], str):
        raise PlanFileError(f'{path}: "fingerprint" must be a text; got {shown(document["fingerprint"])}')
    chunks_loss = document.get("chunks_loss", False)
    if not isinstance(chunks_loss, bool):
        raise PlanFileError(f'{path}: "chunks_loss" must be true or false; got {shown(chunks_loss)}')
    try:
        if budget_bytes is not None:
            budget_bytes = whole_number(budget_bytes, "budget_bytes", maximum=LARGEST_COUNT)
        inputs = inputs_from_document(document.get("inputs", {}))
        counts = {name: whole_number(document[name], name, maximum=LARGEST_COUNT) for name in _COUNTS}
        offloading = {name: whole_number(document.get(name, 0), name, maximum=LARGEST_COUNT) for name in _OFFLOADING}
    except InvalidParameterError as error:
        raise PlanFileError(f"{path}: {error}") from None
    return Plan(
        decisions=_decisions(document["groups"], path),
        recorded_modules=tuple(document["recorded_modules"]),
        hooked_modules=tuple(document["hooked_modules"]),
        fingerprint=document["fingerprint"],
        budget_bytes=budget_bytes,
        inputs=inputs,
        recompute_flops=counts["recompute_flops"],
        predicted_peak_bytes=counts["predicted_peak_bytes"],
        predicted_overhead=_share(document, "predicted_overhead", path, least=-1),
        optimality_gap=_share(document, "optimality_gap", path),
        host_bytes=offloading["host_bytes"],
        window_bytes=offloading["window_bytes"],
        chunks_loss=chunks_loss,
        compiled=(
            compiled_plan_from_document(document["compiled"], f"{path}: compiled")
            if document.get("compiled") is not None
            else None
        ),
    )


def _groups_text(plan: Plan) -> str:
    groups = []
    for module, names in groupby(plan.decisions, key=lambda name: name.rpartition("::")[0]):
        values = [f"      {_text(name.rpartition('::')[2])}: {_text(plan.decisions[name])}" for name in names]
        groups.append(f'    {{"module": {_text(module)}, "values": {{\n' + ",\n".join(values) + "\n    }}")
    return "[\n" + ",\n".join(groups) + "\n  ]" if groups else "[]"


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _decisions(groups: Any, path: str | os.PathLike[str]) -> dict[str, Decision]:
    if not isinstance(groups, list):
        raise PlanFileError(f'{path}: "groups" must be a list of modules with their values; got {shown(groups)}')
    decisions: dict[str, Decision] = {}
    for position, group in enumerate(groups):
        place = f"{path}: groups[{position}]"
        fields = check_fields(group, place, required=frozenset({"module", "values"}))
        if not isinstance(fields["module"], str) or not isinstance(fields["values"], dict):
            raise PlanFileError(f'{place}: "module" must be a text and "values" an object of decisions')
        for call, decision in fields["values"].items():
            name = f"{fields['module']}::{call}"
            if not is_value_name(name):
                raise PlanFileError(f"{place}: a value is named op#call or op#call.output; got {shown(call)}")
            if name in decisions:
                raise PlanFileError(f"{place}: {shown(name)} is decided twice")
            if not isinstance(decision, str) or decision not in list(Decision):
                allowed = ", ".join(Decision)
                raise PlanFileError(f"{place}: {shown(call)} must be one of {allowed}; got {shown(decision)}")
            decisions[name] = Decision(decision)
    return decisions


def _share(document: dict[str, Any], name: str, path: str | os.PathLike[str], *, least: int = 0) -> float:
    value = document[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= sys.float_info.max:
        raise PlanFileError(f'{path}: "{name}" must be a number, at least {least}; got {shown(value)}')
    return float(value)
