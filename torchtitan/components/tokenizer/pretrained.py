"""`PretrainedTokenizer`: the tokenizer in a model's folder, with the BOS and EOS declared there."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer.interface import Offsets, Tokenizer
from torchtitan.components.tokenizer.tiktoken_model import Tiktoken
from torchtitan.components.tokenizer.tokenizer_json import HuggingFace
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import missing_folder_error, read_object

EMBEDDED_TOKENIZER = Path(__file__).parents[2] / "assets" / "tokenizer"
"""Folder of the tokenizer shipped with the package, trained on `Stories`."""

_USUAL_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>"),
    "eos": ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>"),
}


class PretrainedTokenizer(Tokenizer):
    """Tokenizer in the folder `path`, or the embedded one if `path` is empty. Raises `UserError` if the folder contains
    no usable tokenizer, or tokens cannot be added to it.

    `tokenizer.json` (read by the library `tokenizers`) takes precedence over `tokenizer.model` in tiktoken format,
    which must be Llama 3's. BOS and EOS are read from tokenizer_config.json, special_tokens_map.json, config.json or
    generation_config.json; if none sets them, the usual names are tried. `add_bos_token` and `add_eos_token` of
    tokenizer_config.json decide whether to add them; if they are missing, the post-processor decides.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Tokenizer.Config):
        """Tokens added to a tokenizer."""

        added_tokens: list[str] = field(default_factory=list)
        """Special tokens to add to the vocabulary and the model if they are missing, such as <|im_start|>."""

        def validate(self) -> None:
            if blank := [token for token in self.added_tokens if not token.strip()]:
                raise UserError(f"--tokenizer.added_tokens contains {blank[0]!r}; tokens must not be blank")

    def __init__(self, config: Config, *, path: str | Path = ""):
        super().__init__(config)
        self.folder = folder = Path(path) if str(path) else EMBEDDED_TOKENIZER
        self._backend = _load_backend(folder)
        self.n_added = self._backend.add_special_tokens(config.added_tokens) if config.added_tokens else 0
        settings = read_object(folder / "tokenizer_config.json")
        prefix, suffix = self._backend.added_ids()
        self.vocab_size = self._backend.vocab_size
        self.bos_id, self.eos_id = (_special_id(folder, kind, self._backend) for kind in ("bos", "eos"))
        adds = []
        for key, token_id, added in (("add_bos_token", self.bos_id, prefix), ("add_eos_token", self.eos_id, suffix)):
            declared = settings.get(key)
            if not isinstance(declared, bool | None):
                raise UserError(f"'{folder / 'tokenizer_config.json'}' has {key} {declared!r}, not true or false")
            adds.append(token_id is not None and (token_id in added if declared is None else declared))
        self.adds_bos, self.adds_eos = adds
        parts = [type(self).__module__, type(self).__qualname__, type(self._backend).__name__]
        parts += [hashlib.sha256(self._backend.content).hexdigest()]
        parts += [str(x) for x in (self.bos_id, self.eos_id, self.adds_bos, self.adds_eos)]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def changed_files(self) -> dict[str, bytes]:
        return self._backend.changed_files

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        return self._backend.tokenize(texts, allow_special=allow_special)

    def tokenize_with_offsets(self, texts: Sequence[str], *, allow_special: bool) -> list[tuple[list[int], Offsets]]:
        """Like `Tokenizer.tokenize_with_offsets`. Spans include whitespace at the start of a token."""
        if type(self).tokenize is not PretrainedTokenizer.tokenize:  # a subclass changes the ids
            return super().tokenize_with_offsets(texts, allow_special=allow_special)
        return self._backend.tokenize_with_offsets(texts, allow_special=allow_special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return self._backend.special_ids()

    def id_of(self, token: str) -> int | None:
        return self._backend.id_of(token)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)


def _load_backend(folder: Path) -> HuggingFace | Tiktoken:
    if not folder.is_dir():
        raise missing_folder_error(folder)
    if (folder / "tokenizer.json").is_file():
        return HuggingFace(folder / "tokenizer.json")
    if (folder / "tokenizer.model").is_file():
        return Tiktoken(folder / "tokenizer.model")
    raise UserError(
        f"no tokenizer in '{folder}': found neither tokenizer.json (Hugging Face) nor tokenizer.model (tiktoken)"
    )


def _special_id(folder: Path, kind: str, backend: HuggingFace | Tiktoken) -> int | None:
    """Return the id of BOS or EOS (`kind` "bos" or "eos") from the first file that sets it, even to null."""
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        content = read_object(path)
        if f"{kind}_token" in content:
            return _named_id(content[f"{kind}_token"], path, kind, backend)
    for path in (folder / "config.json", folder / "generation_config.json"):
        declared = read_object(path).get(f"{kind}_token_id")
        if declared not in (None, []):
            # A list contains all stop tokens; the first one is the model's end of text.
            token_id = declared[0] if isinstance(declared, list) else declared
            if type(token_id) is not int or token_id not in range(backend.vocab_size):
                raise UserError(f"'{path}' has {kind}_token_id {declared!r}, not an id of the tokenizer in this folder")
            return token_id
    ids = (backend.id_of(name) for name in _USUAL_NAMES[kind])
    return next((token_id for token_id in ids if token_id is not None), None)


def _named_id(token: Any, path: Path, kind: str, backend: HuggingFace | Tiktoken) -> int | None:
    """Return the id of a token declared as null, a string, or a serialized `AddedToken`."""
    name = token.get("content") if isinstance(token, dict) else token
    if name is None:
        return None
    token_id = backend.id_of(name) if isinstance(name, str) else None
    if token_id is None:
        raise UserError(f"'{path}' has {kind}_token {name!r}, which is not a token of the tokenizer in this folder")
    return token_id
