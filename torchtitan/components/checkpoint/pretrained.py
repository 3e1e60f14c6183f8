"""Pre-trained weights into a model of any layout, and a run's own weights as other tools read them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.assets import asset_folder
from torchtitan.components.checkpoint.formats import (
    ConvertedSource,
    GrownVocabulary,
    TensorSource,
    format_of,
    load_weights,
    open_source,
)
from torchtitan.components.checkpoint.formats.export import export_checkpoint, format_for
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.start import load_model_state, raise_if_damaged
from torchtitan.components.checkpoint.states import ModelState
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.protocols.state_dict_adapter import TensorForm, model_forms
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

Forms = Callable[[BaseModel.Config], Mapping[str, TensorForm]]
"""Model → its tensors by name, in one format or another."""


def check_digests(path: str | Path) -> None:
    """Make sure that a checkpoint which a run of ours, or `torchtitan convert`, saved is as it was written. Another's,
    as one from the hub, has nothing to be compared with.

    Raises:
        UserError: naming the files that are not.
    """
    if (format_of(path) == "dcp" or folders.has_marker(path)) and (faults := folders.verify(path)):
        raise UserError(f"{path} is damaged or incomplete: {'; '.join(faults)}; take another checkpoint")


def native_source(path: str | Path, spec: ModelSpec, *, added: range = range(0)) -> TensorSource:
    """The weights of the checkpoint in `path`, in any format, under the names and in the layout of the model `spec`.

    Reads names and shapes, and compares tied weights.

    Args:
        path: the checkpoint's folder.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        added: ids of tokens that were added to the tokenizer. The rows of those that the checkpoint's own tokenizer
            lacks, which the checkpoint does not have or has as padding, are the mean of the rows below.

    Raises:
        UserError: where there is no checkpoint, one that cannot be read, or one of another model; it names the tensors.
    """
    found, source, model = format_of(path), open_source(path), spec.model
    added = _unknown_ids(Path(path), added)
    if found != "dcp":
        adapter = format_for(spec, found).adapter
        saved = _saved_model(source, model, lambda of: adapter(of).foreign_forms(model_forms(of)), added)
        source = ConvertedSource(source, adapter(saved), model_forms(saved))
    return GrownVocabulary(source, _names_of_tokens(model, model_forms), added) if added else source


def load_pretrained(
    path: str | Path, spec: ModelSpec, model_parts: Sequence[nn.Module], *, added: range = range(0)
) -> None:
    """Load the weights of one model from a checkpoint in any format, each process of the default group its part.

    One of a run of ours is verified before.

    Args:
        path: the checkpoint's folder.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        model_parts: the model in this process, materialised, sharded or not.
        added: as of `native_source`.

    Raises:
        UserError: on every process, where the checkpoint cannot be read, is damaged or is one of another model.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if format_of(path) == "dcp":
        if not added:
            load_model_state(path, ModelState(model_parts))
            return
        ranks = Ranks(group)
        raise_if_damaged(ranks.first_decides(lambda: folders.open_checkpoint(path)).path, ranks)
    source = native_source(path, spec, added=added)
    load_weights(source, model_parts, group)
    logger.info("loaded %s, pre-trained weights", path)
    if isinstance(source, GrownVocabulary):
        logger.info("%s: those of added tokens, each the mean of the rows below", source.growth)


def export_huggingface(
    source: Path,
    target: Path,
    ranks: Ranks,
    *,
    spec: ModelSpec,
    assets: Path | None,
    changed_files: Mapping[str, bytes] | None = None,
) -> None:
    """Fill `target` with the Hugging Face folder of a model; every rank calls this, and writes some of the files.

    Args:
        source: a checkpoint of the model, in our own format.
        target: an empty folder.
        ranks: who calls this.
        spec: the model.
        assets: folder with the tokenizer's files; None: there are none.
        changed_files: content by name of files that are written in place of those in `assets`, or beside them.
    """
    # Deferred: DCP takes a second to import.
    from torchtitan.components.checkpoint.formats.dcp import DcpSource

    export_checkpoint(target, "hf", spec, DcpSource(source), assets, changed_files=changed_files, ranks=ranks)


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
