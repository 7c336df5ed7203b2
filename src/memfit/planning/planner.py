"""``plan``: decides for every value of a profiled step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import ModelProfile, Phase, RecordedOp, Replay
from memfit.graph.names import ValueName, is_within, parse_value_name
from memfit.graph.plan import Decision, Plan
from memfit.layers.plan import build_checkpoint_plan
from memfit.layers.strategies import LayerStrategy, NoCheckpointing
from memfit.planning.regions import listening_regions
from memfit.planning.selectors import select

# Outputs this many times smaller than the largest output of their op (means, log-sum-exps) are not worth a replay.
STATISTICS_RATIO = 8


def plan(
    profile: ModelProfile,
    *,
    strategy: LayerStrategy,
    force_save: Iterable[str] = (),
    force_recompute: Iterable[str] = (),
) -> Plan:
    """Return what to do with each value of the profiled step.

    ``strategy`` chooses among the model's blocks; every value inside a chosen block is recomputed from what enters the
    block. Selectors (``MODULE_GLOB::op``) overrule it; a value that both name is saved. What cannot be replayed is
    saved, whoever asks, and so are the small statistics that an op returns beside its result.
    """
    if not isinstance(profile, ModelProfile):
        raise InvalidParameterError(f"profile is a ModelProfile as memfit.profile() returns it, got {profile!r}")
    index_of = _index_of_names(profile)
    wanted = _values_of_chosen_blocks(profile, strategy)
    for selector in _selectors("force_recompute", force_recompute):
        chosen = [index_of[name] for name in select(selector, index_of)]
        wanted.update(index for index in chosen if not _is_statistic(profile, index))
    for selector in _selectors("force_save", force_save):
        wanted.difference_update(index_of[name] for name in select(selector, index_of))
    return _plan_recomputing(profile, wanted)


def plan_of_all_that_replays(profile: ModelProfile) -> Plan:
    """Return the plan that recomputes each value that can be, starting anew at what leaves a block."""
    wanted = set(_plannable_values(profile))
    for block in profile.blocks:
        wanted -= _values_leaving(profile, block.path)
    return _plan_recomputing(profile, wanted)


def _plan_recomputing(profile: ModelProfile, wanted: set[int]) -> Plan:
    recomputed = _replayable(profile, wanted)
    return Plan(
        decisions={
            str(name): Decision.RECOMPUTE if index in recomputed else Decision.SAVE
            for name, index in _index_of_names(profile).items()
        },
        regions=listening_regions(profile, recomputed),
        recompute_flops=sum(op.flops for op in replayed_ops(profile, recomputed)),
        fingerprint=profile.fingerprint,
    )


def replayed_ops(profile: ModelProfile, recomputed: set[int]) -> list[RecordedOp]:
    """Return the ops that the backward pass runs again: those behind what autograd asks for, each once."""
    needed = [index for index in recomputed if profile.values[index].is_saved]
    ops: set[int] = set()
    while needed:
        op_index = profile.values[needed.pop()].op_index
        assert op_index is not None
        if op_index not in ops:
            ops.add(op_index)
            needed.extend(index for index in profile.ops[op_index].inputs if index in recomputed)
    return [profile.ops[op_index] for op_index in sorted(ops)]


def _index_of_names(profile: ModelProfile) -> dict[ValueName, int]:
    return {parse_value_name(profile.values[index].name): index for index in _plannable_values(profile)}


def _plannable_values(profile: ModelProfile) -> list[int]:
    """Return the values that were made inside the model, in the order in which they were."""
    return [
        index
        for index, value in enumerate(profile.values)
        if value.op_index is not None and profile.ops[value.op_index].module is not None
    ]


def _values_of_chosen_blocks(profile: ModelProfile, strategy: LayerStrategy) -> set[int]:
    chosen_layers = set(build_checkpoint_plan(profile.layers, strategy).checkpointed_layers)
    if not profile.blocks and not isinstance(strategy, NoCheckpointing):
        warnings.warn(
            f"the model has no repeated blocks for {strategy!r} to choose from, so it changes nothing; "
            "force_recompute=['*::aten.gelu'] names ops directly",
            stacklevel=3,
        )
    chosen: set[int] = set()
    for block in profile.blocks:
        if block.layer.layer_idx in chosen_layers:
            chosen.update(_inner_values(profile, block.path))
    return chosen


def _inner_values(profile: ModelProfile, block_path: str) -> set[int]:
    """Return the values made and used inside the block only. What leaves it is what the next block starts from."""
    made = {index for index in _values_made_in(profile, block_path) if not _is_statistic(profile, index)}
    return made - _values_leaving(profile, block_path)


def _values_leaving(profile: ModelProfile, block_path: str) -> set[int]:
    # The backward pass reads what autograd saved, wherever that was made: only the forward pass tells what leaves.
    read_outside = {
        index
        for op in profile.ops
        if op.phase is Phase.FORWARD and (op.module is None or not is_within(op.module, block_path))
        for index in op.inputs
    }
    return read_outside & set(_values_made_in(profile, block_path))


def _values_made_in(profile: ModelProfile, block_path: str) -> list[int]:
    return [index for index in _plannable_values(profile) if is_within(_op_of(profile, index).module or "", block_path)]


def _is_statistic(profile: ModelProfile, index: int) -> bool:
    sizes = [profile.values[output].num_bytes for output in _op_of(profile, index).outputs if output is not None]
    return profile.values[index].num_bytes * STATISTICS_RATIO <= max(sizes)


def _replayable(profile: ModelProfile, wanted: set[int]) -> set[int]:
    """Return those of the ``wanted`` values that the engine really recomputes."""
    recomputed: set[int] = set()
    for index in sorted(wanted):
        op = _op_of(profile, index)
        # An op that worked in place on something held would need a copy of that, which is no smaller than its result.
        starts_from_held = any(value in op.inputs and value not in recomputed for value in op.rewrites)
        if op.replay is Replay.YES and profile.values[index].comes_back and not starts_from_held:
            recomputed.add(index)
    return recomputed


def _op_of(profile: ModelProfile, index: int) -> RecordedOp:
    op_index = profile.values[index].op_index
    assert op_index is not None
    return profile.ops[op_index]


def _selectors(argument: str, selectors: Iterable[str]) -> Sequence[str]:
    if isinstance(selectors, str):
        raise InvalidParameterError(
            f"{argument} is a list of selectors, got the text {selectors!r}; write [{selectors!r}]"
        )
    return tuple(selectors)
