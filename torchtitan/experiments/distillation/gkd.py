"""The trainer of generalized knowledge distillation (`CONFIG=gkd`)."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from torchtitan.components.data.base import NO_DOCUMENT, Batch
from torchtitan.components.data.finetuning.answered_prompts import AnsweredPromptDataLoader
from torchtitan.components.rollout.trajectory import Group, Trajectory
from torchtitan.tools.errors import UserError, require

from .trainer import OnPolicyTrainer


class GKDTrainer(OnPolicyTrainer):
    """Each step learns from the student's own answers with the probability λ, and otherwise from
    the answers of the data (Agarwal et al., arXiv:2306.13649, algorithm 1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(OnPolicyTrainer.Config):
        """A whole run of generalized knowledge distillation."""

        on_policy_share: float = 0.5
        """Probability that a step learns from the student's own answers, λ of GKD."""

        def validate(self) -> None:
            OnPolicyTrainer.Config.validate(self)
            share = self.on_policy_share
            require(0 <= share <= 1, "--on_policy_share", share, "from 0 to 1")
            if not isinstance(self.dataloader, AnsweredPromptDataLoader.Config):
                raise UserError("--config gkd needs the answers of an AnsweredPromptDataLoader")
            function = self.rollout.function
            require(
                not function,
                "--rollout.function",
                function,
                "empty with --config gkd, whose rows have no texts of environments",
            )

    config: Config
    measures_named = (*OnPolicyTrainer.measures_named, "on_policy")

    def answers_to(self, prompts: list[Batch]) -> list[Group]:
        config = self.config
        is_own = is_on_policy(config.on_policy_share, config.debug.seed, self.step + 1)
        self.measure("on_policy", torch.tensor(float(is_own)), torch.tensor(1.0))
        if is_own:
            return super().answers_to(prompts)
        self.named_means = {}  # of sampled answers only
        return [answers_in(prompts)]


def is_on_policy(share: float, seed: int, step: int) -> bool:
    """Return whether a step samples its answers: true with the probability `share`. It depends on
    the arguments only, so that a resumed run and all ranks agree."""
    key = np.random.SeedSequence([seed % (1 << 64), step])
    raw = int(np.random.PCG64(key).random_raw())
    return (raw >> 11) * 2.0**-53 < share


def answers_in(batches: Iterable[Batch]) -> list[Trajectory]:
    """Return the conversations of batches of an `AnsweredPromptDataLoader`, whose answers are
    trained, without padding."""
    return [
        Trajectory(list(tokens), [0.0] * len(tokens), list(trained))
        for batch in batches
        for (tokens, trained), document in zip(
            batch["given"], batch["documents"][:, 0].tolist(), strict=True
        )
        if document != NO_DOCUMENT
    ]
