"""Files of profiles: JSON, one op, one value or one block a line. What an entry leaves out has its usual value.

Ops refer to values, and values to ops, by their place in the file's lists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from memfit.documents import check_fields, check_kind, read_document, write_text
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.graph.compiled_data.compiled_blocks_file import compiled_document, compiled_profile_from_document
from memfit.graph.inputs import Input, inputs_document, inputs_from_document
from memfit.graph.layer_profile import LayerMemoryProfile, LayerTypeHint
from memfit.graph.model_profile import (
    HOST_SECONDS,
    Block,
    HostCosts,
    Link,
    ModelProfile,
    ModuleCall,
    Phase,
    RecordedOp,
    RecordedValue,
    Replay,
    Save,
)
from memfit.graph.names import is_value_name
from memfit.validation import LARGEST_COUNT, shown, whole_number

PROFILE_FORMAT = "memfit-profile"
PROFILE_VERSION = 1

_LISTS = ("ops", "values", "blocks")
_HEAD = ("peak_bytes", "step_seconds", "device", "fingerprint", "device_bytes", "free_bytes", "measured_with")
_OP_DEFAULTS: dict[str, Any] = {
    "module": None,
    "inputs": [],
    "outputs": [],
    "rewrites": [],
    "flops": 0,
    "replay": Replay.YES.name,
    "phase": Phase.FORWARD.name,
    "seconds": 0.0,
    "replay_seconds": None,
    "workspace_bytes": 0,
    "hidden_writes": [],
    "has_gradients": True,
}
_VALUE_DEFAULTS: dict[str, Any] = {"op_index": None, "dies_after": None, "saves": [], "replays_exactly": True}
_HOST_FACTS = tuple(field.name for field in fields(HostCosts) if field.name not in HOST_SECONDS)
# Planning adds bytes up in 64 bits, and seconds in floats.
_MOST_BYTES_IN_ALL = 2**62
_LARGEST_NUMBER = 1e15
_LAYER_FIELDS = ("layer_idx", "layer_type", "activation_size_bytes", "recompute_flops")


def save_profile(profile: ModelProfile, path: str | os.PathLike[str]) -> None:
    """Write ``profile`` to ``path`` atomically: readers see the old file or the new one, never a part."""
    head: dict[str, Any] = {"format": PROFILE_FORMAT, "version": PROFILE_VERSION}
    head |= {name: getattr(profile, name) for name in _HEAD}
    if profile.inputs:
        head["inputs"] = inputs_document(profile.inputs)
    if profile.host is not None:
        head["host"] = asdict(profile.host)
    if profile.link is not None:
        head["link"] = asdict(profile.link)
    if profile.compiled is not None:
        head["compiled"] = compiled_document(profile.compiled)
    if profile.unthrottled_share != 1.0:
        head["unthrottled_share"] = profile.unthrottled_share
    if profile.chunks_loss:
        head["chunks_loss"] = True
    if profile.notes:
        head["notes"] = list(profile.notes)
    entries: dict[str, Iterable[Any]] = {
        "blocks": map(_block_entry, profile.blocks),
        "ops": map(_op_entry, profile.ops),
        "values": map(_value_entry, profile.values),
    }
    if profile.module_calls:
        entries["module_calls"] = map(_module_call_entry, profile.module_calls)
    parts = [f'  "{name}": {_text(value)}' for name, value in head.items()]
    parts += [f'  "{name}": {_lines(listed)}' for name, listed in entries.items()]
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def load_profile(path: str | os.PathLike[str]) -> ModelProfile:
    """Return the profile in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    document = read_document(path)
    check_kind(document, path, expected=PROFILE_FORMAT, version=PROFILE_VERSION)
    required = frozenset({"format", "version", *_HEAD, *_LISTS})
    optional = frozenset(
        {"compiled", "host", "inputs", "link", "unthrottled_share", "chunks_loss", "module_calls", "notes"}
    )
    check_fields(document, f"{path}", required=required, optional=optional)
    document.setdefault("module_calls", [])
    for name in (*_LISTS, "module_calls"):
        if not isinstance(document[name], list):
            raise PlanFileError(f'{path}: "{name}" must be a list; got {shown(document[name])}')
    reader = _Reader(len(document["ops"]), len(document["values"]))
    contents = _read(reader.head, {name: document[name] for name in _HEAD}, f"{path}")
    contents["inputs"] = _read(reader.inputs, document.get("inputs", {}), f"{path}")
    if document.get("host") is not None:
        contents["host"] = _read(reader.host, document["host"], f"{path}: host")
    if document.get("link") is not None:
        contents["link"] = _read(reader.link, document["link"], f"{path}: link")
    if document.get("compiled") is not None:
        contents["compiled"] = compiled_profile_from_document(document["compiled"], f"{path}: compiled")
    contents["unthrottled_share"] = _read(reader.unthrottled_share, document.get("unthrottled_share", 1.0), f"{path}")
    contents["notes"] = _read(reader.notes, document.get("notes", []), f"{path}")
    contents["chunks_loss"] = document.get("chunks_loss", False)
    if not isinstance(contents["chunks_loss"], bool):
        raise PlanFileError(f'{path}: "chunks_loss" must be true or false; got {shown(contents["chunks_loss"])}')
    readers = {"ops": reader.op, "values": reader.value, "blocks": reader.block, "module_calls": reader.module_call}
    for name, read in readers.items():
        entries = enumerate(document[name])
        contents[name] = tuple(_read(read, entry, f"{path}: {name}[{place}]") for place, entry in entries)
    _check_makers(contents["ops"], contents["values"], path)
    _check_names(contents["values"], path)
    _check_bytes(contents["ops"], contents["values"], path)
    return ModelProfile(**contents)


def _check_makers(ops: tuple[RecordedOp, ...], values: tuple[RecordedValue, ...], path: str | os.PathLike[str]) -> None:
    """Raise unless ops and values agree on who made what."""
    for place, value in enumerate(values):
        if value.op_index is not None and place not in ops[value.op_index].outputs:
            raise PlanFileError(
                f"{path}: values[{place}]: op_index is {value.op_index}, and the outputs of ops[{value.op_index}] do "
                f"not have {place}; what an op makes must be among its outputs"
            )
    for place, op in enumerate(ops):
        for output in op.outputs:
            if output is not None and values[output].op_index != place:
                raise PlanFileError(
                    f"{path}: ops[{place}]: outputs has {output}, and the op_index of values[{output}] is "
                    f"{json.dumps(values[output].op_index)}; it must be {place}, the op that makes it"
                )


def _check_names(values: tuple[RecordedValue, ...], path: str | os.PathLike[str]) -> None:
    """Raise unless each value has a name of its own, and those that ops make are named as plans name values."""
    seen: set[str] = set()
    for place, value in enumerate(values):
        if value.op_index is not None and not is_value_name(value.name):
            raise PlanFileError(
                f"{path}: values[{place}]: name must be module.path::op#call or module.path::op#call.output for what "
                f"an op makes; got {shown(value.name)}"
            )
        if value.name in seen:
            raise PlanFileError(f"{path}: values[{place}]: the name {shown(value.name)} is given twice")
        seen.add(value.name)


def _check_bytes(ops: tuple[RecordedOp, ...], values: tuple[RecordedValue, ...], path: str | os.PathLike[str]) -> None:
    num_bytes = sum(value.num_bytes for value in values) + sum(op.workspace_bytes for op in ops)
    if num_bytes > _MOST_BYTES_IN_ALL:
        raise PlanFileError(
            f"{path}: num_bytes and workspace_bytes must be at most {_MOST_BYTES_IN_ALL} in all; got {num_bytes}"
        )


def _read(read: Any, entry: Any, place: str) -> Any:
    try:
        return read(entry, place)
    except InvalidParameterError as error:
        raise PlanFileError(f"{place}: {error}") from None


def _op_entry(op: RecordedOp) -> dict[str, Any]:
    entry = {
        "op": op.op,
        "call": op.call,
        "module": op.module,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
        "rewrites": list(op.rewrites),
        "flops": op.flops,
        "replay": op.replay.name,
        "phase": op.phase.name,
        "seconds": op.seconds,
        "replay_seconds": op.replay_seconds,
        "workspace_bytes": op.workspace_bytes,
        "hidden_writes": list(op.hidden_writes),
        "has_gradients": op.has_gradients,
    }
    return _without(entry, _OP_DEFAULTS)


def _value_entry(value: RecordedValue) -> dict[str, Any]:
    entry = {
        "name": value.name,
        "num_bytes": value.num_bytes,
        "storage": value.storage,
        "op_index": value.op_index,
        "dies_after": value.dies_after,
        "saves": [[save.read_before, save.released_after, save.op_index, save.read_place] for save in value.saves],
        "replays_exactly": value.replays_exactly,
    }
    return _without(entry, _VALUE_DEFAULTS)


def _block_entry(block: Block) -> dict[str, Any]:
    layer = block.layer
    entry: dict[str, Any] = {"path": block.path} | {name: getattr(layer, name) for name in _LAYER_FIELDS}
    return entry if layer.name is None else entry | {"name": layer.name}


def _module_call_entry(call: ModuleCall) -> list[Any]:
    return [call.path, call.number, call.begin, call.end, call.num_backward]


def _without(entry: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in usual or value != usual[name]}


def _lines(entries: Iterable[Any]) -> str:
    lines = [_text(entry) for entry in entries]
    return "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidParameterError(f"a profile with a number that is not finite cannot be saved: {value!r}") from None


class _Reader:
    """Reads entries, knowing how many ops and values there are to refer to."""

    def __init__(self, num_ops: int, num_values: int) -> None:
        self._num_ops = num_ops
        self._num_values = num_values

    def head(self, entry: dict[str, Any], place: str) -> dict[str, Any]:
        for name in ("device", "fingerprint", "measured_with"):
            _string(entry[name], name)
        for name in ("device_bytes", "free_bytes"):
            if entry[name] is not None:
                whole_number(entry[name], name)
        whole_number(entry["peak_bytes"], "peak_bytes")
        return entry | {"step_seconds": _seconds(entry["step_seconds"], "step_seconds")}

    def inputs(self, entry: Any, place: str) -> tuple[Input, ...]:
        return inputs_from_document(entry)

    def notes(self, entry: Any, place: str) -> tuple[str, ...]:
        return tuple(_string(note, "a note") for note in _list(entry, "notes"))

    def host(self, entry: Any, place: str) -> HostCosts:
        costs = check_fields(entry, place, required=frozenset(HOST_SECONDS), optional=frozenset(_HOST_FACTS))
        seconds = {name: _seconds(costs[name], name) for name in HOST_SECONDS}
        runs_ahead, hooks_only_dropped_saves = (_boolean(costs.get(name, False), name) for name in _HOST_FACTS)
        return HostCosts(**seconds, runs_ahead=runs_ahead, hooks_only_dropped_saves=hooks_only_dropped_saves)

    def link(self, entry: Any, place: str) -> Link:
        measured = check_fields(entry, place, required=frozenset(field.name for field in fields(Link)))
        return Link(
            out_bytes_per_second=_rate(measured["out_bytes_per_second"], "out_bytes_per_second"),
            back_bytes_per_second=_rate(measured["back_bytes_per_second"], "back_bytes_per_second"),
            seconds_per_copy=_seconds(measured["seconds_per_copy"], "seconds_per_copy"),
            host_free_bytes=whole_number(measured["host_free_bytes"], "host_free_bytes"),
            slowdown=_at_least_zero(measured["slowdown"], "slowdown", "a share"),
            host_seconds=_seconds(measured["host_seconds"], "host_seconds"),
        )

    def unthrottled_share(self, entry: Any, place: str) -> float:
        if isinstance(entry, bool) or not isinstance(entry, (int, float)) or not 0 < entry <= 1:
            raise InvalidParameterError(f"unthrottled_share must be a share, above 0 and at most 1; got {shown(entry)}")
        return float(entry)

    def op(self, entry: Any, place: str) -> RecordedOp:
        fields = check_fields(entry, place, required=frozenset({"op", "call"}), optional=frozenset(_OP_DEFAULTS))
        fields = _OP_DEFAULTS | fields
        return RecordedOp(
            module=fields["module"] if fields["module"] is None else _string(fields["module"], "module"),
            op=_string(fields["op"], "op"),
            call=whole_number(fields["call"], "call"),
            inputs=self._value_indices(fields, "inputs"),
            outputs=tuple(
                None if index is None else self._value_index(index, "outputs")
                for index in _list(fields["outputs"], "outputs")
            ),
            rewrites=self._value_indices(fields, "rewrites"),
            flops=whole_number(fields["flops"], "flops", maximum=LARGEST_COUNT),
            replay=_member(Replay, fields["replay"], "replay"),
            phase=_member(Phase, fields["phase"], "phase"),
            seconds=_seconds(fields["seconds"], "seconds"),
            replay_seconds=(
                None if fields["replay_seconds"] is None else _seconds(fields["replay_seconds"], "replay_seconds")
            ),
            workspace_bytes=whole_number(fields["workspace_bytes"], "workspace_bytes"),
            hidden_writes=self._value_indices(fields, "hidden_writes"),
            has_gradients=_boolean(fields["has_gradients"], "has_gradients"),
        )

    def module_call(self, entry: Any, place: str) -> ModuleCall:
        if not isinstance(entry, list) or len(entry) != 5:
            raise InvalidParameterError(
                f"module_calls must be lists of path, number, begin, end, num_backward; got {shown(entry)}"
            )
        begin = whole_number(entry[2], "begin", maximum=self._num_ops)
        return ModuleCall(
            path=_string(entry[0], "path"),
            number=whole_number(entry[1], "number"),
            begin=begin,
            end=whole_number(entry[3], "end", minimum=begin, maximum=self._num_ops),
            num_backward=whole_number(entry[4], "num_backward"),
        )

    def value(self, entry: Any, place: str) -> RecordedValue:
        required = frozenset({"name", "num_bytes", "storage"})
        fields = check_fields(entry, place, required=required, optional=frozenset(_VALUE_DEFAULTS))
        fields = _VALUE_DEFAULTS | fields
        return RecordedValue(
            name=_string(fields["name"], "name"),
            num_bytes=whole_number(fields["num_bytes"], "num_bytes"),
            op_index=self._op_index(fields["op_index"], "op_index"),
            # There are no more storages than values, and planning allocates lists as long as the largest number.
            storage=self._value_index(fields["storage"], "storage"),
            dies_after=self._op_index(fields["dies_after"], "dies_after"),
            saves=tuple(self._save(save) for save in _list(fields["saves"], "saves")),
            replays_exactly=_boolean(fields["replays_exactly"], "replays_exactly"),
        )

    def block(self, entry: Any, place: str) -> Block:
        required = frozenset({"path", *_LAYER_FIELDS})
        fields = dict(check_fields(entry, place, required=required, optional=frozenset({"name"})))
        path = _string(fields.pop("path"), "path")
        layer_type = fields.pop("layer_type")
        allowed = [str(hint) for hint in LayerTypeHint]
        if layer_type not in allowed:
            raise InvalidParameterError(f"layer_type must be one of {', '.join(allowed)}; got {shown(layer_type)}")
        return Block(path, LayerMemoryProfile(layer_type=LayerTypeHint(layer_type), **fields))

    def _save(self, entry: Any) -> Save:
        # The first version of the format has no order of the reads before one op.
        if not isinstance(entry, list) or len(entry) not in (3, 4):
            raise InvalidParameterError(
                f"saves must be lists of read_before, released_after, op_index, read_place; got {shown(entry)}"
            )
        # Just past the last op: never read.
        read_before = whole_number(entry[0], "read_before", maximum=self._num_ops)
        released_after = whole_number(entry[1], "released_after", maximum=self._num_ops - 1)
        read_place = whole_number(entry[3], "read_place", maximum=2**31) if len(entry) == 4 else 0
        return Save(read_before, released_after, self._op_index(entry[2], "op_index"), read_place)

    def _value_indices(self, fields: dict[str, Any], name: str) -> tuple[int, ...]:
        return tuple(self._value_index(index, name) for index in _list(fields[name], name))

    def _value_index(self, index: Any, name: str) -> int:
        return whole_number(index, name, maximum=self._num_values - 1)

    def _op_index(self, index: Any, name: str) -> int | None:
        return None if index is None else whole_number(index, name, maximum=self._num_ops - 1)


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameterError(f"{name} must be a text; got {shown(value)}")
    return value


def _boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise InvalidParameterError(f"{name} must be true or false; got {shown(value)}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidParameterError(f"{name} must be a list; got {shown(value)}")
    return value


def _seconds(value: Any, name: str) -> float:
    return _at_least_zero(value, name, "a number of seconds")


def _at_least_zero(value: Any, name: str, kind: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST_NUMBER:
        raise InvalidParameterError(
            f"{name} must be {kind}, at least 0 and at most {_LARGEST_NUMBER:g}; got {shown(value)}"
        )
    return float(value)


def _rate(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= _LARGEST_NUMBER:
        raise InvalidParameterError(
            f"{name} must be a number of bytes a second, from 1 to {_LARGEST_NUMBER:g}; got {shown(value)}"
        )
    return float(value)


def _member(kind: Any, name: Any, field: str) -> Any:
    members = kind.__members__
    if not isinstance(name, str) or name not in members:
        raise InvalidParameterError(f"{field} must be one of {', '.join(members)}; got {shown(name)}")
    return members[name]
