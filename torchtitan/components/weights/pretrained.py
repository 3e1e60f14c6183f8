"""Pre-trained weights into a model of any layout, and a run's own weights as other tools read them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.assets import DESCRIPTION, asset_folder, read_converters, read_model_json
from torchtitan.components.checkpoint.folders import CheckpointInfo
from torchtitan.components.checkpoint.formats import (
    ConvertedSource,
    ConvertedView,
    GrownVocabulary,
    JoinedSource,
    PlainView,
    TensorSource,
    format_of,
    load_weights,
    open_source,
)
from torchtitan.components.checkpoint.formats.export import export_checkpoint, format_for
from torchtitan.components.checkpoint.formats.load import check_fit
from torchtitan.components.checkpoint.manager import CheckpointManager
from torchtitan.components.checkpoint.origin import Origin
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.start import (
    Start,
    check_frozen,
    frozen_folder,
    load_model_state,
)
from torchtitan.components.checkpoint.states import ModelState
from torchtitan.components.checkpoint.store import folder_at, is_url
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.protocols import BaseModel, ModelConverter, ModelSpec
from torchtitan.protocols.conversion import (
    converted_model,
    described_converters,
    differences,
    saved_config,
    tensor_shapes,
)
from torchtitan.protocols.state_dict_adapter import TensorForm, model_forms
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_LOOKED_AT = (DESCRIPTION, ".metadata")
"""The files of a checkpoint of ours that are read before all of it is verified, where a run is to start from it."""

Forms = Callable[[BaseModel.Config], Mapping[str, TensorForm]]
"""Model → its tensors by name, in one format or another."""


def check_digests(path: str | Path) -> None:
    """Make sure that a checkpoint which a run of ours, or `torchtitan convert`, saved is as it was written. Another's,
    as one from the hub, has nothing to be compared with.

    Raises:
        UserError: naming the files that are not.
    """
    if format_of(path) == "dcp" or folders.has_marker(path):
        folders.raise_if_damaged(path)


def native_source(
    path: str | Path, spec: ModelSpec, *, added: range = range(0), base: Path | None = None
) -> TensorSource:
    """The weights of the checkpoint in `path`, in any format, under the names and in the layout of the model `spec`.

    Reads names and shapes, and compares tied weights. Weights that a run saved in another form, or with adapters, are
    made plain as they are read.

    Args:
        path: the checkpoint's folder.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        added: ids of tokens that were added to the tokenizer. The rows of those that the checkpoint's own tokenizer
            lacks, which the checkpoint does not have or has as padding, are the mean of the rows below.
        base: for a checkpoint of trained weights only, the folder of the others, in any format, where it is not the one
            that its run had them from.

    Raises:
        UserError: where there is no checkpoint, one that cannot be read, or one of another model; it names the tensors;
            where the weights that it leaves out are not there, or have changed.
    """
    found, model = format_of(path), spec.model
    checkpoint = folders.open_checkpoint(path) if found == "dcp" and folders.has_marker(path) else None
    lacking = checkpoint if checkpoint and checkpoint.frozen_from else None
    if base and not lacking:
        raise UserError(f"{path} holds all weights of its model; leave out --base {base}")
    added = _unknown_ids(Path(path), added)
    if found == "dcp":
        source = _plain_source(Path(path), spec, lacking, base)
    else:
        source, adapter = open_source(path), format_for(spec, found).adapter
        saved = _saved_model(source, model, lambda of: adapter(of).foreign_forms(model_forms(of)), added)
        source = ConvertedSource(source, adapter(saved), model_forms(saved))
    return GrownVocabulary(source, _names_of_tokens(model, model_forms), added) if added else source


def is_as_saved(
    path: str | Path, spec: ModelSpec, converters: Sequence[ModelConverter], *, added: range = range(0)
) -> bool:
    """Whether the checkpoint in `path` is one of ours whose weights are loaded as they are: its tensors have the names
    and shapes of the run's and mean the same, and it knows the same tokens.

    Args:
        path: the checkpoint's folder, or its URL.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        converters: the run's.
        added: as of `native_source`.

    Raises:
        UserError: where it is not, and `path` is a URL; or there is no checkpoint.
    """
    if not is_url(str(path)) and (format_of(path) != "dcp" or _unknown_ids(Path(path), added)):
        return False
    saved = read_converters(path)
    same = not differences(saved, converters) and (not saved or _has_tensors_of(path, spec.model, converters))
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
    """Load the weights of one model from a checkpoint in any format, each process of the default group its part.

    One of a run of ours is verified before; saved with the same converters, it is loaded as it is. Otherwise what a
    converter has added keeps its values, and the rest is as it follows from the plain model's weights.

    Args:
        path: the checkpoint's folder; or its URL, where `is_as_saved`.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        model_parts: the model in this process, materialised, sharded or not.
        added: as of `native_source`.
        converters: those that have been applied to the model.

    Raises:
        UserError: on every process, where the checkpoint cannot be read, is damaged or is one of another model.
    """
    if is_as_saved(path, spec, converters, added=added):
        load_model_state(path, ModelState(model_parts))
        return
    _warn_of_merging(path, converters)
    group = dist.group.WORLD if dist.is_initialized() else None
    if format_of(path) == "dcp":
        ranks = Ranks(group)
        folders.raise_if_damaged(ranks.first_decides(lambda: folders.open_checkpoint(path)).path, ranks)
    plain = native_source(path, spec, added=added)
    load_weights(_converted(plain, spec.model, converters, ModelState(model_parts)), model_parts, group)
    logger.info("loaded %s, pre-trained weights", path)
    if isinstance(plain, GrownVocabulary):
        logger.info("%s: those of added tokens, each the mean of the rows below", plain.growth)


def load_initial_weights(
    path: str,
    spec: ModelSpec,
    model_parts: list[nn.Module],
    converters: Sequence[ModelConverter],
    *,
    added: range = range(0),
) -> None:
    """Give a model the weights that a run begins with, beyond those of its seed: those in `path`, where it is not
    empty, and what its converters have to load.

    Args, and what is raised: as of `load_pretrained`.
    """
    has_theirs = bool(path) and is_as_saved(path, spec, converters, added=added)
    if path:
        load_pretrained(path, spec, model_parts, added=added, converters=converters)
    for converter in converters:
        if not (has_theirs and converter.changes_weights):
            converter.load_initial_weights(model_parts, spec)


def frozen_origin(config: CheckpointManager.Config, seed: int) -> Origin:
    """What the weights of a run that are not trained begin as; `seed` is the run's."""
    return Origin.at(config.initial_load_path) if config.initial_load_path else Origin.of_seed(seed)


def check_start(
    config: CheckpointManager.Config,
    start: Start | None,
    spec: ModelSpec,
    converters: Sequence[ModelConverter],
    *,
    added: range,
    seed: int,
) -> None:
    """Find, before any process starts, a checkpoint that a run cannot start from; reads names and shapes.

    Args:
        config: the run's.
        start: what `config.find_start` gave.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        converters: the run's.
        added: as of `native_source`.
        seed: the run's.

    Raises:
        UserError: as `check_frozen`, `is_as_saved`, `native_source` and `ModelConverter.check_initial_weights`.
    """
    check_frozen(config, start, frozen_origin(config, seed))
    resumes = start and start.resumes and "model" not in config.exclude_from_loading
    if start and resumes and not start.checkpoint.frozen_from:
        return
    path = config.initial_load_path
    if path and folders.has_marker(path):
        folders.raise_if_damaged(path, only=_LOOKED_AT)
    has_theirs = bool(path) and is_as_saved(path, spec, converters, added=added)
    if path and not has_theirs:
        _check_pretrained(config, spec, converters, added)
    saved = read_converters(path) if has_theirs else []
    for converter in converters:
        converter.check_initial_weights(spec, saved_config(saved, converter))


def _check_pretrained(
    config: CheckpointManager.Config, spec: ModelSpec, converters: Sequence[ModelConverter], added: range
) -> None:
    """Find that weights cannot be made the run's, by names and shapes."""
    path = config.initial_load_path
    if not config.initial_load_model_only:
        raise UserError(
            f"checkpoint.initial_load_model_only False: {path} was saved with other model_converters or tokens, so "
            "that only its weights can be loaded"
        )
    _converted(native_source(path, spec, added=added), spec.model, converters)


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
    """Fill `target` with the Hugging Face folder of a model; every rank calls this, and writes some of the files.

    Args:
        source: a checkpoint of the model, in our own format.
        target: an empty folder.
        ranks: who calls this.
        spec: the model.
        assets: folder with the tokenizer's files; None: there are none.
        changed_files: content by name of files that are written in place of those in `assets`, or beside them.
        converters: those that have been applied to the model: what is written is the plain one, and what they write.
        dtype: of the floating-point weights of a converted model; None: as the plain ones follow from it.
    """
    # Deferred: DCP takes a second to import.
    from torchtitan.components.checkpoint.formats.dcp import DcpSource

    weights: TensorSource = DcpSource(source)
    if converters:
        weights = PlainView(weights, converted_model(spec.model, converters), converters)
    export_checkpoint(target, "hf", spec, weights, assets, changed_files=changed_files, dtype=dtype, ranks=ranks)


def _converted(
    plain: TensorSource, model: BaseModel.Config, converters: Sequence[ModelConverter], state: ModelState | None = None
) -> TensorSource:
    """The weights of the plain model as the converted one has them, but for what a converter has added.

    Args:
        plain: the weights.
        model: the plain model.
        converters: those that make the converted one.
        state: what they are for, which says of what types the converted tensors are made.

    Raises:
        UserError: where they are not the plain model's, as they would be found to be in the end, or are quantized.
    """
    if not any(converter.changes_weights for converter in converters):
        return plain
    check_fit(plain.forms, converted_model(model, []).state_dict())
    converted = converted_model(model, converters)
    types = {name: tensor.dtype for name, tensor in state.state_dict().items()} if state else {}
    for name, parameter in converted.named_parameters():
        if name in types:
            parameter.data = parameter.data.to(types[name])
    return ConvertedView(plain, converted)


def _has_tensors_of(path: str | Path, model: BaseModel.Config, converters: Sequence[ModelConverter]) -> bool:
    # Deferred: DCP takes a second to import.
    from torchtitan.components.checkpoint.storage import saved_shapes

    return saved_shapes(folder_at(path), "model") == tensor_shapes(converted_model(model, converters))


def _warn_of_merging(path: str | Path, converters: Sequence[ModelConverter]) -> None:
    """Say that what the run's converters add begins anew, where the checkpoint has such weights."""
    saved = read_converters(path) if format_of(path) == "dcp" else []
    if saved and any(converter.changes_weights for converter in converters):
        logger.warning(
            "%s was saved with other model_converters (%s): what it has of theirs is merged into the weights, and what "
            "this run's add begins anew",
            path,
            "; ".join(differences(saved, converters)) or "for other layers or sizes",
        )


def _plain_source(path: Path, spec: ModelSpec, lacking: CheckpointInfo | None, base: Path | None) -> TensorSource:
    """The weights of a checkpoint of ours as the plain model's, with the vocabulary that it was saved with; `lacking`
    is the checkpoint, where it holds trained weights only."""
    source, descriptions = open_source(path), read_converters(path)
    if not descriptions and not lacking:
        return source
    converters = described_converters(descriptions, str(path))
    saved = dataclasses.replace(spec, model=type(spec.model).from_dict(read_model_json(path)["config"]))
    if lacking:
        source = JoinedSource(source, _frozen_source(path, frozen_folder(lacking, base), saved, converters))
    if not descriptions:
        return source
    converted = converted_model(saved.model, converters)
    _let_train(converted, path)
    return PlainView(source, converted, converters)


def _frozen_source(path: Path, base: Path, spec: ModelSpec, converters: Sequence[ModelConverter]) -> TensorSource:
    """The weights in `base` as the run that saved `path` has begun with them, but for what a converter has added."""
    check_digests(base)
    tokenizers = [asset_folder(folder) for folder in (path, base)]
    has_both = all((folder / "tokenizer.json").is_file() for folder in tokenizers)
    n_tokens = PretrainedTokenizer.Config().build(path=tokenizers[0]).vocab_size if has_both else 0
    added = _unknown_ids(base, range(n_tokens))
    if is_as_saved(base, spec, converters, added=added):
        return open_source(base)
    return _converted(native_source(base, spec, added=added), spec.model, converters)


def _let_train(converted: nn.Module, path: Path) -> None:
    """Mark what the run has trained whose checkpoint this is: converters that change no form are not described."""
    from torchtitan.components.checkpoint.formats.dcp import optimized_names  # deferred: DCP takes a second to import

    names = optimized_names(path)
    for name, parameter in converted.named_parameters():
        if name in names:
            parameter.requires_grad_()


def _unknown_ids(path: Path, added: range) -> range:
    """Those of the `added` ids that the tokenizer in the checkpoint lacks; all, where there is none in it."""
    files = asset_folder(path)
    if not added or not (files / "tokenizer.json").is_file():  # files of the other format cannot be added to
        return added
    known = PretrainedTokenizer.Config().build(path=files).vocab_size
    return range(max(added.start, known), added.stop)


def _names_of_tokens(model: BaseModel.Config, forms: Forms) -> list[str]:
    """Names of the tensors with a row per token; `forms` gives all of a model's."""
    assert model.vocab_size is not None, "filled in"
    larger = forms(dataclasses.replace(model, vocab_size=model.vocab_size + 1))
    return [name for name, form in forms(model).items() if form.shape != larger[name].shape]


def _saved_model(source: TensorSource, model: BaseModel.Config, forms: Forms, added: range) -> BaseModel.Config:
    """`model` with as many rows of the vocabulary as `source` has, where all that it lacks are those of `added`."""
    if not added or model.vocab_size != added.stop:
        return model
    saved = {source.forms[name].shape[0] for name in _names_of_tokens(model, forms) if name in source.forms}
    # Where the tensors disagree, or lack more, the checkpoint is not one of this model, which whoever reads it says.
    if len(saved) == 1 and (rows := saved.pop()) in added:
        return dataclasses.replace(model, vocab_size=rows)
    return model
