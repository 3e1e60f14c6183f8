"""Checkpoint contents besides the weights: the model description, the tokenizer and the chat files."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.checkpoint.filesystem import folder_at
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.protocols.conversion import ConverterRecord
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import file_to_copy, parse_json, read_object
from torchtitan.tools.logging import logger

FOLDER = "assets"
"""Subfolder of a checkpoint."""

DESCRIPTION = f"{FOLDER}/model.json"
"""File of a checkpoint that names its model and any conversion of its weights."""

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
"""Files next to a model's weights that are copied unchanged from checkpoint to checkpoint."""

AssetFile = Path | bytes
"""File to copy, or content to write."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class CheckpointAssets:
    """Contents of a checkpoint's `assets` folder."""

    model: Mapping[str, Any]
    """`module` (the family's import path), `flavor` and model `config`; `converters` (`ConverterRecord`s) if the
    weights are not the plain model's; `simulated` if they were trained for quantization."""

    files: Mapping[str, AssetFile]
    """File name → content."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        files: Mapping[str, AssetFile],
        *,
        converters: Sequence[ConverterRecord] = (),
        simulated: Sequence[ConverterRecord] = (),
    ) -> "CheckpointAssets":
        """Describe a model, with the results of `converter_records` and `simulation_records`."""
        model = {"module": spec.module, "flavor": spec.flavor, "config": spec.model.to_dict()}
        said = {"converters": list(converters), "simulated": list(simulated)}
        return cls({**model, **{key: descriptions for key, descriptions in said.items() if descriptions}}, files)

    def write(self, folder: Path) -> None:
        """Write the assets into the checkpoint's `folder`."""
        assets = folder / FOLDER
        assets.mkdir(exist_ok=True)
        write_files(assets, self.files)
        # A Hugging Face folder always has the plain model.
        left_out = {"converters"} if (folder / "config.json").is_file() else set()
        content = {key: value for key, value in self.model.items() if key not in left_out}
        (folder / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n")


def asset_folder(checkpoint: Path) -> Path:
    """Return the folder of the `FILES` of a checkpoint of any format: `assets`, or the checkpoint itself. Raise
    `UserError` if `assets` is a link out of the checkpoint."""
    is_external = (checkpoint / "config.json").is_file() or not (checkpoint / FOLDER).is_dir()
    return checkpoint if is_external else file_to_copy(checkpoint, FOLDER)


def token_ids(folder: Path, config: Path) -> dict[str, Any]:
    """Return `bos_token_id`, `eos_token_id` (one or several) and `pad_token_id` of the model with files in `folder`:
    from generation_config.json, `config` (a config.json, which may be absent) or else the tokenizer. Unknown ids are
    omitted, with a warning if the tokenizer cannot be read. Raise `UserError` for a JSON file that cannot be read."""
    found: dict[str, Any] = {}
    for file in (config, folder / "generation_config.json"):  # the second wins: it has all ids that end a text
        content = read_object(file)
        found |= {key: content[key] for key in _TOKEN_IDS if content.get(key) is not None}
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    if not {"bos_token_id", "eos_token_id"} <= found.keys() and has_tokenizer:
        found = _ids_of_tokenizer(folder) | found
    return {key: found[key] for key in _TOKEN_IDS if key in found}


def read_model_json(checkpoint: str | Path) -> dict[str, Any]:
    """Return the model description of a checkpoint; raise `UserError` if it cannot be used."""
    path = Path(checkpoint) / DESCRIPTION
    if not path.is_file():
        raise UserError(f"{checkpoint} does not say which model it is of (there is no {DESCRIPTION} in it)")
    content = read_object(path)
    for key, (type_, must_be) in _MODEL_KEYS.items():
        if not isinstance(content.get(key), type_):
            raise UserError(f"{path}: {key} is {content.get(key)!r}, and must be {must_be}")
    return content


def read_converters(
    checkpoint: str | Path, key: Literal["converters", "simulated"] = "converters"
) -> list[ConverterRecord]:
    """Return the `converters` (or `simulated`) of `CheckpointAssets.model` of the checkpoint in a folder or at a URL.
    Raise `UserError` if they cannot be read."""
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
    """Return the `FILES` in `folder` by name; none if `folder` is None. Raise `UserError` if one is a link out of the
    folder, or a damaged JSON file, which must not be copied."""
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


def chat_assets(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, str]:
    """Return the files, name → text, with which other tools continue conversations in a model's training format: the
    template and, unless the tokenizer's files already have them, the end-of-turn token as an end of generation and the
    tokens of the template's `bos_token` and `eos_token`. Raise `UserError` if a JSON file there is unreadable."""
    files = {"chat_template.jinja": template.source}
    files |= _generation_config(tokenizer, template)
    files |= _tokenizer_config(tokenizer.folder, template)
    return files


def _generation_config(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, str]:
    """Return generation_config.json if the end-of-turn token is not among its EOS tokens."""
    (of_end,) = tokenizer.tokenize([template.end_of_turn()], allow_special=True)
    known = token_ids(tokenizer.folder, tokenizer.folder / "config.json") if tokenizer.folder else {}
    said = known.get("eos_token_id", tokenizer.eos_id)
    ends = said if isinstance(said, list) else [] if said is None else [said]
    if not of_end or of_end[0] not in tokenizer.special_ids or of_end[0] in ends:
        return {}
    settings = _read_from(tokenizer.folder, "generation_config.json")
    return {"generation_config.json": _as_text({**settings, **known, "eos_token_id": [*ends, of_end[0]]})}


def _tokenizer_config(folder: Path | None, template: ChatTemplate) -> dict[str, str]:
    """Return tokenizer_config.json if no file names a token that the template writes by its role."""
    settings = _read_from(folder, "tokenizer_config.json")
    named = settings.keys() | _read_from(folder, "special_tokens_map.json").keys()
    unnamed = {k: text for k, text in template.variables.items() if text and k in template.source and k not in named}
    if not unnamed:
        return {}
    return {"tokenizer_config.json": _as_text({**settings, **unnamed})}


def _read_from(folder: Path | None, name: str) -> dict[str, Any]:
    return read_object(folder / name) if folder else {}


def _as_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
