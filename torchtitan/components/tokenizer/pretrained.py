"""`PretrainedTokenizer`: the tokenizer in a model's folder, with the BOS and EOS declared there."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.components.tokenizer.interface import Offsets, Tokenizer
from torchtitan.components.tokenizer.sentencepiece_model import (
    convert_sentencepiece,
    is_sentencepiece,
)
from torchtitan.components.tokenizer.tiktoken_model import (
    Tiktoken,
    convert_ranks,
    read_tekken,
    read_tiktoken,
)
from torchtitan.components.tokenizer.tokenizer_json import HuggingFace
from torchtitan.config.configurable import builds
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import missing_folder_error, read_object
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    import tokenizers

EMBEDDED_TOKENIZER = Path(__file__).parents[2] / "assets" / "tokenizer"
"""Folder of the tokenizer shipped with the package, trained on `Stories`."""

_VOCABULARIES = (
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tiktoken.model",
    "*.tiktoken",
)
"""Patterns of the files with a vocabulary; the first one takes precedence."""

_USUAL_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>"),
    "eos": ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>"),
}


class PretrainedTokenizer(Tokenizer):
    """Tokenizer in the folder `path`, or the embedded one if `path` is empty. Raises `UserError` if
    the folder contains no usable tokenizer, or tokens cannot be added to it.

    `tokenizer.json` (read by the library `tokenizers`) takes precedence over `tekken.json` and
    files in tiktoken's format (read by tiktoken), and over SentencePiece models (converted to
    tokenizer.json, checked against the library sentencepiece, and saved with checkpoints). BOS and
    EOS are read from tokenizer_config.json, special_tokens_map.json, config.json or
    generation_config.json; if none sets them, the usual names are tried. `add_bos_token` and
    `add_eos_token` of tokenizer_config.json decide whether to add them; if they are missing, the
    post-processor decides.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Tokenizer.Config):
        """Tokens added to a tokenizer."""

        added_tokens: list[str] = field(default_factory=list)
        """Special tokens to add to the vocabulary and the model if they are missing, such as
        <|im_start|>."""
        split_pattern: str = ""
        """Regular expression that splits text before merging, for a file in tiktoken's format,
        which lacks it; in the model's code, it is usually called pat_str. Empty: Llama 3's, if the
        ranks are Llama 3's."""

        @builds(lambda: PretrainedTokenizer)
        def build(self) -> object:
            """Build the tokenizer in the folder `path`; empty: the embedded one."""

        def validate(self) -> None:
            if blank := [token for token in self.added_tokens if not token.strip()]:
                raise UserError(
                    f"--tokenizer.added_tokens contains {blank[0]!r}; tokens must not be blank"
                )

    eos_is_guess: bool
    """True if EOS is the first of several stop tokens, for want of a better one."""

    def __init__(self, config: Config, *, path: str | Path = ""):
        super().__init__(config)
        self.folder = folder = Path(path) if str(path) else EMBEDDED_TOKENIZER
        self._backend = _load_backend(folder, config.split_pattern)
        self.n_added = (
            self._backend.add_special_tokens(config.added_tokens) if config.added_tokens else 0
        )
        settings = read_object(folder / "tokenizer_config.json")
        prefix, suffix = self._backend.added_ids()
        self.vocab_size = self._backend.vocab_size
        self.bos_id, _ = _special_id(folder, "bos", self._backend)
        self.eos_id, self.eos_is_guess = _special_id(folder, "eos", self._backend)
        adds = []
        for key, token_id, added in (
            ("add_bos_token", self.bos_id, prefix),
            ("add_eos_token", self.eos_id, suffix),
        ):
            declared = settings.get(key)
            if not isinstance(declared, bool | None):
                raise UserError(
                    f"'{folder / 'tokenizer_config.json'}' has {key} {declared!r}, not true or "
                    "false"
                )
            adds.append(
                token_id is not None and (token_id in added if declared is None else declared)
            )
        self.adds_bos, self.adds_eos = adds
        parts = [type(self).__module__, type(self).__qualname__, type(self._backend).__name__]
        parts += [hashlib.sha256(self._backend.content).hexdigest()]
        parts += [str(x) for x in (self.bos_id, self.eos_id, self.adds_bos, self.adds_eos)]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def changed_files(self) -> dict[str, bytes]:
        return self._backend.changed_files

    @property
    def backend(self) -> HuggingFace | Tiktoken | None:
        """Reader of the vocabulary and encoder of text; None if a subclass changes the ids."""
        return self._backend if type(self).tokenize is PretrainedTokenizer.tokenize else None

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> list[list[int]]:
        return self._backend.tokenize(texts, allow_special=allow_special)

    def tokenize_with_offsets(
        self, texts: Sequence[str], *, allow_special: bool
    ) -> list[tuple[list[int], Offsets]]:
        """Like `Tokenizer.tokenize_with_offsets`. Spans include whitespace at the start of a
        token."""
        if type(self).tokenize is not PretrainedTokenizer.tokenize:  # a subclass changes the ids
            return super().tokenize_with_offsets(texts, allow_special=allow_special)
        return self._backend.tokenize_with_offsets(texts, allow_special=allow_special)

    def as_hugging_face(self) -> "tokenizers.Tokenizer":
        """Return a new `tokenizers.Tokenizer` with the same ids, apart from BOS and EOS. Raise
        `UserError` if a file in another format cannot be converted."""
        return self._backend.as_hugging_face()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return self._backend.special_ids()

    def id_of(self, token: str) -> int | None:
        return self._backend.id_of(token)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)


def tokenizer_file(folder: Path) -> Path | None:
    """Return the file with the vocabulary that `PretrainedTokenizer` reads in a folder, if any."""
    found = (path for name in _VOCABULARIES for path in sorted(folder.glob(name)) if path.is_file())
    return next(found, None)


def _load_backend(folder: Path, split_pattern: str) -> HuggingFace | Tiktoken:
    if not folder.is_dir():
        raise missing_folder_error(folder)
    path = tokenizer_file(folder)
    if path is None:
        raise UserError(
            f"no tokenizer in '{folder}': found neither tokenizer.json (Hugging Face), tekken.json "
            "(Mistral), nor tokenizer.model, tiktoken.model or *.tiktoken (SentencePiece or "
            "tiktoken); copy the tokenizer of the model there"
        )
    is_piece_model = path.suffix != ".json" and is_sentencepiece(path)
    is_ranks = path.suffix != ".json" and not is_piece_model
    if split_pattern and not is_ranks:
        raise UserError(
            "--tokenizer.split_pattern applies to files in tiktoken's format, but the tokenizer "
            f"is '{path}'; remove it"
        )
    if path.name == "tekken.json":
        return Tiktoken(read_tekken(path))
    if is_ranks:
        file = read_tiktoken(path, split_pattern)
        # Without the pattern, checkpoints need a tokenizer.json.
        return (
            HuggingFace(path, convert_ranks(file).to_str(pretty=True).encode())
            if split_pattern
            else Tiktoken(file)
        )
    if is_piece_model:
        return HuggingFace(path, convert_sentencepiece(path))
    return HuggingFace(path)


def _special_id(
    folder: Path, kind: str, backend: HuggingFace | Tiktoken
) -> tuple[int | None, bool]:
    """Return the id of BOS or EOS (`kind` "bos" or "eos") from the first file that sets it, even to
    null, and whether it is a guess among several."""
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        content = read_object(path)
        if f"{kind}_token" in content:
            return _named_id(content[f"{kind}_token"], path, kind, backend), False
    named = [
        token_id for name in _USUAL_NAMES[kind] if (token_id := backend.id_of(name)) is not None
    ]
    for path in (folder / "config.json", folder / "generation_config.json"):
        declared = read_object(path).get(f"{kind}_token_id")
        if declared in (None, []):
            continue
        ids = declared if isinstance(declared, list) else [declared]
        if any(
            type(token_id) is not int or token_id not in range(backend.vocab_size)
            for token_id in ids
        ):
            raise UserError(
                f"'{path}' has {kind}_token_id {declared!r}, not an id of the tokenizer in this "
                "folder"
            )
        # A list contains all stop tokens; the one with a usual name is the model's end of text.
        chosen = next((token_id for token_id in named if token_id in ids), ids[0])
        is_guess = len(ids) > 1 and chosen not in named
        if is_guess:
            texts = [
                repr(backend.decode([token_id], skip_special_tokens=False)) for token_id in ids
            ]
            logger.warning(
                f"'{path}' has the tokens {', '.join(texts)} as {kind}_token_id, and does not say "
                f"which one ends a text; {texts[0]} is used; to choose, set {kind}_token in "
                "tokenizer_config.json"
            )
        return chosen, is_guess
    return next(iter(named), None), False


def _named_id(token: object, path: Path, kind: str, backend: HuggingFace | Tiktoken) -> int | None:
    """Return the id of a token declared as null, a string, or a serialized `AddedToken`."""
    name = token.get("content") if isinstance(token, dict) else token
    if name is None:
        return None
    token_id = backend.id_of(name) if isinstance(name, str) else None
    if token_id is None:
        raise UserError(
            f"'{path}' has {kind}_token {name!r}, which is not a token of the tokenizer in this "
            "folder"
        )
    return token_id
