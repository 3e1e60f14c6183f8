"""Computes few of the equal layers of a model, and replays their effects for the others."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from torchtitan.dry_run.memory_tracker import Allocation, MemoryTracker
from torchtitan.dry_run.observer import tensors_in
from torchtitan.dry_run.work_tracker import Work, WorkTracker
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.autograd import Context
from torchtitan.tools.equal_layers import facts_of, facts_of_layer
from torchtitan.tools.sharded import is_fsdp_module
from torchtitan.tools.torch_private import FakeTensor, like_fake_tensor, storage_references

_Made = tuple[Callable[[], Tensor], Allocation]
"""A function that makes a tensor like a result, and the memory of the result."""


class LayersDiffer(Exception):
    """Layers that looked equal have different effects, or effects beyond their results.

    Args:
        lasts: for each layer that was called, the last one with equal modules and arguments.
    """

    def __init__(self, lasts: dict[int, int]):
        super().__init__(lasts)
        self.lasts = lasts


@dataclass(eq=False)
class _Pass:
    """A pass of a layer that was computed, between two moments."""

    start: int
    before: Work
    """All work before the pass."""
    end: int = -1
    work: Work = field(default_factory=Work)
    results: list[_Made | None] = field(default_factory=list)
    """None: there is no such result, or it is not new memory."""


@dataclass(eq=False)
class _Computed:
    """A layer that was computed."""

    container: type
    """Type of the result: a tensor, or a collection of one."""
    arguments: list[Allocation | None]
    """Memory of the arguments with gradients."""
    keeps: list[bool]
    """Whether the layer keeps each of them for the backward pass."""
    forward: _Pass
    created: list[Allocation]
    """Memory that the forward pass allocated, in order."""
    gradient: Allocation | None = None
    """Memory of the gradient of the result."""
    backward: _Pass | None = None
    """None: it has not ended, or left more than the gradients of arguments and parameters."""
    after_backward: Callable[[], None] | None = None


@dataclass(eq=False)
class _Samples:
    """The layers of a kind that were computed. The last one's backward pass is the first of its
    kind, so that the others repeat it."""

    first: _Computed
    last: _Computed | None = None


class LayerReplay:
    """Compute the first and the last one of equal layers; replay the effects of the first's forward
    pass and of the last's backward pass on memory and work for those between.

    Layers are equal if their modules have the same types, fields and shapes of parameters, and
    their arguments the same sizes. This is checked: the passes of the first and the last must
    allocate the same memory and do the same work. What a layer between them does by its number
    alone is not seen. A layer is always computed if a parameter or an argument is a wrapper of
    tensors, such as a DTensor, if a part of it is sharded by itself, if a parameter is the result
    of another operation (as one process converts its precision) or has a gradient already, if
    gradients flow to other tensors, and without gradients.

    Args:
        lasts: for each layer, the last one that is equal, from an earlier `LayersDiffer`; None: it
            is the last one with equal modules.

    Raises:
        LayersDiffer: in the step, if the check fails, or the last one had other arguments.
    """

    def __init__(
        self,
        model: BaseModel,
        memory: MemoryTracker,
        work: WorkTracker,
        lasts: dict[int, int] | None = None,
    ) -> None:
        self.memory, self.work = memory, work
        self.replayed = 0
        """Number of passes of layers that were not computed."""
        self._samples: dict[object, _Samples] = {}
        self._called: dict[int, object] = {}  # facts about a layer's modules and arguments
        self._alive: list[object] = []  # arguments whose identities are among the facts
        kinds: dict[object, list[int]] = {}
        for index, layer in enumerate(model.blocks().values()):
            if any(is_fsdp_module(part) for part in layer.modules() if part is not layer):
                continue
            equal = kinds.setdefault(facts_of_layer(layer, index), [])
            equal.append(index)
            run = functools.partial(self._run, index, equal, layer, layer.forward)
            vars(layer)["forward"] = run
        self._lasts = lasts or {one: equal[-1] for equal in kinds.values() for one in equal}

    def _run(
        self,
        index: int,
        equal: list[int],
        layer: nn.Module,
        compute: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> object:
        parameters = [one for one in layer.parameters() if one.requires_grad]
        given = tensors_in((args, kwargs))
        tensors = [one for one in given if one.requires_grad]
        if (
            not (tensors and torch.is_grad_enabled())
            or not all(map(_is_plain, [*layer.parameters(), *given]))
            or any(not one.is_leaf or one.grad is not None for one in parameters)
            or len(set(map(id, tensors))) < len(tensors)
        ):
            return compute(*args, **kwargs)
        if index in self._called:  # the next pass of the model, with other arguments
            self._called.clear()
            self._samples.clear()
            self._alive.clear()
        facts = [(name, self._facts_of(one)) for name, one in [*enumerate(args), *kwargs.items()]]
        key = self._called[index] = id(equal), tuple(facts)
        if index == max(self._lasts):  # the identities are not needed, but the memory is
            self._alive.clear()
        is_last = index == self._lasts.get(index, index)
        if key in self._samples and not is_last:
            return self._replayed(self._samples[key], tensors, parameters)
        result, computed = self._compute(parameters, tensors, compute, args, kwargs)
        if computed is None:
            return result
        samples = self._samples.setdefault(key, _Samples(computed))
        if is_last:
            samples.last = computed
            self._check(samples, "forward")
            if samples.first is not computed:
                samples.first.after_backward = functools.partial(self._check, samples, "backward")
        return result

    def _facts_of(self, value: object) -> object:
        try:
            return facts_of(value)
        except TypeError:
            self._alive.append(value)
            return id(value)

    def _compute(
        self,
        parameters: Sequence[Tensor],
        tensors: Sequence[Tensor],
        compute: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[object, _Computed | None]:
        """Compute a layer, and record its forward pass now and its backward pass later; None: it
        cannot be replayed."""
        references = [storage_references(one.untyped_storage()) for one in tensors]
        recorder: list[_Computed] = []
        entered: list[Tensor] = list(_Entry.apply(self, parameters, recorder, *tensors))
        entry = entered[0].grad_fn
        replaced = dict(zip(map(id, tensors), entered, strict=True))
        args = tuple(_replace(one, replaced) for one in args)
        kwargs = {name: _replace(one, replaced) for name, one in kwargs.items()}
        forward = self._start()
        result = compute(*args, **kwargs)
        del entered, replaced, args, kwargs
        keeps = [
            storage_references(one.untyped_storage()) > count
            for one, count in zip(tensors, references, strict=True)
        ]
        results = [result] if isinstance(result, Tensor) else result
        if not isinstance(results, (list, tuple)) or len(results) != 1:
            return result, None
        (output,) = results
        if not isinstance(output, FakeTensor) or output.grad_fn is None:
            return result, None
        if not _is_closed(output.grad_fn, entry, parameters):
            return result, None
        created = self._end(forward, [output])
        if None in forward.results:
            return result, None
        arguments = [self.memory.allocation_of(one) for one in tensors]
        computed = _Computed(type(result), arguments, keeps, forward, created)
        recorder.append(computed)
        # after the hooks of `output`, in which FSDP gathers weights
        start, number = functools.partial(self._start_backward, computed), output.output_nr
        output.grad_fn.register_prehook(lambda gradients: start(gradients[number]))
        return result, computed

    def _start(self) -> _Pass:
        return _Pass(self.memory.now, self.work.work.copy())

    def _end(self, one: _Pass, results: Sequence[Tensor | None]) -> list[Allocation]:
        """End a pass with these results; return the memory that it allocated."""
        one.end, one.work = self.memory.now, self.work.work - one.before
        created = self.memory.created(one.start, one.end)
        for result in results:
            memory = None if result is None else self.memory.allocation_of(result)
            made = None
            if memory is not None and memory in created and isinstance(result, FakeTensor):
                make = functools.partial(like_fake_tensor(result), None, result.fake_mode)
                made = make, memory
            one.results.append(made)
        return created

    def _start_backward(self, computed: _Computed, gradient: Tensor) -> None:
        """Record that the backward pass of a computed layer begins."""
        computed.gradient = self.memory.allocation_of(gradient)
        computed.backward = self._start()

    def end_backward(
        self,
        computed: _Computed,
        gradients: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
    ) -> None:
        """Record that the backward pass of a computed layer has ended."""
        assert computed.backward is not None, "an entry follows its exit"
        results = [*gradients, *(one.grad for one in parameters)]
        created = self._end(computed.backward, results)
        made = computed.backward.results
        kept = {one[1] for one in [*computed.forward.results, *made] if one is not None}
        is_left = any(one.n_bytes for one in [*computed.created, *created] if one not in kept)
        if is_left or [one is None for one in results] != [one is None for one in made]:
            computed.backward = None
        if computed.after_backward is not None:
            computed.after_backward()

    def _check(self, samples: _Samples, which: str) -> None:
        """Check that a pass of the first and of the last layer do the same."""
        assert samples.last is not None, "the last layer was called"
        found = []
        for one in (samples.first, samples.last):
            done: _Pass | None = getattr(one, which)
            if done is None:
                raise self._difference()
            of = [*one.created, *self.memory.created(done.start, done.end)]
            changes = self.memory.changes(done.start, done.end, of)
            found.append((changes, done.work, one.keeps, [made is None for made in done.results]))
        if found[0] != found[1]:
            raise self._difference()

    def _difference(self) -> LayersDiffer:
        lasts = {key: index for index, key in self._called.items()}
        return LayersDiffer({index: lasts[key] for index, key in self._called.items()})

    def _replayed(
        self, samples: _Samples, tensors: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> object:
        self.replayed += 1
        keeps = samples.first.keeps
        held = [one if kept else None for one, kept in zip(tensors, keeps, strict=True)]
        result: Tensor = _Replayed.apply(self, samples, held, *tensors, *parameters)
        container = samples.first.container
        return container([result]) if container in (list, tuple) else result

    def forward(self, samples: _Samples) -> tuple[Tensor, dict[Allocation, Allocation]]:
        """Replay a forward pass; return its result, and its memory by that of the first layer."""
        twins: dict[Allocation, Allocation] = {}
        (result,) = self._replay(samples.first.forward, twins)
        assert result is not None, "the first layer had one"
        return result, twins

    def backward(
        self,
        samples: _Samples,
        twins: dict[Allocation, Allocation],
        held: Sequence[Tensor | None],
        gradient: Tensor,
    ) -> list[Tensor | None]:
        """Replay a backward pass; return its gradients."""
        last = samples.last
        if last is None or last.backward is None:
            raise self._difference()
        pairs = zip(samples.first.created, last.created, strict=True)
        by_last = {theirs: twins[one] for one, theirs in pairs if one in twins}
        outside = zip([*last.arguments, last.gradient], [*held, gradient], strict=True)
        for argument, tensor in outside:
            mine = None if tensor is None else self.memory.allocation_of(tensor)
            if argument is not None and mine is not None:
                by_last[argument] = mine
        return self._replay(last.backward, by_last)

    def _replay(self, one: _Pass, twins: dict[Allocation, Allocation]) -> list[Tensor | None]:
        self.work.work += one.work
        self.memory.replay(one.start, one.end, twins, omit=())
        results = []
        for made in one.results:
            tensor = None
            if made is not None:
                make, allocation = made
                tensor = make()
                self.memory.place(tensor, twins.pop(allocation))
            results.append(tensor)
        return results


class _EntryContext(Context, Protocol):
    replay: LayerReplay
    of_layer: tuple[Sequence[Tensor], list[_Computed]]


class _ReplayedContext(Context, Protocol):
    replay: LayerReplay
    of_layer: tuple[_Samples, Sequence[Tensor | None]]
    twins: dict[Allocation, Allocation]


class _Entry(torch.autograd.Function):
    """Ends the backward pass of a computed layer."""

    @staticmethod
    def forward(
        ctx: _EntryContext,
        replay: LayerReplay,
        parameters: Sequence[Tensor],
        recorder: list[_Computed],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.replay = replay
        ctx.of_layer = parameters, recorder
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    def backward(ctx: _EntryContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        parameters, recorder = ctx.of_layer
        for computed in recorder:
            ctx.replay.end_backward(computed, gradients, parameters)
        return None, None, None, *gradients


class _Replayed(torch.autograd.Function):
    """A layer that is not computed."""

    @staticmethod
    def forward(
        ctx: _ReplayedContext,
        replay: LayerReplay,
        samples: _Samples,
        held: Sequence[Tensor | None],
        *_: Tensor,
    ) -> Tensor:
        ctx.replay = replay
        ctx.of_layer = samples, held
        result, ctx.twins = replay.forward(samples)
        return result

    @staticmethod
    def backward(ctx: _ReplayedContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        samples, held = ctx.of_layer
        del ctx.of_layer
        return None, None, None, *ctx.replay.backward(samples, ctx.twins, held, gradient)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (FakeTensor, nn.Parameter, Tensor)


def _replace(value: object, replaced: dict[int, Tensor]) -> object:
    """Copy nested lists, tuples and dictionaries with other tensors."""
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replace(item, replaced) for key, item in value.items()}
    if type(value) is list:
        return [_replace(item, replaced) for item in value]
    if type(value) is tuple:
        return tuple(_replace(item, replaced) for item in value)
    return value


def _is_closed(node: Node, entry: object, parameters: Sequence[Tensor]) -> bool:
    """Return whether gradients flow from a node to the node `entry` and to parameters only."""
    leaves = set(map(id, parameters))
    seen: set[object] = {entry}
    waiting: list[Node | None] = [node]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if not hasattr(one, "variable"):
            waiting += [following for following, _ in one.next_functions]
        elif id(one.variable) not in leaves:
            return False
    return True
