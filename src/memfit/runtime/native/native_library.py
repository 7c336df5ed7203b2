"""The library of the engine in C++ (``native/``), configured for use."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from memfit.runtime.engine import event_log
from memfit.runtime.engine.offloading import torn_value_error
from memfit.runtime.engine.op_rules import Treatment, rule_for
from memfit.runtime.engine.replay import gather, stale_value_error
from memfit.runtime.fusing.fusing import start_fusing
from memfit.runtime.fusing.pointwise_ops import pointwise_op
from memfit.runtime.native.native_build import native_module
from memfit.runtime.torch_internals import let_higher_order_operators_through

_TREATMENTS = list(Treatment)


@functools.cache
def configured_module() -> Any:
    """Return the module, or None where there is none. The first call on a machine builds it."""
    native = native_module()
    if native is not None:
        native.configure(
            _rule_of,
            torch.cuda.is_current_stream_capturing,
            stale_value_error,
            torn_value_error,
            gather,
            nn.Parameter,
        )
        let_higher_order_operators_through(native.key_name)
        start_fusing(native)
        event_log.add_engine(native.log_events)
    return native


def _rule_of(name: str, overload: str) -> tuple[Any, ...]:
    """Return the rule of the op, in the form that C++ reads: arguments by their place in the schema."""
    namespace, _, short_name = name.partition("::")
    op = getattr(getattr(getattr(torch.ops, namespace), short_name), overload or "default")
    rule = rule_for(op)
    pointwise = pointwise_op(op, rule.name)
    places = {argument.name: place for place, argument in enumerate(op._schema.arguments)}
    return (
        rule.name,
        _TREATMENTS.index(rule.treatment),
        [places[argument] if isinstance(argument, str) else argument for argument in rule.written],
        rule.draws_random,
        rule.deterministic_on_cuda,
        rule.dropout_argument,
        rule.batch_norm_arguments,
        () if pointwise is None else pointwise.arguments,
        pointwise is not None and pointwise.casts,
        pointwise is not None and pointwise.is_exact,
    )
