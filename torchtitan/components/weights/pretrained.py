"""Pretrained weights: found, checked, converted and loaded into a model of any layout."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from torchtitan.components.checkpoint import CheckpointInfo, CheckpointManager, ModelState, catalog, load_model_state
from torchtitan.components.checkpoint.filesystem import DCP_METADATA, is_url
from torchtitan.components.checkpoint.identity import BaseWeights
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.resume import WAY_ON, Start, check_frozen, describe_missing
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.components.weights.assets import DESCRIPTION, asset_folder, read_converters, read_model_json
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.load import check_fit, load_weights
from torchtitan.components.weights.sources import format_of, open_source, weights_at
from torchtitan.components.weights.views import (
    ChainedSource,
    ConvertedView,
    InternalView,
    PlainView,
    ResizedEmbedding,
)
from torchtitan.protocols import BaseModel, ModelConverter, ModelSpec
from torchtitan.protocols.conversion import (
    converted_model,
    converters_from_records,
    differences,
    saved_config,
    tensor_shapes,
)
from torchtitan.protocols.state_dict_adapter import model_tensor_specs
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_LOOKED_AT = (DESCRIPTION, DCP_METADATA)
"""Files of our checkpoints that are read before the whole checkpoint is verified."""

Forms = Callable[[BaseModel.Config], Mapping[str, TensorSpec]]
"""Model → its tensors by name, in some format."""


def check_digests(path: str | Path) -> None:
    """Raise `UserError` if a checkpoint of our runs or `torchtitan convert` has changed; others have no digests."""
    if format_of(path) == "dcp" or catalog.has_marker(path):
        catalog.raise_if_damaged(path)


def internal_source(
    path: str | Path, spec: ModelSpec, *, added: range = range(0), base: Path | None = None
) -> TensorSource:
    """Return the weights of the checkpoint in `path`, in any format, with the names and layout of the model `spec`.
    Weights saved in another form, or with adapters, become plain. Reads names and shapes, and compares tied weights.

    Args:
        spec: the model; a vocabulary size that comes from the tokenizer is filled in.
        added: ids of tokens added to the tokenizer. If the checkpoint's tokenizer lacks them, their rows, absent or
            padding there, become the mean of the rows below.
        base: folder, in any format, of the weights that a checkpoint of only trained weights lacks; None: its run's.

    Raises:
        UserError: for a missing or unreadable checkpoint, one of another model (naming the tensors), or if the weights
            that it omits are absent or have changed.
    """
    found, model = format_of(path), spec.model
    checkpoint = catalog.open_checkpoint(path) if found == "dcp" and catalog.has_marker(path) else None
    lacking = checkpoint if checkpoint and checkpoint.base_model else None
    if base and not lacking:
        raise UserError(f"{path} holds all weights of its model; leave out --base {base}")
    added = _unknown_ids(Path(path), added)
    if found == "dcp":
        source = _plain_source(Path(path), spec, lacking, base)
    else:
        source, adapter = open_source(path), format_for(spec, found).adapter
        saved = _saved_model(source, model, lambda of: adapter(of).external_specs(model_tensor_specs(of)), added)
        source = InternalView(source, adapter(saved), model_tensor_specs(saved))
    return ResizedEmbedding(source, _names_of_tokens(model, model_tensor_specs), added) if added else source


def is_as_saved(
    path: str | Path, spec: ModelSpec, converters: Sequence[ModelConverter], *, added: range = range(0)
) -> bool:
    """Return whether the weights of the checkpoint in the folder or URL `path` are loaded unchanged. That needs a
    checkpoint of ours with the names, shapes and meanings of the run's tensors and the same tokens. Raise `UserError`
    if there is no checkpoint, or if `path` is a URL and the answer is no."""
    if not is_url(str(path)) and (format_of(path) != "dcp" or _unknown_ids(Path(path), added)):
        return False
    saved = read_converters(path)
    same = not differences(saved, converters)
    if same and saved:
        from torchtitan.components.checkpoint.dcp import state_tensor_specs  # deferred: DCP takes a second to import

        shapes = {name: tensor_spec.shape for name, tensor_spec in state_tensor_specs(path).get("model", {}).items()}
        same = shapes == tensor_shapes(converted_model(spec.model, converters))
    if is_url(str(path)) and not same:
        raise UserError(
            f"{path} was saved with other model_converters or another model, and weights are converted from a disk "
            "only; download it"
        )
    return same


def load_pretrained(
    path: str | Path,
    spec: ModelSpec,
    model_parts: Sequence[nn.Module],
    *,
    added: range = range(0),
    converters: Sequence[ModelConverter] = (),
) -> None:
    """Load a model from a checkpoint in any format, each process of the default group its part. Raise `UserError` on
    every process if the checkpoint cannot be read, is damaged or is one of another model.

    A checkpoint of our runs is verified first; with the same converters, it is loaded unchanged. Otherwise tensors
    added by a converter keep their values, and the rest follows from the plain model's weights.

    Args:
        path: the checkpoint's folder; or its URL, if it `is_as_saved`.
            spec: as in `internal_source`.
        added: as in `internal_source`.
            model_parts: the model in this process, materialized, sharded or not.
        converters: applied to the model.
    """
    if is_as_saved(path, spec, converters, added=added):
        load_model_state(path, ModelState(model_parts))
        return
    _warn_of_merging(path, converters)
    group = dist.group.WORLD if dist.is_initialized() else None
    if format_of(path) == "dcp":
        ranks = Ranks(group)
        catalog.raise_if_damaged(ranks.broadcast_from_rank0(lambda: catalog.open_checkpoint(path)).path, ranks)
    plain = internal_source(path, spec, added=added)
    load_weights(_converted(plain, spec.model, converters, ModelState(model_parts)), model_parts, group)
    logger.info("loaded %s, pre-trained weights", path)
    if isinstance(plain, ResizedEmbedding):
        logger.info("%s: those of added tokens, each the mean of the rows below", plain.growth)


def load_initial_weights(
    path: str,
    spec: ModelSpec,
    model_parts: list[nn.Module],
    converters: Sequence[ModelConverter],
    *,
    added: range = range(0),
) -> None:
    """Load the weights in `path`, if any, and the converters' own weights; arguments as in `load_pretrained`."""
    has_theirs = bool(path) and is_as_saved(path, spec, converters, added=added)
    if path:
        load_pretrained(path, spec, model_parts, added=added, converters=converters)
    for converter in converters:
        if not (has_theirs and converter.changes_weights):
            converter.load_initial_weights(model_parts, spec)


def frozen_weights(config: CheckpointManager.Config, seed: int) -> BaseWeights:
    """Return the origin of a run's frozen weights; `seed` is the run's."""
    return weights_at(config.initial_load_path) if config.initial_load_path else BaseWeights.of_seed(seed)


def check_start(
    config: CheckpointManager.Config,
    start: Start | None,
    spec: ModelSpec,
    converters: Sequence[ModelConverter],
    *,
    added: range,
    seed: int,
) -> None:
    """Reject a checkpoint that a run cannot start from, before any process starts; reads names and shapes. `start` is
    the result of `config.find_start`, `seed` the run's; other arguments are as in `load_pretrained`. Raise `UserError`
    as `check_frozen`, `is_as_saved`, `internal_source` and `ModelConverter.check_initial_weights`."""
    check_frozen(config, start, frozen_weights(config, seed))
    resumes = start and start.resumes and "model" not in config.exclude_from_loading
    if start and resumes and not start.checkpoint.base_model:
        return
    path = config.initial_load_path
    if path and catalog.has_marker(path):
        catalog.raise_if_damaged(path, only=_LOOKED_AT)
    has_theirs = bool(path) and is_as_saved(path, spec, converters, added=added)
    if path and not has_theirs:
        _check_pretrained(config, spec, converters, added)
    saved = read_converters(path) if has_theirs else []
    for converter in converters:
        converter.check_initial_weights(spec, saved_config(saved, converter))


def _check_pretrained(
    config: CheckpointManager.Config, spec: ModelSpec, converters: Sequence[ModelConverter], added: range
) -> None:
    path = config.initial_load_path
    if not config.initial_load_model_only:
        raise UserError(
            f"checkpoint.initial_load_model_only False: {path} was saved with other model_converters or tokens, so "
            "that only its weights can be loaded"
        )
    _converted(internal_source(path, spec, added=added), spec.model, converters)


def _converted(
    plain: TensorSource, model: BaseModel.Config, converters: Sequence[ModelConverter], state: ModelState | None = None
) -> TensorSource:
    """Return the plain model's weights in the converted model's form, without a converter's additions, in the types of
    `state`. Raise `UserError` if they are not the plain model's, or are quantized."""
    if not any(converter.changes_weights for converter in converters):
        return plain
    check_fit(plain.specs, converted_model(model, []).state_dict())
    converted = converted_model(model, converters)
    types = {name: tensor.dtype for name, tensor in state.state_dict().items()} if state else {}
    for name, parameter in converted.named_parameters():
        if name in types:
            parameter.data = parameter.data.to(types[name])
    return ConvertedView(plain, converted)


def _warn_of_merging(path: str | Path, converters: Sequence[ModelConverter]) -> None:
    saved = read_converters(path) if format_of(path) == "dcp" else []
    if saved and any(converter.changes_weights for converter in converters):
        logger.warning(
            "%s was saved with other model_converters (%s): what it has of theirs is merged into the weights, and what "
            "this run's add begins anew",
            path,
            "; ".join(differences(saved, converters)) or "for other layers or sizes",
        )


def _plain_source(path: Path, spec: ModelSpec, lacking: CheckpointInfo | None, base: Path | None) -> TensorSource:
    """Return the weights in `path` as the plain model's; `lacking` is the checkpoint if it has only trained weights."""
    source, descriptions = open_source(path), read_converters(path)
    if not descriptions and not lacking:
        return source
    converters = converters_from_records(descriptions, str(path))
    saved = dataclasses.replace(spec, model=type(spec.model).from_dict(read_model_json(path)["config"]))
    if lacking:
        source = ChainedSource(source, _frozen_source(path, _frozen_folder(lacking, base), saved, converters))
    if not descriptions:
        return source
    converted = converted_model(saved.model, converters)
    _let_train(converted, path)
    return PlainView(source, converted, converters)


def _frozen_folder(checkpoint: CheckpointInfo, base: Path | None) -> Path:
    """Return the folder of the weights that a checkpoint lacks; raise `UserError` if they are not in it."""
    assert checkpoint.marker
    origin, lacking = BaseWeights(checkpoint.base_model), f"{checkpoint.path} {describe_missing(checkpoint)}"
    if not origin.path:
        raise UserError(f"{lacking}, and not in it; {WAY_ON}")
    folder = base or Path(origin.path)
    if not folder.is_dir():
        where = base or origin.path  # a URL would not survive as a Path
        raise UserError(f"{lacking}, and {where} is not a folder here; name the one they are in with --base DIR")
    if weights_at(str(folder)).digest() != checkpoint.marker.base_digest:
        raise UserError(f"{lacking} as they were then, and those in {folder} differ; name the folder with --base DIR")
    return folder


def _frozen_source(path: Path, base: Path, spec: ModelSpec, converters: Sequence[ModelConverter]) -> TensorSource:
    """Return the weights in `base` in the tensor_spec `path`'s run started with, without a converter's additions."""
    check_digests(base)
    tokenizers = [asset_folder(folder) for folder in (path, base)]
    has_both = all((folder / "tokenizer.json").is_file() for folder in tokenizers)
    n_tokens = PretrainedTokenizer.Config().build(path=tokenizers[0]).vocab_size if has_both else 0
    added = _unknown_ids(base, range(n_tokens))
    if is_as_saved(base, spec, converters, added=added):
        return open_source(base)
    return _converted(internal_source(base, spec, added=added), spec.model, converters)


def _let_train(converted: nn.Module, path: Path) -> None:
    """Mark the parameters that the checkpoint's run trained: its description omits converters that change no form."""
    from torchtitan.components.checkpoint.dcp import optimized_names  # deferred: DCP takes a second to import

    names = optimized_names(path)
    for name, parameter in converted.named_parameters():
        if name in names:
            parameter.requires_grad_()


def _unknown_ids(path: Path, added: range) -> range:
    """Return the `added` ids that the checkpoint's tokenizer lacks; all, if it has none."""
    files = asset_folder(path)
    if not added or not (files / "tokenizer.json").is_file():  # files of the other format cannot be added to
        return added
    known = PretrainedTokenizer.Config().build(path=files).vocab_size
    return range(max(added.start, known), added.stop)


def _names_of_tokens(model: BaseModel.Config, specs: Forms) -> list[str]:
    """Return the tensors with a row per token; `specs` returns all of a model's."""
    assert model.vocab_size is not None, "filled in"
    larger = specs(dataclasses.replace(model, vocab_size=model.vocab_size + 1))
    return [name for name, tensor_spec in specs(model).items() if tensor_spec.shape != larger[name].shape]


def _saved_model(source: TensorSource, model: BaseModel.Config, specs: Forms, added: range) -> BaseModel.Config:
    """Return `model` with the vocabulary rows of `source`, if only `added` ones are missing there."""
    if not added or model.vocab_size != added.stop:
        return model
    saved = {source.specs[name].shape[0] for name in _names_of_tokens(model, specs) if name in source.specs}
    # If the tensors disagree, or lack more, the checkpoint is of another model, which its reader reports.
    if len(saved) == 1 and (rows := saved.pop()) in added:
        return dataclasses.replace(model, vocab_size=rows)
    return model
