"""The trainer of reward models, and the function that rates answers with one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.chat_template import resolve_chat_template
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.preference import SEQUENCES_PER_SAMPLE, sum_answers
from torchtitan.components.data.finetuning.row_formats import find_format
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.pretrained import load_model, spec_of
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

        trains_scores = True

        def validate(self) -> None:
            if any(converter._owner.freezes for converter in self.model_converters):  # type: ignore[attr-defined]
                raise UserError(
                    "--model_converters would freeze the new head of a reward model; train all "
                    "weights"
                )
            self.parallelism.require_one("tensor", "context", "pipeline", user="--module reward")

    sequences_per_sample = SEQUENCES_PER_SAMPLE
    measures_named = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's pairs, and their number."""
        scores_BL1 = self.models["model"](batch["input"], batch.get("attention"), head=F.linear)
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


def reward_function(folder: str) -> Callable[[str, str, Mapping[str, Any]], float]:
    """Return a function of prompt, completion and row: the reward of a completion as the answer to
    the row's prompt, with tokenizer and chat template of the reward model in `folder`. Raise
    `UserError` if the folder has no reward model."""
    check_reward_model(folder)
    loaded = load_model(folder, device=device_type())
    tokenizer = PretrainedTokenizer.Config().build(path=loaded.tokenizer_path)
    template = resolve_chat_template("", [loaded.tokenizer_path], tokenizer)

    @torch.no_grad()
    def rate(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        sample: Any = find_format(list(row), "auto", {}, "prompt").convert(dict(row))
        messages = [*sample.prompt.messages, {"role": "assistant", "content": completion}]
        text = template.render(messages, tools=sample.prompt.tools, add_generation_prompt=False)
        ids = torch.tensor(tokenizer.tokenize([text], allow_special=True), device=device_type())
        return float(loaded.model(ids, head=F.linear)[0, -1])

    return rate
