"""Format, weights and identity of the checkpoint in a folder."""

import hashlib
from pathlib import Path
from typing import Literal

import torch

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.filesystem import DCP_METADATA, LocalFolder, folder_at
from torchtitan.components.checkpoint.identity import BASE_PATH, BaseWeights, content
from torchtitan.components.weights import huggingface, torch_files
from torchtitan.protocols.tensor_source import Slices, TensorSource, TensorSpec, full_slices, summarize_names
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import missing_folder_error

Format = Literal["dcp", "hf", "meta"]

FORMAT_NAMES: dict[Format, str] = {"dcp": "DCP", "hf": "Hugging Face", "meta": "Meta"}

ADAPTER_CONFIG = "adapter_config.json"
"""File next to the weights of an adapter in PEFT's format."""

_SAFETENSORS = (huggingface.WEIGHTS, huggingface.INDEX)
_PICKLED = (torch_files.PICKLED_WEIGHTS, torch_files.PICKLED_INDEX)


def format_of(path: str | Path) -> Format:
    """Return the format of the checkpoint in the folder `path`. Raise `UserError` if there is none (it names the files
    present and missing), or more than one."""
    folder = Path(path)
    if not folder.is_dir():
        raise missing_folder_error(path)
    found = formats_in(folder)
    if len(found) > 1:
        named = " and ".join(f"{FORMAT_NAMES[format]} ({file})" for format, file in found.items())
        raise UserError(
            f"{folder} holds weights in {len(found)} formats, {named}, and only one can be meant: move the other files "
            "into a folder of their own"
        )
    if found:
        return next(iter(found))
    if (folder / ADAPTER_CONFIG).is_file():
        outer = folder.absolute().parent
        is_merged = any((outer / name).is_file() for name in _SAFETENSORS)
        merged = outer if is_merged else "the step-N folder of its run, or what torchtitan convert made of that"
        raise UserError(f"{folder} holds an adapter alone, which is no model; name the merged one ({merged})")
    if catalog.has_marker(folder):
        catalog.raise_if_damaged(folder)
    has = summarize_names(sorted(item.name for item in folder.iterdir())) or "nothing"
    raise UserError(
        f"{folder} holds no checkpoint: it has {has}, and no weights: no {DCP_METADATA} (DCP), no "
        f"{' or '.join(_SAFETENSORS)}, no {' or '.join(_PICKLED)} (Hugging Face), "
        f"and no {torch_files.META_FILES} (Meta)"
    )


def formats_in(folder: Path) -> dict[Format, str]:
    """Return the formats with files in `folder`, each with the name of one. Safetensors and pytorch_model.bin count as
    one format: many models on the hub have both."""
    huggingface_files = (name for name in (*_SAFETENSORS, *_PICKLED) if (folder / name).is_file())
    files: dict[Format, str | None] = {
        "dcp": DCP_METADATA if (folder / DCP_METADATA).is_file() else None,
        "hf": next(huggingface_files, None),
        "meta": next((file.name for file in sorted(folder.glob(torch_files.META_FILES)) if file.is_file()), None),
    }
    return {format: name for format, name in files.items() if name}


def open_source(path: str | Path) -> TensorSource:
    """Return the weights of the checkpoint in the folder `path`, with its own names and shapes. Raise `UserError` if
    there is no checkpoint, or one that cannot be read."""
    found = format_of(path)
    if found == "hf":
        is_pickled = formats_in(Path(path))["hf"] in _PICKLED
        return torch_files.PickledSource(path) if is_pickled else huggingface.HuggingFaceSource(path)
    if found == "meta":
        return torch_files.MetaSource(path)
    # Deferred: DCP takes a second to import.
    from torchtitan.components.checkpoint.dcp import DcpSource

    return DcpSource(path)


def weights_at(path: str) -> BaseWeights:
    """Return the identity of the weights of a checkpoint, in a folder (any format) or at a URL."""
    folder = folder_at(path)
    resolved = str(folder.path.resolve() if isinstance(folder, LocalFolder) else folder)
    return BaseWeights(f"{BASE_PATH}{resolved}", lambda: _digest(resolved))


def base_weights(initial_load_path: str) -> dict[str, str]:
    """Return a run's initial weights as an identity property; they may be gone when it resumes."""
    if not initial_load_path:
        return content("none", "")
    base = weights_at(initial_load_path)
    try:
        return content(base.path, base.digest())
    except (UserError, OSError):
        return content(base.path, "")


def _digest(path: str) -> str:
    """Return the digest of a checkpoint. For ours, it is the manifest's, which covers all files. For others, it covers
    names, shapes and types of all tensors and some rows of each: enough to tell models, revisions and further training
    apart without reading whole files."""
    folder = folder_at(path)
    if not isinstance(folder, LocalFolder) or (folder.exists() and format_of(folder.path) == "dcp"):
        marker = catalog.open_checkpoint(folder).marker
        assert marker is not None, "it was opened"
        return marker.manifest
    source, digest = open_source(path), hashlib.sha256()
    for name, spec in sorted(source.specs.items()):
        digest.update(f"{name} {list(spec.shape)} {spec.dtype}\n".encode())
        for slices in _sampled(spec):
            digest.update(source.read(name, slices).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sampled(spec: TensorSpec) -> list[Slices]:
    """Return all of a vector; the first, middle and last row of other tensors."""
    if spec.shape.numel() == 0:
        return []
    if len(spec.shape) < 2:
        return [full_slices(spec.shape)]
    n_rows, *others, _ = full_slices(spec.shape)
    rows = sorted({0, n_rows.stop // 2, n_rows.stop - 1})
    return [(slice(row, row + 1), *(slice(0, 1) for _ in others), slice(0, spec.shape[-1])) for row in rows]
