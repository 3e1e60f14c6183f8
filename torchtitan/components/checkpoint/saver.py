"""Writes one checkpoint after another, here or in the background, each complete or not at all."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from torchtitan.components.checkpoint import folders, staging
from torchtitan.components.checkpoint.folders import Kind, Marker
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.staging import Entries
from torchtitan.components.checkpoint.store import Folder
from torchtitan.tools.errors import RunFailure
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan.components.checkpoint.writer_process import WriterProcess

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]

_MISTAKES = (TypeError, AssertionError)

Export = Callable[[Path, Path, Ranks], None]
"""Called on every rank with the folder of a model-only checkpoint, an empty one, which it fills with what others read,
and the ranks; what it raises on one rank it raises on all."""


class CheckpointSaveError(RunFailure):
    """The last save of a run failed, so its end is not on disk. The message names the checkpoint and the cause."""


class Assets(Protocol):
    """What a checkpoint carries beside the states, to be understood without the run that wrote it."""

    def write(self, folder: Path, /) -> None:
        """Write it into the folder of a step."""


class Saver:
    """Writes, commits and reports the saves of a `CheckpointManager`, of which it is a part; one at a time.

    Every rank makes the same calls. Nothing is raised for a save that fails, be it for disk, store or memory: `failure`
    has the reason, until the next one begins. A mistake in the code (`TypeError`, `AssertionError`) is raised.

    Args:
        folder: where the checkpoints lie.
        ranks: who saves; in the background too, so that nothing else may use their group meanwhile.
        async_mode: how to save in the background.
        assets: what rank 0 writes into each checkpoint; None: nothing.
        export: writes a checkpoint of the kind "huggingface"; None: there are none.
        prune: called on rank 0 with the step that was saved.
    """

    def __init__(
        self,
        folder: Folder,
        ranks: Ranks,
        *,
        async_mode: AsyncMode,
        assets: Assets | None,
        export: Export | None,
        prune: Callable[[int], None],
    ):
        self.step = 0
        """The step of the run's newest complete checkpoint."""
        self.kind: Kind = "full"
        """What that checkpoint holds."""
        self.failure = ""
        """Why the most recent save failed."""
        self._folder = folder
        self._ranks = ranks
        self._async_mode = async_mode
        self._assets = assets
        self._export = export
        self._prune = prune
        self._executor = _background_thread()
        self._in_flight: Future[None] | None = None
        self._process: WriterProcess | None = None

    def save(self, marker: Marker, entries: Mapping[str, Entries], begun: float) -> None:
        """Write a checkpoint and wait for it; training has been blocked since `begun` (`time.perf_counter()`)."""
        assert self._in_flight is None, "two saves at a time"
        self.failure = ""
        self._write(marker, entries, begun, None)

    def save_in_background(self, marker: Marker, entries: Mapping[str, Entries], begun: float) -> None:
        """Write a checkpoint of `entries` as they are now; returns when they are copied."""
        assert self._in_flight is None, "two saves at a time"
        self.failure = ""
        staged: dict[str, Entries] = {}
        try:
            # Together, so that no rank waits for one whose memory does not suffice.
            self._ranks.together(lambda: staged.update(self._stage(entries)))
        except _MISTAKES:
            raise
        except Exception as error:
            self._fail(marker.step, error)
            return
        self._in_flight = self._executor.submit(self._write, marker, staged, begun, self._process, time.perf_counter())

    def wait(self) -> None:
        """Wait until the save in the background, if any, has ended."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight:
            in_flight.result()

    def close(self) -> None:
        """Wait for the save in the background and let go of thread, process and memory."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if self._process:
                self._process.close()
                self._process = None

    def raise_failure(self) -> None:
        """Raise the failure of the most recent save, once.

        Raises:
            CheckpointSaveError: where it failed.
        """
        failure, self.failure = self.failure, ""
        if failure:
            raise CheckpointSaveError(failure)

    def _stage(self, entries: Mapping[str, Entries]) -> dict[str, Entries]:
        if self._async_mode == "async":
            return staging.stage(entries, staging.empty_in_memory)
        from torchtitan.components.checkpoint.writer_process import WriterProcess

        if self._process is None:
            self._process = WriterProcess()
        self._process.memory.reserve(entries)
        return staging.stage(entries, self._process.memory.empty_like)

    def _write(
        self,
        marker: Marker,
        entries: Mapping[str, Entries],
        begun: float,
        process: "WriterProcess | None",
        unblocked: float | None = None,
    ) -> None:
        """Write, commit and prune; in the background in an asynchronous save, where training went on at `unblocked`."""
        from torch.distributed.checkpoint import CheckpointException

        from torchtitan.components.checkpoint.writing import failure_cause

        try:
            path = self._write_complete(marker, entries, process)
        except CheckpointException as error:
            self._fail(marker.step, failure_cause(error))
            return
        except _MISTAKES:
            raise
        except Exception as error:  # a store's library may raise anything
            self._fail(marker.step, error)
            return
        self.step, self.kind, self.failure = marker.step, marker.kind, ""
        blocked = (unblocked or time.perf_counter()) - begun
        held = "" if marker.kind == "full" else f" ({folders.in_words(marker.kind)}: a run resumes from a full one)"
        logger.info("saved %s%s; training was blocked for %.2f s", path, held, blocked)
        if self._ranks.rank == 0:
            self._prune(marker.step)

    def _write_complete(
        self, marker: Marker, entries: Mapping[str, Entries], process: "WriterProcess | None"
    ) -> Folder:
        from torchtitan.components.checkpoint import writing

        partial = self._ranks.first_decides(lambda: folders.start_partial(self._folder, marker.step))
        if marker.kind == "huggingface":
            return self._write_exported(partial, marker, entries)
        writing.write(partial, entries, self._ranks.group, process)
        return self._commit(partial, marker)

    def _write_exported(self, partial: Folder, marker: Marker, entries: Mapping[str, Entries]) -> Folder:
        """Save the model as ever into a folder beside `partial`, and let `export` make from that what belongs there."""
        from torchtitan.components.checkpoint import writing

        assert self._export, "checked by the manager"
        native = self._ranks.first_decides(lambda: folders.start_native(partial))
        writing.write(native, entries, self._ranks.group)
        try:
            self._export(Path(str(native)), Path(str(partial)), self._ranks)
            path = self._commit(partial, marker)
        except Exception as error:  # all of them: the weights are at stake
            if marker.step == self.step and self.kind == "full":
                raise  # the run's own checkpoint of this step is still there, and a run can resume from it
            self._keep_native(native, marker)
            raise _ExportError(
                f"{type(error).__name__}: {error}; the weights are kept there in our own format, "
                "and torchtitan convert makes Hugging Face files of them"
            ) from error
        if self._ranks.rank == 0:
            try:
                folders.remove_checkpoint(native)
            except OSError as error:
                logger.warning("%s could not be removed: %s", native, error)
        return path

    def _keep_native(self, native: Folder, marker: Marker) -> None:
        """Make of the weights that could not be exported a checkpoint of the model only."""
        self._ranks.first_decides(lambda: folders.discard_export(native))
        self._commit(native, dataclasses.replace(marker, kind="model_only"))

    def _commit(self, partial: Folder, marker: Marker) -> Folder:
        self._ranks.first_decides(lambda: self._write_assets(partial))
        return folders.commit(partial, marker, self._ranks, name=f"step-{marker.step}")

    def _write_assets(self, partial: Folder) -> None:
        if self._assets:
            with partial.filling() as folder:
                self._assets.write(folder)

    def _fail(self, step: int, cause: BaseException) -> None:
        """Report a save that failed, and remove what it wrote."""
        if not isinstance(cause, Exception) or isinstance(cause, _MISTAKES):
            raise cause  # as Ctrl-C, which DCP takes for a failure of the save
        path = self._folder / f"step-{step}"
        reason = str(cause) if isinstance(cause, _ExportError) else f"{type(cause).__name__}: {cause}"
        self.failure = f"{path} could not be saved: {reason}"
        logger.warning("%s; older checkpoints are as they were", self.failure)
        if self._ranks.rank == 0:
            # What cannot be removed now is removed when the step is saved again or the run starts again.
            with contextlib.suppress(OSError):
                folders.discard_incomplete(self._folder, step)


class _ExportError(Exception):
    """The model was saved, but not in the form that was asked for; the message has the cause."""


def _background_thread() -> ThreadPoolExecutor:
    """An executor of one thread that has the CUDA device of the calling one.

    A new thread begins with device 0, and DCP, which asks for that device's stream, would open a context on it.
    """
    in_thread: Callable[[], None] | None = None
    if torch.cuda.is_initialized():
        in_thread = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=in_thread)
