"""The trainer of reinforcement learning."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from torchtitan.components.data.base import Batch, images_in
from torchtitan.components.generation import Engine
from torchtitan.components.losses.entropies import log_probs_and_entropies
from torchtitan.components.losses.log_probs import token_log_probs
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.losses.policy_loss import (
    METHODS,
    OF_TOKENS,
    PolicyLoss,
    group_advantages,
)
from torchtitan.components.rollout.batches import Advantage
from torchtitan.components.rollout.replay import Replay, ReplayConfig
from torchtitan.components.rollout.trajectory import Group, advantages_of
from torchtitan.components.rollout.vllm import VLLMEngine
from torchtitan.distributed.process_group import on_all_ranks
from torchtitan.experiments.reward.rated_rollouts import EQUAL_REWARDS, RatedRolloutTrainer
from torchtitan.experiments.rl.advantages import estimate_advantages
from torchtitan.tools.errors import SharedError, UserError, errors_of, require
from torchtitan.tools.logging import logger
from torchtitan.trainer import StepResult
from torchtitan.trainer.skips import ends_run

Head = Callable[..., Tensor]
"""See `token_log_probs`."""

_OF_WHOLE_ANSWERS = (*OF_TOKENS, "batch_scaled", "best")
"""Advantages that compare whole answers only, not their turns."""


class RLTrainer(RatedRolloutTrainer):
    """Raise the probability of trajectories that are better than their group. In a step,
    `next_micro_batches` samples, rates and packs them, and `update` trains on them once or more;
    `compute_loss` calls the `PolicyLoss`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RatedRolloutTrainer.Config):
        """A whole run of reinforcement learning."""

        policy: PolicyLoss.Config = field(default_factory=PolicyLoss.Config)
        """Loss of the policy."""

        replay: ReplayConfig = field(default_factory=ReplayConfig)
        """Replay of rare successes."""

        def validate(self) -> None:
            RatedRolloutTrainer.Config.validate(self)
            if type(self.chosen_loss) is not CrossEntropyLoss.Config:
                raise UserError(
                    "reinforcement learning computes log-probabilities, and takes no other --loss"
                )
            self.policy.validate()
            if (self.policy.method == "ppo") != cast(Any, self._owner).has_critic:
                raise UserError(
                    "--policy.method ppo needs --module ppo, and the other methods --module rl"
                )
            size, advantage = self.rollout.group_size, METHODS[self.policy.method].advantage
            needs_group = advantage not in OF_TOKENS
            require(size >= 2 or not needs_group, "--rollout.group_size", size, "2 or more")
            if self.policy.entropy_weight or self.policy.entropy_target is not None:
                self.parallelism.require_one(
                    "tensor",
                    user="--policy.entropy_weight or entropy_target, which need whole "
                    "distributions",
                )
            self.replay.validate()
            if self.replay.size:
                self.check_replay()
            self.check_rated_rollouts()

        def check_replay(self) -> None:
            """Raise `UserError` if kept trajectories cannot be trained."""
            method = self.policy.method
            require(
                not METHODS[method].resample,
                "--policy.method",
                method,
                "another one with --replay.size: it samples again instead of training failures",
            )
            require(
                METHODS[method].advantage not in OF_TOKENS,
                "--policy.method",
                method,
                "another one with --replay.size, which compares answers to one prompt",
            )
            if self.policy.replay_experts:
                raise UserError(
                    "--replay.size cannot be combined with --policy.replay_experts: kept answers "
                    "are of earlier weights, whose experts are not kept"
                )
            if self.prompts_have_images:
                raise UserError("--replay.size keeps answers to prompts without images only")

    config: Config
    has_critic = False
    measures_named = (
        *RatedRolloutTrainer.trajectory_measures,
        *RatedRolloutTrainer.staleness_measures,
        "reward_p10",
        "reward_p50",
        "reward_p90",
        "entropy",
        "clip_fraction",
        "bound_fraction",
        "kl",
        "importance_weight",
        "importance_cut",
        "sampler_gap",
        "experts_replayed",
        "value_loss",
        "replayed",
    )

    def __init__(self, config: Config):
        self.needs_reference = config.policy.beta > 0
        self.records_experts = config.policy.replay_experts
        super().__init__(config)
        self.temperature = config.rollout.temperature
        replay, data = config.replay, self.dataloader.fingerprint
        self.replay = Replay(replay.size, replay.success, replay.rare, data=data)
        self.policy = config.policy.build(max_new_tokens=config.rollout.max_new_tokens)
        n_parts, n_prompts = config.policy.minibatches, self.prompts_per_rank
        require(
            n_prompts % n_parts == 0,
            "--policy.minibatches",
            n_parts,
            f"a divisor of {n_prompts}, the prompts of a step on each rank",
        )

    def build_engine(self) -> Engine | VLLMEngine:
        is_own = self.records_experts and self.config.rollout.engine == "embedded"
        with errors_of("--policy.replay_experts") if is_own else nullcontext():
            return super().build_engine()

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        """Sample trajectories for the next prompts, and return them in packed windows, equally many
        on each rank."""
        self.is_first_update = True
        groups = self.sample_groups(batches)
        if n_tokens := self.measure_trajectories(groups, percents=(10, 50, 90)):
            self.tokens_per_step = n_tokens
        if self.config.rollout.max_staleness:
            self.measure_staleness(groups)
        self.write_completions(groups)
        groups = self.with_replay(groups)
        kind = self.policy.method.advantage
        if kind in _OF_WHOLE_ANSWERS:
            has_turns = any(t.token_rewards for group in groups for t in group)
            if not on_all_ranks(not has_turns):
                method = f"--policy.method {self.config.policy.method}"
                raise SharedError(
                    f"{method} with the advantage {kind} takes no rewards per turn; use another "
                    "method or --policy.advantage"
                )
        deviation = self.reward_deviation(groups) if kind == "batch_scaled" else 1.0
        advantages = advantages_of(
            groups, partial(group_advantages, kind=kind, deviation=deviation)
        )
        if (
            on_all_ranks(not any(np.abs(advantage).max() > 1e-9 for advantage in advantages))
            and groups
            and self.rank == 0
        ):
            what = (
                "only the entropy to learn from"
                if self.policy.entropy.is_on
                else "no learning signal"
            )
            logger.warning("no group has answers with different rewards, so this step has %s", what)
        return self.packed_parts(groups, advantages)

    def with_replay(self, groups: list[Group]) -> list[Group]:
        """Return the groups with kept successes in some, and measure their number, which the
        measures of sampled trajectories do not include."""
        leads = self.parallel_dims.is_batch_leader
        mixed = self.replay.mixed(groups, self.ranks, leads)
        if self.config.replay.size:
            own = sum(new is not old for new, old in zip(mixed, groups, strict=True))
            n_replayed = sum(self.ranks.gather(own if leads else 0))
            self.measure("replayed", torch.tensor(n_replayed), torch.tensor(1))
        return mixed

    @property
    def prompts_per_rank(self) -> int:
        return self.gradient_accumulation_steps * self.config.training.local_batch_size

    def reward_deviation(self, groups: list[Group]) -> float:
        """Return the standard deviation of rewards over all ranks, without trajectories that have
        no verdict."""
        own = [t.reward for group in groups for t in group if t.reward is not None]
        counted = self.ranks.gather(own if self.parallel_dims.is_batch_leader else [])
        rewards = torch.tensor(list(itertools.chain(*counted)), dtype=torch.float64)
        return rewards.std().item() if len(rewards) > 1 else 0.0

    def packed_parts(self, groups: list[Group], advantages: list[Advantage]) -> list[Batch]:
        """Return the packed windows of each mini-batch of prompts, one after the other, and record
        their numbers. A method that trains the best only leaves the others out."""
        left = iter(advantages)
        pairs = [[(t, next(left)) for t in group] for group in groups]
        if self.policy.method.advantage == "best":
            pairs = [[(t, a) for t, a in group if np.any(a)] for group in pairs]
        size = -(-len(pairs) // self.config.policy.minibatches) if pairs else 1
        parts = []
        for number in range(self.config.policy.minibatches):
            part = list(itertools.chain(*pairs[number * size : (number + 1) * size]))
            parts.append(self.packed([[t for t, _ in part]], [a for _, a in part]))
        self.part_sizes = [len(part) for part in parts if part]
        return list(itertools.chain(*parts))

    def sample_groups(self, batches: Iterator[Batch]) -> list[Group]:
        """Return the groups of this rank's prompts. With a method that resamples, return only
        groups with unequal rewards, fewer at the end of the data; raise `UserError` if ten global
        batches have no such group."""
        resamples = self.policy.method.resample
        wanted = self.prompts_per_rank
        groups: list[Group] = []
        for sampled in self.sampled_batches(batches):
            groups += [
                group
                for group in sampled
                if not resamples or len({t.total for t in group} - {None}) > 1
            ]
            if not resamples or on_all_ranks(len(groups) >= wanted or not sampled):
                return groups[:wanted]
        if on_all_ranks(not groups):
            method = f"--policy.method {self.config.policy.method}"
            raise SharedError(
                f"{EQUAL_REWARDS}, from which {method} learns nothing; use an easier reward, or "
                "grpo"
            )
        return groups[:wanted]

    def update(self, micro_batches: list[Batch]) -> StepResult:
        self.complete_batches(micro_batches)
        rest = iter(micro_batches)
        parts = [list(itertools.islice(rest, size)) for size in self.part_sizes] or [[]]
        outcome = super().update(parts[0])
        n_updates = self.config.policy.updates * len(parts)
        for part in itertools.islice(itertools.cycle(parts), 1, n_updates):
            if not outcome.is_taken or outcome.data_exhausted:
                break
            self.is_first_update = False
            self.optimizer.zero_grad()
            last = super().update(part)
            if not last.is_taken:
                break
            outcome = dataclasses.replace(last, measures={**outcome.measures, **last.measures})
        return self.follow_entropy(outcome)

    def follow_entropy(self, outcome: StepResult) -> StepResult:
        """Adapt the factor of the entropy to a step that was taken, and add the factor that the
        step had to its numbers."""
        control = self.policy.entropy
        if not (control.is_adaptive and outcome.is_taken and "entropy" in outcome.measures):
            return outcome
        factor = control.factor
        control.observe(outcome.measures["entropy"])
        return dataclasses.replace(outcome, measures={**outcome.measures, "entropy_weight": factor})

    def state_dict(self) -> dict[str, object]:
        control = self.policy.entropy
        adapted = {"entropy": control.state_dict()} if control.is_adaptive else {}
        kept = {"replay": self.replay.state_dict()} if self.config.replay.size else {}
        return {**super().state_dict(), **adapted, **kept}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "entropy" in state_dict:
            self.policy.entropy.load_state_dict(state_dict["entropy"])
        if "replay" in state_dict:
            self.replay.load_state_dict(state_dict["replay"])

    def complete_batches(self, batches: list[Batch]) -> None:
        """Add what the weights before the first update say of the batches, unless the first update
        does: log-probabilities for further mini-batches, and advantages of tokens."""
        policy = self.config.policy
        kind = self.policy.method.advantage
        if not batches or (policy.minibatches == 1 and kind not in OF_TOKENS):
            return
        with torch.no_grad(), self.precision.fixed_weights(), self.mixed_precision():
            for batch in batches:
                outputs = self.policy_outputs(batch)
                log_probs_BL = outputs["log_probs"]
                batch["old_logprobs"].copy_(log_probs_BL)
                batch["old_values"] = outputs.get("values", torch.zeros_like(log_probs_BL))
                if policy.kl_in_reward:
                    divergence_BL = log_probs_BL - self.reference_log_probs(batch)
                    batch["penalties"] = policy.beta * divergence_BL
        if kind in OF_TOKENS:
            estimate_advantages(batches, policy.gae_decay if kind == "critic" else 1.0)

    def skip_step(self, outcome: StepResult, micro_batches: list[Batch]) -> None:
        """Skip the rest of a step whose first update was taken; such a step does not count as
        skipped."""
        if self.is_first_update or ends_run(self, outcome):
            super().skip_step(outcome, micro_batches)
        else:
            logger.warning(
                "step %d: a further update has %s. The step ends before it.", self.step + 1, outcome
            )

    def heads(self) -> dict[str, Head]:
        """Return functions of hidden states, output weights and labels, whose results for each
        position `policy_outputs` adds to the log-probabilities."""
        return {}

    def policy_outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the `log_probs` of each label, (B, L), `entropies` if the loss rewards them, and
        the results of `heads`."""
        needs_entropies = self.policy.entropy.is_on
        heads = self.heads()

        def head(*outputs: Any, **changes: Any) -> tuple[Tensor, ...]:
            inputs = (*outputs, batch["labels"])
            options = {**changes, "temperature": self.temperature}
            own = (
                log_probs_and_entropies(*inputs, **options)
                if needs_entropies
                else (token_log_probs(*inputs, **options),)
            )
            return (*own, *(each(*inputs, **changes) for each in heads.values()))

        attention = batch.get("attention")
        if "experts" in batch:
            assert attention is not None, "packed windows have one"
            attention = dataclasses.replace(attention, experts_BLNK=batch["experts"])
        results = self.models["model"](batch["input"], attention, head=head, **images_in(batch))
        names = ("log_probs", "entropies") if needs_entropies else ("log_probs",)
        return dict(zip((*names, *heads), results, strict=True))

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's sampled tokens, and the number of trajectories, or of
        tokens."""
        is_trained = batch["labels"] != IGNORE_INDEX
        reference_BL = self.reference_log_probs(batch) if self.needs_reference else None
        outputs = self.policy_outputs(batch)
        log_probs_BL = outputs.pop("log_probs")
        if self.is_first_update and self.config.policy.minibatches == 1:
            batch["old_logprobs"].copy_(log_probs_BL.detach())
        known = {**batch, "reference": reference_BL, **outputs}
        tokens = {
            name: values[is_trained] for name, values in known.items() if isinstance(values, Tensor)
        }
        loss, weight, measures = self.policy(log_probs_BL[is_trained], tokens)
        for name, values in measures.items():
            self.measure(name, values.sum(), is_trained.sum())
        if self.records_experts:
            self.measure(
                "experts_replayed", _has_experts(batch)[is_trained].sum(), is_trained.sum()
            )
        return loss, weight

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the negative rewards of one trajectory for each held-out prompt, and their
        number."""
        groups = self.sample(lambda: [batch], "validation", size=1)
        self.measure_trajectories(groups)
        totals = [trajectory.total for (trajectory,) in groups]
        rewards = torch.tensor([-total for total in totals if total is not None])
        rewards = rewards.to(self.device)
        return self.local_addend(rewards.sum()), self.local_addend(
            torch.full_like(rewards.sum(), len(rewards))
        )


def _has_experts(batch: Batch) -> Tensor:
    """Return which inputs of a batch have recorded experts, (B, L)."""
    if "experts" not in batch:
        return torch.zeros_like(batch["labels"], dtype=torch.bool)
    return (batch["experts"] >= 0).flatten(2).any(dim=-1)
