"""The trainer of reward models, and the function that rates answers with one."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtitan.components.chat_template import resolve_chat_template
from torchtitan.components.data.base import Batch, images_in
from torchtitan.components.data.finetuning.preference import SEQUENCES_PER_SAMPLE, sum_answers
from torchtitan.components.data.finetuning.row_formats import find_format
from torchtitan.components.peft import LoRA
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.pretrained import load_model, spec_of
from torchtitan.protocols.converter import HEAD
from torchtitan.tools.device import device_type
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) of rewards (Llama 2, arXiv:2307.09288,
    equation 2)."""
    return -F.logsigmoid(chosen - rejected - margin)


class RewardTrainer(Trainer):
    """Train a model to give chosen answers higher rewards than rejected ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run of reward modeling."""

        trains_scores: ClassVar[bool] = True

        def validate(self) -> None:
            for converter in self.model_converters:
                trains_head = isinstance(converter, LoRA.Config) and any(
                    re.search(pattern, HEAD) for pattern in converter.include
                )
                if converter._owner.freezes and not trains_head:  # type: ignore[attr-defined]
                    raise UserError(
                        "--model_converters would freeze the new head of a reward model; train all "
                        "weights, or use --config reward_lora, which adapts the head too"
                    )
            why = "since the head with one row is not split, and reads whole conversations"
            self.parallelism.require_one(
                "tensor", "context", "pipeline", user="--module reward", why=why
            )

    sequences_per_sample = SEQUENCES_PER_SAMPLE
    measures_named = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's pairs, and their number."""
        scores_BL1 = self.models["model"](
            batch["input"], batch.get("attention"), head=F.linear, **images_in(batch)
        )
        sequences = batch["sequences"]
        # of an answer; padding counts to the first one
        is_last = sequences != sequences.roll(-1, dims=1)
        chosen, rejected = sum_answers(
            scores_BL1[..., 0].float().where(is_last, 0), sequences
        ).unbind(-1)
        is_pair, margins = sum_answers(is_last.float(), sequences)[..., 0], chosen - rejected
        for name, values in zip(
            self.measures_named, (chosen, rejected, margins, margins > 0), strict=True
        ):
            self.measure(name, (values * is_pair).sum(), is_pair.sum())
        return (
            bradley_terry_loss(chosen, rejected, batch["margins"]) * is_pair
        ).sum(), is_pair.sum()


def check_reward_model(folder: str) -> None:
    """Raise `UserError` unless `folder` has a reward model, without reading its weights."""
    if not spec_of(folder).model.scores:
        raise UserError(f"{folder} is no reward model; train one with --module reward")


def batch_reward_function(
    folder: str, batch_size: int = 16
) -> Callable[[Sequence[str], Sequence[str], Sequence[Mapping[str, Any]]], list[float]]:
    """Return a function of prompts, completions and rows: the rewards of completions as the answers
    to the rows' prompts, with tokenizer and chat template of the reward model in `folder`, which
    computes `batch_size` of similar length at a time. Raise `UserError` if the folder has no reward
    model."""
    check_reward_model(folder)
    device = device_type()
    loaded = load_model(folder, device=device)
    tokenizer = PretrainedTokenizer.Config().build(path=loaded.tokenizer_path)
    template = resolve_chat_template("", [loaded.tokenizer_path], tokenizer)

    def ids_of(completion: str, row: Mapping[str, object]) -> Tensor:
        sample: Any = find_format(list(row), "auto", {}, "prompt").convert(dict(row))
        messages = [*sample.prompt.messages, {"role": "assistant", "content": completion}]
        text = template.render(messages, tools=sample.prompt.tools, add_generation_prompt=False)
        return torch.tensor(tokenizer.tokenize([text], allow_special=True)[0])

    @torch.no_grad()
    def rate(
        prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Mapping[str, object]]
    ) -> list[float]:
        texts = list(map(ids_of, completions, rows))
        rewards = [0.0] * len(texts)
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            lengths = torch.tensor([len(texts[number]) for number in numbers])
            # tokens after the last one do not change its score
            padded = pad_sequence([texts[number] for number in numbers], batch_first=True)
            scores_BL = loaded.model(padded.to(device), head=F.linear)[..., 0]
            last = scores_BL.gather(1, lengths[:, None].to(device) - 1)
            for number, reward in zip(numbers, last.flatten().tolist(), strict=True):
                rewards[number] = reward
        return rewards

    return rate
