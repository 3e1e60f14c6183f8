"""`CheckpointManager`: decides when a run saves, what it resumes from, and which older checkpoints stay."""

import dataclasses
import difflib
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.async_save import Assets, Export, Saver
from torchtitan.components.checkpoint.config import CheckpointConfig
from torchtitan.components.checkpoint.identity import BaseWeights, RunIdentity
from torchtitan.components.checkpoint.manifest import Kind, Marker
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.resume import Start, check_frozen, choose_start, find_start
from torchtitan.components.checkpoint.state import Entries, ModelState, with_parameter_names, without_frozen
from torchtitan.config.configurable import Configurable
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    # Deferred at run time: torch.distributed.checkpoint takes a second to import.
    from torch.distributed.checkpoint.stateful import Stateful

_THE_SEED = BaseWeights("the seed")


class CheckpointManager(Configurable):
    """Saves the states of a run as `{dump_folder}/{folder}/step-N` and restores them.

    With a process group, all ranks of the default group construct it and call each method together, on a shared file
    system or store; rank 0 decides what to load, renames and removes. Without a group it works in one process.

    Args:
        dump_folder: the run's folder.
        states: name → state of the whole run. `state_dict()` returns a flat dict of (D)Tensors, which are loaded in
            place, and JSON-serializable values, equal on all ranks or with different keys; a torch optimizer is wrapped
            in `OptimizerState`. A model-only checkpoint holds each `ModelState`; `initial_load_path` is for "model".
        rank_states: name → state of this rank alone, in the same form: random numbers, positions in the data. Loaded by
            the rank of the same number; a rank that the saved run did not have loads the state of rank 0.
        initial_loads: name of a state → function that sets its initial weights. `load` calls it on every rank if the
            state comes from no checkpoint: the run begins, the checkpoint lacks the state, or the state is excluded.
            The one for "model" also verifies and loads `initial_load_path`, if nothing else of it is loaded.
        assets: files that rank 0 writes into each checkpoint besides the states.
        export: turns a model-only checkpoint into Hugging Face files, for `last_save_in_hf`.
        base_model: origin of the frozen weights, for `save_trainable_only`; `initial_loads` load them before resuming.
        identity: returns the run's identity; called on rank 0. Checkpoints carry it, and checkpoints of another run are
            refused. None: every checkpoint in the folder counts as the run's own.

    Raises:
        UserError: if the configuration does not fit the states.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointConfig):
        """When to save, what to keep and what to start from."""

        def find_start(self, dump_folder: str) -> Start | None:
            """As `resume.find_start`; `CheckpointManager.load` also verifies the files."""
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
        base_model: BaseWeights = _THE_SEED,
        identity: Callable[[], RunIdentity] | None = None,
    ):
        self.config: CheckpointManager.Config = config
        self.folder = config.place(dump_folder)
        self.states = {name: with_parameter_names(name, state, states) for name, state in states.items()}
        self.rank_states = dict(rank_states or {})
        self.initial_loads = dict(initial_loads or {})
        # A separate CPU group, so that background saves never mix with the communication of training.
        self._ranks = Ranks(dist.new_group(backend="gloo") if dist.is_initialized() else None)
        self._base_model = base_model
        self._check(can_export=export is not None)
        # Digested now: by the first save, the files may have been replaced.
        self._base_digest = self._ranks.broadcast_from_rank0(base_model.digest) if config.save_trainable_only else ""
        self._identity = self._ranks.broadcast_from_rank0(identity) if identity and config.enable else None
        self._saver = Saver(
            self.folder,
            self._ranks,
            async_mode=config.async_mode,
            assets=assets,
            export=export,
            prune=self._prune,
        )
        # Lowest validation loss of a complete checkpoint, now and before the most recent save.
        self._best_loss = self._former_best_loss = math.inf
        # Steps with the final checkpoint of an earlier leg of this run.
        self._finished_steps = set[int]()
        # The run's own past: steps up to the one it resumed from, and steps saved since.
        self._resumed_step, self._saved_steps = 0, set[int]()

    def is_due(self, step: int, *, last: bool = False, validation_loss: float | None = None) -> bool:
        """Return whether `save` with these arguments saves, if the checkpoint of `step` does not exist yet; the same on
        every rank. With `keep_best` and a validation loss it waits for the background save, since only a successful
        save's loss counts; otherwise it touches no file, process or device."""
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
        """Save the checkpoint of `step` if one is due and not yet there. A failure is a warning: training continues.

        Args:
            last: training is done; save, only the model if so configured.
            stopped: training stops here to be resumed later; save.
            validation_loss: measured after `step`, equal on all ranks; with `keep_best`, the lowest makes a save due.

        Raises:
            CheckpointSaveError: if the save fails and is the last or stopped one.
        """
        begun = time.perf_counter()
        ends = last or stopped
        # A NumPy number, for example, would make an unreadable marker.
        validation_loss = None if validation_loss is None else float(validation_loss)
        if not self.is_due(step, last=ends, validation_loss=validation_loss):
            return
        self.wait()
        kind = self.config.last_kind if last else "full"
        # Only full weights convert to other forms. A store that cannot rename would remove the checkpoint first.
        replaces = self.config.save_trainable_only and kind != self._saver.kind and self.folder.renames
        if step == self._saver.step and not replaces:
            if kind != self._saver.kind:
                # It may be the only checkpoint that the run can resume from.
                held = "with trained weights only" if self.config.save_trainable_only else "in full"
                logger.warning("step %d is saved %s, and stays so; torchtitan convert makes other forms", step, held)
            return
        if step in self._finished_steps:
            path = self.folder / f"step-{step}"
            logger.warning("%s is the end of a finished run and stays; step %d is not saved", path, step)
            return
        leaves_out = self.config.save_trainable_only and kind == "full"
        marker = Marker(
            step=step,
            kind=kind,
            world_size=self._ranks.size,
            validation_loss=validation_loss,
            base_model=self._base_model.words if leaves_out else "",
            base_digest=self._base_digest if leaves_out else "",
            identity=self._identity.properties if self._identity else {},
            length=self._identity.length if self._identity else {},
        )
        entries = self._encode(kind)
        # Set before the save ends, so that it is the same on every rank; reset if the save fails.
        self._former_best_loss = self._best_loss
        if validation_loss is not None:
            self._best_loss = min(self._best_loss, validation_loss)
        in_background = not ends and self.config.async_mode != "disabled"
        self._saver.save(marker, entries, begun, in_background=in_background)
        self._forget_failed_loss()
        if ends:
            self._saver.raise_failure()

    def load(self) -> int:
        """Restore the configured state and return the run's step, 0 if it begins. Data is verified before it is loaded;
        if the newest checkpoint of the run is damaged or unreadable, a warning says so and an older one is used.

        Raises:
            UserError: if a named checkpoint is damaged or cannot be loaded, all of the run's own are damaged, one does
                not fit the states, or the folder holds checkpoints of another run.
            RunComplete: if the run has ended in a checkpoint that it cannot resume from.
        """
        is_model_given = self.config.initial_load_model_only and "model" in self.initial_loads
        start = choose_start(
            self.config, self.folder, self._ranks, identity=self._identity, verifies_initial=not is_model_given
        )
        self._finished_steps = self._ranks.broadcast_from_rank0(self._find_finished_steps)
        self._ranks.broadcast_from_rank0(lambda: check_frozen(self.config, start, self._base_model))
        needs_base_model = start is not None and start.resumes and bool(start.checkpoint.base_model)
        for give_weights in self.initial_loads.values() if needs_base_model else []:
            give_weights()
        loaded = self._restore(start) if start and (start.resumes or not is_model_given) else set()
        for name, give_weights in self.initial_loads.items():
            if name not in loaded:
                if start and start.resumes and name in self.states:
                    logger.info("state %s is not loaded from %s and is initialized", name, start.checkpoint.path)
                if not needs_base_model:
                    give_weights()
        if start is None:
            return 0
        if start.resumes:
            self._saver.step = self._resumed_step = start.checkpoint.step
            self._best_loss = self._ranks.broadcast_from_rank0(lambda: self._best_loss_until(start.checkpoint.step))
        return start.checkpoint.step if start.resumes or not self.config.initial_load_model_only else 0

    def wait(self) -> None:
        """Wait for the background save, if any."""
        self._saver.wait()
        self._forget_failed_loss()

    def close(self) -> None:
        """Wait for the background save and release threads and memory; call it before the process group is destroyed.
        Raise `CheckpointSaveError` if the run's most recent save failed."""
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

        has_frozen = any(isinstance(state, ModelState) and state.frozen for state in self.states.values())
        if self.config.save_trainable_only and not any(self._ranks.gather(has_frozen)):
            raise UserError("checkpoint.save_trainable_only: all weights are trained, so that none can be left out")

    def _restore(self, start: Start) -> set[str]:
        from torchtitan.components.checkpoint import dcp

        checkpoint, model_only = start.checkpoint, not start.resumes and self.config.initial_load_model_only
        assert checkpoint.marker is not None, "only complete checkpoints are chosen"
        saved_rank = self._ranks.rank if self._ranks.rank < checkpoint.marker.world_size else 0
        names = {"model"} if model_only else {*self.states, *self.rank_states}
        names -= set(self.config.exclude_from_loading)
        held = without_frozen(self.states) if checkpoint.base_model else self.states
        states = {name: state for name, state in held.items() if name in names}
        rank_states = {name: state for name, state in self.rank_states.items() if name in names}
        loaded = dcp.load(
            checkpoint.path, states, rank_states, saved_rank, self._ranks, optional=self.initial_loads.keys()
        )
        left_out = ", ".join(name for name in (*self.states, *self.rank_states) if name not in loaded)
        exception = ", the model only" if loaded == {"model"} else f", without {left_out}"
        logger.info("loaded %s%s", checkpoint.path, exception if left_out else "")
        return loaded

    def _encode(self, kind: Kind) -> dict[str, Entries]:
        from torchtitan.components.checkpoint import dcp

        if kind == "full":
            held = without_frozen(self.states) if self.config.save_trainable_only else self.states
            states = {name: state.state_dict() for name, state in held.items()}
            states |= {
                dcp.rank_key(name, self._ranks.rank): state.state_dict() for name, state in self.rank_states.items()
            }
        else:
            models = {name: state for name, state in self.states.items() if isinstance(state, ModelState)}
            assert "model" in models, "the weights to save are a ModelState"
            states = {name: self._as_exported(state, kind) for name, state in models.items()}
        return {name: dcp.encode(name, state_dict) for name, state_dict in states.items()}

    def _as_exported(self, state: ModelState, kind: Kind) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = state.state_dict()
        if self.config.export_dtype is None:
            return weights
        # Weights merged during the Hugging Face export get their type there; other forms have their own types.
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
            # The steps this run passed through, without those after a step it went back to.
            own_past = range(self._resumed_step + 1), self._saved_steps
            best_of = (lambda step: any(step in steps for steps in own_past)) if self.config.keep_best else None
            catalog.prune(self.folder, step, self.config.keep_latest_k, best_of=best_of)
        except OSError as error:
            logger.warning("an old checkpoint in %s could not be removed: %s", self.folder, error)

    def _find_finished_steps(self) -> set[int]:
        # A user who returns to an earlier step wants to repeat the rest of the run.
        keeps = self.config.saves and self.config.load_step == -1
        return {info.step for info in catalog.list_checkpoints(self.folder) if info.ends_run} if keeps else set()

    def _forget_failed_loss(self) -> None:
        if self._saver.failure:
            self._best_loss = self._former_best_loss

    def _best_loss_until(self, step: int) -> float:
        complete = [info for info in catalog.list_checkpoints(self.folder) if info.complete and not info.damage]
        best = catalog.best([info for info in complete if info.step <= step])
        return best.validation_loss if best and best.validation_loss is not None else math.inf


def _becomes_infinite(value: torch.Tensor, converted: torch.Tensor) -> bool:
    """Return whether this rank's part has finite values that the conversion made infinite."""
    before, after = (x.to_local() if isinstance(x, DTensor) else x for x in (value, converted))
    return bool((before.isfinite() & after.isinf()).any())
