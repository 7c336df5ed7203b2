"""One graph of dynamo's, compiled by inductor once for each partition that is asked for.

dynamo traces a kind of block once and calls `variants_backend`. What that returns looks up which block is running and
calls the code of the block's partition. dynamo's caches therefore never see partitions: its entries cannot mix, they
do not multiply, and applying a plan again finds everything compiled.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx

from memfit.cuts.graph_cuts import ForwardGraph
from memfit.graph.compiled_data.compiled_blocks import Partition
from memfit.runtime.compiling.compiler_internals import (
    InductorPartitioner,
    compiled_with_partitioner,
    copied_graph,
    current_tracing_context,
    divided_by_tags,
    donates_buffers,
    num_ignored_guards,
    saved_by_torch,
)
from memfit.runtime.compiling.joint_graphs import bases_of, forward_graph_of, rounding_unit_of


class CompilingError(Exception):
    """A block could not be compiled."""


class BlockRun:
    """A call of a block that is under way, by a partition. It has the graphs that ran, and their autograd nodes."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        # Whether compiled code began to run, so that what is raised from then on is not about compiling.
        self.has_begun = False
        self.graphs: list[GraphVariants] = []
        self.nodes: list[Any] = []
        # Where somebody asks for them.
        self.outputs: list[Any] | None = None

    def ran(self, graph: GraphVariants, outputs: Sequence[Any]) -> None:
        """Note that ``graph`` was run and returned ``outputs``."""
        self.graphs.append(graph)
        node = next((out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None), None)
        if node is not None:
            self.nodes.append(node)
        if self.outputs is not None:
            self.outputs += outputs


_in_thread = threading.local()


@contextmanager
def running(block: BlockRun) -> Iterator[None]:
    """Let compiled graphs inside the block run by the partition of ``block``."""
    before = getattr(_in_thread, "block", None)
    _in_thread.block = block
    try:
        yield
    finally:
        _in_thread.block = before


def variants_backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return what runs ``graph``. For torch.compile(backend=...); the same function for all models.

    The partition of the running block is compiled before dynamo is done: what the compiler asks of the sizes of inputs
    becomes part of dynamo's guards, and it may ask dynamo to trace again.
    """
    variants = GraphVariants(graph, inputs)
    variants.compiled_for(_in_thread.block.partition)
    variants.let_go_of_inputs()
    return variants


class GraphVariants:
    """A graph and its compiled partitions. What is public about its values is known once one is compiled."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.key = _hash_of(graph, inputs)
        self.forward: ForwardGraph | None = None
        self.torch_saved: tuple[str, ...] = ()
        self.rounding_unit = 0.0
        self._graph = graph
        self._inputs = list(inputs)
        self._context = current_tracing_context()
        self._is_trained = any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        self._compiled: dict[tuple[tuple[str, ...] | float, bool], Callable[..., Any]] = {}

    def let_go_of_inputs(self) -> None:
        """Compile from fake tensors from now on: these would keep activations and weights of the first call alive."""
        placeholders = (node for node in self._graph.graph.nodes if node.op == "placeholder")
        self._inputs = [
            node.meta["example_value"] if isinstance(each, Tensor) else each
            for node, each in zip(placeholders, self._inputs, strict=True)
        ]

    def __call__(self, *args: Any) -> Any:
        block: BlockRun = _in_thread.block
        compiled = self.compiled_for(block.partition)
        block.has_begun = True
        outputs = compiled(*args)
        block.ran(self, outputs)
        return outputs

    def compiled_for(self, partition: Partition) -> Callable[..., Any]:
        """Return the code for ``partition``."""
        # There may be no backward pass to save anything for: then one compiled graph serves all.
        saved = partition.saved.get(self.key) if self._is_trained else ()
        key = (partition.price if saved is None else saved, donates_buffers())
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(saved, partition.price)
        return compiled

    def _compile(self, saved: tuple[str, ...] | None, price: float) -> Callable[..., Any]:
        partitioner = _SavedValues(saved, price, is_first=self.forward is None)
        num_ignored = num_ignored_guards(self._context)
        compiled = compiled_with_partitioner(copied_graph(self._graph), self._inputs, partitioner, self._context)
        if num_ignored_guards(self._context) > num_ignored:
            raise CompilingError("the code for this partition would hold for some of the graph's sizes only")
        if partitioner.forward is not None:
            self.forward, self.torch_saved = partitioner.forward, partitioner.torch_saved
            self.rounding_unit = partitioner.rounding_unit
        # A partition that was chosen by its price is known by its names from now on.
        self._compiled.setdefault((partitioner.divided_names, donates_buffers()), compiled)
        return compiled


class _SavedValues(InductorPartitioner):
    """Divides a joint graph so that the ``saved`` values are; where these are not given, by a price per byte."""

    def __init__(self, saved: tuple[str, ...] | None, price: float, *, is_first: bool) -> None:
        self._saved = saved
        self._price = price
        self._is_first = is_first
        self.forward: ForwardGraph | None = None
        self.torch_saved: tuple[str, ...] = ()
        self.rounding_unit = 0.0
        self.divided_names: tuple[str, ...] = ()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint, inputs, options = gm, joint_inputs, kwargs
        joint.graph.eliminate_dead_code()
        static = options.get("static_lifetime_input_indices") or ()
        forward, nodes = forward_graph_of(joint, static, options["num_fwd_outputs"])
        if self._is_first:
            names = saved_by_torch(joint, inputs, options)
            self.forward, self.torch_saved = forward, tuple(bases_of(node for node in nodes if node.name in names))
            self.rounding_unit = rounding_unit_of(nodes)
        division = None if self._saved is None else forward.saving(self._saved)
        if division is None:
            # Names of another release of torch.
            division = forward.cut(self._price)
        self.divided_names = forward.names_of(division.saved)
        recomputed = {nodes[place] for place in division.recomputed}
        return divided_by_tags(joint, inputs, options, recomputed, set(nodes) - recomputed)

    def uuid(self) -> str:
        # Part of the key of inductor's cache on disk.
        return hashlib.sha256(f"memfit {self._saved} {self._price}".encode()).hexdigest()


def _hash_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return a short text that two graphs share when they run the same ops on inputs of the same shapes."""
    digest = hashlib.sha256(graph.code.encode())
    for each in inputs:
        facts = (
            (tuple(each.shape), each.dtype, each.device.type, each.requires_grad) if isinstance(each, Tensor) else each
        )
        digest.update(f"{facts}\n".encode())
    return digest.hexdigest()[:16]
