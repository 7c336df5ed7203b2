"""Reads the joint graph of a compiled block: which values its forward pass makes, and what each costs to have again."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from memfit.cuts.graph_cuts import ForwardGraph, GraphValue
from memfit.runtime.engine.op_rules import OpRule, Treatment, is_random, rule_for
from memfit.runtime.torch_internals import OpOverload

# Costs are in bytes moved. A device computes about so many FLOPs while it moves a byte.
_FLOPS_PER_BYTE = {"cuda": 120.0, "cpu": 8.0}
# A pointwise op that is recomputed runs in the kernel that reads it: it saves a read, and costs another one.
_FUSED_SHARE = 0.15
_REPEATED_READS = 8.0
# Sizes that the compiler knows nothing about, such as the number of tokens that an expert gets.
_UNKNOWN_SIZE = 1024
# Sums over fewer elements than these take too much memory to be saved in any case.
_SUMMED_ELEMENTS = 16
_PURE_NAMESPACES = {"aten", "prims"}


def forward_graph_of(
    joint: fx.GraphModule, free_inputs: Collection[int], num_forward_outputs: int
) -> tuple[ForwardGraph, list[fx.Node]]:
    """Return the graph of what the block computes without gradients from outside, and the node of each of its values.

    ``free_inputs`` are the places among the inputs of what is in memory anyway, such as parameters. Of the joint
    graph's outputs, the first ``num_forward_outputs`` are the forward pass's.
    """
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if not _is_tangent(node)]
    free = {inputs[place] for place in free_inputs if place < len(inputs)}
    from_backward: set[fx.Node] = set()
    nodes: list[fx.Node] = []
    for node in joint.graph.nodes:
        if node.op == "output":
            continue
        if _is_tangent(node) or not from_backward.isdisjoint(node.all_input_nodes):
            from_backward.add(node)
        else:
            nodes.append(node)
    place_of = {node: place for place, node in enumerate(nodes)}
    output = next(iter(joint.graph.find_nodes(op="output")))
    outputs: list[Any] = [*output.args[0]]
    returned_by_backward = {node for node in outputs[num_forward_outputs:] if isinstance(node, fx.Node)}
    values = [
        GraphValue(
            name=node.name,
            inputs=tuple(place_of[read] for read in node.all_input_nodes),
            num_bytes=0 if node in free else _num_bytes(node),
            cost=_cost(node),
            may_be_saved=_may_be_saved(node),
            may_be_recomputed=_may_be_recomputed(node),
            is_read_by_backward=node in returned_by_backward or any(user in from_backward for user in node.users),
        )
        for node in nodes
    ]
    return ForwardGraph(values), nodes


def bases_of(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """Return the names of ``nodes``, and for views, the names of what they are views of."""
    for node in nodes:
        while _is_view(node):
            node = node.all_input_nodes[0]
        yield node.name


def rounding_unit_of(nodes: Iterable[fx.Node]) -> float:
    """Return the rounding unit of the coarsest floating type of the values of ``nodes``."""
    types = {tensor.dtype for node in nodes for tensor in _tensors(node.meta.get("val"))}
    return max((torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point or dtype.is_complex), default=0.0)


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and ("tangents" in str(node.target) or "bwd_" in str(node.target))


def _is_made_in_backward(node: fx.Node) -> bool:
    """Whether the backward pass computes the node itself, from values of the forward pass only."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _rule(node: fx.Node) -> OpRule | None:
    return rule_for(node.target) if isinstance(node.target, OpOverload) else None


def _is_view(node: fx.Node) -> bool:
    rule = _rule(node)
    return rule is not None and rule.treatment is Treatment.VIEW


def _may_be_saved(node: fx.Node) -> bool:
    """Tensors that are no views: what a view shares is saved instead, which holds no more memory than is counted."""
    if node.op != "call_function":
        return True
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return True
    return isinstance(value, Tensor) and not _is_view(node) and not _is_made_in_backward(node)


def _may_be_recomputed(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)
    ):
        return True
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace not in _PURE_NAMESPACES or op._schema.is_mutable:
        return False
    rule = rule_for(op)
    # A seed is drawn once and saved; what inductor draws from a seed is a function of it.
    if torch.Tag.nondeterministic_seeded in op.tags and not rule.name.startswith("aten._scaled_dot_product"):
        return False
    # Another kernel would sum in another order: the few bytes that it takes to save sums are well spent.
    if torch.Tag.reduction in op.tags and _num_bytes(node) * _SUMMED_ELEMENTS <= _read_bytes(node):
        return False
    if is_random(rule, node.args) or ".empty" in rule.name or ".new_empty" in rule.name:
        return False
    return rule.deterministic_on_cuda or _device_type(node) != "cuda"


def _num_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return _hinted(value.numel()) * value.element_size()
    return 8


def _cost(node: fx.Node) -> float:
    if node.op != "call_function" or node.target is operator.getitem or _is_view(node) or _is_made_in_backward(node):
        return 0.0
    made = _tensors(node.meta.get("val"))
    if not made:
        return 0.0
    made_bytes = sum(_bytes_of(tensor) for tensor in made)
    read_bytes = _read_bytes(node)
    flops = _flops(node)
    if flops:
        return flops / _FLOPS_PER_BYTE.get(_device_type(node), 120.0) + made_bytes + read_bytes
    op = node.target
    if isinstance(op, OpOverload) and (torch.Tag.pointwise in op.tags or op.namespace == "prims"):
        return _FUSED_SHARE * made_bytes
    if isinstance(op, OpOverload) and op._schema.name.partition("::")[2] in ("sort", "topk", "kthvalue", "median"):
        return _REPEATED_READS * (made_bytes + read_bytes)
    return float(made_bytes + read_bytes)


def _read_bytes(node: fx.Node) -> int:
    return sum(_bytes_of(tensor) for read in node.all_input_nodes for tensor in _tensors(read.meta.get("val")))


def _flops(node: fx.Node) -> int:
    formula = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: read.meta.get("val"))
    try:
        return _hinted(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except Exception:
        # A FLOP count only ranks ops; no block may fail to compile for it.
        return 0


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for tensor in value if isinstance(tensor, Tensor)] if isinstance(value, (list, tuple)) else []


def _bytes_of(tensor: Tensor) -> int:
    return _hinted(tensor.numel()) * tensor.element_size()


def _device_type(node: fx.Node) -> str:
    tensors = _tensors(node.meta.get("val"))
    return tensors[0].device.type if tensors else "cpu"


def _hinted(size: Any) -> int:
    """Return a size as a number: a symbolic one by the example that it was traced with."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else _UNKNOWN_SIZE
