"""What a run starts from: a checkpoint of its own, or another's; verified before anything of it is loaded."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.assets import read_converters
from torchtitan.components.checkpoint.folders import AnyFolder, CheckpointInfo
from torchtitan.components.checkpoint.formats.find import format_of
from torchtitan.components.checkpoint.identity import RunIdentity
from torchtitan.components.checkpoint.origin import Origin
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.states import ModelState
from torchtitan.components.checkpoint.store import UNFINISHED, Folder, folder_at
from torchtitan.protocols.conversion import described_converters
from torchtitan.tools.errors import RunComplete, UserError
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan.components.checkpoint.manager import CheckpointManager

_WHOLE = "holds all weights, as the one after the last step does, or any with --checkpoint.no_trained_only"


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts from."""

    checkpoint: CheckpointInfo

    resumes: bool
    """Whether it is a checkpoint of the run itself, and not its `initial_load_path`."""


def check_owner(config: "CheckpointManager.Config", folder: Folder, get_identity: Callable[[], RunIdentity]) -> None:
    """Raise if a run must not train into `folder`; looks at markers only.

    Args:
        config: the run's.
        folder: the place for its checkpoints.
        get_identity: returns the run's identity; not called if the folder holds no checkpoint.

    Raises:
        UserError: if the folder holds checkpoints of another run, or if this run is to make more steps and has ended in
            a checkpoint that it cannot resume from.
        RunComplete: if this run has ended in such a checkpoint, and nothing is left to train.
    """
    with _looking_through(folder):
        checkpoints = [info for info in folders.list_checkpoints(folder) if info.complete]
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


def _stop_if_finished(
    config: "CheckpointManager.Config", checkpoints: Sequence[CheckpointInfo], identity: RunIdentity
) -> None:
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


def find_start(config: "CheckpointManager.Config", folder: Folder) -> Start | None:
    """The checkpoint that a run whose own lie in `folder` would start from, by the markers alone; None: from nothing
    that is a checkpoint.

    Raises:
        UserError: where one is named that cannot be loaded, all of the run's own are damaged, or nothing can be read.
    """
    with _looking_through(folder):
        return _find_start(config, folder)


@contextlib.contextmanager
def _looking_through(folder: Folder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"the checkpoints in {folder} cannot be looked through: {error}") from error


def _find_start(config: "CheckpointManager.Config", folder: Folder) -> Start | None:
    if config.load_step != -1:
        return Start(folders.find_step(folder, config.load_step), resumes=True)
    if config.enable and (own := folders.resumable(folder)):
        return Start(own[-1], resumes=True)
    if not config.initial_load_path:
        return None
    if config.initial_load_in_hf:
        format_of(config.initial_load_path)  # raises where there is none
        return None
    start = Start(folders.open_checkpoint(config.initial_load_path, "checkpoint.initial_load_path"), resumes=False)
    if start.checkpoint.kind == "huggingface":
        raise UserError(
            f"checkpoint.initial_load_path: {config.initial_load_path} holds a Hugging Face model; "
            "add --checkpoint.initial_load_in_hf"
        )
    if frozen_from := start.checkpoint.frozen_from:
        way_on = (
            f"begin from those of {frozen_from}, with the adapter that torchtitan convert --to peft makes of it"
            if has_adapter(start.checkpoint)
            else f"begin from a checkpoint of its run that {_WHOLE}"
        )
        raise UserError(
            f"checkpoint.initial_load_path: {config.initial_load_path} holds trained weights only; {way_on}"
        )
    if start.checkpoint.kind == "model_only" and not config.initial_load_model_only:
        raise UserError(
            f"checkpoint.initial_load_path: {config.initial_load_path} holds the model only, "
            "so it cannot be loaded with checkpoint.initial_load_model_only False"
        )
    return start


def frozen_folder(checkpoint: CheckpointInfo, base: Path | None) -> Path:
    """The folder of the weights that a checkpoint lacks, since they are not trained.

    Args:
        checkpoint: one with trained weights only.
        base: where they lie now; None: where its run had them from.

    Raises:
        UserError: where they are in no folder, or those that are there are others.
    """
    origin = Origin(checkpoint.frozen_from)
    lacking = f"{checkpoint.path} holds trained weights only; the others are those of {origin.words}"
    if not origin.path:
        way_on = (
            "torchtitan convert --to peft makes an adapter of it"
            if has_adapter(checkpoint)
            else f"take one of its run that {_WHOLE}"
        )
        raise UserError(f"{lacking}, and not in it ({way_on})")
    folder = base or Path(origin.path)
    if not folder.is_dir():
        where = base or origin.path  # a URL would not survive as a Path
        raise UserError(f"{lacking}, and {where} is not a folder here; name the one they are in with --base DIR")
    if Origin.at(str(folder)).digest() != checkpoint.frozen_digest:
        raise UserError(f"{lacking} as they were then, and those in {folder} differ; name the folder with --base DIR")
    return folder


def has_adapter(checkpoint: CheckpointInfo) -> bool:
    """Whether `torchtitan convert --to peft` makes an adapter of a checkpoint.

    Raises:
        UserError: where what it says of its converters cannot be read, or one cannot be imported.
    """
    from torchtitan.components.peft import LoRA  # which imports this package

    path = str(checkpoint.path)
    converters = described_converters(read_converters(path), path)
    return sum(isinstance(converter, LoRA) for converter in converters) == 1


def check_frozen(config: "CheckpointManager.Config", start: Start | None, origin: Origin) -> None:
    """Make sure that a checkpoint without the weights that are not trained goes with those that the run has.

    Args:
        config: the run's.
        start: what it starts from.
        origin: what its weights that are not trained begin as.

    Raises:
        UserError: where they are others, or that cannot be known.
    """
    if start is None or not start.resumes:
        return
    checkpoint = start.checkpoint
    if checkpoint.frozen_from:
        _check_same_frozen(checkpoint, origin)
    if config.trained_only and not checkpoint.frozen_from:
        raise UserError(
            f"checkpoint.trained_only: {checkpoint.path} holds all weights, and it is not known what those began as "
            "that are not trained; go on without this option"
        )


def _check_same_frozen(checkpoint: CheckpointInfo, origin: Origin) -> None:
    lacking = f"{checkpoint.path} holds trained weights only; the others are those of {checkpoint.frozen_from}"
    # The same weights are in order wherever they lie now.
    if (digest := origin.digest()) != checkpoint.frozen_digest or not digest and origin.words != checkpoint.frozen_from:
        raise UserError(
            f"{lacking} as they were then, which have changed since: put them back"
            if origin.words == checkpoint.frozen_from
            else f"{lacking}, and in this run they would be those of {origin.words}, which differ: set the former"
        )


def choose_start(
    config: "CheckpointManager.Config",
    folder: Folder,
    ranks: Ranks,
    *,
    identity: RunIdentity | None = None,
    verifies_initial: bool,
) -> Start | None:
    """What `find_start` gives, verified; every rank calls it and digests its share. Another run's checkpoint of ours is
    verified only if `verifies_initial`: what loads it may do so.

    Warnings name what else lies in the folder; what unfinished saves left is removed. Where the run resumes from its
    newest checkpoint and that is damaged or cannot be read, a warning says so, and the next older one takes its place.

    Raises:
        UserError: as `check_owner` and `find_start`; if a named checkpoint is damaged or cannot be read, or if all are
            that the run could resume from.
        RunComplete: as `check_owner`.
    """
    start = ranks.first_decides(lambda: _find_and_tidy(config, folder, identity))
    if start is None:
        if config.initial_load_path and config.initial_load_in_hf:
            _verify_huggingface(folder_at(config.initial_load_path), ranks)
        return None
    if start.resumes and config.load_step == -1:
        return Start(_newest_sound(config, folder, ranks), resumes=True)
    if start.resumes or verifies_initial:
        folders.raise_if_damaged(start.checkpoint.path, ranks)
    return start


def load_model_state(
    path: AnyFolder, state: ModelState, *, saved_name: str = "model", group: dist.ProcessGroup | None = None
) -> None:
    """Load the weights of one model from a checkpoint into `state`, whatever its name in this run; verified before.

    Args:
        path: a step's folder.
        state: sharded or not; every rank reads its parts.
        saved_name: the state's name in the checkpoint.
        group: who calls this together; None: the default process group, or this process where there is none.

    Raises:
        UserError: on every rank, where the checkpoint is damaged or does not fit.
    """
    from torchtitan.components.checkpoint import storage

    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    ranks = Ranks(group)
    checkpoint = ranks.first_decides(lambda: folders.open_checkpoint(path))
    folders.raise_if_damaged(checkpoint.path, ranks)
    storage.load(checkpoint.path, {saved_name: state}, {}, 0, ranks)
    logger.info("loaded %s of %s", saved_name, checkpoint.path)


def _find_and_tidy(config: "CheckpointManager.Config", folder: Folder, identity: RunIdentity | None) -> Start | None:
    if identity:
        check_owner(config, folder, lambda: identity)
    start = find_start(config, folder)
    resumed = start.checkpoint.step if start and start.resumes else -1
    for info in folders.list_checkpoints(folder) if config.enable else []:
        # Where a folder cannot be renamed, one without a marker is what a killed save leaves.
        if info.path.name.endswith(UNFINISHED) or not (info.complete or info.fault or folder.renames):
            logger.warning("%s was left by a save, or a removal, that did not end", info.path)
            if not config.load_only:
                _remove(info)
        elif not info.complete:
            logger.warning("skipped %s: %s", info.path, info.fault or "it is not complete")
        elif info.step > resumed:
            logger.warning("skipped %s: %s", info.path, _why_skipped(info))
    return start


def _remove(info: CheckpointInfo) -> None:
    try:
        folders.remove_checkpoint(info.path)
    except OSError as error:
        logger.warning("%s could not be removed: %s", info.path, error)


def _why_skipped(info: CheckpointInfo) -> str:
    if info.damage:
        return f"it was found damaged: {info.damage}"
    if info.kind != "full":
        return f"it holds {info.holds}, so a run cannot resume from it"
    return "an older step was asked for"


def _newest_sound(config: "CheckpointManager.Config", folder: Folder, ranks: Ranks) -> CheckpointInfo:
    with _looking_through(folder):
        own = ranks.first_decides(lambda: folders.resumable(folder))
    lost: dict[int, str] = {}
    for checkpoint in reversed(own):
        faults = folders.find_damage(checkpoint.path, ranks)
        if not faults:
            return checkpoint
        lost[checkpoint.step] = f"it {faults.in_words()}"
        if ranks.rank == 0:
            logger.warning("skipped %s: %s", checkpoint.path, lost[checkpoint.step])
            # What could not be read is not noted: the next run may be able to.
            if faults.damage and not config.load_only:
                _record(checkpoint, faults.damage)
    with _looking_through(folder):
        raise ranks.first_decides(lambda: folders.none_sound(folder, lost))


def _record(checkpoint: CheckpointInfo, damage: Sequence[str]) -> None:
    try:
        folders.record_damage(checkpoint, damage)
    except OSError as error:
        logger.warning("the damage to %s could not be noted in it: %s", checkpoint.path, error)


def _verify_huggingface(folder: Folder, ranks: Ranks) -> None:
    """Verify a Hugging Face folder that a run of ours saved; others have nothing to be verified by."""
    if ranks.first_decides(lambda: folders.has_marker(folder)):
        folders.raise_if_damaged(folder, ranks)
