"""What a checkpoint says of its model, so that it can be opened without the run that saved it: model and tokenizer."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.components.checkpoint.store import folder_at
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.protocols.conversion import Description
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import file_to_copy, parse_json, read_object
from torchtitan.tools.logging import logger

FOLDER = "assets"
"""The folder inside a checkpoint's."""

_MODEL = "model.json"
DESCRIPTION = f"{FOLDER}/{_MODEL}"
"""The file in a checkpoint that says which model it is of, and what has become of its weights."""

_MODEL_KEYS = {
    "module": (str, "the import path of a family of models"),
    "flavor": (str, "a name"),
    "config": (dict, "an object"),
}

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""The files beside a model's weights that are copied from one checkpoint to the next as they are."""

AssetFile = Path | bytes
"""A file that is copied, or the content of one that is written."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class CheckpointAssets:
    """The content of a checkpoint's folder `assets`."""

    model: Mapping[str, Any]
    """`module` (import path of the family's package), `flavor` and `config` (that of the model); `converters`
    (`protocols.conversion.Description`) where the weights are not those of the plain model, and `simulated` where they
    were trained to be quantized."""

    files: Mapping[str, AssetFile]
    """File name → what is in it."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        files: Mapping[str, AssetFile],
        *,
        converters: Sequence[Description] = (),
        simulated: Sequence[Description] = (),
    ) -> "CheckpointAssets":
        """Those of a model, with `files`, such as `files_in(tokenizer.folder)`, and what `describe_converters` and
        `describe_simulation` say."""
        model = {"module": spec.module, "flavor": spec.flavor, "config": spec.model.to_dict()}
        said = {"converters": list(converters), "simulated": list(simulated)}
        return cls({**model, **{key: descriptions for key, descriptions in said.items() if descriptions}}, files)

    def write(self, folder: Path) -> None:
        """Write them into `folder`, that of a checkpoint."""
        assets = folder / FOLDER
        assets.mkdir(exist_ok=True)
        write_files(assets, self.files)
        # A Hugging Face folder has the plain model, whatever the run's was.
        left_out = {"converters"} if (folder / "config.json").is_file() else set()
        content = {key: value for key, value in self.model.items() if key not in left_out}
        (assets / _MODEL).write_text(json.dumps(content, indent=2) + "\n")


def asset_folder(checkpoint: Path) -> Path:
    """Return the folder of the files of `FILES` in a checkpoint of any format: its folder `assets`, or the checkpoint
    itself where there is a config.json.

    Raises:
        UserError: if `assets` is a link out of the checkpoint.
    """
    is_foreign = (checkpoint / "config.json").is_file() or not (checkpoint / FOLDER).is_dir()
    return checkpoint if is_foreign else file_to_copy(checkpoint, FOLDER)


def token_ids(folder: Path, config: Path) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (one or several) and `pad_token_id` of the model whose files lie in `folder`.

    As its generation_config.json or `config` says; where both are silent, as its tokenizer does. Those that nothing
    says are left out, with a warning where there is a tokenizer that cannot be read.

    Args:
        folder: with the files of `FILES`.
        config: the model's config.json, which need not be there.

    Raises:
        UserError: for a JSON file that cannot be read.
    """
    found: dict[str, Any] = {}
    for file in (config, folder / "generation_config.json"):  # the second wins: it has all ids that end a text
        content = read_object(file)
        found |= {key: content[key] for key in _TOKEN_IDS if content.get(key) is not None}
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    if not {"bos_token_id", "eos_token_id"} <= found.keys() and has_tokenizer:
        found = _ids_of_tokenizer(folder) | found
    return {key: found[key] for key in _TOKEN_IDS if key in found}


def has_model_json(checkpoint: str | Path) -> bool:
    """Whether the checkpoint in that folder says anything of its model."""
    return (Path(checkpoint) / FOLDER / _MODEL).is_file()


def read_model_json(checkpoint: str | Path) -> dict[str, Any]:
    """What the checkpoint in that folder says of its model: `module`, `flavor`, `config`.

    Raises:
        UserError: where it says nothing that can be used.
    """
    path = Path(checkpoint) / FOLDER / _MODEL
    if not path.is_file():
        raise UserError(f"{checkpoint} does not say which model it is of (there is no {FOLDER}/{_MODEL} in it)")
    content = read_object(path)
    for key, (type_, must_be) in _MODEL_KEYS.items():
        if not isinstance(content.get(key), type_):
            raise UserError(f"{path}: {key} is {content.get(key)!r}, and must be {must_be}")
    return content


def read_converters(checkpoint: str | Path) -> list[Description]:
    """The converters without which nothing can be made of the weights of the checkpoint of ours in that folder, or
    behind that URL: what `CheckpointAssets.of` was given; none, where it says nothing of them.

    Raises:
        UserError: where what it says cannot be read.
    """
    return _read_descriptions(checkpoint, "converters")


def read_simulation(checkpoint: str | Path) -> list[Description]:
    """The converters that have simulated, in the run that saved the checkpoint, how the quantized model computes; what
    is returned and raised: as `read_converters`."""
    return _read_descriptions(checkpoint, "simulated")


def _read_descriptions(checkpoint: str | Path, key: str) -> list[Description]:
    folder, name = folder_at(checkpoint), DESCRIPTION
    try:
        content = parse_json(folder.read(name), f"{checkpoint}/{name}") if folder.has_file(name) else {}
    except OSError as error:
        raise UserError(f"{checkpoint}/{name} cannot be read: {error}") from error
    converters = content.get(key, []) if isinstance(content, dict) else None
    if not (isinstance(converters, list) and all(isinstance(converter, dict) for converter in converters)):
        raise UserError(f"{checkpoint}/{name}: {key} is {converters!r}, and must be a list of objects")
    return converters


def files_in(folder: Path | None) -> dict[str, AssetFile]:
    """Return the files of `FILES` that `folder` has, by name; none if there is no folder.

    Raises:
        UserError: if one is a link out of the folder, or a damaged JSON file, which is not to be passed on.
    """
    found = [] if folder is None else [file_to_copy(folder, name) for name in FILES if (folder / name).is_file()]
    for file in found:
        if file.suffix == ".json":
            read_object(file)
    return {file.name: file for file in found}


def write_files(folder: Path, files: Mapping[str, AssetFile]) -> None:
    """Copy or write `files`, by name, into `folder`."""
    for name, file in files.items():
        if isinstance(file, bytes):
            (folder / name).write_bytes(file)
        else:
            shutil.copyfile(file, folder / name)


def _ids_of_tokenizer(folder: Path) -> dict[str, int]:
    try:
        tokenizer = PretrainedTokenizer.Config().build(path=folder)
    except UserError as error:
        logger.warning("the ids of BOS and EOS are not known: %s", error)
        return {}
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {key: value for key, value in ids.items() if value is not None}
