"""Pre-trained weights into a model of any layout, and a run's own weights as other tools read them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from torchtitan.components.checkpoint import folders
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
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.protocols.state_dict_adapter import TensorForm, model_forms
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger


def check_digests(path: str | Path) -> None:
    """Make sure that a checkpoint which a run of ours, or `torchtitan convert`, saved is as it was written. Another's,
    as one from the hub, has nothing to be compared with.

    Raises:
        UserError: naming the files that are not.
    """
    if (format_of(path) == "dcp" or folders.has_marker(path)) and (faults := folders.verify(path)):
        raise UserError(f"{path} is damaged or incomplete: {'; '.join(faults)}; take another checkpoint")


def native_source(path: str | Path, spec: ModelSpec, *, n_added: int = 0) -> TensorSource:
    """The weights of the checkpoint in `path`, in any format, under the names and in the layout of the model `spec`.

    Reads names and shapes, and compares tied weights.

    Args:
        path: the checkpoint's folder.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        n_added: the model's last so many token ids were added to the tokenizer. Rows for them that the checkpoint does
            not have are the mean of those that it has.

    Raises:
        UserError: where there is no checkpoint, one that cannot be read, or one of another model; it names the tensors.
    """
    found, source, model = format_of(path), open_source(path), spec.model
    if found == "dcp":
        saved = _saved_model(source, model, model_forms, n_added)
    else:
        adapter = format_for(spec, found).adapter
        saved = _saved_model(source, model, lambda of: adapter(of).foreign_forms(model_forms(of)), n_added)
        source = ConvertedSource(source, adapter(saved), model_forms(saved))
    return source if saved == model else GrownVocabulary(source, model_forms(model))


def load_pretrained(path: str | Path, spec: ModelSpec, model_parts: Sequence[nn.Module], *, n_added: int = 0) -> None:
    """Load the weights of one model from a checkpoint in any format, each process of the default group its part.

    One of a run of ours is verified before.

    Args:
        path: the checkpoint's folder.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        model_parts: the model in this process, materialised, sharded or not.
        n_added: as of `native_source`.

    Raises:
        UserError: on every process, where the checkpoint cannot be read, is damaged or is one of another model.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if format_of(path) == "dcp":
        if not n_added:
            load_model_state(path, ModelState(model_parts))
            return
        ranks = Ranks(group)
        raise_if_damaged(ranks.first_decides(lambda: folders.open_checkpoint(path)).path, ranks)
    source = native_source(path, spec, n_added=n_added)
    load_weights(source, model_parts, group)
    logger.info("loaded %s, pre-trained weights", path)
    if isinstance(source, GrownVocabulary):
        logger.info("new rows for added tokens, each the mean of the rows there were: %s", source.growth)


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


def _saved_model(
    source: TensorSource,
    model: BaseModel.Config,
    forms: Callable[[BaseModel.Config], Mapping[str, TensorForm]],
    n_added: int,
) -> BaseModel.Config:
    """`model` with as many rows of the vocabulary as `source` has, where all that it lacks are `n_added` last ones.

    `forms` gives the tensors of a model in the source's format; those with a row per token are found by their size.
    """
    if not n_added:
        return model
    size = model.vocab_size
    assert size is not None, "filled in"
    larger = forms(dataclasses.replace(model, vocab_size=size + 1))
    of_tokens = [name for name, form in forms(model).items() if form.shape != larger[name].shape]
    saved = {source.forms[name].shape[0] for name in of_tokens if name in source.forms}
    # Where the tensors disagree, or lack more, the checkpoint is not one of this model, which whoever reads it says.
    if len(saved) == 1 and size - n_added <= (rows := saved.pop()) < size:
        return dataclasses.replace(model, vocab_size=rows)
    return model
