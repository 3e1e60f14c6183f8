"""Trains the embedded tokenizer on the training stories: `python scripts/train_tokenizer.py`.

Writes `tokenizer.json` and `tokenizer_config.json` into the folder named as the only argument, by
default the one that the package has. Run it again when the stories change.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from torchtitan.assets.stories import Stories
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.components.tokenizer.training import (
    BOS,
    EOS,
    PAD,
    save_tokenizer,
    tokenizer_files,
)

VOCAB_SIZE = 2048


def train() -> Tokenizer:
    """A byte-level BPE: its alphabet has all 256 bytes, so that it encodes any text. Special tokens
    come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(Stories("train"), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def main(folder: Path) -> None:
    save_tokenizer(tokenizer_files(train()), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else EMBEDDED_TOKENIZER)
