"""`CheckpointManager`, which saves a run's checkpoints, resumes from them, and removes old ones."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import torch

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.catalog import CheckpointInfo
from torchtitan.components.checkpoint.config import CheckpointConfig
from torchtitan.components.checkpoint.filesystem import errors_logged
from torchtitan.components.checkpoint.identity import BaseWeights, RunIdentity
from torchtitan.components.checkpoint.manifest import VALIDATION_LOSS, Criterion, Kind, Marker
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.rescue import check_fallback, save_elsewhere
from torchtitan.components.checkpoint.resume import (
    Start,
    StartDecision,
    check_frozen,
    check_owner,
    clean_up,
    decide_start,
    newest_up_to,
    verify_initial_checkpoint,
    verify_saved_weights,
    verify_start,
)
from torchtitan.components.checkpoint.saver import Assets, Export, Saver
from torchtitan.components.checkpoint.space import check_free, total_bytes
from torchtitan.components.checkpoint.state import (
    Entries,
    ModelState,
    with_parameter_names,
    without_frozen,
)
from torchtitan.config.configurable import Configurable, builds
from torchtitan.distributed.initialize import local_part
from torchtitan.distributed.process_group import new_cpu_group
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    # Deferred at run time: torch.distributed.checkpoint takes a second to import.
    from torch.distributed.checkpoint.stateful import Stateful

_SEED_WEIGHTS = BaseWeights("the seed")


class _Best(TypedDict, total=False):
    best_metric: str
    best_value: float | None
    best_goal: str


class CheckpointManager(Configurable):
    """Saves the states of a run to `{dump_folder}/{folder}/step-N` and restores them.

    With a process group, all ranks of the default group construct it and call each method together,
    on a shared file system or store; rank 0 chooses what to load, and renames and removes folders.
    Without one, it runs in a single process.

    Args:
        dump_folder: the run's folder.
        states: name → state of the whole run. `state_dict()` returns a flat dict of (D)Tensors,
            which are loaded in place, and JSON-serializable values, equal on all ranks or with
            different keys; a torch optimizer is wrapped in `OptimizerState`. Model-only checkpoints
            contain each `ModelState`; `initial_load_path` is for "model".
        rank_states: name → state of this rank, in the same form, such as random numbers and data
            positions. Loaded by the rank with the same number; ranks beyond the saved world size
            load the state of rank 0.
        initial_loads: name of a state → function that sets its initial weights. `load` calls it on
            every rank if no checkpoint provides the state: in a new run, or if the state is
            excluded or absent from the checkpoint. The function for "model" also verifies and loads
            `initial_load_path` if only the model is loaded from it.
        assets: additional files that rank 0 writes into each checkpoint.
        export: converts a model-only checkpoint to Hugging Face files, for `last_save_in_hf`.
        exported_bytes: size of the files of `export`; None: the model's.
        base_model: origin of the frozen weights, for `save_trainable_only`; `initial_loads` load
            them before resuming.
        identity: returns the run's identity; called on rank 0. It is saved in checkpoints, and
            checkpoints of other runs are rejected. None: every checkpoint in the folder belongs to
            the run.
        decision: the start of the run, for the first `load`. If it is None or the folder has
            changed, `load` decides.

    Raises:
        UserError: if the configuration does not fit the states.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointConfig):
        """Options for saving, keeping and loading checkpoints."""

        @builds(lambda: CheckpointManager)
        def build(self) -> object:
            """Build the checkpointer of a run."""

        def decide_start(
            self, dump_folder: str, get_identity: Callable[[], RunIdentity] | None = None
        ) -> StartDecision:
            """Return the result of `resume.decide_start`; `CheckpointManager.load` also verifies
            the files."""
            return decide_start(self, self.resolve_folder(dump_folder), get_identity)

        def find_start(self, dump_folder: str) -> Start | None:
            """Return the checkpoint that a run would start from, not verified; None for a new
            run."""
            return self.decide_start(dump_folder).start

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
        exported_bytes: int | None = None,
        base_model: BaseWeights = _SEED_WEIGHTS,
        identity: Callable[[], RunIdentity] | None = None,
        decision: StartDecision | None = None,
    ):
        self.config: CheckpointManager.Config = config
        self.folder = config.resolve_folder(dump_folder)
        self._fallback = config.resolve_fallback(dump_folder)
        self.states = {
            name: with_parameter_names(name, state, states) for name, state in states.items()
        }
        self.rank_states = dict(rank_states or {})
        self.initial_loads = dict(initial_loads or {})
        # Names of the states that `load` restored from a checkpoint of this run or
        # `initial_load_path`.
        self.loaded = set[str]()
        # A separate CPU group, so that background saves do not interfere with training's
        # collectives.
        self._ranks = Ranks(new_cpu_group())
        self._base_model = base_model
        self._exported_bytes = exported_bytes
        self._validate_states(can_export=export is not None)
        # Computed now, since the files may have been replaced by the time of the first save.
        self._base_digest = (
            self._ranks.broadcast_from_rank0(base_model.digest)
            if config.save_trainable_only
            else ""
        )
        self._identity = (
            self._ranks.broadcast_from_rank0(identity) if identity and config.enable else None
        )
        self._saver = Saver(
            self.folder,
            self._ranks,
            async_mode=config.async_mode,
            assets=assets,
            export=export,
            prune=self._prune,
        )
        self._decision = decision
        # Steps at which this run ended before it was extended.
        self._finished_steps = set[int]()
        # This run's history: the step it resumed from, and the steps saved since.
        self._resumed_step = 0
        self._saved_steps = set[int]()

    def is_due(
        self,
        step: int,
        *,
        last: bool = False,
        validation_loss: float | None = None,
        measured: Mapping[str, float] | None = None,
    ) -> bool:
        """Return whether `save` with these arguments would write a checkpoint if `step` has none
        yet; the result is the same on every rank. With `keep_best` and a value of `best_metric`,
        wait for the background save, since only successful saves count. Otherwise, access no file,
        process or device."""
        if not self.config.saves:
            return False
        is_best = False
        if self.config.keep_best:
            value = _with_loss(measured, validation_loss).get(self.config.best_metric)
            loss = self.config.criterion.loss(value)
            if loss is not None:
                self.wait()
                is_best = loss < self._saver.best_loss
        is_first = step == 1 and self.config.enable_first_step_checkpoint
        return last or is_first or is_best or step % self.config.interval == 0

    def save(
        self,
        step: int,
        *,
        last: bool = False,
        stopped: bool = False,
        validation_loss: float | None = None,
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """Save a checkpoint of `step` if one is due and does not exist. Log a warning if it fails.
        Raise `CheckpointSaveError` if the save fails and `last` or `stopped` is true.

        Args:
            last: training is complete; always save, only the model if so configured.
            stopped: training stops and can be resumed later; always save.
            validation_loss: loss after `step`, equal on all ranks.
            measured: further numbers after `step` by their names, equal on all ranks; with
                `keep_best`, a new best value of `best_metric` is always saved.
        """
        start_time = time.perf_counter()
        is_final = last or stopped
        # Convert other number types: a NumPy number, for example, would make the marker unreadable.
        validation_loss = None if validation_loss is None else float(validation_loss)
        numbers = _with_loss(measured, validation_loss)
        if not self.is_due(step, last=is_final, measured=numbers):
            return
        self.wait()
        kind = self.config.last_kind if last else "full"
        # Only checkpoints with all weights can be converted. A store that cannot rename would first
        # remove this checkpoint.
        should_replace = (
            self.config.save_trainable_only and kind != self._saver.kind and self.folder.can_rename
        )
        if step == self._saver.step and not should_replace:
            if kind != self._saver.kind:
                # It may be the only checkpoint that the run can resume from.
                contents = "trained weights only" if self.config.save_trainable_only else "in full"
                message = (
                    "step %d is already saved (%s) and is kept; use `torchtitan convert` for other "
                    "formats"
                )
                logger.warning(message, step, contents)
            return
        if step in self._finished_steps:
            path = self.folder / f"step-{step}"
            logger.warning(
                "step %d is not saved, since %s is the final checkpoint of a finished run",
                step,
                path,
            )
            return
        omits_frozen = self.config.save_trainable_only and kind == "full"
        marker = Marker(
            step=step,
            kind=kind,
            world_size=self._ranks.size,
            validation_loss=validation_loss,
            **self._best_of(numbers),
            base_model=self._base_model.description if omits_frozen else "",
            base_digest=self._base_digest if omits_frozen else "",
            identity=self._identity.properties if self._identity else {},
            length=self._identity.length if self._identity else {},
        )
        in_background = not is_final and self.config.async_mode != "disabled"
        self._saver.save(marker, self._encode(kind), start_time, in_background=in_background)
        if is_final and self._saver.failure:
            raise save_elsewhere(self._saver, self._fallback, marker, self._encode)

    def check_space(self, step: int, last_step: int) -> None:
        """Compare the sizes of the checkpoints after `step`, up to the last step of the run, with
        the free disk space. All ranks call this together, before the first step.

        Raises:
            UserError: if the first of them does not fit. If only later ones do not, a warning is
                logged.
        """
        if not self.config.saves:
            return
        # The same type and files as the last save's, except for metadata.
        models = {
            name: state for name, state in self.states.items() if isinstance(state, ModelState)
        }
        weights: dict[str, dict[str, torch.Tensor]] = {
            name: state.state_dict() for name, state in models.items()
        }
        last_kind = self.config.last_kind
        types = {
            name: self._types(state, weights[name], last_kind) for name, state in models.items()
        }
        full = total_bytes(self._encode("full"), self._ranks)
        model = total_bytes(weights, self._ranks, types)
        exported = model if self._exported_bytes is None else self._exported_bytes
        # exports come from a copy
        last = {"full": full, "model_only": model, "huggingface": model + exported}[last_kind]
        n_full = (
            (last_step - 1) // self.config.interval
            - step // self.config.interval
            + (last_kind == "full")
        )

        def check() -> None:
            n_existing = sum(info.is_complete for info in catalog.list_checkpoints(self.folder))
            # Each is written before an old one is removed.
            kept = self.config.keep_latest_k + self.config.keep_best + 1
            n_new = max(1, min(n_full, kept - n_existing)) if self.config.keep_latest_k else n_full
            total = min(n_new, n_full) * full + (last if last_kind != "full" else 0)
            check_free(self.folder, full if n_full else last, total, self.config.keep_latest_k)

        self._ranks.broadcast_from_rank0(check)

    def load(self) -> int:
        """Restore the configured state and return the run's step, 0 for a new run. Files are
        verified before they are loaded. If the run's newest checkpoint is damaged or unreadable,
        log a warning and fall back to an older one.

        Raises:
            UserError: if a requested checkpoint is damaged or cannot be loaded, all checkpoints of
                the run are damaged, the checkpoint does not fit the states, or the folder holds
                checkpoints of another run.
            RunComplete: if the run has ended in a checkpoint that it cannot resume from.
        """
        has_model_loader = self.config.initial_load_model_only and "model" in self.initial_loads
        decision = self._ranks.broadcast_from_rank0(self._decide)
        start = verify_start(self.config, decision, self.folder, self._ranks)
        if start is None:
            verify_saved_weights(self.config, self._ranks)
        elif not has_model_loader:
            verify_initial_checkpoint(start, self._ranks)
        identity = self._identity.properties if self._identity else {}
        self._ranks.broadcast_from_rank0(
            lambda: check_fallback(self.config, self.folder, self._fallback, identity)
        )
        # With --checkpoint.load_step, the user wants to repeat the rest of the run.
        if self.config.saves and self.config.load_step == -1:
            self._finished_steps = {info.step for info in decision.checkpoints if info.ends_run}
        self._ranks.broadcast_from_rank0(lambda: check_frozen(self.config, start, self._base_model))
        if self.config.saves and self.config.async_mode == "async_with_pinned_mem":
            entries = self._encode("full")
            # the first save tries again, and reports the error
            with contextlib.suppress(OSError, RuntimeError):
                self._saver.reserve(entries)
        needs_base_model = start is not None and start.resumes and bool(start.checkpoint.base_model)
        for initialize in self.initial_loads.values() if needs_base_model else []:
            initialize()
        self.loaded = set()
        if start and (start.resumes or not has_model_loader):
            model_only = not start.resumes and self.config.initial_load_model_only
            names = {"model"} if model_only else {*self.states, *self.rank_states}
            self.loaded = self._restore(start, names - set(self.config.exclude_from_loading))
        for name, initialize in self.initial_loads.items():
            if name not in self.loaded:
                if start and start.resumes and name in self.states:
                    logger.info(
                        "initialized state %s instead of loading it from %s",
                        name,
                        start.checkpoint.path,
                    )
                if not needs_base_model:
                    initialize()
        if start is None:
            return 0
        if start.resumes:
            step = start.checkpoint.step
            self._resumed_step = step
            self._saver.step = step
            self._saver.best_loss = _best_loss(
                [info for info in decision.checkpoints if info.step <= step],
                self.config.criterion,
            )
            # The previous process may have been killed before it removed older checkpoints.
            if self.config.saves and self.config.load_step == -1 and self._ranks.rank == 0:
                self._prune(step)
        return (
            start.checkpoint.step if start.resumes or not self.config.initial_load_model_only else 0
        )

    def reload(self, newest: int, *, excluding: Collection[str]) -> int:
        """Load the states again, except for `excluding`, from the newest undamaged checkpoint of
        this run up to the step `newest`, and return its step. Raise `RunFailure` if there is
        none."""
        self.wait()
        checkpoint = newest_up_to(self.config, self.folder, self._ranks, newest)
        self._restore(
            Start(checkpoint, resumes=True), {*self.states, *self.rank_states} - set(excluding)
        )
        return checkpoint.step

    def wait(self) -> None:
        """Wait for the background save, if any."""
        self._saver.wait()

    def close(self) -> None:
        """Wait for the background save and release threads and memory. Call this before destroying
        the process group. Raise `CheckpointSaveError` if the most recent save failed."""
        self._saver.close()
        self._saver.raise_failure()

    def _decide(self) -> StartDecision:
        """Return where the run starts, after checking that the folder is the run's, and clean the
        folder up."""
        decision, self._decision = self._decision, None
        identity = self._identity
        get_identity = (lambda: identity) if identity else None
        if decision is None or not decision.still_holds(self.folder):
            decision = decide_start(self.config, self.folder, get_identity)
        elif get_identity:
            check_owner(self.config, decision.checkpoints, get_identity)
        clean_up(self.config, decision, self.folder)
        return decision

    def _validate_states(self, *, can_export: bool) -> None:
        names = [*self.states, *self.rank_states]
        assert len(names) == len(set(names)), "states and rank_states share a name"
        for name in self.config.exclude_from_loading:
            if name not in names:
                hint = suggest(name, names) or f"; the states are {', '.join(names)}"
                raise UserError(
                    f"--checkpoint.exclude_from_loading: this run has no state {name!r}{hint}"
                )
        if self.config.last_save_in_hf and not can_export:
            raise UserError(
                "--checkpoint.last_save_in_hf: this model cannot be exported to Hugging Face format"
            )
        if self.config.initial_load_in_hf and "model" not in self.initial_loads:
            raise UserError(
                "--checkpoint.initial_load_in_hf: this model cannot be loaded from Hugging Face "
                "format"
            )

        has_frozen = any(
            isinstance(state, ModelState) and state.frozen for state in self.states.values()
        )
        if self.config.save_trainable_only and not any(self._ranks.gather(has_frozen)):
            raise UserError(
                "--checkpoint.save_trainable_only: all weights are trained; remove this option"
            )

    def _restore(self, start: Start, names: set[str]) -> set[str]:
        from torchtitan.components.checkpoint import dcp

        checkpoint = start.checkpoint
        assert checkpoint.marker is not None, "only complete checkpoints are chosen"
        saved_rank = self._ranks.rank if self._ranks.rank < checkpoint.marker.world_size else 0
        saved_states = without_frozen(self.states) if checkpoint.base_model else self.states
        states = {name: state for name, state in saved_states.items() if name in names}
        rank_states = {name: state for name, state in self.rank_states.items() if name in names}
        loaded = dcp.load(
            checkpoint.path,
            states,
            rank_states,
            saved_rank,
            self._ranks,
            optional=self.initial_loads.keys(),
        )
        skipped = ", ".join(
            name for name in (*self.states, *self.rank_states) if name not in loaded
        )
        note = " (model only)" if loaded == {"model"} else f" (without {skipped})"
        how = f"resuming after step {checkpoint.step}: " if start.resumes else ""
        logger.info("%sloaded %s%s", how, checkpoint.path, note if skipped else "")
        return loaded

    def _encode(self, kind: Kind) -> dict[str, Entries]:
        from torchtitan.components.checkpoint import dcp

        if kind == "full":
            saved_states = (
                without_frozen(self.states) if self.config.save_trainable_only else self.states
            )
            states = {name: state.state_dict() for name, state in saved_states.items()}
            states |= {
                dcp.rank_key(name, self._ranks.rank): state.state_dict()
                for name, state in self.rank_states.items()
            }
        else:
            models = {
                name: state for name, state in self.states.items() if isinstance(state, ModelState)
            }
            assert "model" in models, 'the state "model" must be a ModelState'
            states = {name: self._convert_dtypes(state, kind) for name, state in models.items()}
        return {name: dcp.encode(name, state_dict) for name, state_dict in states.items()}

    def _convert_dtypes(self, state: ModelState, kind: Kind) -> dict[str, torch.Tensor]:
        weights = state.state_dict()
        if self.config.export_dtype is None:
            return weights
        types = self._types(state, weights, kind)
        converted = {name: value.to(types[name]) for name, value in weights.items()}
        local = [name for name, value in weights.items() if _has_overflow(value, converted[name])]
        overflowing = sorted({name for names in self._ranks.gather(local) for name in names})
        if not overflowing:
            return converted
        if self._ranks.rank == 0:
            logger.warning(
                f"--checkpoint.export_dtype: values of {', '.join(overflowing)} overflow in "
                f"{self.config.export_dtype}"
                "; the weights are saved in their training type"
            )
        return weights

    def _types(
        self, state: ModelState, weights: Mapping[str, torch.Tensor], kind: Kind
    ) -> dict[str, torch.dtype]:
        """Return the type in which a weights-only save writes each tensor if no value overflows."""
        # The Hugging Face export converts merged weights itself; derived weights keep their own
        # types.
        unchanged = {*(state.converted if kind == "huggingface" else state.derived), *state.buffers}
        chosen = getattr(torch, self.config.export_dtype) if self.config.export_dtype else None
        return {
            name: chosen
            if chosen and value.is_floating_point() and name not in unchanged
            else value.dtype
            for name, value in weights.items()
        }

    def _prune(self, step: int) -> None:
        self._saved_steps.add(step)
        # Exclude the steps that an earlier attempt saved after the step from which this run
        # resumed.
        history = range(self._resumed_step + 1), self._saved_steps
        best_of = (
            (lambda step: any(step in steps for steps in history))
            if self.config.keep_best
            else None
        )
        with errors_logged(f"could not remove an old checkpoint in {self.folder}"):
            catalog.prune(
                self.folder,
                step,
                self.config.keep_latest_k,
                criterion=self.config.criterion,
                best_of=best_of,
            )

    def _best_of(self, measured: Mapping[str, float]) -> _Best:
        """Return the marker's fields about another metric than the validation loss."""
        metric = self.config.best_metric
        if not self.config.keep_best or metric == VALIDATION_LOSS:
            return {}
        value = measured.get(metric)
        return {
            "best_metric": metric,
            "best_value": None if value is None else float(value),
            "best_goal": self.config.criterion.goal,
        }


def _with_loss(
    measured: Mapping[str, float] | None, validation_loss: float | None
) -> Mapping[str, float]:
    """Return all numbers that were measured after a step."""
    loss = {} if validation_loss is None else {VALIDATION_LOSS: validation_loss}
    return {**(measured or {}), **loss}


def _best_loss(checkpoints: Sequence[CheckpointInfo], criterion: Criterion) -> float:
    """Return the lowest `CheckpointInfo.loss` of complete, undamaged checkpoints; infinity if none
    was measured."""
    usable = [info for info in checkpoints if info.is_complete and not info.damage]
    best = catalog.best(usable, criterion)
    loss = best.loss(criterion) if best else None
    return math.inf if loss is None else loss


def _has_overflow(value: torch.Tensor, converted: torch.Tensor) -> bool:
    """Return whether the conversion made finite values of this rank's shard infinite."""
    before, after = local_part(value), local_part(converted)
    return bool((before.isfinite() & after.isinf()).any())
