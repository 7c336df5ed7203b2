"""Lets blocks of a model run compiled, each by its partition, and restores them as they were."""

from __future__ import annotations

import hashlib
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from memfit.graph.compiled_data.compiled_blocks import Partition, SentTensors
from memfit.runtime.applying.forward_wrapping import Forward, bare_forward, wrap_forward
from memfit.runtime.compiling.compiler_internals import (
    FailOnRecompileLimitHit,
    blocks_as_a_whole,
    own_warnings_ignored,
)
from memfit.runtime.compiling.graph_variants import BlockRun, GraphVariants, running, variants_backend
from memfit.runtime.compiling.offloaded_saves import OffloadedSaves, noted_saves
from memfit.runtime.engine.call_arguments import is_strided, tensors_in
from memfit.runtime.torch_internals import in_function_transform


class BlockObserver:
    """Is told of the calls of compiled blocks. By itself, it warns of blocks that could not be compiled."""

    notes_saves = False
    """Whether `saved` is to be called, which takes time."""

    def forward_begins(self, path: str) -> None:
        """The block's forward pass begins."""

    def forward_ended(self, path: str, graphs: Sequence[GraphVariants], nodes: Sequence[Any]) -> None:
        """The block's forward pass is over. It ran ``graphs``, whose backward passes are autograd's ``nodes``."""

    def saved(self, path: str, saves: Mapping[int, int], inputs: Set[int], outputs: Sequence[int]) -> None:
        """The block's forward pass saved ``saves``; its inputs' and outputs' storages are at these addresses."""

    def failed(self, path: str, reason: str) -> None:
        """The block could not be compiled, and ran in eager."""
        warnings.warn(
            f"the block {path!r} cannot be compiled here, so that it runs in eager and saves all of its activations: "
            f"gradients are right, the planned peak does not hold ({reason})",
            stacklevel=5,
        )


class PlannedBlocks:
    """Blocks of ``model`` that run compiled, by the partition that ``partitions`` has for their path.

    ``offloaded`` has, for the blocks that offload, which of the tensors that they save leave for the host's memory.
    A block that cannot be compiled runs in eager. `remove` restores all blocks, also those that the user had compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        partitions: Mapping[str, Partition],
        observer: BlockObserver | None = None,
        owner: object = None,
        offloaded: Mapping[str, SentTensors] | None = None,
    ) -> None:
        self._restore: list[Callable[[], None]] = []
        self._model = model
        self._blocks: dict[str, _PlannedBlock] = {}
        modules = dict(model.named_modules())
        saves = self._saves_of(partitions, offloaded)
        for path, partition in partitions.items():
            block = self._blocks[path] = _PlannedBlock(path, modules[path], partition, observer, saves)
            self._restore += _taken_over(modules[path], block, owner)

    def use(self, partitions: Mapping[str, Partition], offloaded: Mapping[str, SentTensors] | None = None) -> None:
        """Let later forward passes of the blocks run by other partitions."""
        saves = self._saves_of(partitions, offloaded)
        for path, partition in partitions.items():
            self._blocks[path].use(partition, saves)

    def _saves_of(
        self, partitions: Mapping[str, Partition], offloaded: Mapping[str, SentTensors] | None
    ) -> OffloadedSaves | None:
        return OffloadedSaves(self._model, offloaded, list(partitions)) if offloaded else None

    def remove(self) -> None:
        """Let the blocks run as they did before."""
        while self._restore:
            self._restore.pop()()

    def __enter__(self) -> PlannedBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _PlannedBlock:
    """Runs the forward passes of one block."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        partition: Partition,
        observer: BlockObserver | None,
        saves: OffloadedSaves | None,
    ) -> None:
        self._path = path
        self._partition = partition
        self._observer = observer or BlockObserver()
        self._saves = saves
        self._original = original_of(module)
        self._is_eager = False
        self._has_run = False
        self._user_compiled = self._original.forward if self._original is not module else None
        self._calls = _compiled_calls_of(self._original)

    def use(self, partition: Partition, saves: OffloadedSaves | None) -> None:
        """Run later forward passes by ``partition``."""
        self._partition, self._saves = partition, saves

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_eager or not torch.is_grad_enabled() or torch.compiler.is_compiling() or in_function_transform():
            return forward(*args, **kwargs)
        call = BlockRun(self._partition)
        failure: str | None = None
        self._observer.forward_begins(self._path)
        try:
            # The first call traces and compiles.
            first = nullcontext() if self._has_run else own_warnings_ignored()
            with running(call), self._seeing_saves(call, (args, kwargs)), first, blocks_as_a_whole():
                result = self._run_compiled(self._user_compiled or bare_forward(forward), args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # dynamo raises errors of many classes. They come before anything has run, so that nothing is done twice.
            if call.has_begun:
                raise
            failure = first_line(error)
        if failure is not None:
            # What the block raises in eager as well is its own error.
            result = forward(*args, **kwargs)
            self._is_eager = True
            self._observer.failed(self._path, failure)
            return result
        self._has_run = True
        self._observer.forward_ended(self._path, call.graphs, call.nodes)
        return result

    def _run_compiled(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._calls.call_at(self._path)
        try:
            return call(forward, args, kwargs)
        except FailOnRecompileLimitHit:
            another = self._calls.after_limit_at(self._path, call)
            if another is None:
                raise
            return another(forward, args, kwargs)

    @contextmanager
    def _seeing_saves(self, call: BlockRun, inputs: Any) -> Iterator[None]:
        """Offload what the call saves, or note how large it is."""
        if self._saves is not None:
            with self._saves.saving(self._path, self._original) as saves:
                yield
            if saves is not None and self._saves.starts_fetching(self._path):
                forward_pass = saves.forward_pass
                for node in call.nodes:
                    node.register_prehook(lambda _: forward_pass.fetch_ahead())
        elif self._observer.notes_saves:
            call.outputs = []
            with noted_saves(self._original) as noted:
                yield
            self._observer.saved(self._path, noted, set(_addresses_of(inputs)), _addresses_of(call.outputs))
            call.outputs = None
        else:
            yield


def _addresses_of(values: Any) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors_in(values) if is_strided(tensor)]


def original_of(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile() was called on, or ``module`` itself."""
    original = module._modules.get("_orig_mod")
    return module if original is None else original


def first_line(error: BaseException) -> str:
    """Return what an error says first, in one line; where dynamo passes on an error of the compiler, what that says."""
    text = str(getattr(error, "inner_exception", error)).strip()
    first, explanation = text.partition("\n")[0], text.partition("Explanation: ")[2].partition("\n")[0]
    return ": ".join(filter(None, (first, explanation))) or type(error).__name__


class _CompiledCall:
    """A function of its own that calls forwards, compiled.

    ``num_graphs`` is how many graphs dynamo has for it, ``is_full`` whether dynamo has refused one more.
    """

    def __init__(self, name: str) -> None:
        self.num_graphs = 0
        self.is_full = False
        # By the code object and its name dynamo counts recompilations and learns which sizes vary.
        own = types.FunctionType(_call.__code__.replace(co_name=name), _call.__globals__)
        self._compiled = torch.compile(own, backend=self._backend, fullgraph=True)

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._compiled(forward, args, kwargs)

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        return variants_backend(graph, inputs)


# dynamo compares a call with each graph of a function, and gives up beyond its own limit of 8. Blocks that have graphs
# of their own, because each has another number in it (a rate, an index), share a function until it has so many.
_SHARED_GRAPHS = 4
# Beyond so many functions for one class of blocks, whatever makes the graphs differ will not end.
_MOST_FUNCTIONS = 32


class _CompiledCalls:
    """The functions that call the forwards of all modules of a class with the same parameters.

    A block keeps the function that blocks at its path had before, so that a plan that is applied again, or a model that
    is built again, finds its graphs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: list[_CompiledCall] = []
        self._by_path: dict[str, _CompiledCall] = {}

    def call_at(self, path: str) -> _CompiledCall:
        """Return the function for the block at ``path``."""
        return self._by_path.get(path) or self._another_at(path)

    def after_limit_at(self, path: str, call: _CompiledCall) -> _CompiledCall | None:
        """Return another function than ``call``, which has as many graphs as dynamo allows; None at the end."""
        call.is_full = True
        return self._another_at(path) if len(self._calls) < _MOST_FUNCTIONS else None

    def _another_at(self, path: str) -> _CompiledCall:
        shared = (each for each in self._calls if each.num_graphs < _SHARED_GRAPHS and not each.is_full)
        call = next(shared, None)
        if call is None:
            call = _CompiledCall(f"{self._name}_{len(self._calls)}")
            self._calls.append(call)
        self._by_path[path] = call
        return call


_compiled_calls: dict[tuple[Any, ...], _CompiledCalls] = {}


def _compiled_calls_of(module: nn.Module) -> _CompiledCalls:
    parameters = tuple((name, tuple(each.shape), each.dtype) for name, each in module.named_parameters())
    key = (type(module), parameters)
    if key not in _compiled_calls:
        digest = hashlib.sha256(str(parameters).encode()).hexdigest()[:16]
        _compiled_calls[key] = _CompiledCalls(f"{type(module).__name__}_{digest}")
    return _compiled_calls[key]


def _call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _taken_over(module: nn.Module, block: _PlannedBlock, owner: object) -> list[Callable[[], None]]:
    """Put ``block`` around the module's forward, and return what restores the module."""
    restore = [wrap_forward(module, block.run, owner)]
    compiled_call = getattr(module, "_compiled_call_impl", None)
    if compiled_call is not None:
        # Of module.compile(): calls would go there, past the forward.
        module._compiled_call_impl = None

        def compile_again() -> None:
            module._compiled_call_impl = compiled_call

        restore.append(compile_again)
    return restore
