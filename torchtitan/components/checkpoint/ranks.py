"""The processes that save and load a checkpoint together, and how they agree."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan.tools.errors import UserError

T = TypeVar("T")


class Ranks:
    """The ranks of a process group that can communicate from the host, or this process alone.

    Args:
        group: None: this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = group.rank() if group else 0
        self.size = group.size() if group else 1

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in their order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def first_decides(self, decide: Callable[[], T]) -> T:
        """What `decide` returns on rank 0, on every rank; what it raises there is raised on every rank.

        An error that cannot be sent to the others becomes an `OSError` (or a `UserError`) of the same text.
        """
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = decide()
            except Exception as error:  # all of them: the other ranks wait for an answer
                outcome[1] = self._sendable(error)
        if self.group:
            dist.broadcast_object_list(outcome, group_src=0, group=self.group)
        result, raised = outcome
        if raised:
            raise raised
        return result

    def together(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns on every rank, in their order; what it raises on any is raised on every rank.

        An error that cannot be sent to the others becomes an `OSError` (or a `UserError`) of the same text.
        """
        outcome: tuple[Any, Exception | None]
        try:
            outcome = act(), None
        except Exception as error:  # all of them: the other ranks wait for an answer
            outcome = None, self._sendable(error)
        outcomes: list[Any] = self.gather(outcome)
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
