"""Format of the checkpoint in a folder, by the names of its files.

Needs no torch, so that commands refuse a wrong folder at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan.components.checkpoint import catalog, torchtune_files
from torchtitan.components.checkpoint.filesystem import DCP_METADATA
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.files import inner_folder, missing_folder_error

Format = Literal["dcp", "hf", "meta"]

FORMAT_NAMES: dict[Format, str] = {"dcp": "DCP", "hf": "Hugging Face", "meta": "Meta"}

ADAPTER_CONFIG = "adapter_config.json"
"""File next to the weights of an adapter in PEFT's format."""


@dataclass(frozen=True)
class Library:
    """What differs between the libraries that open a folder of Hugging Face's format."""

    stem: str
    """Beginning of the names of weight files."""

    class_key: str
    """Key of config.json whose value names the model's type or class, by which its family is
    found."""

    has_text: bool
    """True if models read text: config.json then also has the type of weights and the ids of
    tokens, and the card of a model and the configuration of an adapter may name a task."""


LIBRARIES = {
    "transformers": Library(stem="model", class_key="model_type", has_text=True),
    "diffusers": Library(stem="diffusion_pytorch_model", class_key="_class_name", has_text=False),
}
"""Name of each library that opens our folders, as in `ExternalFormat.library`."""

STEMS = tuple(library.stem for library in LIBRARIES.values())
"""Beginnings of the names of weight files."""

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
META_FILES = "consolidated.*.pth"
META_PARAMETERS = "params.json"

NAMES_OF_WEIGHTS = (
    *((f"{stem}.safetensors", f"{stem}.safetensors.index.json") for stem in STEMS),
    PICKLED,
)
"""Names of a single file of weights and of the index of several."""

SAFETENSORS = tuple(name for pair in NAMES_OF_WEIGHTS[:-1] for name in pair)


def library_of(config: Mapping[str, object]) -> str:
    """Return the name of the library whose key names a class in a config.json; without any, that
    of the first."""
    found = (name for name, one in LIBRARIES.items() if config.get(one.class_key) is not None)
    return next(found, next(iter(LIBRARIES)))


def format_of(path: str | Path) -> Format:
    """Return the format of the checkpoint in the folder `path`. Raise `UserError` without a
    checkpoint (naming the files present and expected), or with more than one format."""
    folder = Path(path)
    if not folder.is_dir():
        raise missing_folder_error(path)
    formats = formats_in(folder)
    if len(formats) > 1:
        names = " and ".join(f"{FORMAT_NAMES[format]} ({file})" for format, file in formats.items())
        raise UserError(
            f"{folder} holds weights in {len(formats)} formats: {names}; keep one of them and move "
            "the other files to another folder"
        )
    if formats:
        return next(iter(formats))
    if (folder / ADAPTER_CONFIG).is_file() or torchtune_files.adapter_in(folder):
        outer = folder.absolute().parent
        is_merged = any((outer / name).is_file() for name in SAFETENSORS)
        merged = outer if is_merged else "the step-N folder of its run, or that folder converted"
        raise UserError(
            f"{folder} holds only an adapter, not a model; use the merged model ({merged})"
        )
    if catalog.has_marker(folder):
        catalog.raise_if_damaged(folder)
    if epochs := torchtune_files.epochs_in(folder):
        raise UserError(
            f"{folder} is the output folder of torchtune; use the model of an epoch: {epochs[-1]}"
        )
    _reject_other_kinds(folder)
    inside = sorted(item.name for item in folder.iterdir())
    contents = f"contains {summarize_names(inside)}" if inside else "is empty"
    if advice := inner_folder(folder):
        raise UserError(f"{folder} holds no checkpoint itself{advice}")
    raise UserError(
        f"{folder} holds no checkpoint: it {contents}, and has neither {DCP_METADATA} (DCP), "
        f"{', '.join((*SAFETENSORS, *PICKLED))} (Hugging Face), {META_FILES} (Meta) nor "
        f"{', '.join(torchtune_files.WEIGHTS)} (torchtune)"
    )


def _reject_other_kinds(folder: Path) -> None:
    """Raise `UserError` for a folder, a pipe or a link to nothing under the name of weights."""
    named = [folder / name for name in (DCP_METADATA, *SAFETENSORS, *PICKLED)]
    patterns = (META_FILES, *torchtune_files.WEIGHTS)
    found = [*named, *(file for pattern in patterns for file in sorted(folder.glob(pattern)))]
    for file in found:
        if file.is_file() or not os.path.lexists(file):
            continue
        if file.is_symlink() and not file.exists():
            fault = f"is a link to {os.readlink(file)}, which does not exist; copy the file here"
        elif file.is_dir():
            fault = "is a folder; a checkpoint has a file of this name"
        else:
            fault = "is not a regular file; save its content to a file"
        raise UserError(f"{file} {fault}")


def formats_in(folder: Path) -> dict[Format, str]:
    """Return each format with files in `folder` and the name of one file. Safetensors and
    pytorch_model.bin count as one format, since many models on the Hub have both. torchtune's files
    count as the format of the model's description next to them, if there are no others."""
    huggingface_files = (name for name in (*SAFETENSORS, *PICKLED) if (folder / name).is_file())
    files: dict[Format, str | None] = {
        "dcp": DCP_METADATA if (folder / DCP_METADATA).is_file() else None,
        "hf": next(huggingface_files, None),
        "meta": next(
            (file.name for file in sorted(folder.glob(META_FILES)) if file.is_file()),
            None,
        ),
    }
    found = {format: name for format, name in files.items() if name}
    if found or not (own := torchtune_files.weights_in(folder)):
        return found
    is_meta = (folder / META_PARAMETERS).is_file()
    return {"meta" if is_meta and not (folder / "config.json").is_file() else "hf": own[0].name}


def check_checkpoint(path: Path, option: str = "") -> None:
    """Raise `UserError` if the folder `path`, the value of `option`, is not a checkpoint. A folder
    that describes a model passes, since its model may be the first thing to refuse."""
    if option:
        catalog.reject_outer_folder(path, option)
    if not (path / "config.json").is_file():
        format_of(path)
