"""The processes that save and load a checkpoint together, with collectives that also propagate
errors."""

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The ranks of a CPU process group, or this process alone without a group. An error that cannot
    be pickled is raised as an `OSError` (or `UserError`) with the same text."""

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.group = group
        self.rank = group.rank() if group else 0
        self.size = group.size() if group else 1

    @classmethod
    def of_run(cls) -> "Ranks":
        """Return the ranks of the default process group, if there is one."""
        import torch.distributed as dist

        return cls(dist.group.WORLD if dist.is_initialized() else None)

    def gather(self, value: T) -> list[T]:
        """Return `value` of every rank, in rank order."""
        if self.group is None:
            return [value]
        from torchtitan.distributed.process_group import gather_objects

        return gather_objects(value, self.group)

    def broadcast_from_rank0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result, or raise its error, on every rank."""
        result = self._call(function) if self.rank == 0 else (None, None)
        results: list[tuple[T | None, Exception | None]] = [result]
        if self.group:
            import torch.distributed as dist

            dist.broadcast_object_list(results, group_src=0, group=self.group)
        return self._unwrap(results)[0]

    def all_ranks_or_raise(self, function: Callable[[], T]) -> list[T]:
        """Return the results of `function` on all ranks, in rank order; an error on any rank is
        raised on all."""
        return self._unwrap(self.gather(self._call(function)))

    def _call(self, function: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return function(), None
        except Exception as error:  # any error, since the other ranks wait for the result
            return None, self._make_picklable(error)

    @staticmethod
    def _unwrap(results: list[tuple[T | None, Exception | None]]) -> list[T]:
        for _, error in results:
            if error:
                raise error
        return [cast(T, result) for result, _ in results]

    def _make_picklable(self, error: Exception) -> Exception:
        if self.group is None:
            return error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the error's class may raise anything here
            return UserError(str(error)) if isinstance(error, UserError) else OSError(repr(error))
        return error
