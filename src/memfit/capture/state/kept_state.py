"""Keeps a model, and what it touches, as it is while steps are run on it for measuring."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memfit.capture.phases import before_optimizer_steps
from memfit.capture.recording.plain_tensors import plain_alias
from memfit.capture.state.python_state import AttributeSnapshot
from memfit.capture.state.random_states import RandomStates
from memfit.capture.state.reached_objects import ReachedObjects
from memfit.capture.state.step_gradients import ZEROING_OPS, StepGradients
from memfit.capture.step_arguments import innermost_optimizer, optimizers_within, refuse_optimizer_with_closures
from memfit.capture.training_step import TrainingStep
from memfit.distributed.local_tensors import has_dtensor, is_dtensor
from memfit.distributed.wrapped_models import (
    STEPS_UNTIL_SETTLED,
    is_ddp,
    is_map_of_used_parameters,
    num_warm_up_steps,
)
from memfit.runtime.applying.batch_tensors import tensors_of
from memfit.runtime.engine.call_arguments import is_strided, tensors_in, written_tensors
from memfit.runtime.engine.op_rules import Treatment, rule_for
from memfit.runtime.engine.storage_attribute import StorageAttribute
from memfit.runtime.torch_internals import DispatchMode

# Who made a storage: a run of a step, or somebody before it.
_MAKERS: StorageAttribute[object] = StorageAttribute("maker")
_OUTSIDE = object()
# The namespaces of ops that wait for other processes.
_COLLECTIVES = ("c10d.", "_c10d_functional.")


class KeptState:
    """Puts back, after each run of a training step, everything that the step changes.

    That is: gradients, the state of random number generators, the plain Python state that is reached from modules and
    from the functions of the step (counters, caches, variables of closures), learning rate schedulers, gradient
    scalers, and each tensor that the step writes: buffers, but also weights, the batch, or tensors in closures. Which
    those are is found in the runs until `is_warm`, and only they are copied, to host memory. All other runs begin with
    the same random numbers and the same state, so that they write the same; those that do not must say so.

    What optimizers keep for themselves stays from run to run, since the step to be measured is one of many; it goes
    when the block that `kept_optimizer` goes around ends. Where a step function steps optimizers several times, later
    gradients depend on that state, and it is put back after each run too.

    Each run but the first begins with the gradients that the step before it leaves in a training loop.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        arguments = step.arguments
        self._reached = ReachedObjects([step.model, arguments.loss, arguments.step, *optimizers_within(step.optimizer)])
        modules = {id(module): module for module in (*step.model.modules(), *self._reached.modules)}
        self._modules = list(modules.values())
        self._leaves = _leaves_of(step, self._modules)
        self._optimizers = {id(optimizer): optimizer for optimizer in self._reached.optimizers}
        step.reached_optimizers = self._optimizers.values()
        self._optimizer_states: list[AttributeSnapshot] = []
        self._writes: list[_FirstWrites] = []
        self._num_watched_runs = 0
        self._gradients = StepGradients(step)
        self._num_runs_to_watch = max(num_warm_up_steps(step.model), self._gradients.num_runs_to_watch)
        self._steps_optimizers = False
        self._attributes = AttributeSnapshot([])
        self._num_optimizers_in_attributes = -1
        self._changes_attributes = False
        self._draws_random_numbers = False
        self._random_states = RandomStates(())

    @property
    def consumes_gradients(self) -> bool:
        """Whether the step itself, or a hook, steps optimizers, so that no gradients may be left when it ends."""
        return self._steps_optimizers

    @property
    def may_step_an_optimizer_later(self) -> bool:
        """Whether a step function that counts its calls, or keeps anything else, has an optimizer and stepped none."""
        arguments = self._step.arguments
        is_unclear = arguments.step is not None and arguments.optimizer is None and not self._steps_optimizers
        return is_unclear and self._changes_attributes and bool(self._optimizers)

    @property
    def is_warm(self) -> bool:
        """Whether a further run writes only what the runs so far wrote."""
        return self._num_watched_runs >= self._num_runs_to_watch

    @contextmanager
    def kept(self, *, may_write_more: bool = False) -> Iterator[None]:
        """Run a step, or several, inside the block.

        With ``may_write_more`` these may write other tensors than earlier runs, because they begin with other random
        numbers or are several. Such a block must be neither timed nor recorded.
        """
        gradients = [(leaf, leaf.grad, leaf.requires_grad) for leaf in self._leaves]
        contents = [(leaf, plain_alias(leaf)) for leaf in self._leaves if is_strided(leaf) and not is_dtensor(leaf)]
        attributes = self._current_attributes()
        self._begin_gradients()
        # Inside autocast, casts of weights are kept from pass to pass; each run is to make its own.
        torch.clear_autocast_cache()
        self._random_states = RandomStates({leaf.device.index for leaf in self._leaves if leaf.device.type == "cuda"})
        random_states = self._random_states
        try:
            with self._watching_writes(always=may_write_more):
                self._begin_run()
                yield
            leaves = [*self._leaves, *(leaf for writes in self._writes for leaf in writes.leaves)]
            self._gradients.learn(leaves, fills_with_zeros=any(writes.zeroed_gradients for writes in self._writes))
        finally:
            random_states.restore()
            for leaf, gradient, requires_grad in gradients:
                leaf.grad = gradient
                if leaf.requires_grad is not requires_grad:
                    self._changes_attributes |= leaf.is_leaf
                    leaf.detach_().requires_grad_(requires_grad)
            for leaf, content in contents:
                if leaf.untyped_storage() is not content.untyped_storage():
                    leaf.data = content
            self._changes_attributes |= attributes.has_changed()
            self._draws_random_numbers |= attributes.has_drawn()
            attributes.restore()
            for writes in self._writes:
                writes.undo()
                self._leaves += writes.take_leaves(known=self._leaves)

    @property
    def changes_attributes(self) -> bool:
        """Whether the runs so far changed Python state that the next step would begin with."""
        return self._changes_attributes

    @property
    def draws_random_numbers(self) -> bool:
        """Whether the runs so far may have drawn from random number generators that the step itself has."""
        return self._draws_random_numbers

    @property
    def writes_tensors(self) -> bool:
        """Whether the runs so far wrote tensors that the next step would begin with."""
        return any(writes.has_any for writes in self._writes)

    def run_watched(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, and put back what it writes when the run is over."""
        return self._writes[-1].run(op, types, args, kwargs)

    def _begin_run(self) -> None:
        """Bring the step to where it is to be measured."""
        self._seed()
        for _ in range(self._step.num_steps_before):
            self._step.run()
            self.begin_next()

    def begin_next(self) -> None:
        """Go on to the next step of a training loop inside the block: only the gradients are made anew."""
        self._begin_gradients()
        self._seed()

    def _seed(self) -> None:
        seed = self._step.random_seed
        if seed is not None:
            self._attributes.seed(seed)
            torch.manual_seed(seed)
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
        elif self._step.branches_at_random:
            self._random_states.restore()

    def begin_another(self) -> None:
        """Begin one more step inside the block: with the gradients that training loops have, and the same counters.

        A model that counts its steps may have room for so many only. Where the first step left all attributes as they
        were, which takes time to put back, they are left alone.
        """
        if self._step.arguments.gradients == "fresh":
            self._drop_gradients()
        if self._changes_attributes and not self._step.num_steps_before:
            self._attributes.restore()
        self._seed()

    def _current_attributes(self) -> AttributeSnapshot:
        """Return the snapshot of an earlier run, which ended with all as it was; a new one where that is outdated."""
        if self._num_optimizers_in_attributes != len(self._optimizers) or self._attributes.has_changed():
            self._attributes = self._snapshot()
            self._num_optimizers_in_attributes = len(self._optimizers)
        return self._attributes

    def _snapshot(self) -> AttributeSnapshot:
        # What DDP knows in Python of its steps goes with what it knows in C++, which goes on.
        attributes = [vars(module) for module in self._modules if not is_ddp(module)] + self._reached.holders
        for optimizer in self._optimizers.values():
            attributes += [vars(optimizer), *_groups_of(optimizer)]
        return AttributeSnapshot(attributes, but=[_state_of(optimizer) for optimizer in self._optimizers.values()])

    def _begin_gradients(self) -> None:
        self._drop_gradients()
        self._gradients.begin()

    def _drop_gradients(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    @contextmanager
    def kept_optimizer(self) -> Iterator[None]:
        """Run all steps inside the block: afterwards no optimizer knows of any of them."""
        self._optimizer_states = [_snapshot_of_optimizer(optimizer) for optimizer in self._optimizers.values()]
        try:
            yield
        finally:
            for snapshot in self._optimizer_states:
                snapshot.restore()

    @contextmanager
    def _watching_writes(self, *, always: bool) -> Iterator[None]:
        """Look for writes, and for optimizers, in the steps that warm up, or ``always``: others may be timed."""
        if self.is_warm and not always:
            yield
            return
        self._num_watched_runs += 1
        if not self._writes:
            self._writes.append(self._first_writes())
        writes = self._writes[-1]
        writes.gradients = frozenset(map(id, self._gradients.kept))
        num_steps = 0

        def see(optimizer: torch.optim.Optimizer) -> None:
            nonlocal num_steps
            refuse_optimizer_with_closures(optimizer)
            num_steps += 1
            self._steps_optimizers |= optimizer is not innermost_optimizer(self._step.optimizer) or num_steps > 1
            if id(optimizer) not in self._optimizers:
                # One that only a hook or an object of an extension knows: its state is as it was, before its step.
                self._optimizers[id(optimizer)] = optimizer
                self._optimizer_states.append(_snapshot_of_optimizer(optimizer))

        with before_optimizer_steps(see), writes:
            yield
        self._steps_optimizers |= num_steps > 0 and self._step.arguments.step is not None
        if writes.met_collectives:
            # What stands around the model may be out of sight.
            self._step.runs_collectives = True
            self._num_runs_to_watch = max(self._num_runs_to_watch, STEPS_UNTIL_SETTLED)
        if len(self._writes) == 1 and num_steps > 1 and self._step.arguments.step is not None:
            # The optimizers' state was made in this run; the next one writes it.
            self._num_runs_to_watch += 1
            self._writes.append(self._first_writes())

    def _first_writes(self) -> _FirstWrites:
        return _FirstWrites([module for module in self._modules if is_ddp(module)])


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    return list(getattr(optimizer, "param_groups", ()))


def _state_of(optimizer: Any) -> Any:
    return getattr(optimizer, "state", None)


def _snapshot_of_optimizer(optimizer: Any) -> AttributeSnapshot:
    """Return a snapshot of all of the optimizer, however many parameters it is for."""
    states = list(innermost_optimizer(optimizer).state.values())
    return AttributeSnapshot([vars(optimizer), *_groups_of(optimizer), *states])


def _copied_to_host(tensor: Tensor) -> Tensor:
    """Return a copy that is written back after every run: from pinned memory, that takes a fifth of the time."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    try:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        # The host lets no more memory be pinned.
        return tensor.to("cpu", copy=True)
    return pinned.copy_(tensor)


def existed_before(tensor: Tensor) -> bool:
    """Return whether the tensor's storage was there when the first run of the step ended, or earlier."""
    return _MAKERS.of(tensor.untyped_storage()) is not None


class _FirstWrites(DispatchMode):
    """Copies each tensor from outside the step before the step's first write to it, and marks all storages it meets."""

    def __init__(self, ddp: Sequence[Any]) -> None:
        super().__init__()
        self._ddp = ddp
        self._made_here = object()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.met_collectives = False
        # By the ids of gradients that the run began with, and whether one of them was filled with zeros.
        self.gradients: frozenset[int] = frozenset()
        self.zeroed_gradients = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(op, types, args, kwargs or {})

    def run(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, and copy what it is the first to write."""
        rule = rule_for(op)
        if has_dtensor(types):
            # What is written are local tensors.
            return NotImplemented
        if types:
            return op(*args, **kwargs)
        self.met_collectives |= rule.name.startswith(_COLLECTIVES)
        arguments = tensors_in((args, kwargs))
        if rule.name in ZEROING_OPS:
            self.zeroed_gradients |= not self.gradients.isdisjoint(map(id, arguments))
        self._mark(arguments, _OUTSIDE)
        for tensor in arguments:
            # What the step made looks like a leaf too, once backward has let go of the graph behind it.
            if tensor.requires_grad and tensor.is_leaf and not self._is_made_here(tensor):
                # Met before backward fills it in: a loss may have parameters that are none of the model's.
                self._gradients.setdefault(id(tensor), (tensor, tensor.grad))
        if rule.treatment is Treatment.VIEW:
            return op(*args, **kwargs)
        written = written_tensors(rule, args, kwargs)
        if rule.batch_norm_arguments is not None:
            written = tensors_in([args[place] for place in rule.batch_norm_arguments])
        for tensor in written:
            if not is_strided(tensor) or is_map_of_used_parameters(tensor, self._ddp):
                continue
            if not self._is_made_here(tensor):
                whole = _whole_storage_of(tensor)
                self._copies.append((whole, _copied_to_host(whole)))
                self._mark([tensor], self._made_here, again=True)
        result = op(*args, **kwargs)
        self._mark(tensors_in([result]), self._made_here)
        return result

    def _is_made_here(self, tensor: Tensor) -> bool:
        if not is_strided(tensor):
            return False
        return _MAKERS.of(tensor.untyped_storage()) is self._made_here

    def _mark(self, tensors: list[Tensor], maker: object, *, again: bool = False) -> None:
        for tensor in tensors:
            if is_strided(tensor) and (again or _MAKERS.of(tensor.untyped_storage()) is None):
                _MAKERS.set(tensor.untyped_storage(), maker)

    def undo(self) -> None:
        """Write back what the tensors held."""
        for tensor, copy in self._copies:
            # FSDP2 frees the memory that it gathers parameters into, and allocates it anew.
            if tensor.untyped_storage().nbytes() == copy.numel():
                tensor.copy_(copy, non_blocking=True)

    @property
    def has_any(self) -> bool:
        """Whether anything from outside the step was written."""
        return bool(self._copies)

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves that were met and not taken yet."""
        return [leaf for leaf, _ in self._gradients.values()]

    def take_leaves(self, known: list[Tensor]) -> list[Tensor]:
        """Give the leaves met beside the ``known`` ones their gradients back, once, and return them."""
        for tensor in known:
            self._gradients.pop(id(tensor), None)
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        leaves = [leaf for leaf, _ in self._gradients.values()]
        self._gradients.clear()
        return leaves


def _whole_storage_of(tensor: Tensor) -> Tensor:
    """Return the bytes of the tensor's storage as a tensor, with a version counter of its own."""
    storage = tensor.untyped_storage()
    # What is made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _leaves_of(step: TrainingStep, modules: Iterable[nn.Module]) -> list[Tensor]:
    leaves: list[Tensor] = [leaf for module in modules for leaf in module.parameters(recurse=False)]
    leaves += [tensor for tensor in tensors_of((step.batch, step.arguments.targets)) if tensor.is_leaf]
    if step.optimizer is not None:
        leaves += [
            parameter for group in innermost_optimizer(step.optimizer).param_groups for parameter in group["params"]
        ]
    return list({id(leaf): leaf for leaf in leaves}.values())
