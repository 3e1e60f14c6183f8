"""Worker processes that prepare batches ahead of the training loop."""

import signal
import warnings
import weakref
from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.components.data.base import Batch
from torchtitan.components.data.plan.sampler import State
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.torch_private import end_loader_workers

Item = Batch | UserError | RunFailure
"""An error is raised where the batch is needed: if a worker raised it, its message would be the
worker's traceback."""

Key = TypeVar("Key", contravariant=True)


class MapStyle(Protocol[Key]):
    """A dataset whose items have keys; it need not derive from torch's class."""

    def __getitem__(self, key: Key, /) -> Item: ...


class Workers:
    """Iterator over the items of a dataset, prepared by torchdata's `StatefulDataLoader`.

    Args:
        dataset: map-style with `sampler`, or iterable.
        sampler: keys of a map-style dataset's items.
        num_workers: worker processes; 0: create items in this process.
        state: result of `state_dict` to resume from.
    """

    def __init__(
        self,
        dataset: MapStyle[Key] | IterableDataset[Item],
        *,
        num_workers: int,
        sampler: Iterable[Key] | None = None,
        state: State | None = None,
    ):
        with warnings.catch_warnings():
            # torchdata 0.11 on torch 2.13
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                dataset,
                batch_size=None,
                sampler=sampler,
                num_workers=num_workers,
                pin_memory=torch.cuda.is_available(),
                worker_init_fn=_ignore_signals,
                generator=torch.Generator(),  # worker seeds must not advance the default generator
                persistent_workers=num_workers > 0,
            )
        if state is not None:
            self._loader.load_state_dict(state)
        self._items = iter(self._loader)
        # Also runs at exit: an iterator that a traceback refers to is never finalized, and the
        # interpreter would wait for its workers forever.
        self._finalizer = (
            weakref.finalize(self, end_loader_workers, self._items) if num_workers else None
        )

    def __next__(self) -> Batch:
        item: Item = next(self._items)
        if isinstance(item, (UserError, RunFailure)):
            raise item
        return item

    def state_dict(self) -> State:
        """Return an iterable dataset's state after the last item returned, ignoring prefetched
        items."""
        state: State = self._loader.state_dict()
        return state

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()


def _ignore_signals(worker_id: int) -> None:
    """Leave Ctrl-C and SIGTERM, which reach the whole process group, to the training process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
