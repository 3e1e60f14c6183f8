"""Start of a run: from its own checkpoint or another's, verified before it is loaded."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.catalog import CheckpointInfo
from torchtitan.components.checkpoint.config import CheckpointConfig
from torchtitan.components.checkpoint.filesystem import UNFINISHED, AnyFolder, Folder, folder_at
from torchtitan.components.checkpoint.identity import BaseWeights, RunIdentity
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.tools.errors import RunComplete, UserError
from torchtitan.tools.logging import logger

WAY_ON = (
    "take one of its run that holds all weights, as the one after the last step does, or any with "
    "--checkpoint.no_trained_only; of a LoRA run, torchtitan convert --to peft makes an adapter of it"
)
"""Advice if a checkpoint of only trained weights does not suffice."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Checkpoint that a run starts from."""

    checkpoint: CheckpointInfo
    """Always complete."""

    resumes: bool
    """True for the run's own checkpoint, false for `initial_load_path`."""


def check_owner(config: CheckpointConfig, folder: Folder, get_identity: Callable[[], RunIdentity]) -> None:
    """Raise if a run must not train into `folder`; looks only at markers, and needs the identity only if there are any.

    Raises:
        UserError: if the folder holds checkpoints of another run, or if this run has steps left but has ended in a
            checkpoint that it cannot resume from.
        RunComplete: if this run has ended in such a checkpoint, and nothing is left to train.
    """
    with _looking_through(folder):
        checkpoints = [info for info in catalog.list_checkpoints(folder) if info.complete]
    if not checkpoints:
        return
    identity = get_identity()
    for info in reversed(checkpoints):
        assert info.marker is not None, "it is complete"
        if info.kind != "full" and not info.marker.identity:
            raise UserError(
                f"{info.path} holds {info.holds} and does not say which run it belongs to; so that it is not replaced, "
                "give this run its own folder with --dump_folder"
            )
        if different := identity.differences(info.marker.identity):
            raise UserError(
                f"{info.path} belongs to another run, and two runs cannot share a folder: {'; '.join(different)}. "
                "Give this run its own with --dump_folder"
            )
    if config.load_step == -1:
        _stop_if_finished(config, [info for info in checkpoints if not info.damage], identity)


def _stop_if_finished(config: CheckpointConfig, checkpoints: Sequence[CheckpointInfo], identity: RunIdentity) -> None:
    ends = [info for info in checkpoints if info.ends_run]
    own = [info.step for info in checkpoints if info.kind == "full"]
    if not ends or (own and own[-1] > ends[-1].step):
        return
    last = ends[-1]
    marker = last.marker
    assert marker is not None, "it is complete"
    if identity.is_finished(last.step, marker.length):
        if last.kind == config.last_kind:
            raise RunComplete(f"complete at step {last.step}: {last.path} (another --dump_folder trains again)")
        raise UserError(
            f"this run ended at step {last.step}, and {last.path} holds {last.holds}; torchtitan convert makes other "
            "forms of it, and another --dump_folder trains again"
        )
    if not own:
        in_hf = " --checkpoint.initial_load_in_hf" if last.kind == "huggingface" else ""
        raise UserError(
            f"{last.path} is the end of this run and holds {last.holds}, so no further steps can follow; to train on, "
            f"begin a new run from it: another --dump_folder and --checkpoint.initial_load_path {last.path}{in_hf}"
        )


def find_start(config: CheckpointConfig, folder: Folder) -> Start | None:
    """Return the checkpoint that a run with checkpoints in `folder` would start from, judging by the markers alone.
    Raise `UserError` if a named one cannot be loaded, all of the run's own are damaged, or nothing can be read."""
    with _looking_through(folder):
        if config.load_step != -1:
            return Start(catalog.find_step(folder, config.load_step), resumes=True)
        if config.enable and (own := catalog.resumable(folder)):
            return Start(own[-1], resumes=True)
    if not config.initial_load_path or config.initial_load_in_hf:
        return None
    start = Start(catalog.open_checkpoint(config.initial_load_path, "checkpoint.initial_load_path"), resumes=False)
    if start.checkpoint.kind == "huggingface":
        raise UserError(
            f"checkpoint.initial_load_path: {config.initial_load_path} holds a Hugging Face model; "
            "add --checkpoint.initial_load_in_hf"
        )
    if start.checkpoint.base_model:
        raise UserError(
            f"checkpoint.initial_load_path: {config.initial_load_path} {describe_missing(start.checkpoint)}; {WAY_ON}"
        )
    if start.checkpoint.kind == "model_only" and not config.initial_load_model_only:
        raise UserError(
            f"checkpoint.initial_load_path: {config.initial_load_path} holds the model only, "
            "so it cannot be loaded with checkpoint.initial_load_model_only False"
        )
    return start


def check_frozen(config: CheckpointConfig, start: Start | None, base: BaseWeights) -> None:
    """Raise `UserError` unless `base`, this run's frozen weights, are the weights that `start` lacks."""
    if start is None or not start.resumes:
        return
    checkpoint = start.checkpoint
    if checkpoint.base_model:
        assert checkpoint.marker
        digest, lacking = base.digest(), f"{checkpoint.path} {describe_missing(checkpoint)}"
        # The same weights are accepted from any location.
        if digest != checkpoint.marker.base_digest or not digest and base.words != checkpoint.base_model:
            raise UserError(
                f"{lacking} as they were then, which have changed since: put them back"
                if base.words == checkpoint.base_model
                else f"{lacking}, and in this run they would be those of {base.words}, which differ: set the former"
            )
    elif config.save_trainable_only:
        raise UserError(
            f"checkpoint.save_trainable_only: {checkpoint.path} holds all weights, but not the source of the frozen "
            "ones; resume without this option"
        )


def describe_missing(checkpoint: CheckpointInfo) -> str:
    """Describe the weights that a checkpoint of trained weights lacks."""
    return f"holds trained weights only; the others are those of {checkpoint.base_model}"


def choose_start(
    config: CheckpointConfig,
    folder: Folder,
    ranks: Ranks,
    *,
    identity: RunIdentity | None = None,
    verifies_initial: bool,
) -> Start | None:
    """Return the verified result of `find_start`; every rank calls it and digests its share. Raise as `check_owner` and
    `find_start`, and `UserError` if every candidate is damaged.

    The checkpoint of another run is verified only if `verifies_initial`; otherwise its loader does so. Warn about other
    contents of the folder, remove the remains of unfinished saves, and fall back, with a warning, from a damaged or
    unreadable checkpoint of the run to the next older one.
    """
    start = ranks.broadcast_from_rank0(lambda: _find_and_tidy(config, folder, identity))
    if start is None:
        if config.initial_load_path and config.initial_load_in_hf:
            given = folder_at(config.initial_load_path)
            # A Hugging Face folder saved by one of our runs; others have nothing to verify.
            if ranks.broadcast_from_rank0(lambda: catalog.has_marker(given)):
                catalog.raise_if_damaged(given, ranks)
        return None
    if start.resumes and config.load_step == -1:
        return Start(_newest_usable(config, folder, ranks), resumes=True)
    if start.resumes or verifies_initial:
        catalog.raise_if_damaged(start.checkpoint.path, ranks)
    return start


def load_model_state(
    path: AnyFolder, state: ModelState, *, saved_name: str = "model", group: dist.ProcessGroup | None = None
) -> None:
    """Verify the checkpoint in `path` and load the weights of its model `saved_name` into `state`, sharded or not. The
    ranks of `group` call this together; None: the default process group, or this process if there is none. Raise
    `UserError` on every rank if the checkpoint is damaged or does not fit."""
    from torchtitan.components.checkpoint import dcp

    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    ranks = Ranks(group)
    checkpoint = ranks.broadcast_from_rank0(lambda: catalog.open_checkpoint(path))
    catalog.raise_if_damaged(checkpoint.path, ranks)
    dcp.load(checkpoint.path, {saved_name: state}, {}, 0, ranks)
    logger.info("loaded %s of %s", saved_name, checkpoint.path)


def _find_and_tidy(config: CheckpointConfig, folder: Folder, identity: RunIdentity | None) -> Start | None:
    if identity:
        check_owner(config, folder, lambda: identity)
    start = find_start(config, folder)
    resumed = start.checkpoint.step if start and start.resumes else -1
    for info in catalog.list_checkpoints(folder) if config.enable else []:
        # If folders cannot be renamed, a killed save leaves one without a marker.
        if info.path.name.endswith(UNFINISHED) or not (info.complete or info.fault or folder.renames):
            logger.warning("%s was left by a save, or a removal, that did not end", info.path)
            if not config.load_only:
                _or_warn(functools.partial(catalog.remove_checkpoint, info.path), f"{info.path} could not be removed")
        elif not info.complete:
            logger.warning("skipped %s: %s", info.path, info.fault or "it is not complete")
        elif info.step > resumed:
            logger.warning("skipped %s: %s", info.path, _skip_reason(info))
    return start


def _or_warn(act: Callable[[], None], failure: str) -> None:
    try:
        act()
    except OSError as error:
        logger.warning("%s: %s", failure, error)


def _skip_reason(info: CheckpointInfo) -> str:
    if info.damage:
        return f"it was found damaged: {info.damage}"
    if info.kind != "full":
        return f"it holds {info.holds}, so a run cannot resume from it"
    return "an older step was asked for"


def _newest_usable(config: CheckpointConfig, folder: Folder, ranks: Ranks) -> CheckpointInfo:
    with _looking_through(folder):
        own = ranks.broadcast_from_rank0(lambda: catalog.resumable(folder))
    lost: dict[int, str] = {}
    for checkpoint in reversed(own):
        faults = catalog.find_damage(checkpoint.path, ranks)
        if not faults:
            return checkpoint
        lost[checkpoint.step] = f"it {faults.in_words()}"
        if ranks.rank == 0:
            logger.warning("skipped %s: %s", checkpoint.path, lost[checkpoint.step])
            # Unreadable files are not noted: the next run may be able to read them.
            if faults.damage and not config.load_only:
                note = functools.partial(catalog.record_damage, checkpoint, faults.damage)
                _or_warn(note, f"the damage to {checkpoint.path} could not be noted in it")
    with _looking_through(folder):
        raise ranks.broadcast_from_rank0(lambda: catalog.no_usable_checkpoint(folder, lost))


@contextlib.contextmanager
def _looking_through(folder: Folder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"the checkpoints in {folder} cannot be looked through: {error}") from error
