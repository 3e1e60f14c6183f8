"""Format, weights and identity of the checkpoint in a folder."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.filesystem import LocalFolder, folder_at
from torchtitan.components.checkpoint.formats import (
    META_PARAMETERS,
    NAMES_OF_WEIGHTS,
    PICKLED,
    SAFETENSORS,
    Format,
    format_of,
    formats_in,
)
from torchtitan.components.checkpoint.identity import BASE_PATH, BaseWeights, identify_content
from torchtitan.components.checkpoint.torchtune_files import has_own_names, weights_in
from torchtitan.components.weights import huggingface, torch_files, torchtune
from torchtitan.components.weights.dequantize import DESCRIPTIONS, dequantized, read_method
from torchtitan.protocols.tensor_source import TensorSource
from torchtitan.tools.digests import cache_root, remembered, threads
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object
from torchtitan.tools.progress import progress
from torchtitan.tools.redact import redact

_LARGE = 1 << 30
"""Reading more bytes of weights than this shows progress."""


def open_source(path: str | Path) -> TensorSource:
    """Return the weights of the checkpoint in the folder `path`, with the names and shapes of its
    files; quantized weights as floating-point numbers. Raise `UserError` if the folder has no
    checkpoint, or it cannot be read."""
    source_format = format_of(path)
    if source_format == "dcp":
        # Deferred: DCP takes a second to import.
        from torchtitan.components.checkpoint.dcp import DcpSource

        return DcpSource(path)
    source = _stored(Path(path), source_format)
    if source_format == "meta":
        return source
    if has_own_names(source.specs):
        return torchtune.TorchtuneView(source, read_object(Path(path) / "config.json"))
    return dequantized(source, Path(path))


def _stored(folder: Path, source_format: Format) -> TensorSource:
    """Return a checkpoint's tensors in Hugging Face's or Meta's format, unchanged from its
    files."""
    if source_format == "meta":
        return torch_files.MetaSource(folder)
    found = formats_in(folder)["hf"]
    if found in SAFETENSORS:
        return huggingface.HuggingFaceSource(folder)
    if found in PICKLED:
        return torch_files.PickledSource(folder)
    return torchtune.stored(weights_in(folder))


def weights_at(path: str) -> BaseWeights:
    """Return the identity of a checkpoint's weights, in a folder (any format) or at a URL."""
    folder = folder_at(path)
    resolved = str(folder.path.resolve() if isinstance(folder, LocalFolder) else folder)
    return BaseWeights(f"{BASE_PATH}{redact(resolved)}", lambda: _digest(resolved))


def base_weights(initial_load_path: str) -> dict[str, str]:
    """Return a run's initial weights as an identity property. The files may no longer exist when
    the run resumes."""
    if not initial_load_path:
        return identify_content("none", "")
    base = weights_at(initial_load_path)
    try:
        return identify_content(base.path, base.digest())
    except (UserError, OSError):
        return identify_content(base.path, "")


def _digest(path: str) -> str:
    """Return the digest of a checkpoint's content. For checkpoints of our runs in DCP, it is the
    manifest's digest; all files are compared with the manifest before they are loaded. For others,
    it covers the stored tensors (names, shapes, dtypes and all values) and the method of
    quantization; equal tensors in other files have an equal digest.
    """
    folder = folder_at(path)
    if not isinstance(folder, LocalFolder) or (folder.exists() and format_of(folder.path) == "dcp"):
        marker = catalog.open_checkpoint(folder).marker
        assert marker is not None, "the checkpoint is complete"
        return marker.manifest
    source_format = format_of(path)
    files = _files_of(folder.path, source_format)
    return remembered(
        cache_root(),
        "tensors, XXH3-128",
        files,
        lambda: _tensors_digest(folder.path, source_format),
    )


def _files_of(folder: Path, source_format: Format) -> list[Path]:
    """Return the files that determine the tensors of a checkpoint in Hugging Face's or Meta's
    format."""
    if source_format == "meta":
        weights, described = torch_files.meta_files(folder), [folder / META_PARAMETERS]
        return [*weights, *(file for file in described if file.is_file())]
    found = formats_in(folder)["hf"]
    single, index = next((pair for pair in NAMES_OF_WEIGHTS if found in pair), (found, ""))
    described = [folder / name for name in (index, "config.json", *DESCRIPTIONS) if name]
    weights = list(huggingface.files_of(folder, single, index)) if index else weights_in(folder)
    return [*weights, *(file for file in described if file.is_file())]


def _tensors_digest(folder: Path, source_format: Format) -> str:
    """Read all tensors of a checkpoint, several at a time, and return their digest."""
    import xxhash

    source = _stored(folder, source_format)
    method = read_method(folder) if source_format == "hf" else None
    names = sorted(source.specs)
    sizes = [source.specs[name].n_bytes for name in names]
    digest = xxhash.xxh3_128(json.dumps(method, sort_keys=True).encode())

    def value_digest(name: str) -> bytes:
        values = source.read(name).contiguous().view(-1).view(torch.uint8)
        return xxhash.xxh3_128(values.numpy().data).digest()

    with ExitStack() as stack:
        is_large = sum(sizes) >= _LARGE
        advance = (
            stack.enter_context(progress(f"reading {folder}", sum(sizes))) if is_large else None
        )
        pool = stack.enter_context(ThreadPoolExecutor(min(4, threads())))  # each holds a tensor
        for name, size, values in zip(names, sizes, pool.map(value_digest, names), strict=True):
            spec = source.specs[name]
            digest.update(f"{name} {list(spec.shape)} {spec.dtype}\n".encode())
            digest.update(values)
            if advance:
                advance(size)
    return digest.hexdigest()
