"""The few names of torch's compiler that are not public, each with the releases it was checked on.

Checked on torch 2.13.0 (CPU), and against the sources of 2.11.0, which has all of them. It is a file of its own, as
importing the compiler takes seconds, and only compiled blocks need it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memfit.errors import MemfitError

try:
    with warnings.catch_warnings():
        # torch warns of itself when its compiler is imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._dynamo import config as dynamo_config
        from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
        from torch._functorch import config as functorch_config
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._guards import TracingContext, tracing
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.custom_graph_pass import CustomPartitionerFn
        from torch.utils._python_dispatch import _disable_current_modes

        if not hasattr(inductor_config, "custom_partitioner_fn"):
            raise ImportError("torch._inductor.config has no custom_partitioner_fn")
except ImportError as error:
    raise MemfitError(
        f"compiled blocks need parts of torch's compiler that torch {torch.__version__} does not have ({error}); they "
        "are known to be in 2.11 and 2.13. Use compile=False, or another release of torch"
    ) from error

InductorPartitioner = CustomPartitionerFn

_NOTHING = nullcontext()


def blocks_as_a_whole() -> AbstractContextManager[object]:
    """Return a context in which DDP does not divide what is compiled inside it at the borders of its buckets."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return _NOTHING
    context: AbstractContextManager[object] = dynamo_config.patch(optimize_ddp=False)
    return context


def current_tracing_context() -> TracingContext | None:
    """Return what dynamo knows of the graph that it is compiling."""
    return TracingContext.try_get()


def num_ignored_guards(context: TracingContext | None) -> int:
    """Return how many questions about sizes came after dynamo had made the guards of a graph, and were answered by its
    examples. What is compiled from such an answer is wrong for other sizes."""
    shape_env = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    return 0 if shape_env is None else shape_env.counter["ignored_backward_guard"]


@contextmanager
def own_warnings_ignored() -> Iterator[None]:
    """Ignore what torch warns of for its own developers: that it uses what it has deprecated itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        # What cannot be traced is reported by itself.
        warnings.filterwarnings("ignore", message="Error detected in .* Traceback of forward call")
        yield


def compiled_with_partitioner(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    partitioner: InductorPartitioner,
    context: TracingContext | None,
) -> Callable[..., Any]:
    """Return ``graph`` compiled by inductor, its joint graph divided by ``partitioner``."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        # Without them, the partitioner would not be called; inductor's own cache comes after it.
        # The backward graph is compiled at once: what fails is known before the block runs.
        settings = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        stack.enter_context(functorch_config.patch(settings))
        # Then half precision is rounded where eager rounds, and so alike in every partition.
        options = {"custom_partitioner_fn": partitioner, "emulate_precision_casts": True}
        stack.enter_context(inductor_config.patch(options))
        stack.enter_context(tracing(context))
        stack.enter_context(own_warnings_ignored())
        compiled: Callable[..., Any] = compile_fx(graph, inputs)  # type: ignore[assignment]
        return compiled


def divided_by_tags(
    joint: fx.GraphModule,
    inputs: Any,
    options: Mapping[str, Any],
    recomputed: Collection[fx.Node],
    saved: Collection[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph, where the backward pass has the ``recomputed`` nodes again."""
    for node in (*recomputed, *saved):
        if node.op == "call_function":
            again = node in recomputed
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, inputs, **options)


def donates_buffers() -> bool:
    """Return whether backward passes may overwrite what was saved for them, so that graphs cannot be retained."""
    return bool(functorch_config.donated_buffer)


def copied_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``graph``, which compiling changes."""
    with own_warnings_ignored():
        return copy.deepcopy(graph)


def saved_by_torch(joint: fx.GraphModule, inputs: Any, options: Mapping[str, Any]) -> set[str]:
    """Return the names of the nodes that torch's own partitioner would save."""
    with own_warnings_ignored():
        copied = fx.GraphModule(joint, copy.deepcopy(joint.graph))
    _, backward = min_cut_rematerialization_partition(copied, inputs, **options)
    return {str(node.target) for node in backward.graph.find_nodes(op="placeholder")}
