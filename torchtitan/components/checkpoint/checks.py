"""What a `CheckpointManager.Config` is checked for before any file is looked at."""

import sys
from typing import TYPE_CHECKING

from torchtitan.components.checkpoint.store import LocalFolder, folder_at, is_url
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from torchtitan.components.checkpoint.manager import CheckpointManager

_OF_SAVES = {
    "last_save_in_hf": "no_last_save_in_hf",
    "last_save_model_only": "no_last_save_model_only",
    "export_dtype": "export_dtype None",
    "keep_best": "no_keep_best",
}
"""Option that says what is saved → what takes it back."""


def check_options(config: "CheckpointManager.Config") -> None:
    """Raise `UserError` for a wrong value, or for options that do not go together."""
    if config.interval < 1:
        raise UserError(f"checkpoint.interval must be at least 1 step, not {config.interval}")
    if config.keep_latest_k < 0:
        raise UserError(f"checkpoint.keep_latest_k must be 0 (keep all) or more, not {config.keep_latest_k}")
    if config.load_step != -1 and not config.enable:
        raise UserError(f"checkpoint.load_step {config.load_step} needs --checkpoint.enable")
    _check_initial_load(config)
    _check_saves(config)
    if config.export_dtype and config.last_kind == "full":
        raise UserError(
            f"checkpoint.export_dtype {config.export_dtype} needs --checkpoint.last_save_model_only or "
            "--checkpoint.last_save_in_hf: what a run resumes from is saved as it is trained "
            "(--checkpoint.export_dtype None)"
        )
    _check_place(config)


def _check_saves(config: "CheckpointManager.Config") -> None:
    """Find all options at once that say what to save, where nothing is."""
    given = [option for option in _OF_SAVES if getattr(config, option)]
    if not given or config.saves:
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


def _check_initial_load(config: "CheckpointManager.Config") -> None:
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


def _check_place(config: "CheckpointManager.Config") -> None:
    place = folder_at(config.folder)
    if config.last_save_in_hf and not isinstance(place, LocalFolder):
        raise UserError(f"checkpoint.last_save_in_hf writes to a disk, and checkpoint.folder is {place}")
    if config.async_mode != "async_with_pinned_mem":
        return
    if not sys.platform.startswith("linux"):
        raise UserError("checkpoint.async_mode async_with_pinned_mem needs Linux; use async")
    if str(place).startswith("memory://"):
        raise UserError(f"checkpoint.async_mode async_with_pinned_mem: no other process sees {place}; use async")
