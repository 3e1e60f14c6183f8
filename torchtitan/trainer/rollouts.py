"""`RolloutTrainer`: a trainer that samples with its own weights, by the engine that the
configuration names."""

import asyncio
import contextlib
import itertools
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch

from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.prompts import PromptInBatch, prompts_in
from torchtitan.components.generation import Engine, stop_ids
from torchtitan.components.generation.experts import ExpertSizes
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.observe.run_files import COMPLETIONS
from torchtitan.components.rollout.ahead import Rollouts, RolloutsAhead, added, staleness_of
from torchtitan.components.rollout.batches import Advantage, to_batches
from torchtitan.components.rollout.chat import Chat
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.components.rollout.rollout import ContextFull, RolloutEngine, log_completions
from torchtitan.components.rollout.trajectory import Group, Trajectory, shape_overlong
from torchtitan.components.rollout.vllm import VLLMEngine, check_server
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.views import ExternalView, LiveSource, PlainView
from torchtitan.config.sections import require_at_least
from torchtitan.protocols.conversion import converted_model
from torchtitan.protocols.tensor_source import TensorSource
from torchtitan.tools.errors import SharedError, UserError, errors_of, require
from torchtitan.tools.user_code import is_canceled, is_ctrl_c, user_frames, with_place
from torchtitan.trainer.ahead import RolloutsInFlight, check_ahead
from torchtitan.trainer.callbacks import Callback, LineRecorder
from torchtitan.trainer.step_result import StepResult
from torchtitan.trainer.trainer import Trainer


def check_rollouts(config: Any) -> None:
    """Raise `UserError` for a run that cannot sample with its section `rollout`."""
    rollout = config.rollout
    parallelism = config.parallelism
    training = config.training
    require_at_least(
        1, rollout__max_new_tokens=rollout.max_new_tokens, rollout__max_rows=rollout.max_rows
    )
    require_at_least(1, rollout__group_size=rollout.group_size)
    rollout.validate()
    rollout.find_function()
    unit = config.lr_scheduler.unit
    sizes = training.batch_schedule
    windows = training.seq_len_schedule
    why = "since rollouts do not know the tokens of a step"
    require(unit == "steps", "--lr_scheduler.unit", unit, f"steps, {why}")
    require(
        not any("t:" in change for change in sizes),
        "--training.batch_schedule",
        sizes,
        f"in steps, {why}",
    )
    require(not windows, "--training.seq_len_schedule", windows, f"empty, {why}")
    parallelism.require_one(
        "context", "pipeline", user="rollouts, which the run's own weights generate"
    )
    if rollout.function:
        why = (
            "since its processes must compute the same texts in the same pass, and a rollout may "
            "wait for anything in between"
        )
        parallelism.require_one("tensor", user="--rollout.function", why=why)
    limit = f"at most --training.seq_len {training.seq_len}, since a window also holds the prompt"
    require(
        rollout.max_new_tokens <= training.seq_len,
        "--rollout.max_new_tokens",
        rollout.max_new_tokens,
        limit,
    )
    if rollout.max_staleness:
        check_ahead(config)
    has_images = isinstance(config.dataloader, ImagePromptDataLoader.Config)
    # whose processes of a tensor-parallel group would get different tokens
    if rollout.engine == "vllm":
        if has_images:
            raise UserError(
                "--rollout.engine vllm sends token ids only, and these prompts have images; use "
                "embedded"
            )
        parallelism.require_one("tensor", user="--rollout.engine vllm")
        check_server(rollout.url)


class Completions(LineRecorder):
    """Append the lines of sampled trajectories, of steps that are not complete yet, to
    `completions.jsonl`."""

    file_name = COMPLETIONS


def _is_closed(error: BaseException) -> bool:
    """Return whether an engine ends a rollout that waits for a text, after another one has failed;
    otherwise code has raised the error."""
    if is_canceled(error):
        return True
    if isinstance(error, asyncio.CancelledError):
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, GeneratorExit) and innermost not in user_frames(error)


class RolloutTrainer(Trainer):
    """A trainer whose configuration has the section `rollout`, and whose data are prompts. A
    trajectory depends on weights, seed, phase, number of the prompt in the data, and number among
    the answers to this prompt."""

    config: Any
    dataloader: PromptDataLoader
    rewards = Rewards([], [])
    records_experts = False
    """True if trajectories get the experts that their tokens passed through."""
    engine: Engine | VLLMEngine
    ahead: RolloutsAhead
    """Rollouts of later steps; only with `--rollout.max_staleness`."""
    completions: Completions
    trajectory_measures = (
        "reward",
        "length",
        "truncated",
        "overlong",
        "no_verdict",
        "reused_tokens",
    )
    """For `measures_named`: means of the rewards of trajectories with a verdict, of the numbers of
    sampled tokens, and of whether the last token is not in `stop_ids`, the context ended the
    trajectory, and it has no verdict. With `--rollout.function` also the mean number of tokens of
    later turns that were not recomputed, since their keys and values were kept."""
    staleness_measures = ("staleness", "staleness_max", "dropped")
    """For `measures_named`: mean and maximum of the ages of sampled tokens, in steps, and the
    rollouts that were dropped since the step before; only with `--rollout.max_staleness`."""
    named_means: Mapping[str, float] = MappingProxyType({})
    """Means of the numbers that the reward functions and environments of a step have named."""

    def __init__(self, config: Any):
        super().__init__(config)
        rollout = self.config.rollout
        tokenizer = self.tokenizer
        template = self.dataloader.template
        assert template
        folders = [tokenizer.folder] if tokenizer.folder else []
        self.chat = Chat(template, tokenizer)
        self.stop_ids = stop_ids(tokenizer, *folders) | {*self.chat.stops.ids()}
        self.reader = self.dataloader.image_reader()
        self.engine = self.build_engine()
        self.rollout = rollout.find_function()
        if rollout.max_staleness:
            self.dataloader.read_ahead(rollout.max_staleness * self.global_batch_size)
            self.ahead = RolloutsAhead(cast(Engine, self.build_engine()))

    def build_engine(self) -> Engine | VLLMEngine:
        """Build an engine that samples with the run's weights."""
        rollout = self.config.rollout
        engine: Engine | VLLMEngine
        if rollout.engine == "vllm":
            weights = huggingface_weights(self)
            engine = VLLMEngine(
                rollout.url,
                weights,
                self.stop_ids,
                rollout.max_rows,
                self.ranks,
                sampling=rollout.sampling,
                experts=ExpertSizes.of(self.model_parts[0]) if self.records_experts else None,
            )
        else:
            engine = Engine(
                self.model_parts[0],
                sampling=rollout.sampling,
                logprobs_of="sampling",
                stop_ids=self.stop_ids,
                max_rows=rollout.max_rows,
                group=self.ranks.group,
                records_experts=self.records_experts,
                reader=self.reader,
            )
        engine.context = min(engine.context, self.config.training.seq_len + 1)
        return engine

    def build_callbacks(self) -> list[Callback]:
        self.completions = Completions(Completions.Config(), trainer=self)
        callbacks = [*super().build_callbacks(), self.completions]
        if self.config.rollout.max_staleness:
            callbacks.append(RolloutsInFlight(Callback.Config(), trainer=self))
        return callbacks

    def next_groups(self, batches: Iterator[Batch], number: int = 0) -> list[Group]:
        """Return the trajectories of the next global batch. A step may need several global
        batches; `number` counts them from 0. With `--rollout.max_staleness`, the rollouts may have
        begun in earlier steps."""
        n_ahead = self.config.rollout.max_staleness
        if not n_ahead:
            load = super().next_micro_batches
            return self.sample(lambda: load(batches), f"{self.step + 1}/{number}")
        with _shared_errors():
            self.begin_ahead(batches, 1 + min(n_ahead, self.total_steps - self.step - 1), number)
            with self.mixed_precision():
                rollouts, trajectories = self.ahead.finish_first(self.step)
            assert rollouts.position is not None
            self.dataloader.hold(rollouts.position)
            self.take_batches(rollouts.batches)
            self.has_data = bool(rollouts.batches)
            return self.rated(rollouts, trajectories, self.config.rollout.group_size)

    def begin_ahead(self, batches: Iterator[Batch], n_batches: int, number: int) -> None:
        """Begin rollouts of the next global batches until `n_batches` are in flight."""
        loader, engine = self.dataloader, self.ahead.engine
        if not self.ahead.n_batches:
            loader.hold(loader.read_position())
        for later in range(self.ahead.n_batches, n_batches):
            phase = f"{self.step + 1}/{number}+{later}"
            size = self.config.rollout.group_size
            begun = self.rollouts_of(lambda: self.read_batches(batches), phase, size, engine)
            self.ahead.begin(replace(begun, position=loader.read_position()))

    def sample(
        self, load: Callable[[], Iterable[Batch]], phase: str, size: int | None = None
    ) -> list[Group]:
        """Return `size` trajectories, by default `group_size`, of each prompt in the batches that
        `load` returns, held-out ones in the phase "validation". Raise `SharedError` if it, a
        rollout or a reward fails on any rank."""
        size = size or self.config.rollout.group_size
        with _shared_errors():
            rollouts = self.rollouts_of(load, phase, size, self.engine)
            with self.mixed_precision():
                trajectories = self.engine.run(rollouts.coroutines)
            return self.rated(rollouts, trajectories, size)

    def rollouts_of(
        self,
        load: Callable[[], Iterable[Batch]],
        phase: str,
        size: int,
        engine: Engine | VLLMEngine,
    ) -> Rollouts:
        """Return rollouts that have not begun; see `sample`."""
        most = self.config.rollout.max_new_tokens
        rollouts = Rollouts([], [], [])
        prompts: list[PromptInBatch] = []
        leader = self.parallel_dims.tensor_leader

        def read() -> tuple[int, list[int]]:
            rollouts.batches.extend(load())
            prompts.extend(itertools.chain(*map(prompts_in, rollouts.batches)))
            return leader, [prompt.document for prompt in prompts]

        # A prompt may occur several times in a global batch; ranks with the same leader have the
        # same prompts.
        of_leaders = dict(self.ranks.all_ranks_or_raise(read))
        earlier = (documents for other, documents in of_leaders.items() if other < leader)
        sampled = Counter(itertools.chain(*earlier))
        for ids, row, document, carried in prompts:
            images = [ImageFile.from_json(image) for image in carried]
            where = (
                f"validation prompt {document}"
                if phase == "validation"
                else self.dataloader.sample_name(document)
            )
            for number in range(sampled[document] * size, (sampled[document] + 1) * size):
                key = f"{self.config.debug.seed}/{phase}/{document}/{number}"
                own = RolloutEngine(
                    engine,
                    self.tokenizer,
                    self.rewards,
                    ids,
                    most,
                    key,
                    images,
                    sampling=self.config.rollout.sampling,
                    chat=self.chat,
                )
                rollouts.engines.append(own)
                rollouts.documents.append(document)
                rollouts.coroutines.append(self.checked_rollout(row, own, where))
            sampled[document] += 1
        return rollouts

    def rated(self, rollouts: Rollouts, trajectories: list[Trajectory], size: int) -> list[Group]:
        """Return the groups of `size` trajectories of rollouts that have ended, with the rewards
        that need all of them."""
        self.rate_batch(trajectories, rollouts.engines)
        self.take_rewards(trajectories, self.parallel_dims.tensor_leader)
        for trajectory, document in zip(trajectories, rollouts.documents, strict=True):
            self.shape(trajectory)
            trajectory.document = document
        return [trajectories[start : start + size] for start in range(0, len(trajectories), size)]

    async def checked_rollout(
        self, row: Mapping[str, object], engine: RolloutEngine, where: str
    ) -> Trajectory:
        """Return a valid trajectory. Raise `UserError` that names the row (`where`) and the
        function that fails."""
        with errors_of(where):
            subject = f"the rollout {self.config.rollout.function or 'single_turn'}"
            try:
                trajectory = await self.rollout(row, engine)
            except ContextFull as error:
                trajectory = engine.trajectory_of(error.tokens)
            except UserError:
                raise
            except BaseException as error:
                if is_ctrl_c(error) or _is_closed(error):
                    raise
                raise UserError(f"{subject} failed: {with_place(error)}") from error
            if not isinstance(trajectory, Trajectory):
                raise UserError(
                    f"{subject} failed: TypeError: it returned {trajectory!r:.60}, not a Trajectory"
                )
            if self.config.rollout.max_staleness:
                trajectory.versions = engine.versions_of(trajectory)
            if self.records_experts:
                trajectory.experts = engine.experts_of(trajectory)
            trajectory.n_reused = sum(turn.n_reused for _, turn in engine.sampled)
            trajectory.is_overlong |= engine.is_full
            trajectory.cut(self.engine.context)
            trajectory.named |= engine.rating.named
            trajectory.check(self.engine.context)
            if self.reader:
                trajectory.images = engine.images_of(trajectory.tokens)
                self.reader.check(trajectory.tokens[:-1], trajectory.images)
            return trajectory

    def rate_batch(
        self, trajectories: Sequence[Trajectory], engines: Sequence[RolloutEngine]
    ) -> None:
        """Add the ratings of functions that rate a whole batch: the completions of this rank's
        trajectories, in order. Raise `UserError` if one fails on any rank."""
        if not self.rewards.has_batch_functions:
            return

        def rate() -> None:
            texts = [engine.to_rate for engine in engines if engine.to_rate is not None]
            ratings = iter(asyncio.run(self.rewards.rate_batch(texts)))
            for trajectory, engine in zip(trajectories, engines, strict=True):
                if engine.to_rate is not None:
                    engine.add_rating(trajectory, next(ratings))

        self.ranks.all_ranks_or_raise(rate)

    def take_rewards(self, trajectories: Sequence[Trajectory], leader: int) -> None:
        """Take the rewards of the first rank with the same prompts. The ranks of a tensor-parallel
        group sample the same tokens, but a reward may draw random numbers. Raise `UserError` if a
        trajectory of any rank cannot be trained now, such as one that another rollout has
        changed."""

        def own() -> list[tuple[float | None, dict[int, float]]]:
            for trajectory in trajectories:
                trajectory.check(self.engine.context)
            return [_plain_rewards(trajectory) for trajectory in trajectories]

        rewards = self.ranks.all_ranks_or_raise(own)[leader]
        for trajectory, found in zip(trajectories, rewards, strict=True):
            trajectory.reward, trajectory.token_rewards = found

    def shape(self, trajectory: Trajectory) -> None:
        """Change the reward of a long trajectory by `--rollout.overlong`."""
        rollout = self.config.rollout
        limit = self.engine.context - trajectory.n_prompt
        if not rollout.function:
            limit = min(limit, rollout.max_new_tokens)
        shape_overlong(trajectory, limit, rollout.overlong, rollout.overlong_buffer)

    def packed(self, groups: Iterable[Group], advantages: Sequence[Advantage] = ()) -> list[Batch]:
        """Return trajectories in packed windows on the device, equally many batches on each rank;
        see `to_batches`. Raise `UserError` if an image changed."""
        trajectories, training = list(itertools.chain(*groups)), self.config.training
        samples = list(zip(trajectories, advantages or [0.0] * len(trajectories), strict=True))
        batches: list[Batch] = []

        def make() -> None:  # images may fail to be decoded
            batches.extend(
                to_batches(
                    samples,
                    training.seq_len,
                    training.local_batch_size,
                    self.ranks,
                    packs=self.dataloader.packs_answers,
                    make_batch=self.dataloader.answer_batch_maker(),
                )
            )

        self.ranks.all_ranks_or_raise(make)
        return [self.post_dataloading_process(batch) for batch in batches]

    def update(self, micro_batches: list[Batch]) -> StepResult:
        """Update the weights, while rollouts of later steps continue, and log `named_means`."""
        in_flight = self.ahead.beside() if self.config.rollout.max_staleness else nullcontext()
        with in_flight:
            outcome = super().update(micro_batches)
        return replace(outcome, measures={**self.named_means, **outcome.measures})

    def write_completions(self, groups: Iterable[Group]) -> None:
        """Log the first trajectories, and append them to `completions.jsonl`, on rank 0 in a step
        that is logged."""
        if self.rank == 0 and self.metrics.should_log(self.step + 1):
            self.completions.write(log_completions(self.step + 1, groups, self.tokenizer))

    def measure_trajectories(self, groups: Iterable[Group], percents: Sequence[int] = ()) -> int:
        """Measure `trajectory_measures` and percentiles `reward_pN` of the trajectories of all
        ranks, and set `named_means`. Return the number of their tokens, with prompts."""
        own = list(itertools.chain(*groups)) if self.parallel_dims.is_batch_leader else []
        rows = [
            (
                math.nan if t.total is None else t.total,
                sum(t.loss_mask),
                t.tokens[-1] not in self.stop_ids,
                t.is_overlong,
                t.total is None,
                t.n_reused,
                len(t.tokens),
            )
            for t in own
        ]
        gathered = self.ranks.gather((rows, [t.named for t in own]))
        every = torch.tensor(
            list(itertools.chain(*(rows for rows, _ in gathered))), dtype=torch.float64
        ).view(-1, 7)
        rewards = every[:, 0][~every[:, 0].isnan()]
        self.measure("reward", rewards.sum(), torch.tensor(len(rewards)))
        for name, values in zip(self.trajectory_measures[1:-1], every.T[1:5], strict=True):
            self.measure(name, values.sum(), torch.tensor(len(every)))
        if self.config.rollout.function:
            self.measure("reused_tokens", every[:, 5].sum(), torch.tensor(len(every)))
        for percent in percents if len(rewards) else ():
            self.measure(f"reward_p{percent}", rewards.quantile(percent / 100), torch.tensor(1))
        self.named_means = _means(itertools.chain(*(named for _, named in gathered)))
        return int(every[:, 6].sum())

    def measure_staleness(self, groups: Sequence[Group]) -> None:
        """Measure `staleness_measures` of the trajectories of all ranks."""
        leads = self.parallel_dims.is_batch_leader
        own = staleness_of(groups if leads else [], self.step)
        n_dropped = self.ahead.n_dropped if leads else 0
        self.ahead.n_dropped = 0
        parts, dropped = zip(*self.ranks.gather((own, n_dropped)), strict=True)
        every, one = added(parts), torch.tensor(1)
        self.measure("staleness", torch.tensor(every.total), torch.tensor(every.n_tokens))
        self.measure("staleness_max", torch.tensor(every.most), one)
        self.measure("dropped", torch.tensor(sum(dropped)), one)


def _plain_rewards(trajectory: Trajectory) -> tuple[float | None, dict[int, float]]:
    """Return the rewards as floats: a rollout may have computed them in another type, which
    `completions.jsonl` and checkpoints cannot contain."""
    reward = None if trajectory.reward is None else float(trajectory.reward)
    return reward, {place: float(value) for place, value in trajectory.token_rewards.items()}


@contextlib.contextmanager
def _shared_errors() -> Iterator[None]:
    """Raise a `UserError` of the block, which all ranks raise, as a `SharedError`."""
    try:
        yield
    except UserError as error:
        raise SharedError(str(error)) from error


def _means(numbers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over those that have it, by the name `rewards/NAME`."""
    values: dict[str, list[float]] = {}
    for each in numbers:
        for name, value in each.items():
            values.setdefault(f"rewards/{name}", []).append(value)
    return {name: math.fsum(each) / len(each) for name, each in sorted(values.items())}


def huggingface_weights(trainer: Trainer) -> TensorSource:
    """Return the current weights of a trainer's model under Hugging Face's names, without adapters.
    Specifications have the type of the computation, except that buffers keep theirs."""
    spec = trainer.config.model_spec
    converters = trainer.converters
    state = ModelState(trainer.model_parts)
    source = PlainView(
        LiveSource(state.state_dict()), converted_model(spec.model, converters), converters
    )
    dtype, buffers = getattr(torch, trainer.config.training.mixed_precision_param), state.buffers
    source.specs = {
        name: given if name in buffers else replace(given, dtype=dtype)
        for name, given in source.specs.items()
    }
    return ExternalView(source, format_for(spec, "hf").adapter(spec.model))
