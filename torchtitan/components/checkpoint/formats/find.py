"""Which format a checkpoint has, by what is in its folder."""

from pathlib import Path
from typing import Literal

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.formats import huggingface, meta
from torchtitan.components.checkpoint.formats.source import TensorSource
from torchtitan.tools.errors import UserError

Format = Literal["dcp", "hf", "meta"]

DCP_METADATA = ".metadata"
"""The file that DCP writes last into a checkpoint."""

ADAPTER_CONFIG = "adapter_config.json"
"""The file that is beside an adapter in the files of PEFT."""


def format_of(path: str | Path) -> Format:
    """The format of the checkpoint that is the folder `path`.

    Raises:
        UserError: where there is none; it says what was looked for, or what is missing of one of ours.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the folder that holds the checkpoint's files")
    if (folder / DCP_METADATA).is_file():
        return "dcp"
    if (folder / huggingface.WEIGHTS).is_file() or (folder / huggingface.INDEX).is_file():
        return "hf"
    if next(folder.glob(meta.FILES), None):
        return "meta"
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder} holds an adapter alone, which is no model; name the merged one ({_merged(folder)})")
    if folders.has_marker(folder):
        folders.raise_if_damaged(folder)
    raise UserError(
        f"{folder} holds no checkpoint: there is no {DCP_METADATA} (DCP), no {huggingface.WEIGHTS} or "
        f"{huggingface.INDEX} (Hugging Face), and no {meta.FILES} (Meta)"
    )


def _merged(adapter: Path) -> str:
    outer = adapter.absolute().parent
    is_merged = any((outer / name).is_file() for name in (huggingface.WEIGHTS, huggingface.INDEX))
    return str(outer) if is_merged else "the step-N folder of its run, or what torchtitan convert made of that"


def open_source(path: str | Path) -> TensorSource:
    """The weights of the checkpoint that is the folder `path`, under the names and in the shapes that it has them.

    Raises:
        UserError: where there is no checkpoint, or one that cannot be read.
    """
    found = format_of(path)
    if found == "hf":
        return huggingface.HuggingFaceSource(path)
    if found == "meta":
        return meta.MetaSource(path)
    # Deferred: DCP takes a second to import.
    from torchtitan.components.checkpoint.formats.dcp import DcpSource

    return DcpSource(path)
