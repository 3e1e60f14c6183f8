"""Checking, converting and loading pretrained weights into a model of any layout."""

import dataclasses
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Protocol

from torch import nn

from torchtitan.components.checkpoint import (
    CheckpointInfo,
    CheckpointManager,
    ModelState,
    catalog,
    load_model_state,
)
from torchtitan.components.checkpoint.filesystem import DCP_METADATA
from torchtitan.components.checkpoint.formats import format_of
from torchtitan.components.checkpoint.identity import BaseWeights
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.resume import (
    MISSING_WEIGHTS_ADVICE,
    Start,
    check_frozen,
    describe_missing,
)
from torchtitan.components.tokenizer import PretrainedTokenizer, tokenizer_file
from torchtitan.components.weights.assets import (
    DESCRIPTION,
    asset_folder,
    read_converters,
    read_model_json,
)
from torchtitan.components.weights.dequantize import check_quantization
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.load import check_fit, load_weights
from torchtitan.components.weights.sources import open_source, weights_at
from torchtitan.components.weights.views import (
    ChainedSource,
    ConvertedView,
    InternalView,
    PlainView,
    RenamedView,
    ResizedEmbedding,
    with_new_score,
)
from torchtitan.protocols import BaseModel, ModelConverter, ModelSpec
from torchtitan.protocols.conversion import (
    converted_model,
    converters_from_records,
    differences,
    saved_config,
    tensor_shapes,
)
from torchtitan.protocols.converter import HEAD
from torchtitan.protocols.state_dict_adapter import (
    StateDictAdapter,
    adapter_for,
    model_tensor_specs,
)
from torchtitan.protocols.tensor_source import TensorSource
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import is_url
from torchtitan.tools.logging import logger

_READ_BEFORE_VERIFICATION = (DESCRIPTION, DCP_METADATA)
"""Files of our checkpoints that are read before the whole checkpoint is verified."""


class Initialize(Protocol):
    """Draw the initial values of a model's tensors, except tensors with canonical names in
    `loaded`."""

    def __call__(self, *, loaded: Container[str] = ()) -> None: ...


def check_digests(path: str | Path) -> None:
    """Raise `UserError` if a file of a checkpoint saved by torchtitan has changed; others have no
    digests to check."""
    if format_of(path) == "dcp" or catalog.has_marker(path):
        catalog.raise_if_damaged(path)


def internal_source(
    path: str | Path, spec: ModelSpec, *, added: range = range(0), base: Path | None = None
) -> TensorSource:
    """Return the weights of the checkpoint in `path` (any format) with the names and layout of the
    plain model `spec`. Converted weights and adapters are merged. Only names, shapes and tied
    weights are read.

    Args:
        spec: the model, with its vocabulary size set.
        added: ids of tokens added to the tokenizer. If the checkpoint's tokenizer does not have
            them, their rows (missing or padding) are set to the mean of the preceding rows.
        base: folder, in any format, of the frozen weights omitted from the checkpoint; None: the
            folder that its run used.

    Raises:
        UserError: if the checkpoint is missing, unreadable or of another model (naming the
            tensors), or if the weights that it omits are missing or have changed.
    """
    source_format, model = format_of(path), spec.model
    checkpoint = (
        catalog.open_checkpoint(path)
        if source_format == "dcp" and catalog.has_marker(path)
        else None
    )
    partial = checkpoint if checkpoint and checkpoint.base_model else None
    if base and not partial:
        raise UserError(f"{path} holds all weights of its model; remove --base {base}")
    added = _unknown_ids(Path(path), added)
    if source_format == "dcp":
        source = _plain_source(Path(path), spec, partial, base)
    else:
        if source_format == "hf":
            check_quantization(Path(path))
        format = format_for(spec, source_format)
        source = RenamedView(open_source(path), format.name_of)
        if model.scores and "score.weight" not in source.specs:
            source = with_new_score(source, model_tensor_specs(model)[f"{HEAD}.weight"].shape)
        names = source.specs

        def adapter(model: BaseModel.Config) -> StateDictAdapter:
            return adapter_for(format, model, names)

        saved = _saved_model(source, model, adapter, added)
        source = InternalView(source, adapter(saved), model_tensor_specs(saved))
    return ResizedEmbedding(source, _find_token_tensors(model), added) if added else source


def is_as_saved(
    path: str | Path,
    spec: ModelSpec,
    converters: Sequence[ModelConverter],
    *,
    added: range = range(0),
) -> bool:
    """Return whether the checkpoint in the folder or URL `path` can be loaded without conversion:
    it is a DCP checkpoint with the same tensor names and shapes, converters and tokens as the run.
    Raise `UserError` without a checkpoint, or if `path` is a URL and conversion is needed."""
    if not is_url(str(path)) and (format_of(path) != "dcp" or _unknown_ids(Path(path), added)):
        return False
    saved = read_converters(path)
    is_same = not differences(saved, converters)
    if is_same and saved:
        # deferred: DCP takes a second to import
        from torchtitan.components.checkpoint.dcp import state_tensor_specs

        shapes = {
            name: tensor_spec.shape
            for name, tensor_spec in state_tensor_specs(path).get("model", {}).items()
        }
        is_same = shapes == tensor_shapes(converted_model(spec.model, converters))
    if is_url(str(path)) and not is_same:
        raise UserError(
            f"{path} was saved with other model_converters or another model, and only local "
            "weights can be converted; download it"
        )
    return is_same


def load_pretrained(
    path: str | Path,
    spec: ModelSpec,
    model_parts: Sequence[nn.Module],
    *,
    added: range = range(0),
    converters: Sequence[ModelConverter] = (),
    initialize: Initialize | None = None,
) -> None:
    """Load a model from a checkpoint in any format; each process of the default group loads its
    shards. Raise `UserError` on every process if the checkpoint cannot be read, is damaged or
    belongs to another model.

    Checkpoints of our runs are verified first. With the same converters, they are loaded unchanged.
    Otherwise, tensors added by a converter keep their values, and the others are computed from the
    plain model's weights.

    Args:
        path: the checkpoint's folder, or its URL if `is_as_saved`.
        spec: as in `internal_source`.
        model_parts: the model in this process, materialized, sharded or not.
        added: as in `internal_source`.
        converters: converters applied to the model.
        initialize: called before weights are copied; None: the model is initialized.
    """
    state = ModelState(model_parts)
    if is_as_saved(path, spec, converters, added=added):
        if initialize:
            initialize(loaded=state.state_dict())
        load_model_state(path, state)
        return
    _warn_of_merging(path, converters)
    ranks = Ranks.of_run()
    if format_of(path) == "dcp":
        catalog.raise_if_damaged(
            ranks.broadcast_from_rank0(lambda: catalog.open_checkpoint(path)).path, ranks
        )
    plain = internal_source(path, spec, added=added)
    source = _converted(plain, spec.model, converters, state)
    if initialize:
        initialize(loaded=source.specs)
    load_weights(source, model_parts, ranks.group)
    logger.info("loaded pretrained weights from %s", path)
    if isinstance(plain, ResizedEmbedding):
        logger.info("initialized %s (added tokens) to the mean of the preceding rows", plain.growth)


def load_initial_weights(
    path: str,
    spec: ModelSpec,
    model_parts: list[nn.Module],
    converters: Sequence[ModelConverter],
    *,
    added: range = range(0),
    initialize: Initialize,
) -> None:
    """Load the weights in `path`, if any, and the converters' own weights. Arguments are as in
    `load_pretrained`."""
    has_converter_weights = bool(path) and is_as_saved(path, spec, converters, added=added)
    if path:
        load_pretrained(
            path, spec, model_parts, added=added, converters=converters, initialize=initialize
        )
    else:
        initialize()
    for converter in converters:
        if not (has_converter_weights and converter.changes_weights):
            converter.load_initial_weights(model_parts, spec)


def frozen_weights(config: CheckpointManager.Config, seed: int) -> BaseWeights:
    """Return the origin of a run's frozen weights."""
    return (
        weights_at(config.initial_load_path)
        if config.initial_load_path
        else BaseWeights.of_seed(seed)
    )


def check_start(
    config: CheckpointManager.Config,
    start: Start | None,
    spec: ModelSpec,
    converters: Sequence[ModelConverter],
    *,
    added: range,
    seed: int,
) -> None:
    """Check, before processes start, that a run can start from its checkpoint; reads only names and
    shapes.

    Arguments other than `start`, which `config.decide_start` chose, are as in `load_pretrained`.
    Raise the errors of `check_frozen`, `is_as_saved`, `internal_source` and
    `ModelConverter.check_initial_weights`.
    """
    check_frozen(config, start, frozen_weights(config, seed))
    resumes = start and start.resumes and "model" not in config.exclude_from_loading
    if start and resumes and not start.checkpoint.base_model:
        return
    path = config.initial_load_path
    if path and catalog.has_marker(path):
        catalog.raise_if_damaged(path, only=_READ_BEFORE_VERIFICATION)
    has_converter_weights = bool(path) and is_as_saved(path, spec, converters, added=added)
    if path and not has_converter_weights:
        if not config.initial_load_model_only:
            raise UserError(
                f"--checkpoint.no_initial_load_model_only: {path} was saved with other "
                "model_converters or tokens, so only its weights can be loaded; remove this option"
            )
        _converted(internal_source(path, spec, added=added), spec.model, converters)
    saved = read_converters(path) if has_converter_weights else []
    for converter in converters:
        converter.check_initial_weights(spec, saved_config(saved, converter))


def _converted(
    plain: TensorSource,
    model: BaseModel.Config,
    converters: Sequence[ModelConverter],
    state: ModelState | None = None,
) -> TensorSource:
    """Return the converted model's weights, computed from the plain model's weights, without
    tensors added by a converter, in the dtypes of `state`. Raise `UserError` if the weights do not
    fit the plain model or are quantized."""
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
        others = "; ".join(differences(saved, converters)) or "for other layers or sizes"
        logger.warning(
            f"{path} was saved with other model_converters ({others}): its adapters are merged "
            "into the weights, and tensors added by this run's converters are newly initialized"
        )


def _plain_source(
    path: Path, spec: ModelSpec, partial: CheckpointInfo | None, base: Path | None
) -> TensorSource:
    """Return the plain model's weights from `path`; `partial` is the checkpoint if it has only
    trained weights."""
    source, records = open_source(path), read_converters(path)
    if not records and not partial:
        return source
    converters = converters_from_records(records, str(path))
    saved = dataclasses.replace(
        spec, model=type(spec.model).from_dict(read_model_json(path)["config"])
    )
    if partial:
        source = ChainedSource(
            source, _frozen_source(path, _frozen_folder(partial, base), saved, converters)
        )
    if not records:
        return source
    converted = converted_model(saved.model, converters)
    _mark_trained(converted, path)
    return PlainView(source, converted, converters)


def _frozen_folder(checkpoint: CheckpointInfo, base: Path | None) -> Path:
    """Return the folder of the weights omitted from a checkpoint. Raise `UserError` if it is
    missing or has changed."""
    assert checkpoint.marker
    origin = BaseWeights(checkpoint.base_model)
    reason = f"{checkpoint.path} {describe_missing(checkpoint)}"
    if not origin.path:
        raise UserError(f"{reason}; {MISSING_WEIGHTS_ADVICE}")
    folder = base or Path(origin.path)
    if not folder.is_dir():
        location = base or origin.path  # a Path would change a URL
        raise UserError(
            f"{reason}, but {location} is not a local folder; set the folder of these weights with "
            "--base"
        )
    if weights_at(str(folder)).digest() != checkpoint.marker.base_digest:
        raise UserError(
            f"{reason}, but the weights in {folder} are different; set the original folder with "
            "--base"
        )
    return folder


def _frozen_source(
    path: Path, base: Path, spec: ModelSpec, converters: Sequence[ModelConverter]
) -> TensorSource:
    """Return the weights in `base` in the form that the run of `path` loaded, without converters'
    additions."""
    check_digests(base)
    tokenizers = [asset_folder(folder) for folder in (path, base)]
    n_tokens, n_base = (_vocab_size(folder) for folder in tokenizers)
    added = range(n_base, n_tokens) if n_tokens and n_base else range(0)
    if is_as_saved(base, spec, converters, added=added):
        return open_source(base)
    return _converted(internal_source(base, spec, added=added), spec.model, converters)


def _mark_trained(converted: nn.Module, path: Path) -> None:
    """Mark the parameters that the checkpoint's run trained. Converters that only freeze are not in
    its description."""
    # deferred: DCP takes a second to import
    from torchtitan.components.checkpoint.dcp import optimized_names

    names = optimized_names(path)
    for name, parameter in converted.named_parameters():
        if name in names:
            parameter.requires_grad_()


def _unknown_ids(path: Path, added: range) -> range:
    """Return the `added` ids that are not in the checkpoint's tokenizer; all if it has no
    tokenizer."""
    n_known = _vocab_size(asset_folder(path)) if added else 0
    return range(max(added.start, n_known), added.stop)


def _vocab_size(folder: Path) -> int:
    """Return the vocabulary size of a folder's tokenizer; 0 if it has none, or only ranks without a
    split pattern."""
    file = tokenizer_file(folder)
    if file is None:
        return 0
    try:
        tokenizer: PretrainedTokenizer = PretrainedTokenizer.Config().build(path=folder)
    except UserError:
        if file.name == "tokenizer.json":
            raise
        return 0
    return tokenizer.vocab_size


def _find_token_tensors(model: BaseModel.Config) -> list[str]:
    """Return the names of the tensors with one row per token."""
    assert model.vocab_size is not None, "the vocabulary size must be set"
    larger = model_tensor_specs(dataclasses.replace(model, vocab_size=model.vocab_size + 1))
    return [
        name
        for name, tensor_spec in model_tensor_specs(model).items()
        if tensor_spec.shape != larger[name].shape
    ]


def _saved_model(
    source: TensorSource,
    model: BaseModel.Config,
    adapter: Callable[[BaseModel.Config], StateDictAdapter],
    added: range,
) -> BaseModel.Config:
    """Return `model` with the vocabulary size of `source`, if only `added` rows are missing
    there."""
    if not added or model.vocab_size != added.stop:
        return model
    token_tensors = set(_find_token_tensors(model))
    saved: set[int] = set()
    for step in adapter(model).match(source.specs).steps:
        if not token_tensors.isdisjoint(step.internal):
            saved |= {source.specs[name].shape[0] for name in step.external if name in source.specs}
    # Otherwise the checkpoint belongs to another model, and `InternalView` raises an error.
    if len(saved) == 1 and (rows := saved.pop()) in added:
        return dataclasses.replace(model, vocab_size=rows)
    return model
