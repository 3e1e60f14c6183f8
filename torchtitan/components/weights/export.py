"""Export of complete checkpoints in any format: weights, model description and tokenizer."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.components.checkpoint.formats import LIBRARIES, META_PARAMETERS, Format
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.tokenizer.auto_tokenizer import make_loadable_by_auto_tokenizer
from torchtitan.components.weights.assets import (
    FOLDER,
    AssetFile,
    CheckpointAssets,
    files_in,
    token_ids,
    write_files,
)
from torchtitan.components.weights.huggingface import MAX_FILE_BYTES, write_huggingface
from torchtitan.components.weights.torch_files import write_meta
from torchtitan.components.weights.views import ExternalView, LiveSource, PlainView
from torchtitan.protocols.conversion import converted_model
from torchtitan.protocols.converter import ModelConverter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import ExternalFormat
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import without_logs

GENERATION_CONFIG = "generation_config.json"


def export_checkpoint(
    folder: Path,
    to: Format,
    spec: ModelSpec,
    source: TensorSource,
    assets: Path | None,
    *,
    changed_files: Mapping[str, bytes] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    advance: Callable[[int], None] = lambda n_bytes: None,
    ranks: Ranks | None = None,
) -> None:
    """Write a model into `folder` in the format `to`, one tensor at a time, then the converters'
    additional files.

    Args:
        folder: an existing, empty folder; the caller commits a DCP checkpoint (`catalog.commit`).
        source: the weights under our names; a `PlainView` for a converted model.
        assets: folder with the files to copy (`assets.FILES`) and, for a Hugging Face checkpoint, a
            config.json.
        changed_files: name → content of files that override or extend the files in `assets`.
        dtype: dtype of the written floating-point weights; None: unchanged.
        max_file_bytes: maximum size of a Hugging Face weights file.
        advance: called with the number of bytes after each tensor is read.
        ranks: processes that call this together and divide the work, each with a source of the
            whole model; None: this process alone.

    Raises:
        UserError: if the format or dtype cannot represent the model; names the tensor whose values
            are too large.
        OSError: if a file cannot be written.
    """
    view = source if to == "dcp" else ExternalView(source, format_for(spec, to).adapter(spec.model))
    specs = {
        name: TensorSpec(given.shape, dtype) if dtype and given.dtype.is_floating_point else given
        for name, given in view.specs.items()
    }

    def make(name: str) -> Tensor:
        tensor = view.read(name)
        advance(view.specs[name].n_bytes)
        return tensor

    group = ranks or Ranks()
    group.broadcast_from_rank0(
        lambda: _write_description(folder, to, spec, assets, changed_files or {}, specs)
    )
    if to == "hf":
        write_huggingface(
            folder,
            specs,
            make,
            max_file_bytes=max_file_bytes,
            ranks=group,
            stem=LIBRARIES[format_for(spec, to).library].stem,
        )
        if isinstance(source, PlainView):
            group.broadcast_from_rank0(partial(source.write_extra_files, folder, spec))
    elif to == "meta":
        group.broadcast_from_rank0(lambda: write_meta(folder, specs, make))
    else:
        # deferred: DCP takes a second to import
        from torchtitan.components.checkpoint.dcp import write_dcp

        group.broadcast_from_rank0(lambda: write_dcp(folder, specs, make))


def export_huggingface(
    source: Path,
    target: Path,
    ranks: Ranks,
    *,
    spec: ModelSpec,
    assets: Path | None,
    changed_files: Mapping[str, bytes] | None = None,
    converters: Sequence[ModelConverter] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model into `target` in Hugging Face format. All ranks call this together and divide
    the files. Other parameters are as in `export_checkpoint`.

    Args:
        source: DCP checkpoint of the model.
        converters: converters applied to the model; the plain model and the converters' additional
            files are written.
        dtype: dtype of the floating-point weights of a converted model; None: the types of the
            plain model.
    """
    # deferred: DCP takes a second to import
    from torchtitan.components.checkpoint.dcp import DcpSource

    weights: TensorSource = DcpSource(source)
    if converters:
        weights = PlainView(weights, converted_model(spec.model, converters), converters)
    export_checkpoint(
        target, "hf", spec, weights, assets, changed_files=changed_files, dtype=dtype, ranks=ranks
    )


def exported_bytes(
    spec: ModelSpec,
    converters: Sequence[ModelConverter],
    *,
    training_dtype: torch.dtype,
    dtype: torch.dtype | None,
) -> int:
    """Return the size of the weights that `export_huggingface` writes with these arguments for a
    model that trains in `training_dtype`. Values in few bits become wide."""
    model = converted_model(spec.model, converters).to(training_dtype)
    with without_logs(logging.INFO):
        plain = PlainView(LiveSource(model.state_dict()), model, converters)
    given = plain.specs.values()
    return sum(
        TensorSpec(one.shape, dtype).n_bytes
        if dtype and one.dtype.is_floating_point
        else one.n_bytes
        for one in given
    )


def format_for(spec: ModelSpec, to: str) -> ExternalFormat:
    """Return the format `to` of the family of `spec`. Raise `UserError` if the family does not
    support it."""
    if to not in spec.formats:
        raise UserError(
            f"{spec.name} does not support the format '{to}'; use "
            f"{' or '.join(['dcp', *spec.formats])}"
        )
    return spec.formats[to]


def config_json(
    spec: ModelSpec, ids: Mapping[str, object], dtype: torch.dtype
) -> dict[str, object]:
    """Return a model's config.json, for transformers 4 and 5, or for a library that needs
    no further keys. `ids` come from `assets.token_ids`; `dtype` is the type of the weights."""
    format = format_for(spec, "hf")
    if not LIBRARIES[format.library].has_text:
        return format.to_external(spec.model)
    name = str(dtype).removeprefix("torch.")
    if spec.model.scores:  # transformers reads the last token that is not padding, so EOS is none
        pads = (ids.get("pad_token_id"), ids.get("bos_token_id"))
        ids = {
            **ids,
            "pad_token_id": next(
                (id for id in pads if id not in (None, ids.get("eos_token_id"))), None
            ),
        }
    document = format.to_external(spec.model)
    if spec.model.scores and "text_config" in document:  # where classes with images look for it
        document["text_config"]["pad_token_id"] = ids["pad_token_id"]
    return {
        **document,
        **ids,
        "dtype": name,
        "torch_dtype": name,
    }


def _write_description(
    folder: Path,
    to: Format,
    spec: ModelSpec,
    assets: Path | None,
    changed_files: Mapping[str, bytes],
    specs: Mapping[str, TensorSpec],
) -> None:
    files: dict[str, AssetFile] = {**files_in(assets), **changed_files}
    if to == "hf":
        write_hf_description(
            folder, files, assets, partial(config_json, spec, dtype=prevailing_dtype(specs))
        )
    elif to == "meta":
        write_files(folder, files)
        _write_json(folder / META_PARAMETERS, format_for(spec, "meta").to_external(spec.model))
        _write_token_ids(folder, assets)
    else:
        CheckpointAssets.of(spec, files).write(folder)
        _write_token_ids(folder / FOLDER, assets)


def write_hf_description(
    folder: Path,
    files: Mapping[str, AssetFile],
    assets: Path | None,
    config: Callable[[Mapping[str, Any]], Any],
) -> None:
    """Write `files` and config.json of a Hugging Face folder; `config` creates the latter from
    `token_ids`."""
    write_files(folder, files)
    _write_json(folder / "config.json", config(_write_token_ids(folder, assets)))
    make_loadable_by_auto_tokenizer(folder)


def _write_token_ids(folder: Path, assets: Path | None) -> Mapping[str, object]:
    ids = token_ids(folder, assets / "config.json") if assets else {}
    if ids and not (folder / GENERATION_CONFIG).exists():
        _write_json(folder / GENERATION_CONFIG, dict(ids))
    return ids


def prevailing_dtype(specs: Mapping[str, TensorSpec]) -> torch.dtype:
    """Return the dtype with the most elements."""
    n_elements: Counter[torch.dtype] = Counter()
    for tensor_spec in specs.values():
        n_elements[tensor_spec.dtype] += tensor_spec.shape.numel()
    return n_elements.most_common(1)[0][0]


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
