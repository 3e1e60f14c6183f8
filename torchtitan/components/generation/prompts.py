"""What begins a text and what ends it, for a model that comes with these files."""

from pathlib import Path

from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object


def start_id(tokenizer: Tokenizer) -> int:
    """The token that an empty text is continued from: BOS, or EOS (the border between documents) where there is none.

    Raises:
        UserError: if the tokenizer has neither.
    """
    token_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if token_id is None:
        raise UserError("the tokenizer has neither BOS nor EOS to begin an empty text with; give a text to begin from")
    return token_id


def stop_ids(tokenizer: Tokenizer, *folders: Path) -> set[int]:
    """The tokens that end a text: the tokenizer's EOS, and all that `eos_token_id` names in the first of `folders`
    that says something, in `generation_config.json` or, where that says nothing, in `config.json`.

    Raises:
        UserError: if such a file is not what it should be.
    """
    own = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    for path in (folder / name for folder in folders for name in ("generation_config.json", "config.json")):
        if declared := _declared_ids(path):
            return own | declared
    return own


def _declared_ids(path: Path) -> set[int]:
    declared = read_object(path).get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(type(token_id) is int for token_id in ids):
        raise UserError(f"'{path}' has eos_token_id {declared!r}, and must have an id or a list of ids")
    return set(ids)
