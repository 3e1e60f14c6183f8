"""`NoTokens`, the tokenizer of models that read no text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.config.configurable import builds
from torchtitan.tools.errors import UserError


class NoTokens(Tokenizer):
    """A tokenizer without tokens: it has an empty vocabulary and needs no file."""

    @dataclass(kw_only=True, slots=True)
    class Config(Tokenizer.Config):
        """No tokenizer: the model reads no text."""

        @builds(lambda: NoTokens)
        def build(self) -> object:
            """Build the tokenizer."""

    vocab_size = 0
    bos_id = eos_id = None
    adds_bos = adds_eos = False
    fingerprint = "no tokens"

    def __init__(self, config: Config, *, path: str):
        """Raise `UserError` for a folder of tokenizer files."""
        super().__init__(config)
        if path:
            raise UserError(
                f"--hf_assets_path '{path}' names a tokenizer, and this model reads no text; unset "
                "it, and start from weights with --checkpoint.initial_load_path"
            )

    def tokenize(self, texts: Sequence[str], *, allow_special: bool) -> NoReturn:
        """Raise `UserError`."""
        raise UserError("this model reads no text")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> NoReturn:
        """Raise `UserError`."""
        raise UserError("this model writes no text")
