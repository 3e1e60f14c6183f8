"""Files of a checkpoint other than weights: the model description, the tokenizer and the chat
template."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.checkpoint.filesystem import folder_at, read_document
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer, tokenizer_file
from torchtitan.config.configurable import Configurable
from torchtitan.protocols.conversion import ConverterRecord, converter_records
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.files import file_to_copy, parse_json, read_object
from torchtitan.tools.logging import logger

FOLDER = "assets"
"""Subfolder of a checkpoint."""

DESCRIPTION = f"{FOLDER}/model.json"
"""File of a checkpoint that describes its model and the converters applied to it."""

_MODEL_KEYS = {
    "module": (str, "the import path of a model family"),
    "flavor": (str, "a string"),
    "model": (str, "the name of a class of the family's models"),
    "config": (dict, "an object"),
}

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "qformer_tokenizer/tokenizer.json",
    "qformer_tokenizer/tokenizer_config.json",
    "qformer_tokenizer/special_tokens_map.json",
    "qformer_tokenizer/added_tokens.json",
    "qformer_tokenizer/vocab.txt",
)
"""Files next to a model's weights that are copied unchanged between checkpoints."""

AssetFile = Path | bytes
"""A file to copy, or bytes to write."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class CheckpointAssets:
    """Files in the `assets` folder of a checkpoint."""

    model: Mapping[str, Any]
    """`module` (the family's import path), `flavor`, the `model`'s class and its `config`; also
    `converters` (`ConverterRecord`s) for a converted model, and `simulated` for weights trained
    with simulated quantization."""

    files: Mapping[str, AssetFile]
    """File name → file or content."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        files: Mapping[str, AssetFile],
        *,
        converters: Sequence[Configurable.Config] = (),
    ) -> "CheckpointAssets":
        """Describe a model to which the `converters` were applied."""
        owner = spec.model._owner.__name__
        model = {
            "module": spec.module,
            "flavor": spec.flavor,
            "model": owner,
            "config": spec.model.to_dict(),
        }
        records = {
            "converters": converter_records(converters),
            "simulated": converter_records(converters, "simulates"),
        }
        return cls({**model, **{key: value for key, value in records.items() if value}}, files)

    def write(self, folder: Path) -> None:
        """Write the assets into the checkpoint's `folder`."""
        assets = folder / FOLDER
        assets.mkdir(exist_ok=True)
        write_files(assets, self.files)
        # A Hugging Face folder always contains the plain model.
        omitted = {"converters"} if (folder / "config.json").is_file() else set()
        content = {key: value for key, value in self.model.items() if key not in omitted}
        (folder / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n")


def asset_folder(checkpoint: Path) -> Path:
    """Return the folder with the `FILES` of a checkpoint in any format: `assets`, or the checkpoint
    itself. Raise `UserError` if `assets` is a link to a path outside the checkpoint."""
    is_external = (checkpoint / "config.json").is_file() or not (checkpoint / FOLDER).is_dir()
    return checkpoint if is_external else file_to_copy(checkpoint, FOLDER)


def token_ids(folder: Path, config: Path) -> dict[str, Any]:
    """Return `bos_token_id`, `eos_token_id` (an id or a list) and `pad_token_id` of the model with
    files in `folder`, from generation_config.json, `config` (a config.json, which may be absent) or
    the tokenizer, in this order. Unknown ids are omitted, with a warning if the tokenizer cannot be
    read. Raise `UserError` if a JSON file cannot be read."""
    ids: dict[str, Any] = {}
    # the second overrides: it lists all end tokens
    for file in (config, folder / "generation_config.json"):
        content = read_object(file)
        ids |= {key: content[key] for key in _TOKEN_IDS if content.get(key) is not None}
    if not {"bos_token_id", "eos_token_id"} <= ids.keys() and tokenizer_file(folder):
        ids = _read_tokenizer_ids(folder) | ids
    return {key: ids[key] for key in _TOKEN_IDS if key in ids}


def read_model_json(checkpoint: str | Path) -> dict[str, Any]:
    """Return the model description of a checkpoint. Raise `UserError` if it is missing or
    invalid."""
    path = Path(checkpoint) / DESCRIPTION
    if not path.is_file():
        raise UserError(f"{checkpoint} has no model description ({DESCRIPTION})")
    content = read_object(path)
    for key, (type_, description) in _MODEL_KEYS.items():
        if not isinstance(content.get(key), type_):
            raise UserError(f"{path}: {key} must be {description}, not {content.get(key)!r}")
    return content


def read_converters(
    checkpoint: str | Path, key: Literal["converters", "simulated"] = "converters"
) -> list[ConverterRecord]:
    """Return the `converters` (or `simulated`) in `CheckpointAssets.model` of a checkpoint in a
    folder or at a URL. Raise `UserError` if they cannot be read."""
    folder, name = folder_at(checkpoint), DESCRIPTION
    with os_errors_as(f"{checkpoint}/{name} cannot be read"):
        content = (
            parse_json(read_document(folder, name), f"{checkpoint}/{name}")
            if folder.has_file(name)
            else {}
        )
    converters = content.get(key, []) if isinstance(content, dict) else None
    if not (
        isinstance(converters, list)
        and all(isinstance(converter, dict) for converter in converters)
    ):
        raise UserError(f"{checkpoint}/{name}: {key} must be a list of objects, not {converters!r}")
    return converters


def files_in(folder: Path | None) -> dict[str, AssetFile]:
    """Return the `FILES` and the vocabulary in `folder` by name; none if `folder` is None. Raise
    `UserError` if one is a link to a path outside the folder or a damaged JSON file."""
    if folder is None:
        return {}
    names = [name for name in FILES if (folder / name).is_file()]
    vocabulary = tokenizer_file(folder)
    if vocabulary and vocabulary.name not in names:
        names.append(vocabulary.name)
    files: dict[str, AssetFile] = {}
    for name in names:
        file = file_to_copy(folder, name)
        if file.suffix == ".json":
            read_object(file)
        files[name] = file
    return files


def write_files(folder: Path, files: Mapping[str, AssetFile]) -> None:
    """Copy or write `files` (name → file or content) into `folder`."""
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(file, bytes):
            (folder / name).write_bytes(file)
        else:
            shutil.copyfile(file, folder / name)


def _read_tokenizer_ids(folder: Path) -> dict[str, int]:
    try:
        tokenizer = PretrainedTokenizer.Config().build(path=folder)
    except UserError as error:
        logger.warning("BOS and EOS ids are unknown: %s", error)
        return {}
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {key: value for key, value in ids.items() if value is not None}


def chat_assets(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, str]:
    """Return the files (name → text) that let other tools chat in a model's training format: the
    template and, unless the tokenizer's files already have them, its stops as EOS tokens and its
    `bos_token` and `eos_token`. Raise `UserError` if one of the tokenizer's JSON files is
    unreadable."""
    files = {"chat_template.jinja": template.source}
    files |= _make_generation_config(tokenizer, template)
    files |= _make_tokenizer_config(tokenizer.folder, template)
    return files


def _make_generation_config(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, str]:
    """Return generation_config.json if it must be extended with the stops of the template."""
    ids = token_ids(tokenizer.folder, tokenizer.folder / "config.json") if tokenizer.folder else {}
    eos = ids.get("eos_token_id", tokenizer.eos_id)
    eos_ids = []
    if eos is not None:
        eos_ids = eos if isinstance(eos, list) else [eos]
    stops = [token_id for token_id in Stops(template, tokenizer).ids() if token_id not in eos_ids]
    if not stops:
        return {}
    settings = _read_json(tokenizer.folder, "generation_config.json")
    return {
        "generation_config.json": _to_json({**settings, **ids, "eos_token_id": [*eos_ids, *stops]})
    }


def _make_tokenizer_config(folder: Path | None, template: ChatTemplate) -> dict[str, str]:
    """Return tokenizer_config.json if it must be extended with special tokens that the template
    uses."""
    settings = _read_json(folder, "tokenizer_config.json")
    known = settings.keys() | _read_json(folder, "special_tokens_map.json").keys()
    missing = {
        k: text
        for k, text in template.variables.items()
        if text and k in template.source and k not in known
    }
    if not missing:
        return {}
    return {"tokenizer_config.json": _to_json({**settings, **missing})}


def _read_json(folder: Path | None, name: str) -> dict[str, object]:
    return read_object(folder / name) if folder else {}


def _to_json(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
