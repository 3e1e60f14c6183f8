"""Options of checkpoints, and the checks that read no files."""

import dataclasses
import sys
from typing import Literal

from torchtitan.components.checkpoint.filesystem import (
    Folder,
    LocalFolder,
    folder_at,
    resolve_folder,
)
from torchtitan.components.checkpoint.manifest import VALIDATION_LOSS, Criterion, Kind
from torchtitan.config.code import RunFolder
from torchtitan.config.configurable import Configurable
from torchtitan.config.goals import Goal, sign_of
from torchtitan.config.ranges import check_ranges
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import is_url

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]

_SAVE_OPTIONS = {
    "last_save_in_hf": "no_last_save_in_hf",
    "last_save_model_only": "no_last_save_model_only",
    "export_dtype": "export_dtype None",
    "keep_best": "no_keep_best",
    "fallback_folder": "fallback_folder ''",
}
"""Option that affects saves → option that reverts it."""


@dataclasses.dataclass(kw_only=True, slots=True)
class CheckpointConfig(Configurable.Config):
    """Options for saving, keeping and loading checkpoints."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""

    folder: RunFolder = "checkpoint"
    """Folder for checkpoints, inside the dump folder, or a URL such as s3://bucket/run."""

    fallback_folder: RunFolder = ""
    """Folder or URL, such as one on another disk, for the last save of a run if it fails in
    `folder`."""

    interval: int = 500
    """Steps between saves. The last step is always saved."""

    initial_load_path: str = ""
    """Checkpoint to start from if the run has none of its own: the step-N folder of another run, or
    its URL."""

    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path and start at step 0; otherwise, load everything,
    including the step."""

    initial_load_in_hf: bool = False
    """initial_load_path is a folder of pretrained weights, such as a Hugging Face model, not a
    run's checkpoint."""

    last_save_model_only: bool = False
    """After the last step, save only the weights. A run cannot resume from them."""

    last_save_in_hf: bool = False
    """After the last step, save only the weights, in Hugging Face format. A run cannot resume from
    them."""

    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights written by last_save_model_only and last_save_in_hf; None: the type used
    in training."""

    async_mode: AsyncMode = "disabled"
    """Copy the state to CPU memory and write it while training continues: in a thread (async), or
    in a separate process from pinned memory, which is faster to copy to (async_with_pinned_mem; not
    pinned without CUDA)."""

    save_trainable_only: bool = False
    """Omit frozen weights from full checkpoints; on resume they come from initial_load_path or the
    seed."""

    keep_latest_k: int = 10
    """Keep only this many of the newest checkpoints (0: keep all)."""

    keep_best: bool = False
    """Also keep the checkpoint with the best value of best_metric."""

    best_metric: str = VALIDATION_LOSS
    """Name of a number of validation or evaluation in metrics.jsonl, such as
    evaluation/quiz/accuracy; the model before the first step does not count."""

    best_goal: Goal = "auto"
    """Direction of better values of best_metric; auto: by the name."""

    load_step: int = -1
    """Resume from this step (-1: the newest)."""

    exclude_from_loading: list[str] = dataclasses.field(default_factory=list)
    """Names of states not to load, such as optimizer, lr_scheduler or dataloader."""

    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to test early that saving works."""

    load_only: bool = False
    """Resume from checkpoints, but do not save or remove any."""

    @property
    def saves(self) -> bool:
        """True if a run with this configuration writes checkpoints."""
        return self.enable and not self.load_only

    @property
    def criterion(self) -> Criterion:
        """The metric that `keep_best` compares. Raises `UserError` if the name of `best_metric`
        does not tell whether lower or higher is better."""
        if not self.keep_best:
            return Criterion()
        sign = sign_of(
            self.best_metric,
            self.best_goal,
            option="--checkpoint.best_metric",
            goal_option="--checkpoint.best_goal",
        )
        return Criterion(self.best_metric, "min" if sign < 0 else "max")

    @property
    def last_kind(self) -> Kind:
        """Contents of the save after the last step."""
        if self.last_save_in_hf:
            return "huggingface"
        return "model_only" if self.last_save_model_only else "full"

    def validate(self) -> None:
        check_ranges("checkpoint", self)
        if self.load_step != -1 and not self.enable:
            raise UserError(f"--checkpoint.load_step {self.load_step} requires --checkpoint.enable")
        if self.keep_best and self.criterion == Criterion(VALIDATION_LOSS, "max"):
            raise UserError(
                f"--checkpoint.best_goal max: of {VALIDATION_LOSS}, the lowest is kept; name "
                "another number with --checkpoint.best_metric"
            )
        _check_initial_load(self)
        _check_saves(self)
        _check_folder(self)

    def resolve_folder(self, dump_folder: str) -> Folder:
        """Return the checkpoint folder of a run in `dump_folder`."""
        return resolve_folder(dump_folder, self.folder)

    def resolve_fallback(self, dump_folder: str) -> Folder | None:
        """Return the fallback folder of a run in `dump_folder`, if any."""
        return resolve_folder(dump_folder, self.fallback_folder) if self.fallback_folder else None


def _check_saves(config: CheckpointConfig) -> None:
    """Raise one `UserError` for all options that affect saves if the run does not save."""
    options = [option for option in _SAVE_OPTIONS if getattr(config, option)]
    if config.saves or not options:
        if config.export_dtype and config.last_kind == "full":
            raise UserError(
                f"--checkpoint.export_dtype is {config.export_dtype}, by an option or the "
                "configuration, but the last save is a full checkpoint, which keeps the training "
                "type; add --checkpoint.export_dtype None, or export with "
                "--checkpoint.last_save_in_hf or --checkpoint.last_save_model_only"
            )
        return
    names = ", ".join(f"--checkpoint.{option}" for option in options)
    if config.enable:
        raise UserError(
            f"{names} cannot be combined with --checkpoint.load_only, which saves nothing"
        )
    reverted = " ".join(f"--checkpoint.{_SAVE_OPTIONS[option]}" for option in options)
    verb = "require" if len(options) > 1 else "requires"
    raise UserError(
        f"{names} {verb} --checkpoint.enable; to run without checkpoints, add {reverted}"
    )


def _check_initial_load(config: CheckpointConfig) -> None:
    path = config.initial_load_path
    if path and "model" in config.exclude_from_loading and not config.initial_load_in_hf:
        raise UserError(
            "--checkpoint.exclude_from_loading model cannot be combined with "
            f"--checkpoint.initial_load_path {path}, which loads the model"
        )
    if not config.initial_load_in_hf:
        return
    if not path:
        raise UserError(
            "--checkpoint.initial_load_in_hf requires --checkpoint.initial_load_path, the folder "
            "to load"
        )
    if is_url(path):
        raise UserError(
            f"--checkpoint.initial_load_path: {path} is a URL, but --checkpoint.initial_load_in_hf "
            "needs a local folder; download it and set its path"
        )
    if not config.initial_load_model_only:
        raise UserError(
            "--checkpoint.no_initial_load_model_only cannot be combined with "
            "--checkpoint.initial_load_in_hf: a Hugging Face folder contains only the model"
        )


def _check_folder(config: CheckpointConfig) -> None:
    folder, fallback = folder_at(config.folder), folder_at(config.fallback_folder or ".")
    if config.fallback_folder == config.folder:
        raise UserError(
            f"--checkpoint.fallback_folder {fallback} is --checkpoint.folder too; name another "
            "folder"
        )
    if config.last_save_in_hf and not isinstance(fallback, LocalFolder):
        raise UserError(
            "--checkpoint.last_save_in_hf needs a local --checkpoint.fallback_folder, not "
            f"{fallback}"
        )
    if config.last_save_in_hf and not isinstance(folder, LocalFolder):
        raise UserError(
            f"--checkpoint.last_save_in_hf needs a local --checkpoint.folder, not {folder}"
        )
    if config.async_mode != "async_with_pinned_mem":
        return
    if not sys.platform.startswith("linux"):
        raise UserError("--checkpoint.async_mode async_with_pinned_mem requires Linux; use async")
    if str(folder).startswith("memory://"):
        raise UserError(
            "--checkpoint.async_mode async_with_pinned_mem: other processes cannot access "
            f"{folder}; use async"
        )
