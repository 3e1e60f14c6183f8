"""The trainer of reinforcement learning."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.components.data.base import NO_DOCUMENT, Batch, to_batch
from torchtitan.components.data.finetuning.prompts import prompt_ids
from torchtitan.components.generation import Engine, Sampling, stop_ids
from torchtitan.components.log_probs import token_log_probs
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metric_sinks import JsonLines
from torchtitan.config.sections import require_at_least
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.trainer import RunModel, StepResult, Trainer

from . import losses
from .data import PromptRowDataLoader
from .rewards import Rewards
from .rollout import RolloutEngine, Trajectory, find_rollout, pack_trajectories, padding

Group = list[Trajectory]
"""Trajectories of one prompt."""

_LOGGED = 2
"""Trajectories to log, and to write to completions.jsonl, when metrics are logged."""

_MOST_ROUNDS = 10
"""Global batches that a step reads at most to replace groups with equal rewards."""


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """Loss of the policy."""

    method: Literal["grpo", "dr_grpo", "dapo", "rloo", "gspo"] = "grpo"
    """Method; see losses.METHODS."""

    clip_low: float | None = None
    """Largest distance of the ratio of probabilities below 1. None: the method's."""

    clip_high: float | None = None
    """Largest distance of the ratio of probabilities above 1. None: the method's."""

    beta: float = 0.0
    """Factor of the KL divergence from the initial weights, kept as a frozen reference; 0: without a reference."""

    kl: losses.KLEstimator = "k3"
    """Estimator of the KL divergence."""

    max_importance_weight: float = 2.0
    """Maximum correction of a token for a difference between the sampler's probability and the trainer's."""

    updates: int = 1
    """Optimizer updates per step, all on the same trajectories."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of trajectories, at temperature 1."""

    function: str = ""
    """Rollout, package.module:function or file.py:function. Empty: one answer, rated by the rewards."""

    group_size: int = 8
    """Trajectories per prompt."""

    max_new_tokens: int = 256
    """Maximum tokens of an answer."""

    max_rows: int = 64
    """Texts that a rank generates at a time; a finished one makes room for the next."""


class RLTrainer(Trainer):
    """Sample trajectories, rate them, and raise the probability of those better than their group; see the package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run of reinforcement learning."""

        policy: PolicyConfig = field(default_factory=PolicyConfig)
        """Loss of the policy."""

        rollout: RolloutConfig = field(default_factory=RolloutConfig)
        """Sampling of trajectories."""

        rewards: list[str] = field(default_factory=list)
        """Reward functions: number, pattern=REGEX, length=N, package.module:function or file.py:function."""

        reward_weights: list[float] = field(default_factory=list)
        """Weight of each reward function; empty: 1."""

        def validate(self) -> None:
            rollout, policy = self.rollout, self.policy
            if type(self.chosen_loss) is not CrossEntropyLoss.Config:
                raise UserError("reinforcement learning computes log-probabilities, and takes no other --loss")
            if rollout.group_size < 2:
                raise UserError(f"--rollout.group_size is {rollout.group_size}, but must be 2 or more")
            require_at_least(1, rollout__max_new_tokens=rollout.max_new_tokens, rollout__max_rows=rollout.max_rows)
            require_at_least(1, policy__updates=policy.updates)
            for name in ("clip_low", "clip_high", "beta", "max_importance_weight"):
                value = getattr(policy, name)
                if value is not None and not 0 <= value < math.inf:
                    raise UserError(f"--policy.{name} is {value}, but must be at least 0")
            self.parallelism.require_one("context", "pipeline", user="rollouts, which the run's own weights generate")
            if not (self.rewards or rollout.function):
                raise UserError("--rewards is empty; name a function, such as my_rewards.py:score")
            Rewards(self.rewards, self.reward_weights)
            find_rollout(rollout.function)

    config: Config
    dataloader: PromptRowDataLoader
    measures_named = ("reward", "length", "truncated", "entropy", "clip_fraction", "kl", "importance_weight")

    def __init__(self, config: Trainer.Config):
        super().__init__(config)
        config, folder = self.config, self.config.hf_assets_path
        self.rollout = find_rollout(config.rollout.function)
        self.rewards = Rewards(config.rewards, config.reward_weights)
        self.method = losses.METHODS[config.policy.method]
        assert self.dataloader.template
        end = self.dataloader.template.end_of_turn_id(self.tokenizer)
        ends = stop_ids(self.tokenizer, *([Path(folder)] if folder else []))
        self.stop_ids = ends | (set() if end is None else {end})
        self.completions: JsonLines | None = None

    def build_models(self) -> dict[str, RunModel]:
        models = super().build_models()
        if self.config.policy.beta:
            weights = self.config.checkpoint.initial_load_path
            models["reference"] = self.build_other_model(self.config.model_spec, weights=weights)
        return models

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        """Sample trajectories for the next prompts, and return them in packed windows, equally many on each rank."""
        position = self.dataloader.state_dict()
        self.is_first_update = True
        try:
            groups = self.sample_groups(batches)
        except UserError:
            # Resume before these prompts, once the user has mended the rewards.
            self.dataloader.load_state_dict(position)
            if self.step:
                self.sync_records()
                self.checkpointer.save(self.step, stopped=True)
                self.checkpointer.wait()
            raise
        rewards_PG = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
        advantages = losses.group_advantages(rewards_PG, self.method.advantage).flatten().tolist() if groups else []
        trajectories = list(itertools.chain.from_iterable(groups))
        self.describe(trajectories)
        seq_len, size = self.config.training.seq_len, self.config.training.local_batch_size
        windows = pack_trajectories(list(zip(trajectories, advantages, strict=True)), seq_len)
        n_windows = size * max(gather_objects(-(-len(windows) // size)))  # ranks take equally many forward passes
        windows += [padding(seq_len)] * (n_windows - len(windows))
        return [to_batch(windows[start : start + size]) for start in range(0, n_windows, size)]

    def sample_groups(self, batches: Iterator[Batch]) -> list[Group]:
        """Return the groups of this rank's prompts; with a method that resamples, only groups with unequal rewards."""
        training = self.config.training
        wanted = self.gradient_accumulation_steps * training.local_batch_size
        groups: list[Group] = []
        for number in range(_MOST_ROUNDS):
            loaded = super().next_micro_batches(batches)
            self.watchdog.phase("rollouts")
            phase = f"{self.step + 1}/{number}"
            sampled = self.run_rollouts(loaded, self.config.rollout.group_size, phase, self.dataloader.sample_name)
            self.log_samples(sampled)
            if not self.method.resample:
                return sampled
            groups += [group for group in sampled if len({trajectory.reward for trajectory in group}) > 1]
            if all(gather_objects(len(groups) >= wanted or not loaded)):
                break
        if not any(gather_objects(bool(groups))) and any(gather_objects(bool(loaded))):
            raise UserError(
                f"the rewards of each prompt's answers were equal in {_MOST_ROUNDS} global batches, from which "
                f"--policy.method {self.config.policy.method} learns nothing; use an easier reward, or grpo"
            )
        return groups[:wanted]

    def run_rollouts(
        self, batches: list[Batch], group_size: int, phase: str, name_of: Callable[[int], str]
    ) -> list[Group]:
        """Return `group_size` trajectories of each prompt. They depend on seed, phase, number of the prompt in the data
        and number in the group. Raise `UserError` for a rollout or reward that fails on any rank."""
        config = self.config.rollout
        engine = Engine(
            self.model_parts[0],
            sampling=Sampling(temperature=1.0),
            stop_ids=self.stop_ids,
            max_rows=config.max_rows,
            group=dist.group.WORLD if dist.is_initialized() else None,
        )
        engine.context = min(engine.context, self.config.training.seq_len + 1)
        texts = []
        for batch in batches:
            documents = batch["documents"][:, 0].tolist()
            for ids, row, document in zip(prompt_ids(batch), batch["rows"], documents, strict=True):
                if document == NO_DOCUMENT:
                    continue
                for number in range(group_size):
                    view = RolloutEngine(
                        engine,
                        self.tokenizer,
                        self.rewards,
                        ids,
                        config.max_new_tokens,
                        key=f"{self.config.debug.seed}/{phase}/{document}/{number}",
                        where=name_of(document),
                    )
                    texts.append(self.checked_rollout(json.loads(row), view))
        with self.mixed_precision():
            trajectories = engine.run(texts)
        if self.parallel_dims.tp > 1:  # else a reward with random numbers would differ between ranks
            leader = self.rank - self.parallel_dims.coordinate("tp")
            rewards = gather_objects([trajectory.reward for trajectory in trajectories])[leader]
            trajectories = [dataclasses.replace(t, reward=r) for t, r in zip(trajectories, rewards, strict=True)]
        return [trajectories[start : start + group_size] for start in range(0, len(trajectories), group_size)]

    async def checked_rollout(self, row: dict[str, Any], engine: RolloutEngine) -> Trajectory:
        """Return a valid trajectory. Raise `UserError` that names row and function if the user's code fails."""
        try:
            trajectory = await self.rollout(row, engine)
            trajectory.check(self.config.training.seq_len + 1)
        except Exception as error:
            name = self.config.rollout.function
            failed = f"{engine.where}: the rollout {name} failed: {type(error).__name__}: {error}"
            raise UserError(failed) if name else error from error
        return trajectory

    def describe(self, trajectories: list[Trajectory]) -> None:
        """Measure rewards and lengths, and count the tokens of all ranks."""
        own = [(trajectory.reward, len(trajectory.tokens)) for trajectory in trajectories]
        of_ranks = gather_objects(own if self.parallel_dims.is_batch_leader else [])
        everyone = list(itertools.chain.from_iterable(of_ranks))
        self.tokens_per_step = sum(length for _, length in everyone)
        quantiles = np.quantile([reward for reward, _ in everyone] or [math.nan], (0.1, 0.5, 0.9)).tolist()
        self.reward_quantiles = dict(zip(("reward_p10", "reward_p50", "reward_p90"), quantiles, strict=True))
        for trajectory in trajectories:
            truncated = float(trajectory.tokens[-1] not in self.stop_ids)
            values = {"reward": trajectory.reward, "length": sum(trajectory.loss_mask), "truncated": truncated}
            for name, value in values.items():
                self.measure(name, torch.tensor(value, device=self.device), torch.ones((), device=self.device))

    def log_samples(self, groups: list[Group]) -> None:
        """Log the first trajectories on rank 0, and append them to completions.jsonl."""
        if self.rank or not self.metrics.should_log(self.step + 1):
            return
        if self.completions is None:
            self.completions = JsonLines(Path(self.config.dump_folder) / "completions.jsonl", self.step)
        for trajectory in itertools.islice(itertools.chain.from_iterable(groups), _LOGGED):
            start = trajectory.loss_mask.index(True)
            parts = trajectory.tokens[:start], trajectory.tokens[start:]
            texts = dict(zip(("prompt", "completion"), map(self.tokenizer.decode, parts), strict=True))
            logger.info("reward %.3f: %r -> %r", trajectory.reward, texts["prompt"][-200:], texts["completion"][:400])
            numbers = {"step": self.step + 1, "reward": trajectory.reward, "tokens": trajectory.tokens}
            self.completions.append({**numbers, **texts})

    # --- updates ----------------------------------------------------------------------------------------------------

    def update(self, micro_batches: list[Batch]) -> StepResult:
        on_device = [self.post_dataloading_process(batch) for batch in micro_batches]
        outcome = super().update(on_device)
        for _ in range(self.config.policy.updates - 1):
            if not outcome.is_finite or outcome.data_exhausted:
                break
            self.is_first_update = False
            self.optimizer.zero_grad()
            last = super().update(on_device)
            outcome = dataclasses.replace(last, measures={**outcome.measures, **last.measures})
        return outcome

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's sampled tokens, and the number of trajectories, or of tokens."""
        policy, method = self.config.policy, self.method
        labels_BL = batch["labels"]
        head = partial(token_log_probs, labels_BL=labels_BL)
        inputs = batch["input"], batch["attention"]
        reference_BL = self.models["reference"](*inputs, head=head) if policy.beta else None
        log_probs_BL = self.models["model"](*inputs, head=head)
        if self.is_first_update:
            batch["old_logprobs"].copy_(log_probs_BL.detach())
        is_trained = labels_BL != IGNORE_INDEX
        names = ("old_logprobs", "logprobs", "advantages", "lengths", "samples")
        old, sampler, advantages, lengths, samples = (batch[name][is_trained] for name in names)
        log_probs = log_probs_BL[is_trained]
        log_ratio = log_probs - old
        if method.sequence_ratio:
            log_ratio = losses.mean_by_sample(log_ratio, samples)
        low, high = (
            default if value is None else value
            for value, default in zip((policy.clip_low, policy.clip_high), method.clip, strict=True)
        )
        token_losses, is_clipped = losses.clipped_losses(log_ratio, advantages, low, high)
        importance = losses.truncated_weights(old, sampler, policy.max_importance_weight)
        token_losses = token_losses * importance
        if reference_BL is not None:
            kl = losses.kl_estimates(log_probs, reference_BL[is_trained], policy.kl)
            token_losses = token_losses + policy.beta * kl
            self.measure("kl", kl.sum(), is_trained.sum())
        sums = {"entropy": -log_probs, "clip_fraction": is_clipped.float(), "importance_weight": importance}
        for name, values in sums.items():
            self.measure(name, values.sum(), is_trained.sum())
        constant = {"mean": 1 / lengths, "constant": 1 / self.config.rollout.max_new_tokens, "sum": 1.0}
        loss = (token_losses * constant[method.token_weight]).sum()
        return loss, is_trained.sum() if method.per_token else (1 / lengths).sum().round()

    def read_result(self, loss: Tensor, grad_norm: Tensor, n_tokens: Tensor) -> StepResult:
        outcome = super().read_result(loss, grad_norm, n_tokens)
        measured = {name: value for name, value in outcome.measures.items() if not math.isnan(value)}
        return dataclasses.replace(outcome, measures={**measured, **self.reward_quantiles})

    def validation_sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the negative rewards of one trajectory for each held-out prompt, and their number."""
        groups = self.run_rollouts([batch], 1, "validation", "validation prompt {}".format)
        trajectories = list(itertools.chain.from_iterable(groups))
        self.describe(trajectories)
        sums = -sum(trajectory.reward for trajectory in trajectories), len(trajectories)
        total, count = (self.local_addend(torch.tensor(float(value), device=self.device)) for value in sums)
        return total, count

    def close(self) -> None:
        if self.completions is not None:
            self.completions.close()
        super().close()
