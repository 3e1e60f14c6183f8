"""Format, weights and identity of the checkpoint in a folder."""

import hashlib
from pathlib import Path
from typing import Literal

import torch

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.filesystem import DCP_METADATA, LocalFolder, folder_at
from torchtitan.components.checkpoint.identity import BASE_PATH, BaseWeights, identify_content
from torchtitan.components.weights import huggingface, torch_files
from torchtitan.components.weights.dequantize import dequantized
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
    """Return the format of the checkpoint in the folder `path`. Raise `UserError` if there is none (naming the files
    present and expected), or more than one."""
    folder = Path(path)
    if not folder.is_dir():
        raise missing_folder_error(path)
    formats = formats_in(folder)
    if len(formats) > 1:
        names = " and ".join(f"{FORMAT_NAMES[format]} ({file})" for format, file in formats.items())
        raise UserError(
            f"{folder} holds weights in {len(formats)} formats: {names}; keep one of them and move the other files to "
            "another folder"
        )
    if formats:
        return next(iter(formats))
    if (folder / ADAPTER_CONFIG).is_file():
        outer = folder.absolute().parent
        is_merged = any((outer / name).is_file() for name in _SAFETENSORS)
        merged = outer if is_merged else "the step-N folder of its run, or that folder converted"
        raise UserError(f"{folder} holds only an adapter, not a model; use the merged model ({merged})")
    if catalog.has_marker(folder):
        catalog.raise_if_damaged(folder)
    inside = sorted(item.name for item in folder.iterdir())
    contents = f"contains {summarize_names(inside)}" if inside else "is empty"
    raise UserError(
        f"{folder} holds no checkpoint: it {contents}, and has neither {DCP_METADATA} (DCP), "
        f"{', '.join((*_SAFETENSORS, *_PICKLED))} (Hugging Face) nor {torch_files.META_FILES} (Meta)"
    )


def formats_in(folder: Path) -> dict[Format, str]:
    """Return each format with files in `folder` and the name of one file. Safetensors and pytorch_model.bin count as
    one format, since many models on the Hub have both."""
    huggingface_files = (name for name in (*_SAFETENSORS, *_PICKLED) if (folder / name).is_file())
    files: dict[Format, str | None] = {
        "dcp": DCP_METADATA if (folder / DCP_METADATA).is_file() else None,
        "hf": next(huggingface_files, None),
        "meta": next((file.name for file in sorted(folder.glob(torch_files.META_FILES)) if file.is_file()), None),
    }
    return {format: name for format, name in files.items() if name}


def open_source(path: str | Path) -> TensorSource:
    """Return the weights of the checkpoint in the folder `path`, with the names and shapes of its files; weights in FP8
    and MXFP4 as bfloat16. Raise `UserError` if there is no checkpoint, or if it cannot be read."""
    source_format = format_of(path)
    if source_format == "hf":
        is_pickled = formats_in(Path(path))["hf"] in _PICKLED
        source = torch_files.PickledSource(path) if is_pickled else huggingface.HuggingFaceSource(path)
        return dequantized(source, Path(path))
    if source_format == "meta":
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
    """Return a run's initial weights as an identity property. The files may no longer exist when the run resumes."""
    if not initial_load_path:
        return identify_content("none", "")
    base = weights_at(initial_load_path)
    try:
        return identify_content(base.path, base.digest())
    except (UserError, OSError):
        return identify_content(base.path, "")


def _digest(path: str) -> str:
    """Return the digest of a checkpoint. For checkpoints of our runs, it is the manifest's, which covers all files. For
    others, it covers the names, shapes and dtypes of all tensors and some rows of each, which distinguishes models,
    revisions and further training without reading whole files."""
    folder = folder_at(path)
    if not isinstance(folder, LocalFolder) or (folder.exists() and format_of(folder.path) == "dcp"):
        marker = catalog.open_checkpoint(folder).marker
        assert marker is not None, "the checkpoint is complete"
        return marker.manifest
    source, digest = open_source(path), hashlib.sha256()
    for name, spec in sorted(source.specs.items()):
        digest.update(f"{name} {list(spec.shape)} {spec.dtype}\n".encode())
        for slices in _sample_slices(spec):
            digest.update(source.read(name, slices).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sample_slices(spec: TensorSpec) -> list[Slices]:
    """Return slices for a whole vector, or for the first, middle and last row of another tensor."""
    if spec.shape.numel() == 0:
        return []
    if len(spec.shape) < 2:
        return [full_slices(spec.shape)]
    n_rows, *others, _ = full_slices(spec.shape)
    rows = sorted({0, n_rows.stop // 2, n_rows.stop - 1})
    return [(slice(row, row + 1), *(slice(0, 1) for _ in others), slice(0, spec.shape[-1])) for row in rows]
