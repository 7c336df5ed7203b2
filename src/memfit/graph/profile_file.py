"""Files of profiles: JSON, one op, one value or one block a line. What an entry leaves out has its usual value.

Ops refer to values, and values to ops, by their place in the file's lists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple
from functools import partial
from typing import Any

from memfit.documents import check_fields, contents_of, read_document, write_text
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.graph.compiled_data.compiled_blocks_file import COMPILED_CHECKS
from memfit.graph.inputs import Input, inputs_document, inputs_from_document
from memfit.graph.layer_profile import LayerMemoryProfile
from memfit.graph.model_profile import (
    Block,
    ModelProfile,
    ModuleCall,
    Phase,
    RecordedOp,
    RecordedValue,
    Replay,
    Save,
)
from memfit.graph.names import is_value_name
from memfit.graph.records import Reader, Records, member_by_name, text, usual_values
from memfit.validation import shown

PROFILE_FORMAT = "memfit-profile"
PROFILE_VERSION = 1

_HEAD = ("peak_bytes", "step_seconds", "device", "fingerprint", "device_bytes", "free_bytes", "measured_with")
_LISTS = ("blocks", "ops", "values", "module_calls")
_USUAL_OP: Mapping[str, Any] = {
    **usual_values(RecordedOp),
    "module": None,
    "inputs": (),
    "outputs": (),
    "rewrites": (),
    "flops": 0,
    "replay": Replay.YES,
}
_USUAL_VALUE: Mapping[str, Any] = {**usual_values(RecordedValue), "op_index": None}
_BLOCK_FIELDS = frozenset({"path", "layer_idx", "layer_type", "activation_size_bytes", "recompute_flops"})
# Planning adds bytes up in 64 bits.
_MOST_BYTES_IN_ALL = 2**62


def save_profile(profile: ModelProfile, path: str | os.PathLike[str]) -> None:
    """Write ``profile`` to ``path`` atomically: readers see the old file or the new one, never a part."""
    head: dict[str, Any] = {"format": PROFILE_FORMAT, "version": PROFILE_VERSION}
    head |= {name: getattr(profile, name) for name in _HEAD}
    for name, usual in usual_values(ModelProfile).items():
        value = getattr(profile, name)
        if name not in (*_HEAD, *_LISTS) and value != usual:
            head[name] = value
    if profile.inputs:
        head["inputs"] = inputs_document(profile.inputs)
    entries: dict[str, Iterable[Any]] = {
        "blocks": ({"path": block.path, **_without(block.layer, {"name": None})} for block in profile.blocks),
        "ops": (_without(op, _USUAL_OP) for op in profile.ops),
        "values": (_without(value, _USUAL_VALUE) for value in profile.values),
    }
    if profile.module_calls:
        entries["module_calls"] = map(astuple, profile.module_calls)
    parts = [f'  "{name}": {_text(value)}' for name, value in head.items()]
    parts += [f'  "{name}": {_lines(listed)}' for name, listed in entries.items()]
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def load_profile(path: str | os.PathLike[str]) -> ModelProfile:
    """Return the profile in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    document = contents_of(read_document(path), path, PROFILE_FORMAT, PROFILE_VERSION)
    for name in _LISTS:
        if not isinstance(document.get(name, []), list):
            raise PlanFileError(f'{path}: "{name}" must be a list; got {shown(document[name])}')
    num_ops, num_values = (len(document.get(name, [])) for name in ("ops", "values"))
    records = Records(
        {Replay: member_by_name(Replay), Phase: member_by_name(Phase), tuple[Input, ...]: inputs_from_document},
        # What is read just past the last op is never read.
        limits={"number of ops": num_ops, "last op": num_ops - 1, "last value": num_values - 1},
        checks={**COMPILED_CHECKS, ModuleCall: _check_call, ModelProfile: _check_profile},
    )
    records.readers |= {
        Save: records.positional(Save),
        ModuleCall: records.positional(ModuleCall),
        RecordedOp: records.record(RecordedOp, _USUAL_OP),
        Block: partial(_block, records.reader_of(LayerMemoryProfile)),
    }
    # Its values are saved, so that their reader needs that of saves.
    records.readers[RecordedValue] = records.record(RecordedValue, _USUAL_VALUE)
    profile: ModelProfile = records.record(ModelProfile, required=_HEAD)(document, f"{path}")
    return profile


def _block(read_layer: Reader, entry: Any, place: str) -> Block:
    layer = dict(check_fields(entry, place, required=_BLOCK_FIELDS, optional=frozenset({"name"})))
    path = text(layer.pop("path"), "path")
    return Block(path, read_layer(layer, place))


def _check_call(call: ModuleCall) -> None:
    if call.end < call.begin:
        raise InvalidParameterError(f"end must be a whole number, at least {call.begin}; got {shown(call.end)}")


def _check_profile(profile: ModelProfile) -> None:
    _check_makers(profile.ops, profile.values)
    _check_names(profile.values)
    num_bytes = sum(value.num_bytes for value in profile.values) + sum(op.workspace_bytes for op in profile.ops)
    num_bytes += profile.peak_bytes
    if profile.compiled is not None:
        num_bytes += _sum_of_whole_numbers(asdict(profile.compiled))
    if num_bytes > _MOST_BYTES_IN_ALL:
        raise InvalidParameterError(
            "peak_bytes, the numbers of compiled blocks, num_bytes and workspace_bytes must be at most "
            f"{_MOST_BYTES_IN_ALL} in all; got {num_bytes}"
        )


def _sum_of_whole_numbers(entry: Any) -> int:
    if isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, (list, tuple)):
        return sum(map(_sum_of_whole_numbers, entry))
    return entry if type(entry) is int else 0


def _check_makers(ops: tuple[RecordedOp, ...], values: tuple[RecordedValue, ...]) -> None:
    """Raise unless ops and values agree on who made what."""
    for place, value in enumerate(values):
        if value.op_index is not None and place not in ops[value.op_index].outputs:
            raise InvalidParameterError(
                f"values[{place}]: op_index is {value.op_index}, and the outputs of ops[{value.op_index}] do "
                f"not have {place}; what an op makes must be among its outputs"
            )
    for place, op in enumerate(ops):
        for output in op.outputs:
            if output is not None and values[output].op_index != place:
                raise InvalidParameterError(
                    f"ops[{place}]: outputs has {output}, and the op_index of values[{output}] is "
                    f"{json.dumps(values[output].op_index)}; it must be {place}, the op that makes it"
                )


def _check_names(values: tuple[RecordedValue, ...]) -> None:
    """Raise unless each value has a name of its own, and those that ops make are named as plans name values."""
    seen: set[str] = set()
    for place, value in enumerate(values):
        if value.op_index is not None and not is_value_name(value.name):
            raise InvalidParameterError(
                f"values[{place}]: name must be module.path::op#call or module.path::op#call.output for what "
                f"an op makes; got {shown(value.name)}"
            )
        if value.name in seen:
            raise InvalidParameterError(f"values[{place}]: the name {shown(value.name)} is given twice")
        seen.add(value.name)


def _without(record: Any, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``record`` by name but those with their ``usual`` value."""
    entry = {}
    for name in record.__slots__:
        value = getattr(record, name)
        if name not in usual or value != usual[name]:
            entry[name] = value.name if isinstance(value, (Replay, Phase)) else value
    return entry


def _lines(entries: Iterable[Any]) -> str:
    lines = [_text(entry) for entry in entries]
    return "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        raise InvalidParameterError(f"a profile with a number that is not finite cannot be saved: {value!r}") from None


def _plain(record: Any) -> Any:
    return astuple(record) if isinstance(record, Save) else asdict(record)
