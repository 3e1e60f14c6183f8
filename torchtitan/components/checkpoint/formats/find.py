"""Which format a checkpoint has, by what is in its folder."""

from pathlib import Path
from typing import Literal

from torchtitan.components.checkpoint import folders
from torchtitan.components.checkpoint.formats import huggingface, meta, pickled
from torchtitan.components.checkpoint.formats.source import TensorSource, some
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import no_folder

Format = Literal["dcp", "hf", "meta"]

FORMAT_NAMES: dict[Format, str] = {"dcp": "DCP", "hf": "Hugging Face", "meta": "Meta"}

DCP_METADATA = ".metadata"
"""The file that DCP writes last into a checkpoint."""

ADAPTER_CONFIG = "adapter_config.json"
"""The file that is beside an adapter in the files of PEFT."""


_SAFETENSORS = (huggingface.WEIGHTS, huggingface.INDEX)
_PICKLED = (pickled.WEIGHTS, pickled.INDEX)


def format_of(path: str | Path) -> Format:
    """The format of the checkpoint that is the folder `path`.

    Raises:
        UserError: if there is none (it names the files that the folder has, and those it lacks), or more than one.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise no_folder(path)
    found = formats_in(folder)
    if len(found) > 1:
        named = " and ".join(f"{FORMAT_NAMES[format]} ({file})" for format, file in found.items())
        raise UserError(
            f"{folder} holds weights in {len(found)} formats, {named}, and only one can be meant: move the other files "
            "into a folder of their own"
        )
    if found:
        return next(iter(found))
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder} holds an adapter alone, which is no model; name the merged one ({_merged(folder)})")
    if folders.has_marker(folder):
        folders.raise_if_damaged(folder)
    has = some(sorted(item.name for item in folder.iterdir())) or "nothing"
    raise UserError(
        f"{folder} holds no checkpoint: it has {has}, and no weights: no {DCP_METADATA} (DCP), no "
        f"{' or '.join(_SAFETENSORS)}, no {' or '.join(_PICKLED)} (Hugging Face), and no {meta.FILES} (Meta)"
    )


def formats_in(folder: Path) -> dict[Format, str]:
    """Return the formats that `folder` has files of, each with the name of one. Safetensors and pytorch_model.bin are
    one format: many models on the hub have both."""
    huggingface_files = (name for name in (*_SAFETENSORS, *_PICKLED) if (folder / name).is_file())
    files: dict[Format, str | None] = {
        "dcp": DCP_METADATA if (folder / DCP_METADATA).is_file() else None,
        "hf": next(huggingface_files, None),
        "meta": next((file.name for file in sorted(folder.glob(meta.FILES)) if file.is_file()), None),
    }
    return {format: name for format, name in files.items() if name}


def _has_any(folder: Path, *names: str) -> bool:
    return any((folder / name).is_file() for name in names)


def _merged(adapter: Path) -> str:
    outer = adapter.absolute().parent
    is_merged = _has_any(outer, *_SAFETENSORS)
    return str(outer) if is_merged else "the step-N folder of its run, or what torchtitan convert made of that"


def open_source(path: str | Path) -> TensorSource:
    """The weights of the checkpoint that is the folder `path`, under the names and in the shapes that it has them.

    Raises:
        UserError: where there is no checkpoint, or one that cannot be read.
    """
    found = format_of(path)
    if found == "hf":
        is_pickled = not _has_any(Path(path), *_SAFETENSORS)
        return pickled.PickledSource(path) if is_pickled else huggingface.HuggingFaceSource(path)
    if found == "meta":
        return meta.MetaSource(path)
    # Deferred: DCP takes a second to import.
    from torchtitan.components.checkpoint.formats.dcp import DcpSource

    return DcpSource(path)
