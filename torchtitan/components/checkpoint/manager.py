"""`CheckpointManager`: when a run saves, what it resumes from, and what becomes of older checkpoints."""

import contextlib
import dataclasses
import difflib
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.folders import CheckpointInfo, Kind, Marker
from torchtitan.config.configurable import Configurable
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    # Deferred at run time: torch.distributed.checkpoint takes a second to import.
    from torch.distributed.checkpoint.stateful import Stateful

    from torchtitan.components.checkpoint import storage

T = TypeVar("T")


class CheckpointSaveError(RunFailure):
    """The last save of a run failed, so its end is not on disk. The message names the checkpoint and the cause."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts from."""

    checkpoint: CheckpointInfo

    resumes: bool
    """Whether it is a checkpoint of the run itself, and not its `initial_load_path`."""


class CheckpointManager(Configurable):
    """Saves the states of a run as `{dump_folder}/{folder}/step-N` and restores them.

    Works in one process without a process group, and on every rank of the default process group, where all ranks
    construct it and call each method together; the ranks then need a file system they share. Rank 0 decides what
    to load, renames and removes, so ranks cannot disagree.

    Args:
        dump_folder: the run's folder.
        states: name → state of the whole run. `state_dict()` gives a flat dict of (D)Tensors, which are loaded in
            place, and JSON-ready values, equal on all ranks or with different keys. "model" is what a model-only
            checkpoint holds.
        rank_states: name → state of this rank alone, of the same form: random numbers, positions in the data. Loaded
            by the rank of the same number; by ranks that the saved run did not have, from rank 0.

    Raises:
        UserError: where the configuration does not hold together.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When to save, what to keep and what to start from."""

        enable: bool = False
        """Save checkpoints, and resume from the newest one in the folder."""

        folder: str = "checkpoint"
        """The checkpoints' folder, inside the dump folder."""

        interval: int = 500
        """Save every so many steps (and after the last one)."""

        initial_load_path: str = ""
        """Start from this checkpoint (the step-N folder of another run) where the run has none of its own."""

        initial_load_model_only: bool = True
        """From initial_load_path, load the weights only and start at step 0; otherwise everything, the step too."""

        last_save_model_only: bool = False
        """After the last step, save the weights only. A run cannot resume from such a checkpoint."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """Write in the background while training goes on, from a copy in CPU memory (pinned: faster to copy to)."""

        keep_latest_k: int = 10
        """Remove all but the newest so many checkpoints (0: keep all)."""

        load_step: int = -1
        """Resume from this step (-1: the newest)."""

        exclude_from_loading: list[str] = dataclasses.field(default_factory=list)
        """States not to load, by name, such as optimizer, lr_scheduler, dataloader."""

        enable_first_step_checkpoint: bool = False
        """Save after step 1 too, to see early that saving works."""

        load_only: bool = False
        """Resume from checkpoints, but neither save nor remove any."""

        @property
        def saves(self) -> bool:
            """Whether a run with this configuration writes checkpoints."""
            return self.enable and not self.load_only

        def validate(self) -> None:
            """Raise `UserError` for a wrong value; looks at no file."""
            if self.interval < 1:
                raise UserError(f"checkpoint.interval must be at least 1 step, not {self.interval}")
            if self.keep_latest_k < 0:
                raise UserError(f"checkpoint.keep_latest_k must be 0 (keep all) or more, not {self.keep_latest_k}")
            if self.async_mode == "async_with_pinned_mem" and not torch.cuda.is_available():
                raise UserError("checkpoint.async_mode async_with_pinned_mem needs CUDA, and there is none: use async")
            if self.load_step != -1 and not self.enable:
                raise UserError(f"checkpoint.load_step {self.load_step} needs --checkpoint.enable")

        def find_start(self, dump_folder: str) -> Start | None:
            """The checkpoint that a run in `dump_folder` would start from now; None: from nothing.

            Raises:
                UserError: where one is named that cannot be loaded.
            """
            folder = Path(dump_folder) / self.folder
            if self.load_step != -1:
                return Start(folders.find_step(folder, self.load_step), resumes=True)
            if self.enable and (newest := folders.newest_full(folder)):
                return Start(newest, resumes=True)
            if not self.initial_load_path:
                return None
            start = Start(folders.open_checkpoint(Path(self.initial_load_path)), resumes=False)
            if start.checkpoint.kind == "model_only" and not self.initial_load_model_only:
                raise UserError(
                    f"checkpoint.initial_load_path: {self.initial_load_path} holds the model only, "
                    "so it cannot be loaded with checkpoint.initial_load_model_only False"
                )
            return start

    def __init__(
        self,
        config: Config,
        *,
        dump_folder: str,
        states: "Mapping[str, Stateful]",
        rank_states: "Mapping[str, Stateful] | None" = None,
    ):
        self.config: CheckpointManager.Config = config
        self.dump_folder = dump_folder
        self.folder = Path(dump_folder) / config.folder
        self.states = dict(states)
        self.rank_states = dict(rank_states or {})
        self._check_names()
        # A group of its own, so that a save in the background never mixes with what training sends; on the CPU.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank = self._group.rank() if self._group else 0
        self._world_size = self._group.size() if self._group else 1
        self._executor = _background_thread()
        self._in_flight: Future[None] | None = None
        self._stager: storage.Stager | None = None
        self._saved_step = 0
        self._failure = ""

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Whether `save(step, last=last)` saves, provided that the checkpoint of `step` is not there yet.

        It touches no file, process or device, and is the same on every rank.
        """
        if not self.config.saves:
            return False
        first = step == 1 and self.config.enable_first_step_checkpoint
        return last or first or step % self.config.interval == 0

    def save(self, step: int, *, last: bool = False, stopped: bool = False) -> None:
        """Save the checkpoint of `step` if one is due and not yet there.

        A save that fails is a warning, since training goes on and the next one may succeed.

        Args:
            step: the number of training steps done.
            last: training is done; saves, the model only if so configured.
            stopped: training stops here to be resumed later; saves.

        Raises:
            CheckpointSaveError: where the save fails and is the last or stopped one.
        """
        ends = last or stopped
        if not self.is_due(step, last=ends):
            return
        begun = time.perf_counter()
        self.wait()
        if step == self._saved_step:
            return
        model_only = last and self.config.last_save_model_only
        marker = Marker(step=step, kind="model_only" if model_only else "full", world_size=self._world_size)
        entries = self._encode(marker.kind)
        if ends or self.config.async_mode == "disabled":
            self._write(marker, entries, begun)
        else:
            staged = self._stage(entries)
            self._in_flight = self._executor.submit(self._write, marker, staged, begun, time.perf_counter())
        if ends:
            self._raise_failure()

    def load(self) -> int:
        """Restore what the configuration says, and return the step the run is at: 0 where it begins.

        Raises:
            UserError: where a named checkpoint cannot be loaded, or one does not fit the states.
        """
        from torchtitan.components.checkpoint import storage

        start = self._on_rank_zero(self._choose_start)
        if start is None:
            return 0
        checkpoint = start.checkpoint
        model_only = not start.resumes and self.config.initial_load_model_only
        assert checkpoint.marker is not None, "only complete checkpoints are chosen"
        saved_rank = self._rank if self._rank < checkpoint.marker.world_size else 0
        names = {"model"} if model_only else {*self.states, *self.rank_states}
        names -= set(self.config.exclude_from_loading)
        states = {name: state for name, state in self.states.items() if name in names}
        rank_states = {name: state for name, state in self.rank_states.items() if name in names}
        storage.load(checkpoint.path, states, rank_states, saved_rank, self._group)
        if start.resumes:
            self._saved_step = checkpoint.step
        logger.info("loaded %s%s", checkpoint.path, ", the model only" if model_only else "")
        return 0 if model_only else checkpoint.step

    def wait(self) -> None:
        """Wait until the save that is under way in the background, if any, has ended."""
        if self._in_flight:
            self._in_flight.result()
            self._in_flight = None

    def close(self) -> None:
        """Wait for the save under way and let go of threads and memory. Call it before the process group ends.

        Raises:
            CheckpointSaveError: where the run's most recent save failed.
        """
        self.wait()
        self._executor.shutdown()
        if self._stager:
            self._stager.close()
        self._raise_failure()

    def _check_names(self) -> None:
        names = [*self.states, *self.rank_states]
        assert len(names) == len(set(names)), "a name in states and rank_states"
        for name in self.config.exclude_from_loading:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
                raise UserError(f"checkpoint.exclude_from_loading: there is no state {name!r}; {hint}")

    def _encode(self, kind: Kind) -> "dict[str, storage.Entries]":
        from torchtitan.components.checkpoint import storage

        if kind == "model_only":
            return {"model": storage.encode("model", self.states["model"].state_dict())}
        states = {name: state.state_dict() for name, state in self.states.items()}
        states |= {storage.rank_key(name, self._rank): state.state_dict() for name, state in self.rank_states.items()}
        return {name: storage.encode(name, state_dict) for name, state_dict in states.items()}

    def _stage(self, entries: "dict[str, storage.Entries]") -> "dict[str, storage.Entries]":
        from torchtitan.components.checkpoint import storage

        if self._stager is None:
            self._stager = storage.Stager(pin_memory=self.config.async_mode == "async_with_pinned_mem")
        return self._stager.stage(entries)

    def _write(
        self, marker: Marker, entries: "dict[str, storage.Entries]", begun: float, unblocked: float | None = None
    ) -> None:
        """Write, commit and prune; in the background in an asynchronous save, where training went on at `unblocked`."""
        from torch.distributed.checkpoint import CheckpointException

        from torchtitan.components.checkpoint import storage

        step = marker.step
        try:
            partial = self._on_rank_zero(lambda: folders.start_partial(self.folder, step))
            storage.write(partial, entries, self._group)
            path = self._on_rank_zero(lambda: folders.commit(partial, marker))
        except OSError as error:
            self._fail(step, error)
            return
        except CheckpointException as error:
            self._fail(step, storage.failure_cause(error))
            return
        self._saved_step, self._failure = step, ""
        blocked = (unblocked or time.perf_counter()) - begun
        logger.info("saved %s; training was blocked for %.2f s", path, blocked)
        if self._rank == 0:
            self._prune(step)

    def _fail(self, step: int, cause: BaseException) -> None:
        """Report a save that failed, and remove what it wrote."""
        if not isinstance(cause, Exception):
            raise cause  # Ctrl-C, which DCP takes for a failure of the save
        path = self.folder / f"step-{step}"
        self._failure = f"{path} could not be saved: {type(cause).__name__}: {cause}"
        logger.warning("%s; older checkpoints are as they were", self._failure)
        if self._rank == 0:
            # What cannot be removed now is removed when the step is saved again or the run starts again.
            with contextlib.suppress(OSError):
                folders.discard_incomplete(self.folder, step)

    def _raise_failure(self) -> None:
        """Raise the failure of the most recent save, once."""
        failure, self._failure = self._failure, ""
        if failure:
            raise CheckpointSaveError(failure)

    def _prune(self, step: int) -> None:
        try:
            folders.prune(self.folder, step, self.config.keep_latest_k)
        except OSError as error:
            logger.warning("an old checkpoint in %s could not be removed: %s", self.folder, error)

    def _choose_start(self) -> Start | None:
        start = self.config.find_start(self.dump_folder)
        for info in folders.list_checkpoints(self.folder) if self.config.enable else []:
            if info.path.suffix == ".partial":
                logger.warning("%s was left by a save that did not end", info.path)
                if not self.config.load_only:
                    folders.remove_checkpoint(info.path)
            elif not info.complete:
                logger.warning("skipped %s: %s", info.path, info.fault or "it is not complete")
            elif start is None or not start.resumes or info.step > start.checkpoint.step:
                reason = "it holds the model only" if info.kind == "model_only" else "an older step was asked for"
                logger.warning("skipped %s: %s", info.path, reason)
        return start

    def _on_rank_zero(self, decide: Callable[[], T]) -> T:
        """What `decide` returns on rank 0, on every rank; what it raises there is raised on every rank."""
        outcome: list[Any] = [None, None]
        if self._rank == 0:
            try:
                outcome[0] = decide()
            except Exception as error:  # all of them: the other ranks wait for an answer
                outcome[1] = error
        if self._group:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        result, raised = outcome
        if raised:
            raise raised
        return result


def _background_thread() -> ThreadPoolExecutor:
    """An executor of one thread that has the CUDA device of the calling one.

    A new thread begins with device 0, and DCP, which asks for that device's stream, would open a context on it.
    """
    in_thread: Callable[[], None] | None = None
    if torch.cuda.is_initialized():
        in_thread = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=in_thread)
