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
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from memfit.documents import check_fields, contents_of, read_document
from memfit.errors import InvalidParameterError
from memfit.graph.compiled_data.compiled_blocks_file import COMPILED_CHECKS
from memfit.graph.inputs import Input, inputs_document, inputs_from_document
from memfit.graph.names import is_value_name
from memfit.graph.plan import Decision, Plan
from memfit.graph.records import Records
from memfit.validation import shown

PLAN_FORMAT = "memfit-plan"
PLAN_VERSION = 1

# In every plan file.
_HEAD = (
    "budget_bytes",
    "predicted_peak_bytes",
    "predicted_overhead",
    "optimality_gap",
    "recompute_flops",
    "recorded_modules",
    "hooked_modules",
)
# Only in plans that offload.
_OFFLOADING = ("host_bytes", "window_bytes")


def plan_text(plan: Plan) -> str:
    """Return ``plan`` as the text of its file, which ``--json`` prints too."""
    head = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "fingerprint": plan.fingerprint,
        **({"inputs": inputs_document(plan.inputs)} if plan.inputs else {}),
        **{name: getattr(plan, name) for name in _HEAD},
        **({"chunks_loss": True} if plan.chunks_loss else {}),
        **({name: getattr(plan, name) for name in _OFFLOADING} if plan.host_bytes or plan.window_bytes else {}),
    }
    lines = [f"  {_text(name)}: {_text(value)}," for name, value in head.items()]
    if plan.compiled is not None:
        compiled = json.dumps(asdict(plan.compiled), ensure_ascii=False, indent=2)
        lines.append('  "compiled": ' + compiled.replace("\n", "\n  ") + ",")
    return "{\n" + "\n".join(lines) + '\n  "groups": ' + _groups_text(plan) + "\n}\n"


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    contents = contents_of(read_document(path), path, PLAN_FORMAT, PLAN_VERSION)
    own = {tuple[Input, ...]: inputs_from_document, Mapping[str, Decision]: _decisions}
    records = Records(own, checks=COMPILED_CHECKS)
    plan: Plan = records.record(Plan, required=_HEAD, written_as={"decisions": "groups"})(contents, f"{path}")
    return plan


def _groups_text(plan: Plan) -> str:
    groups = []
    for module, names in groupby(plan.decisions, key=lambda name: name.rpartition("::")[0]):
        values = [f"      {_text(name.rpartition('::')[2])}: {_text(plan.decisions[name])}" for name in names]
        groups.append(f'    {{"module": {_text(module)}, "values": {{\n' + ",\n".join(values) + "\n    }}")
    return "[\n" + ",\n".join(groups) + "\n  ]" if groups else "[]"


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _decisions(groups: Any, name: str) -> dict[str, Decision]:
    if not isinstance(groups, list):
        raise InvalidParameterError(f'"{name}" must be a list of modules with their values; got {shown(groups)}')
    decisions: dict[str, Decision] = {}
    for position, group in enumerate(groups):
        place = f"{name}[{position}]"
        fields = check_fields(group, place, required=frozenset({"module", "values"}))
        if not isinstance(fields["module"], str) or not isinstance(fields["values"], dict):
            raise InvalidParameterError(f'{place}: "module" must be a text and "values" an object of decisions')
        for call, decision in fields["values"].items():
            value = f"{fields['module']}::{call}"
            if not is_value_name(value):
                raise InvalidParameterError(f"{place}: a value is named op#call or op#call.output; got {shown(call)}")
            if value in decisions:
                raise InvalidParameterError(f"{place}: {shown(value)} is decided twice")
            if not isinstance(decision, str) or decision not in list(Decision):
                allowed = ", ".join(Decision)
                raise InvalidParameterError(f"{place}: {shown(call)} must be one of {allowed}; got {shown(decision)}")
            decisions[value] = Decision(decision)
    return decisions
