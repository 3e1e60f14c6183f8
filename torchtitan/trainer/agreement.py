"""Agreement of the ranks of a run that have all failed: by a mistake in code that each of them
runs, or because one of them has failed alone and has ended the collectives of the others.

The ranks may have left a step at different collectives, so the groups of training cannot be used.
They agree through the store, and then save with the checkpointer's own group.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Mapping

import torch.distributed as dist

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.tools.torch_private import default_store

SECONDS = 10.0
"""Time that a failed rank waits for the others to fail too, if it cannot end their collectives.
Ranks that run the same code leave it at the same layer, so only the time between two collectives
separates them."""

_POLL_SECONDS = 0.2


class Agreement:
    """A meeting of all ranks of a run, which each attends at most once, after its failure. All
    ranks construct it together."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._store: dist.Store | None = None
        # The store may outlive the run, in the same processes and in others.
        name = ranks.broadcast_from_rank0(lambda: uuid.uuid4().hex)
        if ranks.group is not None:
            self._store = dist.PrefixStore(f"agreement {name}", default_store())

    def announce(self, failure: str) -> None:
        """Tell the others why this rank fails, if it is the first one."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):
                self._store.compare_set("failure", "", failure)

    def announced(self) -> str:
        """Return why the first rank has failed; "" if none has announced it."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):
                if self._store.check(["failure"]):
                    return self._store.get("failure").decode()
        return ""

    def reach(self, state: Mapping[str, object], seconds: float = SECONDS) -> bool:
        """Return whether all ranks call this with the same state within `seconds`. All that call it
        get the same result, unless the store is gone: then False."""
        if self._store is None:
            return True
        with contextlib.suppress(dist.DistError):
            return self._reach(self._store, json.dumps(state, sort_keys=True), seconds)
        return False

    def _reach(self, store: dist.Store, state: str, seconds: float) -> bool:
        store.set(f"state/{self._ranks.rank}", state)
        if store.add("number", 1) == self._ranks.size:
            states = {store.get(f"state/{rank}") for rank in range(self._ranks.size)}
            store.compare_set("decision", "", "equal" if len(states) == 1 else "different")
        deadline = time.monotonic() + seconds
        while not store.check(["decision"]):
            if time.monotonic() > deadline:
                store.compare_set("decision", "", "alone")
            time.sleep(_POLL_SECONDS)
        return store.get("decision") == b"equal"
