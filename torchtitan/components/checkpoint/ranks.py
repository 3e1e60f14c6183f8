"""The processes that save and load a checkpoint together, and their agreement on results and errors."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan.tools.errors import UserError

T = TypeVar("T")


class Ranks:
    """The ranks of a process group that communicates from the host; without a group, this process alone. An error that
    cannot be pickled for other ranks becomes an `OSError` (or a `UserError`) of the same text."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = group.rank() if group else 0
        self.size = group.size() if group else 1

    def gather(self, value: T) -> list[T]:
        """Return `value` of every rank, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_from_rank0(self, decide: Callable[[], T]) -> T:
        """Return the result of `decide` on rank 0 to every rank; an error there is raised on every rank."""
        outcome = self._attempt(decide) if self.rank == 0 else (None, None)
        if self.group:
            outcomes: list[Any] = [outcome]
            dist.broadcast_object_list(outcomes, group_src=0, group=self.group)
            [outcome] = outcomes
        return self._results([outcome])[0]

    def all_ranks_or_raise(self, act: Callable[[], T]) -> list[T]:
        """Return the result of `act` on every rank, in rank order; an error on any rank is raised on all."""
        return self._results(self.gather(self._attempt(act)))

    def _attempt(self, act: Callable[[], T]) -> tuple[Any, Exception | None]:
        try:
            return act(), None
        except Exception as error:  # all of them: the other ranks wait for an answer
            return None, self._sendable(error)

    @staticmethod
    def _results(outcomes: list[tuple[Any, Exception | None]]) -> list[Any]:
        for _, raised in outcomes:
            if raised:
                raise raised
        return [result for result, _ in outcomes]

    def _sendable(self, error: Exception) -> Exception:
        if self.group is None:
            return error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever the error's own class does there
            return UserError(str(error)) if isinstance(error, UserError) else OSError(repr(error))
        return error
