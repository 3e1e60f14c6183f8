"""The data loader for preference methods: pairs of answers to one prompt, of which one is preferred."""

from dataclasses import dataclass

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.example_loader import ExampleDataLoader
from torchtitan.components.data.finetuning.row_encoders import SIDES, PairEncoder
from torchtitan.components.data.finetuning.windows import Windows, pack_windows
from torchtitan.components.data.packing import Batch
from torchtitan.components.tokenizer import Tokenizer


class PreferenceDataLoader(ExampleDataLoader):
    """Pairs for the two forward passes of a preference method; see `PlannedDataLoader` for order and position.

    A batch has, for each side, `chosen_input`, `chosen_labels`, `chosen_positions` and `rejected_…` likewise, all
    (B, T) with T = `seq_len`: row b of both sides is one pair, its prompt (with ignored labels) followed by one answer.
    The labels are those of the assistant's turns of the answer. The rest of a row is padding: a document of its own
    with ignored labels. So `model(batch["chosen_input"], batch["chosen_positions"])` needs no mask.

    `too_long` means pairs one of whose sides takes more than T positions; `truncate_left` cuts the same number of
    tokens off both, and leaves out pairs whose answers alone are longer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ExampleDataLoader.Config):
        """Preference data."""

        def encoder(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> PairEncoder:
            return PairEncoder(ChatEncoder(tokenizer, template, "assistant"))

    config: Config
    kind = "preference"

    @staticmethod
    def collate(windows: Windows, seq_len: int) -> Batch:
        sides = [(side, pack_windows(windows, seq_len, part)) for part, side in enumerate(SIDES)]
        return {f"{side}_{name}": values for side, packed in sides for name, values in packed.items()}
