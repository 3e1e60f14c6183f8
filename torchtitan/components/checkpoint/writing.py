"""Writes entries into a checkpoint's folder with torch.distributed.checkpoint (DCP), each rank its part.

DCP takes a second to import: import this module where it is used, not at the top of another.
"""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan.components.checkpoint.staging import Entries
from torchtitan.components.checkpoint.store import Folder, LocalFolder
from torchtitan.tools.torch_private import FsspecWriter

if TYPE_CHECKING:
    from torchtitan.components.checkpoint.writer_process import WriterProcess

# DCP says so at each save and load of a single process, where nothing is amiss.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write(
    folder: Folder,
    states: Mapping[str, Entries],
    group: dist.ProcessGroup | None,
    process: "WriterProcess | None" = None,
) -> None:
    """Write `states` into `folder`, every rank its part.

    Args:
        folder: an empty one.
        states: name → entries; staged in `process`'s memory where one is given.
        group: None: this process alone.
        process: what writes the files of this rank; None: this process itself.

    Raises:
        CheckpointException: on every rank, where it failed on any.
    """
    writer = writer_into(folder)
    writer.process = process
    dcp.save(dict(states), storage_writer=writer, process_group=group, no_dist=group is None)


def failure_cause(error: dcp.CheckpointException) -> BaseException:
    """The first of the errors, by rank, that `error` was raised for."""
    return error.failures[min(error.failures)][0]


class Writer(dcp.FileSystemWriter):
    """DCP's writer, which tells the system's errors as they are and may leave the writing to another process."""

    process: "WriterProcess | None" = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of `plan`."""
        if self.process:
            written: Future[list[WriteResult]] = Future()
            written.set_result(self.process.write(str(self.path), plan, planner))
            return written
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save ends with an error of its own that hides the system's, say "No space left on device".
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _RemoteWriter(Writer, FsspecWriter):
    pass


def writer_into(folder: Folder) -> Writer:
    """What writes into `folder`."""
    if isinstance(folder, LocalFolder):
        return Writer(folder.path)
    # Not synced: a store has what was written when the file is closed, and DCP would sync every disk of this host.
    return _RemoteWriter(str(folder), sync_files=False)
