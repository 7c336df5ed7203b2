"""How the engine treats each ATen op: which may be replayed, which write, which draw random numbers.

A rule is read once per op from its schema and tags; the tables below hold what schemas do not declare.
Whatever is not known to be a function of its inputs is `OPAQUE`: its outputs are saved, never replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any

import torch

from memfit.runtime.torch_internals import OpOverload


class Treatment(Enum):
    """What an op does to the storages it touches."""

    VIEW = auto()  # the outputs alias an input: not recorded, since values are identified by their storages
    PURE = auto()  # new outputs, a function of the inputs (and of the generator's state, where it draws)
    IN_PLACE = auto()  # rewrites its first argument, as a function of its content and of the other arguments
    OVERWRITE = auto()  # rewrites its first argument regardless of its content (possibly with random numbers)
    OPAQUE = auto()  # everything else


@dataclass(frozen=True, slots=True)
class OpRule:
    """How one op overload is treated. ``written`` are the arguments it writes, by position or by keyword."""

    name: str
    treatment: Treatment
    written: tuple[int | str, ...] = ()
    draws_random: bool = False
    deterministic_on_cuda: bool = True
    dropout_argument: int | None = None
    # (running mean, running variance, training) of batch norms, whose schemas hide that they update statistics.
    batch_norm_arguments: tuple[int, int, int] | None = None


# Their schemas do not say that the result shares memory with the input.
_UNDECLARED_VIEWS = {"aten._unsafe_view", "aten._reshape_alias", "aten.lift_fresh", "aten.lift"}

# Hidden state (weight buffers, dropout state, opaque reserves) makes these more than functions of their inputs.
_STATEFUL = {
    "aten._cudnn_rnn",
    "aten._cudnn_rnn_flatten_weight",
    "aten._cudnn_init_dropout_state",
    "aten.miopen_rnn",
    "aten.mkldnn_rnn_layer",
    "aten._thnn_fused_lstm_cell",
    "aten._thnn_fused_gru_cell",
    "aten._local_scalar_dense",
    "aten._nested_tensor_from_mask",
    # Returns which entries it took only where gradients are asked for.
    "aten._sparse_mm_reduce_impl",
}

# Floating-point sums in no fixed order on CUDA (torch.use_deterministic_algorithms lists them).
_UNORDERED_ON_CUDA = {
    "aten.index_add",
    "aten.index_add_",
    "aten.index_reduce",
    "aten.index_put",
    "aten.index_put_",
    "aten._index_put_impl_",
    "aten._unsafe_index_put",
    "aten.scatter_add",
    "aten.scatter_add_",
    "aten.scatter_reduce",
    "aten.scatter_reduce_",
    "aten.scatter",
    "aten.scatter_",
    "aten.put_",
    "aten.cumsum",
    "aten.cumsum_",
    "aten.cumprod",
    "aten.logcumsumexp",
    "aten.histc",
    "aten.bincount",
    "aten.kthvalue",
    "aten.median",
    "aten.nanmedian",
    "aten._embedding_bag",
    "aten._ctc_loss",
    "aten._cudnn_ctc_loss",
    "aten.resize_",
}

# The content that they write to their first argument does not depend on its previous content.
_OVERWRITING = {
    "aten.bernoulli_",
    "aten.uniform_",
    "aten.normal_",
    "aten.exponential_",
    "aten.cauchy_",
    "aten.log_normal_",
    "aten.geometric_",
    "aten.random_",
    "aten.zero_",
    "aten.fill_",
}

_BATCH_NORMS = {"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm"}


def op_name(op: Any) -> str:
    """Return the name that plans use: namespace and op, without the overload ("aten.gelu")."""
    if isinstance(op, OpOverload):
        return f"{op.namespace}.{op._schema.name.partition('::')[2]}"
    return str(op)


def is_random(rule: OpRule, args: tuple[Any, ...]) -> bool:
    """Return whether this call of the op draws random numbers: attention does only when it has dropout."""
    if not rule.draws_random:
        return False
    position = rule.dropout_argument
    # An argument that is left out has its default, which is no dropout.
    return position is None or (position < len(args) and bool(args[position]))


@cache
def rule_for(op: Any) -> OpRule:
    """Return the rule of ``op`` (an OpOverload or a higher-order operator), reading its schema the first time."""
    name = op_name(op)
    if not isinstance(op, OpOverload):
        return OpRule(name, Treatment.OPAQUE)
    schema = op._schema
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    positions = {argument.name: i for i, argument in enumerate(schema.arguments) if not argument.kwarg_only}
    return OpRule(
        name=name,
        treatment=_treatment(op, name, written),
        written=written,
        draws_random=torch.Tag.nondeterministic_seeded in op.tags or "dropout_p" in positions,
        deterministic_on_cuda=name not in _UNORDERED_ON_CUDA,
        dropout_argument=positions.get("dropout_p"),
        batch_norm_arguments=(
            (positions["running_mean"], positions["running_var"], positions["training"])
            if name in _BATCH_NORMS
            else None
        ),
    )


def _treatment(op: OpOverload[Any, Any], name: str, written: tuple[int | str, ...]) -> Treatment:
    schema = op._schema
    returns_alias = any(result.alias_info is not None for result in schema.returns)
    if name in _UNDECLARED_VIEWS:
        return Treatment.VIEW
    if op.namespace != "aten" or name in _STATEFUL or torch.Tag.inplace_view in op.tags:
        return Treatment.OPAQUE
    if written:
        rewrites_self = written == (0,) and len(schema.returns) == 1 and returns_alias and name.endswith("_")
        if not rewrites_self:
            return Treatment.OPAQUE
        return Treatment.OVERWRITE if name in _OVERWRITING else Treatment.IN_PLACE
    if returns_alias:
        return Treatment.VIEW
    if _is_factory(op, name) or not any("Tensor" in str(result.type) for result in schema.returns):
        return Treatment.OPAQUE
    return Treatment.PURE


def _is_factory(op: OpOverload[Any, Any], name: str) -> bool:
    """A factory's result may be the canvas of a raw kernel that the dispatcher never sees, so it is not replayed."""
    takes_tensor = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
    short_name = name.partition(".")[2]
    return not takes_tensor or short_name.startswith(("new_", "empty")) or short_name.endswith("_like")
