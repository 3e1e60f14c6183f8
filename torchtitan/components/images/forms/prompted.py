"""The form of texts of classes that read the prompt together with its image, such as
InstructBLIP's."""

from collections.abc import Sequence

from torch import Tensor

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.images.files import PROMPT, ImageFile
from torchtitan.components.images.forms.caption import CaptionForm
from torchtitan.components.images.opened import Opened, Samples
from torchtitan.tools.files import read_object


class PromptedForm(CaptionForm):
    """Texts of one image, whose features depend on the prompt: the Q-Former reads both, the prompt
    in tokens of its own tokenizer. It must not read the answer; a caption has no prompt."""

    names = {"InstructBlipProcessor"}
    reads_prompts = True

    def __init__(self, opened: Opened, token: str):
        super().__init__(opened, token)
        from transformers import InstructBlipQFormerConfig

        document = read_object(opened.folder / "config.json").get("qformer_config")
        config = InstructBlipQFormerConfig(**(document or {}))
        self._most: int = config.max_position_embeddings
        self.identity = (opened.processor.qformer_tokenizer.backend_tokenizer.to_str(), self._most)

    def with_prompt(self, images: Sequence[ImageFile], ids: Sequence[int]) -> Sequence[ImageFile]:
        tokenizer = self.opened.tokenizer
        text = tokenizer.decode([token for token in ids if token not in tokenizer.special_ids])
        n_tokens = len(self.opened.processor.qformer_tokenizer(text)["input_ids"])
        if n_tokens > self._most:
            raise BrokenSample(
                f"its prompt has {n_tokens:,} tokens for the Q-Former, which reads {self._most:,} "
                "at most; shorten it"
            )
        return [image._replace(prompt=text) for image in images]

    def inputs(self, images: Samples) -> dict[str, Tensor]:
        flat = [image for sample in images for image in sample]
        prompts = self.opened.processor.qformer_tokenizer(
            [image.info.get(PROMPT, "") for image in flat],
            padding=True,
            padding_side="right",  # positions count from the left
            return_tensors="pt",
        )
        names = ("input_ids", "attention_mask")
        return super().inputs(images) | {f"qformer_{name}": prompts[name] for name in names}
