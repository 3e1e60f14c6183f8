"""Choosing and verifying the checkpoint that a run starts from."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.catalog import CheckpointInfo
from torchtitan.components.checkpoint.config import CheckpointConfig
from torchtitan.components.checkpoint.filesystem import (
    UNFINISHED,
    AnyFolder,
    Folder,
    errors_logged,
    folder_at,
)
from torchtitan.components.checkpoint.identity import BaseWeights, RunIdentity
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.tools.errors import RunComplete, RunFailure, UserError, os_errors_as
from torchtitan.tools.folder_lock import lock_folder
from torchtitan.tools.logging import logger

MISSING_WEIGHTS_ADVICE = (
    "use a checkpoint of the run with all weights: the last one with --checkpoint.last_save_in_hf, "
    "or any with --checkpoint.no_save_trainable_only; to get the adapter of a LoRA run, use "
    "`torchtitan convert --to peft`"
)
"""Advice if a checkpoint contains only trained weights, but all are needed."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Checkpoint that a run starts from."""

    checkpoint: CheckpointInfo
    """A complete checkpoint."""

    resumes: bool
    """True for the run's own checkpoint, false for `initial_load_path`."""


@dataclasses.dataclass(frozen=True)
class StartDecision:
    """Start of a run, decided once from the markers in its folder. All code that depends on the
    start uses this decision."""

    start: Start | None
    """None for a new run with initial values, or with weights that are not a checkpoint of a
    run."""

    checkpoints: Sequence[CheckpointInfo]
    """The run's checkpoints, complete or not, by step."""

    names: frozenset[str]
    """Names of the checkpoints when they were listed."""

    def still_holds(self, folder: Folder) -> bool:
        """Return whether the run's `folder` has checkpoints with the same names. Reads no
        checkpoint."""
        with os_errors_as(f"the checkpoints in {folder} cannot be read"):
            return catalog.names_in(folder) == self.names


def decide_start(
    config: CheckpointConfig, folder: Folder, get_identity: Callable[[], RunIdentity] | None = None
) -> StartDecision:
    """Decide where a run with checkpoints in `folder` starts; reads only markers, each once.

    Args:
        get_identity: returns the run's identity, to check that the folder is the run's; None: do
            not check.

    Raises:
        UserError: if a requested checkpoint cannot be loaded, all of the run's are damaged, or
            reading fails; and as `check_owner`.
        RunComplete: as `check_owner`.
    """
    with os_errors_as(f"the checkpoints in {folder} cannot be read"):
        names = catalog.names_in(folder)
        checkpoints = catalog.list_checkpoints(folder)
    if get_identity:
        check_owner(config, checkpoints, get_identity)
    return StartDecision(_find_start(config, folder, checkpoints), checkpoints, names)


def check_owner(
    config: CheckpointConfig,
    found: Sequence[CheckpointInfo],
    get_identity: Callable[[], RunIdentity],
) -> None:
    """Check that a run may save into a folder with the checkpoints `found`. `get_identity` is
    called only if there are complete ones.

    Raises:
        UserError: if the folder holds checkpoints of another run, or if this run has steps left but
            ended in a checkpoint that it cannot resume from.
        RunComplete: if this run ended in such a checkpoint and is complete.
    """
    checkpoints = [info for info in found if info.is_complete]
    if not checkpoints:
        return
    identity = get_identity()
    for info in reversed(checkpoints):
        assert info.marker is not None, "the checkpoint is complete"
        if info.kind != "full" and not info.marker.identity:
            raise UserError(
                f"{info.path} holds {info.contents} of an unknown run; to avoid overwriting it, "
                "choose another folder with --dump_folder"
            )
        if differences := identity.describe_differences(info.marker.identity):
            raise UserError(
                f"{info.path} belongs to another run, and two runs cannot share a folder: "
                f"{'; '.join(differences)}; choose another folder with --dump_folder"
            )
    if config.load_step == -1:
        _stop_if_finished(config, [info for info in checkpoints if not info.damage], identity)


def _stop_if_finished(
    config: CheckpointConfig, checkpoints: Sequence[CheckpointInfo], identity: RunIdentity
) -> None:
    ends = [info for info in checkpoints if info.ends_run]
    own = [info.step for info in checkpoints if info.kind == "full"]
    if not ends or (own and own[-1] > ends[-1].step):
        return
    last = ends[-1]
    marker = last.marker
    assert marker is not None, "the checkpoint is complete"
    if identity.is_finished(last.step, marker.length):
        if last.kind == config.last_kind:
            raise RunComplete(
                f"complete at step {last.step}: {last.path} (to train again, set another "
                "--dump_folder)"
            )
        raise UserError(
            f"this run ended at step {last.step}, and {last.path} holds {last.contents}; use "
            "`torchtitan convert` for other formats, or set another --dump_folder to train again"
        )
    if not own:
        in_hf = " --checkpoint.initial_load_in_hf" if last.kind == "huggingface" else ""
        raise UserError(
            f"this run ended in {last.path}, which holds {last.contents} and cannot be resumed; to "
            "continue training, start a new run with another --dump_folder and "
            f"--checkpoint.initial_load_path {last.path}{in_hf}"
        )


def _find_start(
    config: CheckpointConfig, folder: Folder, checkpoints: Sequence[CheckpointInfo]
) -> Start | None:
    if config.load_step != -1:
        return Start(catalog.find_step(folder, checkpoints, config.load_step), resumes=True)
    if config.enable and (own := catalog.resumable(folder, checkpoints)):
        return Start(own[-1], resumes=True)
    if not config.initial_load_path or config.initial_load_in_hf:
        return None
    start = Start(
        catalog.open_checkpoint(config.initial_load_path, "--checkpoint.initial_load_path"),
        resumes=False,
    )
    if start.checkpoint.kind == "huggingface":
        raise UserError(
            f"--checkpoint.initial_load_path: {config.initial_load_path} holds a Hugging Face "
            "model; set --checkpoint.initial_load_in_hf"
        )
    if start.checkpoint.base_model:
        raise UserError(
            f"--checkpoint.initial_load_path: {config.initial_load_path} "
            f"{describe_missing(start.checkpoint)}; {MISSING_WEIGHTS_ADVICE}"
        )
    if start.checkpoint.kind == "model_only" and not config.initial_load_model_only:
        raise UserError(
            f"--checkpoint.initial_load_path: {config.initial_load_path} holds the model only; "
            "remove --checkpoint.no_initial_load_model_only"
        )
    return start


def check_frozen(config: CheckpointConfig, start: Start | None, base: BaseWeights) -> None:
    """Raise `UserError` if `start` omits frozen weights other than `base`, this run's."""
    if start is None or not start.resumes:
        return
    checkpoint = start.checkpoint
    if checkpoint.base_model:
        assert checkpoint.marker
        digest, reason = base.digest(), f"{checkpoint.path} {describe_missing(checkpoint)}"
        # The same weights are accepted from any location.
        if (
            digest != checkpoint.marker.base_digest
            or not digest
            and base.description != checkpoint.base_model
        ):
            if base.description == checkpoint.base_model:
                raise UserError(f"{reason}, which have changed since; restore the original files")
            raise UserError(
                f"{reason}, but this run uses different weights from {base.description}; use the "
                "original ones"
            )
    elif config.save_trainable_only:
        raise UserError(
            f"--checkpoint.save_trainable_only: {checkpoint.path} holds all weights, without the "
            "origin of the frozen ones; resume without this option"
        )


def describe_missing(checkpoint: CheckpointInfo) -> str:
    """Describe the weights omitted from a checkpoint of trained weights."""
    return f"holds trained weights only; the frozen ones come from {checkpoint.base_model}"


def verify_start(
    config: CheckpointConfig, decision: StartDecision, folder: Folder, ranks: Ranks
) -> Start | None:
    """Return the start of a decision after verifying the run's own checkpoint, and the next older
    ones with a warning if it is damaged or unreadable. All ranks call this together and divide the
    work. Raise `UserError` if every candidate is damaged."""
    start = decision.start
    if start is None or not start.resumes:
        return start
    if config.load_step == -1:
        return Start(
            newest_usable(config, folder, ranks, catalog.resumable(folder, decision.checkpoints)),
            resumes=True,
        )
    catalog.raise_if_damaged(start.checkpoint.path, ranks)
    return start


def verify_initial_checkpoint(start: Start, ranks: Ranks) -> None:
    """Verify the checkpoint that a run starts from if it is another run's. All ranks call this
    together. Raise `UserError` if it is damaged."""
    if not start.resumes:
        catalog.raise_if_damaged(start.checkpoint.path, ranks)


def verify_saved_weights(config: CheckpointConfig, ranks: Ranks) -> None:
    """Verify a Hugging Face folder in `initial_load_path` if a torchtitan run has saved it; others
    have no marker. All ranks call this together. Raise `UserError` if it is damaged."""
    if config.initial_load_path and config.initial_load_in_hf:
        initial = folder_at(config.initial_load_path)
        if ranks.broadcast_from_rank0(lambda: catalog.has_marker(initial)):
            catalog.raise_if_damaged(initial, ranks)


def load_model_state(path: AnyFolder, state: ModelState, *, saved_name: str = "model") -> None:
    """Verify the checkpoint in `path` and load its model `saved_name` into `state`, sharded or not.
    All ranks of the default process group, if any, call this together. Raise `UserError` on every
    rank if the checkpoint is damaged or does not fit."""
    from torchtitan.components.checkpoint import dcp

    ranks = Ranks.of_run()
    checkpoint = ranks.broadcast_from_rank0(lambda: catalog.open_checkpoint(path))
    catalog.raise_if_damaged(checkpoint.path, ranks)
    dcp.load(checkpoint.path, {saved_name: state}, {}, 0, ranks)
    logger.info("loaded %s from %s", saved_name, checkpoint.path)


def clean_up(config: CheckpointConfig, decision: StartDecision, folder: Folder) -> None:
    """Remove the remains of unfinished saves in the run's folder, and warn of checkpoints that the
    run does not use."""
    start = decision.start
    resumed = start.checkpoint.step if start and start.resumes else -1
    for info in decision.checkpoints if config.enable else []:
        if _is_left_over(info, folder):
            logger.warning("%s was left by an interrupted save or removal", info.path)
            if not config.load_only:
                with errors_logged(f"could not remove {info.path}"):
                    catalog.remove_checkpoint(info.path)
        elif not info.is_complete:
            logger.warning("skipped %s: %s", info.path, info.fault or "it is incomplete")
        elif info.step > resumed:
            logger.warning("skipped %s: %s", info.path, _skip_reason(info))


def clean_up_complete(config: CheckpointConfig, dump_folder: Path) -> None:
    """Remove the remains of unfinished saves and removals of a complete run, whose process may have
    been killed after the last save. Its checkpoints stay, since a command that is only repeated
    may have another `keep_latest_k`. A run in use is left alone."""
    if config.load_only:
        return
    folder = config.resolve_folder(str(dump_folder))

    def left_over() -> list[Folder]:
        found = catalog.list_checkpoints(folder)
        return [info.path for info in found if _is_left_over(info, folder)]

    with errors_logged(f"could not clean up {folder}"):
        if not left_over():
            return  # and the lock's file does not change
        try:
            lock = lock_folder(dump_folder)
        except UserError:
            return
        for path in left_over():
            catalog.remove_checkpoint(path)
        del lock  # unless the caller holds it


def _is_left_over(info: CheckpointInfo, folder: Folder) -> bool:
    # In a store that cannot rename, a killed save leaves a folder without a marker.
    return info.path.name.endswith(UNFINISHED) or not (
        info.is_complete or bool(info.fault) or folder.can_rename
    )


def _skip_reason(info: CheckpointInfo) -> str:
    if info.damage:
        return f"it was found damaged: {info.damage}"
    if info.kind != "full":
        return f"it holds {info.contents}, so a run cannot resume from it"
    return "an older step was requested"


def newest_up_to(
    config: CheckpointConfig, folder: Folder, ranks: Ranks, newest: int
) -> CheckpointInfo:
    """Return the newest undamaged full checkpoint up to the step `newest`. All ranks call this
    together. Raise `RunFailure` if all checkpoints are newer, `UserError` if all are damaged."""

    def find() -> list[CheckpointInfo]:
        with os_errors_as(f"the checkpoints in {folder} cannot be read"):
            own = catalog.resumable(folder, catalog.list_checkpoints(folder))
        return [info for info in own if info.step <= newest]

    own = ranks.broadcast_from_rank0(find)
    if not own:
        raise RunFailure(f"{folder} has no checkpoint up to step {newest} to return to")
    return newest_usable(config, folder, ranks, own)


def newest_usable(
    config: CheckpointConfig, folder: Folder, ranks: Ranks, own: Sequence[CheckpointInfo]
) -> CheckpointInfo:
    """Return the newest of a run's `own` checkpoints, by step, that is not damaged. All ranks call
    this together and divide the work. Raise `UserError` if all of them are damaged."""
    reasons: dict[int, str] = {}
    for checkpoint in reversed(own):
        faults = catalog.find_damage(checkpoint.path, ranks)
        if not faults:
            return checkpoint
        reasons[checkpoint.step] = f"it {faults.describe()}"
        if ranks.rank == 0:
            logger.warning("skipped %s: %s", checkpoint.path, reasons[checkpoint.step])
            # Unreadable files are not recorded, since the next run may be able to read them.
            if faults.damage and not config.load_only:
                with errors_logged(f"could not record the damage in {checkpoint.path}"):
                    catalog.record_damage(checkpoint, faults.damage)
    with os_errors_as(f"the checkpoints in {folder} cannot be read"):
        found = ranks.broadcast_from_rank0(lambda: catalog.list_checkpoints(folder))
    raise catalog.no_usable_checkpoint_error(folder, found, reasons)
