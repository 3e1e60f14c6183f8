"""`CheckpointManager`: when a run saves, what it resumes from, and what becomes of older checkpoints."""

import dataclasses
import difflib
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.checks import check_options
from torchtitan.components.checkpoint.identity import RunIdentity
from torchtitan.components.checkpoint.marker import Kind, Marker
from torchtitan.components.checkpoint.origin import Origin
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.saver import Assets, AsyncMode, Export, Saver
from torchtitan.components.checkpoint.start import Start, check_frozen, choose_start, find_start
from torchtitan.components.checkpoint.states import ModelState, TrainedState, with_parameter_names
from torchtitan.components.checkpoint.store import Folder, inside
from torchtitan.config.configurable import Configurable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    # Deferred at run time: torch.distributed.checkpoint takes a second to import.
    from torch.distributed.checkpoint.stateful import Stateful

    from torchtitan.components.checkpoint.staging import Entries

_THE_SEED = Origin("the seed")


class CheckpointManager(Configurable):
    """Saves the states of a run as `{dump_folder}/{folder}/step-N` and restores them.

    Works in one process without a process group, and on every rank of the default process group, where all ranks
    construct it and call each method together; the ranks then need a file system, or a store, that they share. Rank 0
    decides what to load, renames and removes, so ranks cannot disagree.

    Args:
        dump_folder: the run's folder.
        states: name → state of the whole run. A torch optimizer is kept under the parameter names of its `ModelState`
            (`OptimizerState`). `state_dict()` gives a flat dict of (D)Tensors, which are loaded in
            place, and JSON-ready values, equal on all ranks or with different keys. A model-only checkpoint holds
            those that are a `ModelState`; `initial_load_path` is for "model".
        rank_states: name → state of this rank alone, of the same form: random numbers, positions in the data. Loaded
            by the rank of the same number; by ranks that the saved run did not have, from rank 0.
        initial_loads: name of a state → what gives it its initial weights, called by `load` on every rank where the
            state comes from no checkpoint: the run begins, what it resumes from lacks the state, or it is excluded.
            One for "model" also verifies and loads the weights of an `initial_load_path` of which nothing else is
            loaded.
        assets: what rank 0 writes into each checkpoint beside the states.
        export: turns a model-only checkpoint into Hugging Face files, for `last_save_in_hf`.
        frozen_from: what the weights that are not trained begin as; for `trained_only`, where a run resumes
            after `initial_loads` have given it these weights.
        identity: returns the run's identity; called on rank 0. Checkpoints carry it, and checkpoints of another run are
            refused. None: every checkpoint in the folder counts as the run's own.

    Raises:
        UserError: where the configuration does not hold together, or with the model.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When to save, what to keep and what to start from."""

        enable: bool = False
        """Save checkpoints, and resume from the newest one in the folder."""

        folder: str = "checkpoint"
        """The checkpoints' folder, inside the dump folder; or a URL, such as s3://bucket/run."""

        interval: int = 500
        """Save every so many steps (and after the last one)."""

        initial_load_path: str = ""
        """Start from this checkpoint (the step-N folder of another run, or its URL) where the run has none itself."""

        initial_load_model_only: bool = True
        """From initial_load_path, load the weights only and start at step 0; otherwise everything, the step too."""

        initial_load_in_hf: bool = False
        """initial_load_path is a folder of pre-trained weights, as Hugging Face's, and not a checkpoint of a run."""

        last_save_model_only: bool = False
        """After the last step, save the weights only. A run cannot resume from such a checkpoint."""

        last_save_in_hf: bool = False
        """After the last step, save the weights only, as a Hugging Face folder. A run cannot resume from it."""

        export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
        """Type of the weights that last_save_model_only and last_save_in_hf write; None: as they are trained."""

        async_mode: AsyncMode = "disabled"
        """Write while training goes on, from a copy in CPU memory: in a thread (async), or in a process of its own from
        memory that is pinned, so faster to copy to (async_with_pinned_mem; where CUDA is absent, it is not pinned)."""

        trained_only: bool = False
        """Leave weights that are not trained out of the checkpoints that a run resumes from; it has them again from
        initial_load_path, or its seed."""

        keep_latest_k: int = 10
        """Remove all but the newest so many checkpoints (0: keep all)."""

        keep_best: bool = False
        """Keep the checkpoint of the lowest validation loss beside the newest ones."""

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

        @property
        def last_kind(self) -> Kind:
            """What the save after the last step holds."""
            return "huggingface" if self.last_save_in_hf else "model_only" if self.last_save_model_only else "full"

        def validate(self) -> None:
            """Raise `UserError` for a wrong value; looks at no file."""
            check_options(self)

        def place(self, dump_folder: str) -> Folder:
            """Where the checkpoints of a run in `dump_folder` lie."""
            return inside(dump_folder, self.folder)

        def find_start(self, dump_folder: str) -> Start | None:
            """The checkpoint that a run in `dump_folder` would start from now; None: from nothing that is one.

            It looks at markers only; `CheckpointManager.load` verifies the files.

            Raises:
                UserError: where one is named that cannot be loaded, or all of the run's own are known to be damaged.
            """
            return find_start(self, self.place(dump_folder))

    def __init__(
        self,
        config: Config,
        *,
        dump_folder: str,
        states: "Mapping[str, Stateful]",
        rank_states: "Mapping[str, Stateful] | None" = None,
        initial_loads: Mapping[str, Callable[[], None]] | None = None,
        assets: Assets | None = None,
        export: Export | None = None,
        frozen_from: Origin = _THE_SEED,
        identity: Callable[[], RunIdentity] | None = None,
    ):
        self.config: CheckpointManager.Config = config
        self.folder = config.place(dump_folder)
        self.states = {name: with_parameter_names(name, state, states) for name, state in states.items()}
        self.rank_states = dict(rank_states or {})
        self.initial_loads = dict(initial_loads or {})
        self._check(can_export=export is not None)
        # A group of its own, so that a save in the background never mixes with what training sends; on the CPU.
        self._ranks = Ranks(dist.new_group(backend="gloo") if dist.is_initialized() else None)
        self._frozen_from = frozen_from
        self._check_trained_only()
        # Now: when the first checkpoint is saved, they may have been replaced.
        self._frozen_digest = self._ranks.first_decides(frozen_from.digest) if config.trained_only else ""
        self._identity = self._ranks.first_decides(identity) if identity and config.enable else None
        self._saver = Saver(
            self.folder,
            self._ranks,
            async_mode=config.async_mode,
            assets=assets,
            export=export,
            prune=self._prune,
        )
        # The lowest validation loss of a complete checkpoint, and what it was before the most recent save.
        self._best_loss = self._former_best_loss = math.inf
        # Steps whose checkpoint is the end of an earlier leg of this run.
        self._finished_steps = set[int]()
        # The steps of the run's own past: up to the one it resumed from, and those saved since.
        self._resumed_step, self._saved_steps = 0, set[int]()

    def is_due(self, step: int, *, last: bool = False, validation_loss: float | None = None) -> bool:
        """Whether `save` with these arguments saves, provided that the checkpoint of `step` is not there yet.

        It is the same on every rank, and touches no file, process or device, but for one case: with `keep_best` and a
        validation loss it waits for the save under way in the background, whose loss counts only where it succeeds.
        """
        if not self.config.saves:
            return False
        best = False
        if self.config.keep_best and validation_loss is not None:
            self.wait()
            best = validation_loss < self._best_loss
        first = step == 1 and self.config.enable_first_step_checkpoint
        return last or first or best or step % self.config.interval == 0

    def save(
        self, step: int, *, last: bool = False, stopped: bool = False, validation_loss: float | None = None
    ) -> None:
        """Save the checkpoint of `step` if one is due and not yet there.

        A save that fails is a warning, since training goes on and the next one may succeed.

        Args:
            step: the number of training steps done.
            last: training is done; saves, the model only if so configured.
            stopped: training stops here to be resumed later; saves.
            validation_loss: what was measured after `step`, equal on all ranks; with `keep_best`, the lowest so far
                makes a save due.

        Raises:
            CheckpointSaveError: where the save fails and is the last or stopped one.
        """
        begun = time.perf_counter()
        ends = last or stopped
        # A number of numpy's, say, would make a marker that cannot be read back.
        validation_loss = None if validation_loss is None else float(validation_loss)
        if not self.is_due(step, last=ends, validation_loss=validation_loss):
            return
        self.wait()
        kind = self.config.last_kind if last else "full"
        # No other form can be made of trained weights. A store that cannot rename would first remove what is there.
        replaces = self.config.trained_only and kind != self._saver.kind and self.folder.renames
        if step == self._saver.step and not replaces:
            if kind != self._saver.kind:
                # It may be the only one that the run can resume from.
                held = "with trained weights only" if self.config.trained_only else "in full"
                logger.warning("step %d is saved %s, and stays so; torchtitan convert makes other forms", step, held)
            return
        if step in self._finished_steps:
            path = self.folder / f"step-{step}"
            logger.warning("%s is the end of a finished run and stays; step %d is not saved", path, step)
            return
        leaves_out = self.config.trained_only and kind == "full"
        marker = Marker(
            step=step,
            kind=kind,
            world_size=self._ranks.size,
            validation_loss=validation_loss,
            frozen_from=self._frozen_from.words if leaves_out else "",
            frozen_digest=self._frozen_digest if leaves_out else "",
            identity=self._identity.properties if self._identity else {},
            length=self._identity.length if self._identity else {},
        )
        entries = self._encode(kind)
        # Before the save ends, so that it is the same on every rank; where it fails, it is set back.
        self._former_best_loss = self._best_loss
        if validation_loss is not None:
            self._best_loss = min(self._best_loss, validation_loss)
        if ends or self.config.async_mode == "disabled":
            self._saver.save(marker, entries, begun)
        else:
            self._saver.save_in_background(marker, entries, begun)
        self._forget_failed_loss()
        if ends:
            self._saver.raise_failure()

    def load(self) -> int:
        """Restore what the configuration says, and return the step the run is at: 0 where it begins.

        What is loaded is verified first. Where the newest checkpoint of the run is damaged or cannot be read, a warning
        says so, and an older one takes its place.

        Raises:
            UserError: where a named checkpoint is damaged or cannot be loaded, none of the run's own is whole, one does
                not fit the states, or those in the folder are of another run.
            RunComplete: if the run has ended in a checkpoint that it cannot resume from.
        """
        is_model_given = self.config.initial_load_model_only and "model" in self.initial_loads
        start = choose_start(
            self.config, self.folder, self._ranks, identity=self._identity, verifies_initial=not is_model_given
        )
        self._finished_steps = self._ranks.first_decides(self._find_finished_steps)
        self._ranks.first_decides(lambda: check_frozen(self.config, start, self._frozen_from))
        lacks_frozen = start is not None and start.resumes and bool(start.checkpoint.frozen_from)
        for give_weights in self.initial_loads.values() if lacks_frozen else []:
            give_weights()
        loaded = self._restore(start) if start and (start.resumes or not is_model_given) else set()
        for name, give_weights in self.initial_loads.items():
            if name not in loaded:
                if start and start.resumes:
                    logger.info("state %s is not loaded from %s and is initialised", name, start.checkpoint.path)
                if not lacks_frozen:
                    give_weights()
        if start is None:
            return 0
        if start.resumes:
            self._saver.step = self._resumed_step = start.checkpoint.step
            self._best_loss = self._ranks.first_decides(lambda: self._best_loss_until(start.checkpoint.step))
        return 0 if self._loads_model_only(start) else start.checkpoint.step

    def wait(self) -> None:
        """Wait until the save that is under way in the background, if any, has ended."""
        self._saver.wait()
        self._forget_failed_loss()

    def close(self) -> None:
        """Wait for the save under way and let go of threads and memory. Call it before the process group ends.

        Raises:
            CheckpointSaveError: where the run's most recent save failed.
        """
        self._saver.close()
        self._saver.raise_failure()

    def _check(self, *, can_export: bool) -> None:
        names = [*self.states, *self.rank_states]
        assert len(names) == len(set(names)), "a name in states and rank_states"
        for name in self.config.exclude_from_loading:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
                raise UserError(f"checkpoint.exclude_from_loading: there is no state {name!r}; {hint}")
        if self.config.last_save_in_hf and not can_export:
            raise UserError("checkpoint.last_save_in_hf: this model has no Hugging Face form")
        if self.config.initial_load_in_hf and "model" not in self.initial_loads:
            raise UserError("checkpoint.initial_load_in_hf: this model cannot be loaded from a Hugging Face form")

    def _check_trained_only(self) -> None:
        has_frozen = any(isinstance(state, ModelState) and state.frozen for state in self.states.values())
        if self.config.trained_only and not any(self._ranks.gather(has_frozen)):
            raise UserError("checkpoint.trained_only: all weights are trained, so that none can be left out")

    def _loads_model_only(self, start: Start) -> bool:
        return not start.resumes and self.config.initial_load_model_only

    def _restore(self, start: Start) -> set[str]:
        """Load from `start` what is to be loaded, and return the names of the states."""
        from torchtitan.components.checkpoint import storage

        checkpoint, model_only = start.checkpoint, self._loads_model_only(start)
        assert checkpoint.marker is not None, "only complete checkpoints are chosen"
        saved_rank = self._ranks.rank if self._ranks.rank < checkpoint.marker.world_size else 0
        names = {"model"} if model_only else {*self.states, *self.rank_states}
        names -= set(self.config.exclude_from_loading)
        held = _only_trained(self.states) if checkpoint.frozen_from else self.states
        states = {name: state for name, state in held.items() if name in names}
        rank_states = {name: state for name, state in self.rank_states.items() if name in names}
        loaded = storage.load(
            checkpoint.path, states, rank_states, saved_rank, self._ranks, optional=self.initial_loads.keys()
        )
        left_out = ", ".join(name for name in (*self.states, *self.rank_states) if name not in loaded)
        exception = ", the model only" if loaded == {"model"} else f", without {left_out}"
        logger.info("loaded %s%s", checkpoint.path, exception if left_out else "")
        return loaded

    def _encode(self, kind: Kind) -> "dict[str, Entries]":
        from torchtitan.components.checkpoint import storage

        if kind == "full":
            held = _only_trained(self.states) if self.config.trained_only else self.states
            states = {name: state.state_dict() for name, state in held.items()}
            states |= {
                storage.rank_key(name, self._ranks.rank): state.state_dict() for name, state in self.rank_states.items()
            }
        else:
            models = {name: state for name, state in self.states.items() if isinstance(state, ModelState)}
            assert "model" in models, "the weights to save are a ModelState"
            states = {name: self._as_exported(state, kind) for name, state in models.items()}
        return {name: storage.encode(name, state_dict) for name, state_dict in states.items()}

    def _as_exported(self, state: ModelState, kind: Kind) -> "dict[str, torch.Tensor]":
        weights: dict[str, torch.Tensor] = state.state_dict()
        if self.config.export_dtype is None:
            return weights
        # What is merged on the way into a Hugging Face folder gets its type there; other forms have types of their own.
        kept = state.of_converted if kind == "huggingface" else state.derived
        dtype = getattr(torch, self.config.export_dtype)
        exported = {
            name: value.to(dtype) if value.is_floating_point() and name not in kept else value
            for name, value in weights.items()
        }
        here = [name for name, value in weights.items() if _becomes_infinite(value, exported[name])]
        lost = sorted({name for names in self._ranks.gather(here) for name in names})
        if not lost:
            return exported
        if self._ranks.rank == 0:
            logger.warning(
                "checkpoint.export_dtype: %s cannot hold values of %s; the weights are saved as they are trained",
                self.config.export_dtype,
                ", ".join(lost),
            )
        return weights

    def _prune(self, step: int) -> None:
        self._saved_steps.add(step)
        try:
            best_of = self._is_of_own_past if self.config.keep_best else None
            folders.prune(self.folder, step, self.config.keep_latest_k, best_of=best_of)
        except OSError as error:
            logger.warning("an old checkpoint in %s could not be removed: %s", self.folder, error)

    def _is_of_own_past(self, step: int) -> bool:
        """Whether the run passed through `step`'s checkpoint, and did not go back to an earlier one."""
        return step <= self._resumed_step or step in self._saved_steps

    def _find_finished_steps(self) -> set[int]:
        # A user who goes back to an earlier step wants to repeat the rest of the run.
        keeps = self.config.saves and self.config.load_step == -1
        return {info.step for info in folders.list_checkpoints(self.folder) if info.ends_run} if keeps else set()

    def _forget_failed_loss(self) -> None:
        if self._saver.failure:
            self._best_loss = self._former_best_loss

    def _best_loss_until(self, step: int) -> float:
        complete = [info for info in folders.list_checkpoints(self.folder) if info.complete and not info.damage]
        best = folders.best([info for info in complete if info.step <= step])
        return best.validation_loss if best and best.validation_loss is not None else math.inf


def _only_trained(states: "Mapping[str, Stateful]") -> "dict[str, Stateful]":
    return {name: TrainedState(state) if isinstance(state, ModelState) else state for name, state in states.items()}


def _becomes_infinite(value: torch.Tensor, converted: torch.Tensor) -> bool:
    """Whether this rank's part has finite values that were converted into infinite ones."""
    before, after = (x.to_local() if isinstance(x, DTensor) else x for x in (value, converted))
    return bool((before.isfinite() & after.isinf()).any())
