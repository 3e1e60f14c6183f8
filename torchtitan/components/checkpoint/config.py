"""Options of checkpoints, and the checks that need no file."""

import dataclasses
import sys
from typing import Literal

from torchtitan.components.checkpoint.filesystem import Folder, LocalFolder, folder_at, inside, is_url
from torchtitan.components.checkpoint.manifest import Kind
from torchtitan.config.configurable import Configurable
from torchtitan.tools.errors import UserError

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]

_OF_SAVES = {
    "last_save_in_hf": "no_last_save_in_hf",
    "last_save_model_only": "no_last_save_model_only",
    "export_dtype": "export_dtype None",
    "keep_best": "no_keep_best",
}
"""Option that says what to save → option that reverts it."""


@dataclasses.dataclass(kw_only=True, slots=True)
class CheckpointConfig(Configurable.Config):
    """When to save, what to keep and what to start from."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""

    folder: str = "checkpoint"
    """The checkpoints' folder, inside the dump folder; or a URL, such as s3://bucket/run."""

    interval: int = 500
    """Steps between saves; the last step is always saved."""

    initial_load_path: str = ""
    """Start from this checkpoint (the step-N folder of another run, or its URL) if the run has none of its own."""

    initial_load_model_only: bool = True
    """From initial_load_path, load only the weights and start at step 0; otherwise load everything, even the step."""

    initial_load_in_hf: bool = False
    """initial_load_path is a folder of pretrained weights, such as Hugging Face's, not a checkpoint of a run."""

    last_save_model_only: bool = False
    """After the last step, save only the weights. A run cannot resume from such a checkpoint."""

    last_save_in_hf: bool = False
    """After the last step, save only the weights, as a Hugging Face folder. A run cannot resume from it."""

    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights that last_save_model_only and last_save_in_hf write; None: the type used in training."""

    async_mode: AsyncMode = "disabled"
    """Write while training continues, from a copy in CPU memory: in a thread (async), or in a separate process from
    pinned memory, which is faster to copy to (async_with_pinned_mem; without CUDA, it is not pinned)."""

    save_trainable_only: bool = False
    """Leave frozen weights out of the checkpoints a run resumes from; they come from initial_load_path or the seed."""

    keep_latest_k: int = 10
    """Keep only this many of the newest checkpoints (0: keep all)."""

    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss."""

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
        """True if a run with this configuration writes checkpoints."""
        return self.enable and not self.load_only

    @property
    def last_kind(self) -> Kind:
        """Contents of the save after the last step."""
        return "huggingface" if self.last_save_in_hf else "model_only" if self.last_save_model_only else "full"

    def validate(self) -> None:
        if self.interval < 1:
            raise UserError(f"checkpoint.interval must be at least 1 step, not {self.interval}")
        if self.keep_latest_k < 0:
            raise UserError(f"checkpoint.keep_latest_k must be 0 (keep all) or more, not {self.keep_latest_k}")
        if self.load_step != -1 and not self.enable:
            raise UserError(f"checkpoint.load_step {self.load_step} needs --checkpoint.enable")
        _check_initial_load(self)
        _check_saves(self)
        _check_place(self)

    def place(self, dump_folder: str) -> Folder:
        """Return the folder of the checkpoints of a run in `dump_folder`."""
        return inside(dump_folder, self.folder)


def _check_saves(config: CheckpointConfig) -> None:
    """Report together all options that say what to save if nothing is saved."""
    given = [option for option in _OF_SAVES if getattr(config, option)]
    if config.saves or not given:
        if config.export_dtype and config.last_kind == "full":
            raise UserError(
                f"checkpoint.export_dtype {config.export_dtype} needs --checkpoint.last_save_model_only or "
                "--checkpoint.last_save_in_hf: what a run resumes from is saved as it is trained "
                "(--checkpoint.export_dtype None)"
            )
        return
    named = ", ".join(f"checkpoint.{option}" for option in given)
    if config.enable:
        raise UserError(
            f"{named} {'do' if len(given) > 1 else 'does'} not go with checkpoint.load_only, which saves nothing"
        )
    without = " ".join(f"--checkpoint.{_OF_SAVES[option]}" for option in given)
    raise UserError(
        f"{named} {'need' if len(given) > 1 else 'needs'} --checkpoint.enable: without it nothing is saved; "
        f"to try the run without, add {without}"
    )


def _check_initial_load(config: CheckpointConfig) -> None:
    path = config.initial_load_path
    if path and "model" in config.exclude_from_loading and not config.initial_load_in_hf:
        raise UserError(
            f"checkpoint.exclude_from_loading model does not go with checkpoint.initial_load_path {path}, "
            "which is there to load it"
        )
    if not config.initial_load_in_hf:
        return
    if not path:
        raise UserError("checkpoint.initial_load_in_hf needs checkpoint.initial_load_path, the folder to load")
    if is_url(path):
        raise UserError(
            f"checkpoint.initial_load_path: {path} is a URL, and with checkpoint.initial_load_in_hf weights "
            "are read from a disk; download the folder and give its path"
        )
    if not config.initial_load_model_only:
        raise UserError(
            "checkpoint.initial_load_model_only False does not go with checkpoint.initial_load_in_hf: "
            "such a folder holds the model only"
        )


def _check_place(config: CheckpointConfig) -> None:
    place = folder_at(config.folder)
    if config.last_save_in_hf and not isinstance(place, LocalFolder):
        raise UserError(f"checkpoint.last_save_in_hf writes to a disk, and checkpoint.folder is {place}")
    if config.async_mode != "async_with_pinned_mem":
        return
    if not sys.platform.startswith("linux"):
        raise UserError("checkpoint.async_mode async_with_pinned_mem needs Linux; use async")
    if str(place).startswith("memory://"):
        raise UserError(f"checkpoint.async_mode async_with_pinned_mem: no other process sees {place}; use async")
