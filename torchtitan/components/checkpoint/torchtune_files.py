"""Files of torchtune in a folder, by their names.

Needs no torch, so that commands refuse a wrong folder at once."""

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from torchtitan.tools.errors import UserError, summarize_names

ADAPTERS = ("adapter_model.pt", "adapter_*.pt")
"""Names of files with an adapter, of new and old versions."""

WEIGHTS = ("model-*-of-*.*", "torchtune_model_*.pt", "hf_model_*.pt", "meta_model_*.pt")
"""Names of files of weights, in torchtune's or Hugging Face's layout, of new and old versions."""

_SUFFIXES = (".safetensors", ".bin", ".pt")
_NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.")


def weights_in(folder: Path) -> list[Path]:
    """Return torchtune's files of one model in `folder`. Raise `UserError` if it has files
    of several models, or not all files of one."""
    found = sorted(
        file
        for pattern in WEIGHTS
        for file in folder.glob(pattern)
        if file.suffix in _SUFFIXES and file.is_file()
    )
    if not any(file.suffix != ".safetensors" or _has_own_names(file) for file in found):
        return []  # Hugging Face's, without the index that is written last
    numbers = [_NUMBERED.match(file.name) for file in found]
    if not any(numbers):
        if len({file.stem.rpartition("_")[2] for file in found}) > 1:
            raise UserError(
                f"{folder} has the weights of several epochs: "
                f"{summarize_names([file.name for file in found])}; keep one's"
            )
        return found
    totals = {(match[2], file.suffix) for match, file in zip(numbers, found, strict=True) if match}
    if not all(numbers) or len(totals) > 1:
        names = summarize_names([file.name for file in found])
        raise UserError(f"{folder} has the weights of several models: {names}; keep one's")
    ((total, _),) = totals
    if len(found) != int(total):
        names = summarize_names([file.name for file in found])
        raise UserError(f"{folder} is incomplete: of {int(total)} files of weights, it has {names}")
    return found


def epochs_in(folder: Path) -> list[Path]:
    """Return the folders of epochs with weights in a recipe's output folder, in order."""
    epochs = [epoch for epoch in folder.glob("epoch_*") if weights_in(epoch)]
    return sorted(epochs, key=lambda epoch: (len(epoch.name), epoch.name))


def adapter_in(folder: Path) -> Path | None:
    """Return the file of an adapter in torchtune's format. Raise `UserError` if there are
    several."""
    found = sorted({file for pattern in ADAPTERS for file in folder.glob(pattern)})
    if len(found) > 1:
        names = summarize_names([file.name for file in found])
        raise UserError(f"{folder} has several adapters: {names}; keep one of them")
    return found[0] if found else None


def _has_own_names(file: Path) -> bool:
    """Return whether the tensors of a safetensors file have torchtune's names."""
    try:
        with safe_open(file, framework="np") as tensors:
            return has_own_names(tensors.keys())
    except SafetensorError:
        return False  # named as damaged when its tensors are read


def has_own_names(names: Iterable[str]) -> bool:
    """Return whether these are torchtune's names of a model's tensors."""
    return any(".attn.output_proj." in name for name in names)
