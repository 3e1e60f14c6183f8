"""Answers that the model samples during training, and the rewards of them."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.checkpoint.state import kept_random_state
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.prompts import read_prompts
from torchtitan.components.evaluation.pass_at_k import pass_at_k
from torchtitan.components.evaluation.validate import split_name
from torchtitan.components.generation import Generation, Sampling, generate, stop_ids
from torchtitan.components.rollout.reward_trial import try_rewards
from torchtitan.components.rollout.rewards import REWARD_MODEL, RewardName, Rewards, Text
from torchtitan.config.sections import require_at_least
from torchtitan.tools.errors import UserError, errors_of, require
from torchtitan.trainer.callbacks import PeriodicEvaluation, refuse_scores
from torchtitan.trainer.evaluation import share_of
from torchtitan.trainer.run import Run, Sections
from torchtitan.trainer.samples import template_of

_OPTION = "--callbacks.answers"


class _Prompt(NamedTuple):
    ids: list[int]
    text: str
    row: dict[str, object]


class _Answer(NamedTuple):
    prompt: int
    reward: float | None
    """None: no verdict."""
    is_cut: bool
    """True if it ended at `max_new_tokens`."""


class Answers(PeriodicEvaluation):
    """Answer prompts every `freq` steps and after the last one, and report the mean reward and
    pass@k as `evaluation/NAME/…`. Data-parallel ranks divide the answers. Nothing that training
    depends on changes."""

    @dataclass(kw_only=True, slots=True)
    class Config(PeriodicEvaluation.Config):
        """Answers that are sampled and rated during training."""

        dataset: list[str] = field(default_factory=list)
        """Prompts, as --dataloader.dataset of reinforcement learning, each as DATASET or
        NAME=DATASET; the default name is the file's."""

        rewards: list[RewardName] = field(default_factory=list)
        """Functions whose sum is the reward of an answer: number, math, pattern=REGEX, length=N,
        package.module:function or file.py:function."""

        passing: float = 1.0
        """Smallest reward of a right answer."""

        per_prompt: int = 1
        """Answers to each prompt."""

        k: list[int] = field(default_factory=lambda: [1])
        """Numbers k of answers of which one must be right: pass_at_k, estimated from all answers to
        a prompt."""

        freq: int = 500
        """Training steps between evaluations."""

        limit: int | None = None
        """Maximum prompts per dataset. None: all."""

        max_new_tokens: int = 256
        """Tokens of an answer, at most."""

        temperature: float = 1.0
        """Temperature of sampling; 0: always the most probable token."""

        batch_size: int = 32
        """Answers that a rank writes at a time."""

        def validate(self) -> None:
            names = ("freq", "limit", "max_new_tokens", "batch_size", "per_prompt")
            require_at_least(
                1, **{f"callbacks__answers__{name}": getattr(self, name) for name in names}
            )
            with errors_of(_OPTION):
                Sampling(temperature=self.temperature).validate()
            is_random = self.temperature > 0 or self.per_prompt == 1
            least = f"above 0 with per_prompt {self.per_prompt}, since all answers would be equal"
            require(is_random, f"{_OPTION}.temperature", self.temperature, least)
            fits = all(1 <= k <= self.per_prompt for k in self.k)
            most = f"from 1 to {_OPTION}.per_prompt {self.per_prompt}"
            require(fits, f"{_OPTION}.k", self.k, most)
            if bool(self.dataset) != bool(self.rewards):
                raise UserError(f"{_OPTION}.dataset and {_OPTION}.rewards need each other")
            if of_models := [name for name in self.rewards if name.startswith(REWARD_MODEL)]:
                raise UserError(
                    f"{_OPTION}.rewards {of_models[0]}: reward models rate in --module rl; use a "
                    "function"
                )
            self.named_datasets()

        def named_datasets(self) -> dict[str, str]:
            """Return name → dataset. Raise `UserError` for a name of two."""
            pairs = [split_name(text, default=Path(text).stem) for text in self.dataset]
            for name, count in Counter(name for name, _ in pairs).items():
                if count > 1:
                    raise UserError(
                        f"{_OPTION}.dataset: '{name}' names two results; name one otherwise "
                        f"({name}2=DATASET)"
                    )
            return dict(pairs)

        def evaluates(self, task: str) -> bool:
            return task in self.named_datasets()

        def open_rewards(self) -> Rewards:
            """Return the reward functions. Raise `UserError` for an unknown one."""
            with errors_of(_OPTION):
                return Rewards(self.rewards, [])

        def is_on(self, run: Run) -> bool:
            return bool(self.dataset)

        def check_run(self, run: Sections) -> None:
            if not self.dataset:
                return
            user = f"{_OPTION} (evaluate the checkpoints: torchtitan eval)"
            run.parallelism.require_one("context", "pipeline", user=user)
            refuse_scores(run, _OPTION)
            length = run.training.seq_len
            room = f"below --training.seq_len {length}, which also holds the prompt"
            fits = self.max_new_tokens < length
            require(fits, f"{_OPTION}.max_new_tokens", self.max_new_tokens, room)
            self.open_rewards()
            for dataset in self.named_datasets().values():
                with errors_of(f"{_OPTION}.dataset"):
                    [first] = read_prompts(dataset, limit=1)
                with errors_of(f"{_OPTION}.rewards"):
                    text = "\n".join(str(one["content"]) for one in first.prompt.messages)
                    where = f"the first prompt of {dataset}"
                    try_rewards(self.rewards, where, text, first.row, group_size=self.per_prompt)

    config: Config

    def __init__(self, config: Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        self._prompts: dict[str, list[_Prompt]] = {}
        self._rewards = config.open_rewards()
        tokenizer = trainer.tokenizer
        template = template_of(trainer, _OPTION)
        folders = [tokenizer.folder] if tokenizer.folder else []
        self._stop_ids = stop_ids(tokenizer, *folders) | {*Stops(template, tokenizer).ids()}
        encoder = ChatEncoder(tokenizer, template, "assistant", [])
        for name, dataset in config.named_datasets().items():
            with errors_of(f"{_OPTION}.dataset"):
                prompts = read_prompts(dataset, config.limit)
            encoded = [encoder.encode_prompt(prompt.prompt).tolist() for prompt in prompts]
            self._check_lengths(name, encoded)
            self._prompts[name] = [
                _Prompt(ids, tokenizer.decode(ids, skip_special_tokens=True), prompt.row)
                for ids, prompt in zip(encoded, prompts, strict=True)
            ]

    def _check_lengths(self, name: str, prompts: Sequence[Sequence[int]]) -> None:
        room = self.trainer.config.training.seq_len - self.config.max_new_tokens
        longest = max(map(len, prompts))
        if longest > room:
            raise UserError(
                f"{_OPTION}: a prompt of {name} has {longest} tokens, and --training.seq_len "
                f"leaves {room} besides max_new_tokens {self.config.max_new_tokens}"
            )

    @property
    def period(self) -> int:
        return self.config.freq

    def evaluate(self) -> None:
        """Answer and rate all prompts."""
        trainer = self.trainer
        with trainer.evaluated_weights(), trainer.mixed_precision(), kept_random_state():
            for name, prompts in self._prompts.items():
                numbers = self._numbers(len(prompts), self._answers(prompts))
                trainer.report_measured(trainer.metrics.log_evaluation(trainer.step, name, numbers))

    def _numbers(self, n_prompts: int, answers: Sequence[_Answer]) -> dict[str, float]:
        n_each = self.config.per_prompt
        passing = self.config.passing
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        n_right = Counter(
            answer.prompt
            for answer in answers
            if answer.reward is not None and answer.reward >= passing
        )
        numbers = {
            f"pass_at_{k}": statistics.fmean(
                pass_at_k(n_each, n_right[prompt], k) for prompt in range(n_prompts)
            )
            for k in self.config.k
        }
        if rewards:
            numbers["reward"] = statistics.fmean(rewards)
        numbers["truncated"] = statistics.fmean(answer.is_cut for answer in answers)
        numbers["no_verdict"] = float(len(answers) - len(rewards))
        return numbers | {"prompts": float(n_prompts)}

    def _answers(self, prompts: Sequence[_Prompt]) -> list[_Answer]:
        """Return all answers to the prompts, on every rank."""
        (model,) = self.trainer.model_parts
        share, size = share_of(self.trainer), self.config.batch_size
        numbers = [number for number in range(len(prompts)) for _ in range(self.config.per_prompt)]
        found: dict[int, list[_Answer]] = {}
        for batch in share.rounds(-(-len(numbers) // size)):
            asked = numbers[batch * size : (batch + 1) * size]
            written = generate(
                model,
                [prompts[number].ids for number in asked],
                max_new_tokens=self.config.max_new_tokens,
                sampling=Sampling(temperature=self.config.temperature, seed=batch),
                stop_ids=self._stop_ids,
                group=share.group,
            )
            found[batch] = self._rated(prompts, asked, written)
        return [answer for answers in share.gather(found) for answer in answers]

    def _rated(
        self, prompts: Sequence[_Prompt], asked: Sequence[int], written: Sequence[Generation]
    ) -> list[_Answer]:
        tokenizer = self.trainer.tokenizer
        of_answers = [prompts[number] for number in asked]
        texts = [
            Text(prompt.text, tokenizer.decode(one.ids, skip_special_tokens=True), prompt.row)
            for prompt, one in zip(of_answers, written, strict=True)
        ]
        # Ranks of a tensor-parallel group have the same texts, but a reward may be random.
        of_ranks = self.trainer.ranks.all_ranks_or_raise(
            lambda: asyncio.run(self._rewards.totals(texts))
        )
        rewards = of_ranks[self.trainer.parallel_dims.tensor_leader]
        return [
            _Answer(number, reward, one.finish_reason == "length")
            for number, reward, one in zip(asked, rewards, written, strict=True)
        ]
