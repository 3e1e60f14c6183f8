"""The files by which other tools go on with conversations as a model was trained on them."""

import json
from pathlib import Path
from typing import Any

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.checkpoint.assets import token_ids
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.files import read_object


def chat_assets(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, str]:
    """What a model's checkpoints carry that was trained on conversations: file name → text.

    That is the template and, where the tokenizer's own files do not say so already, that generating ends where a turn
    does, and which tokens the template's `bos_token` and `eos_token` are.

    Args:
        tokenizer: what the conversations are encoded with.
        template: what makes text of them.

    Raises:
        UserError: for a JSON file of the tokenizer that cannot be read.
    """
    files = {"chat_template.jinja": template.source}
    files |= _generation_config(tokenizer, template)
    files |= _tokenizer_config(tokenizer.folder, template)
    return files


def _generation_config(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, str]:
    """generation_config.json, where the token that ends a turn is not among its ends of a text."""
    (of_end,) = tokenizer.tokenize([template.end_of_turn()], allow_special=True)
    known = token_ids(tokenizer.folder, tokenizer.folder / "config.json") if tokenizer.folder else {}
    said = known.get("eos_token_id", tokenizer.eos_id)
    ends = said if isinstance(said, list) else [] if said is None else [said]
    if not of_end or of_end[0] not in tokenizer.special_ids or of_end[0] in ends:
        return {}
    settings = _read_beside(tokenizer.folder, "generation_config.json")
    return {"generation_config.json": _as_text({**settings, **known, "eos_token_id": [*ends, of_end[0]]})}


def _tokenizer_config(folder: Path | None, template: ChatTemplate) -> dict[str, str]:
    """tokenizer_config.json, where a token that the template writes by its role is named nowhere."""
    settings = _read_beside(folder, "tokenizer_config.json")
    named = settings.keys() | _read_beside(folder, "special_tokens_map.json").keys()
    unnamed = {k: text for k, text in template.variables.items() if text and k in template.source and k not in named}
    if not unnamed:
        return {}
    return {"tokenizer_config.json": _as_text({**settings, **unnamed})}


def _read_beside(folder: Path | None, name: str) -> dict[str, Any]:
    return read_object(folder / name) if folder else {}


def _as_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
