"""The store that ranks meet through under torchrun, which has to be a new one after each restart."""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.05


def attempt_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of torchrun's agent, with a prefix that the processes of this attempt alone have.

    The agent keeps one store over all restarts, and PyTorch (2.13) writes the same keys to it each time: a rank that is
    faster than another would find the address of that one's dead predecessor, fail to connect, and use up a restart.
    Nor does the agents' count of restarts tell attempts apart, since those of several hosts may count differently.

    So each process says hello with a number of its own. Rank 0 replies with its number, which is the prefix, and a
    process believes a reply only if it repeats that process's number: a dead rank 0 cannot have known it.

    Raises:
        TimeoutError: where the others do not come.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    greetings = dist.PrefixStore("torchtitan", store)
    own = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        prefix = _welcome(greetings, own, world_size, deadline) if rank == 0 else _greet(greetings, own, rank, deadline)
    except dist.DistStoreError as error:  # a key that was waited for did not come
        raise _absent() from error
    return dist.PrefixStore(prefix, store)


def _welcome(store: dist.Store, own: str, world_size: int, deadline: float) -> str:
    """Reply to all others until each has confirmed it; a new process may take the place of a dead one meanwhile."""
    keys = {rank: f"hello/{rank}" for rank in range(1, world_size)}
    replied: dict[int, str] = {}
    while True:
        hellos = [value.decode().split() for value in store.multi_get(list(keys.values()))]
        if all(confirmed == [own] for _, *confirmed in hellos):
            return own
        for rank, (number, *_) in zip(keys, hellos, strict=True):
            if replied.get(rank) != number:
                store.set(f"reply/{rank}", f"{own} {number}")
                replied[rank] = number
        _pause(deadline)


def _greet(store: dist.Store, own: str, rank: int, deadline: float) -> str:
    """Rank 0's number, once it has replied to this very process."""
    store.set(f"hello/{rank}", own)
    while True:
        prefix, number = store.get(f"reply/{rank}").decode().split()
        if number == own:
            store.set(f"hello/{rank}", f"{own} {prefix}")
            return prefix
        _pause(deadline)


def _pause(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise _absent()
    time.sleep(_POLL_SECONDS)


def _absent() -> TimeoutError:
    return TimeoutError("the processes of this attempt did not all come (--comm.init_timeout_seconds)")
