"""Pre-trained weights into a model of any layout, and a run's own weights as other tools read them."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.formats import ConvertedSource, TensorSource, format_of, load_weights, open_source
from torchtitan.components.checkpoint.formats.export import export_checkpoint, format_for
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.checkpoint.start import load_model_state
from torchtitan.components.checkpoint.states import ModelState
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.state_dict_adapter import model_forms
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


def native_source(path: str | Path, spec: ModelSpec) -> TensorSource:
    """The weights of the checkpoint in `path`, in any format, under the names and in the layout of the model `spec`.

    Reads names and shapes, and compares tied weights.

    Raises:
        UserError: where there is no checkpoint, one that cannot be read, or one of another model; it names the tensors.
    """
    found, source = format_of(path), open_source(path)
    if found == "dcp":
        return source
    return ConvertedSource(source, format_for(spec, found).adapter(spec.model), model_forms(spec.model))


def load_pretrained(path: str | Path, spec: ModelSpec, model_parts: Sequence[nn.Module]) -> None:
    """Load the weights of one model from a checkpoint in any format, each process of the default group its part.

    One of a run of ours is verified before.

    Args:
        path: the checkpoint's folder.
        spec: the model; a vocabulary that comes from the tokenizer is filled in.
        model_parts: the model in this process, materialised, sharded or not.

    Raises:
        UserError: on every process, where the checkpoint cannot be read, is damaged or is one of another model.
    """
    if format_of(path) == "dcp":
        load_model_state(path, ModelState(model_parts))
        return
    load_weights(native_source(path, spec), model_parts, dist.group.WORLD if dist.is_initialized() else None)
    logger.info("loaded %s, pre-trained weights", path)


def export_huggingface(source: Path, target: Path, ranks: Ranks, *, spec: ModelSpec, assets: Path | None) -> None:
    """Fill `target` with the Hugging Face folder of a model; every rank calls this, and writes some of the files.

    Args:
        source: a checkpoint of the model, in our own format.
        target: an empty folder.
        ranks: who calls this.
        spec: the model.
        assets: folder with the tokenizer's files; None: there are none.
    """
    # Deferred: DCP takes a second to import.
    from torchtitan.components.checkpoint.formats.dcp import DcpSource

    export_checkpoint(target, "hf", spec, DcpSource(source), assets, ranks=ranks)
