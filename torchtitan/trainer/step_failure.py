"""Errors of one of several ranks in the data or the loss of a step: all ranks end before the
update.

The other ranks wait for the failed one in the collectives of the step. So it takes part in them to
the end of the backward passes: with the micro-batches of the step before if it cannot read data,
and with a gradient of zero if it cannot compute a loss. The sum of the
step's numbers then tells all ranks, which save the step before and end.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from torchtitan.components.data.base import Batch
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.distributed.process_group import gather_objects, is_lost_rank, world_size
from torchtitan.protocols.output_head import Head
from torchtitan.tools.autograd import Context
from torchtitan.tools.errors import RunFailure, SharedError, UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import tree_iter, tree_map_only
from torchtitan.tools.user_code import is_ctrl_c, is_of_user, with_place
from torchtitan.trainer.run import Run


class PendingResult(Protocol):
    """Results that a run reads late (`DeferredResults`), as other parts see them."""

    @property
    def pending(self) -> object | None: ...

    def settle(self) -> None: ...


class SteppingRun(Run, Protocol):
    """A `Trainer` as `StepFailure` sees it."""

    @property
    def deferred(self) -> PendingResult: ...


class StepFailure:
    """The error that spoils the step in progress on this rank of a `Trainer`.

    With several ranks it is kept until all ranks know of it, except where there is nothing to save
    or nothing to take part with: without checkpoints, in the first step after a start, after an
    optimizer step in the backward pass, under tensor parallelism. There, and in a single process,
    it ends the run at once.
    """

    def __init__(self, trainer: SteppingRun):
        self._trainer = trainer
        self.error: BaseException | None = None
        """The first error of this rank in the step."""
        self._batches: Sequence[Batch] = ()  # of the step before
        self._batch: Batch | None = None  # the last one that was processed
        self._before: Sequence[_Pass] = ()  # through the models, in the last micro-batch
        self._passes: list[_Pass] | None = None  # in this micro-batch; None outside of one
        self._open: list[_Pass] = []  # of them, the passes in progress
        self._stage = _FORWARD

    @property
    def _is_on(self) -> bool:
        config = self._trainer.config
        return (
            world_size() > 1
            and config.checkpoint.saves
            and not config.optimizer.early_step_in_backward
            # There the loss communicates, and what it sends depends on the labels.
            and self._trainer.parallel_dims.tp == 1
        )

    def has_failed(self) -> bool:
        """Return whether the step in progress has failed on this rank."""
        return self.error is not None

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Record the passes through models, if the run saves."""
        if not self._is_on:
            return
        for model in models:
            model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
            model.register_forward_hook(self._end_pass, with_kwargs=True)

    def or_batches_before(self, read: Callable[[], list[Batch]], n_batches: int) -> list[Batch]:
        """Return what `read` returns, or the step before's micro-batches if it raises an error that
        is kept."""
        try:
            batches = read()
        except BaseException as error:
            if isinstance(error, RunFailure) or is_ctrl_c(error) or is_lost_rank(error):
                raise
            if not self._is_on or not self._batches:
                self.error = error
                raise
            self._keep(error, "data")
            return list(islice(cycle(self._batches), n_batches))
        if self._is_on and batches:
            self._batches = batches
        return batches

    def or_batch_before(self, process: Callable[[], Batch]) -> Batch:
        """Return what `process` returns, or its last result if it raises an error that is kept."""
        try:
            batch = process()
        except BaseException as error:
            if self._batch is None or not is_of_user(error) or is_lost_rank(error):
                raise
            self._keep(error, "data")
            return self._batch
        self._batch = batch if self._is_on else None
        return batch

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Take part in a micro-batch's collectives to their end if the block raises an error that
        is kept. May be nested."""
        if not self._is_on:
            yield
            return
        self._passes = []
        self._open = []
        self._stage = _FORWARD
        try:
            yield
        except BaseException as error:
            if not self._is_kept(error):
                raise
            self._keep(error, "loss")
            if self._stage == _FORWARD:
                self._stage = _BACKWARD
                self._complete()
            self._stage = _COMPLETE
        if self._passes:
            self._before = [one.without_result() for one in self._passes]
        self._passes = None

    def _is_kept(self, error: BaseException) -> bool:
        if not is_of_user(error) or is_lost_rank(error):
            return False
        if self._stage == _FORWARD:
            return bool(self._before) and not self._open
        return self._stage == _COMPLETE

    def _keep(self, error: BaseException, part: str) -> None:
        if self.error is not None:
            return
        self.error = error
        logger.error(
            "rank %d failed in the %s of step %d: %s; all ranks end before its update",
            self._trainer.rank,
            part,
            self._trainer.step + 1,
            describe(error),
        )

    def end_backward(self) -> None:
        """Tell that the micro-batch's backward pass has ended."""
        self._stage = _COMPLETE
        for one in self._passes or ():
            one.ends.clear()

    def guarded(self, head: Head) -> Head:
        """Return an output head whose errors in a micro-batch are kept: a loss of zero replaces the
        result, since the model's pass must end."""
        return partial(self._call, head)

    def _call(self, head: Head, hidden: Tensor, weight: Tensor | None, **inputs: object) -> Tensor:
        try:
            return head(hidden, weight, **inputs)
        except BaseException as error:
            is_training = self._passes is not None and torch.is_grad_enabled()
            if not is_training or not is_of_user(error) or is_lost_rank(error):
                raise
            self._keep(error, "loss")
            return _zero_loss(hidden, weight)

    def _begin_pass(
        self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        if self._passes is None:
            return None
        # The head may hold large tensors, such as the states of a teacher.
        head = {"head": _zero_loss} if _computes_loss(kwargs) else {}
        kept_args, kept_kwargs = _detached((args, {**kwargs, **head}))
        begun = _Pass(model, kept_args, kept_kwargs, torch.is_grad_enabled())
        # In the order of their beginnings: a head may begin a pass, such as of a critic, within
        # another one.
        self._passes.append(begun)
        self._open.append(begun)
        return (args, {**kwargs, "head": self.guarded(kwargs["head"])}) if head else None

    def _end_pass(
        self, model: nn.Module, args: object, kwargs: Mapping[str, object], result: object
    ) -> None:
        if self._passes is None:
            return
        done = self._open.pop()
        for output in tree_iter(result):
            if isinstance(output, Tensor) and output.requires_grad:
                done.ends.append((get_gradient_edge(output), _zeros_like(output)))
                done.ends[-1][0].node.register_prehook(self._begin_backward)

    def _begin_backward(self, *gradients: object) -> None:
        if self._stage == _FORWARD:
            self._stage = _BACKWARD

    def _complete(self) -> None:
        """Run the passes that the other ranks run in this micro-batch, and all backward passes."""
        assert self._passes is not None
        for one in self._before[len(self._passes) :]:
            with torch.set_grad_enabled(one.has_gradients):
                one.model(*one.args, **one.kwargs)
            if not one.has_gradients:
                free_gathered_weights(one.model)
        ends = [end for one in self._passes for end in one.ends]
        torch.autograd.backward(
            [edge for edge, _ in ends], [make_zeros() for _, make_zeros in ends]
        )

    def end_run(self) -> NoReturn:
        """Raise the error of the first rank that failed, on all ranks alike. A collective."""
        errors = gather_objects(None if self.error is None else describe(self.error))
        rank = next(rank for rank, error in enumerate(errors) if error is not None)
        raise SharedError(f"rank {rank} failed: {errors[rank]}") from self.error

    def check_step(self) -> None:
        """Raise the error on this rank after a step that did not read its result, so that no update
        follows."""
        if self.error is not None and self._trainer.deferred.pending is None:
            raise self.error


T = TypeVar("T")

_FORWARD = "forward"
_BACKWARD = "backward"
_COMPLETE = "complete"


@dataclass
class _Pass:
    """A pass through a model in a micro-batch."""

    model: nn.Module
    args: Sequence[object]
    kwargs: Mapping[str, object]
    has_gradients: bool
    ends: list[tuple[GradientEdge, Callable[[], Tensor]]] = field(default_factory=list)
    """Beginnings of the backward pass, with functions that make gradients of zeros. An edge keeps
    no result in memory."""

    def without_result(self) -> "_Pass":
        return _Pass(self.model, self.args, self.kwargs, self.has_gradients)


class _Kept(Context, Protocol):
    saved_tensors: tuple[Tensor | None, ...]


class _Zero(torch.autograd.Function):
    """A loss of zero whose backward pass gives all its inputs gradients, of zeros."""

    @staticmethod
    def forward(ctx: _Kept, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        device = next(x.device for x in inputs if x is not None)
        return torch.zeros((), device=device)

    @staticmethod
    def backward(ctx: _Kept, *gradients: Tensor) -> object:
        return tuple(x if x is None else torch.zeros_like(x) for x in ctx.saved_tensors)


def _zero_loss(hidden: Tensor, weight: Tensor | None, **inputs: object) -> Tensor:
    """An output head without a result."""
    zero: Tensor = _Zero.apply(hidden, weight)
    return zero


def _computes_loss(kwargs: Mapping[str, object]) -> bool:
    """Return whether a model's pass ends with the loss. Scores of a reward model are the result of
    `F.linear`, by which its head knows them."""
    return kwargs.get("head", F.linear) is not F.linear


def _zeros_like(x: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes zeros like a tensor, which it does not keep."""
    if not is_dtensor(x):
        return partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)
    from torch.distributed.tensor import DTensor

    make_local = _zeros_like(x.to_local())
    mesh, placements = x.device_mesh, x.placements
    shape, stride = x.shape, x.stride()

    def make_zeros() -> Tensor:
        zeros: Tensor = DTensor.from_local(
            make_local(), mesh, placements, shape=shape, stride=stride
        )
        return zeros

    return make_zeros


def _detached(arguments: T) -> T:
    """Return arguments without their graphs, which would stay in memory. Whether they have
    gradients stays, since it decides when FSDP sends the gradients of weights."""
    detached: T = tree_map_only(Tensor, _without_graph, arguments)
    return detached


def _without_graph(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def describe(error: BaseException) -> str:
    """Return an error in one line: a `UserError`'s own message, else type, message and place."""
    return str(error) if isinstance(error, UserError) else with_place(error)
