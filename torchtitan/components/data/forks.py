"""Calls of one function in forked processes, which have all that this process has read so far.
Other ways to start processes would import everything again, and could not pass on functions of
users."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from torchtitan.tools.process import signal_when_orphaned

A = TypeVar("A")
T = TypeVar("T")
_function: Callable[..., Any]


def can_fork() -> bool:
    """Return whether this process may start processes by a fork. System libraries of macOS do not
    allow it, and daemonic processes, such as workers of `multiprocessing`, have no children."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


@contextmanager
def forked_calls(
    function: Callable[[A], T], n_processes: int, prepare: Callable[[], None] | None = None
) -> Iterator[Callable[[A], Future[T]]]:
    """Yield a function that calls `function` with an argument in one of the processes, which end
    with the block. A result raises `BrokenProcessPool` if a process was killed.

    Args:
        function: inherited by the processes, so it need not be picklable.
        n_processes: number of processes, all forked by the first call.
        prepare: called in each process before its first call.
    """
    global _function
    _function = function
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(n_processes, context, _begin, (os.getpid(), prepare)) as pool:
        try:
            yield lambda argument: pool.submit(_call, argument)
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(parent: int, prepare: Callable[[], None] | None) -> None:
    signal_when_orphaned(signal.SIGKILL, parent)
    if prepare:
        prepare()


def _call(argument: object) -> Any:
    return _function(argument)
