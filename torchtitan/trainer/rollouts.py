"""`RolloutTrainer`: a trainer that samples with its own weights, by the engine that the
configuration names."""

import asyncio
import contextlib
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.base import Batch
from torchtitan.components.data.finetuning.prompts import PromptInBatch, prompts_in
from torchtitan.components.generation import Engine, Sampling, stop_ids
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.observe.metric_sinks import JsonLines
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.components.rollout.rollout import Group, RolloutEngine, Trajectory, to_batches
from torchtitan.components.rollout.vllm import VLLMEngine, check_server
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.views import ExternalView, LiveSource, PlainView
from torchtitan.config.sections import require_at_least
from torchtitan.protocols.conversion import converted_model
from torchtitan.protocols.tensor_source import TensorSource
from torchtitan.tools.errors import UserError, errors_of, require
from torchtitan.tools.logging import logger
from torchtitan.tools.user_code import is_ctrl_c, user_frames, with_place
from torchtitan.trainer.callbacks import Callback, Recorder
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
    limit = f"at most --training.seq_len {training.seq_len}, since a window also holds the prompt"
    require(
        rollout.max_new_tokens <= training.seq_len,
        "--rollout.max_new_tokens",
        rollout.max_new_tokens,
        limit,
    )
    # whose processes of a tensor-parallel group would get different tokens
    if rollout.engine == "vllm":
        if isinstance(config.dataloader, ImagePromptDataLoader.Config):
            raise UserError(
                "--rollout.engine vllm sends token ids only, and these prompts have images; use "
                "embedded"
            )
        parallelism.require_one("tensor", user="--rollout.engine vllm")
        check_server(rollout.url)


class Completions(Recorder):
    """Append lines to `completions.jsonl` on rank 0. Resuming from step N drops later lines once; a
    fresh run moves an existing file aside. If the file cannot be written, the run continues without
    it."""

    def around_run(self) -> AbstractContextManager[Any]:
        if self.trainer.rank == 0:
            self.file = JsonLines(
                Path(self.trainer.config.dump_folder) / "completions.jsonl", self.trainer.step
            )
        return super().around_run()

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines of a step that is not complete yet."""
        for line in lines:
            self.use(partial(JsonLines.append, document=line))

    def on_failure(self, error: OSError) -> None:
        logger.warning(
            "completions.jsonl cannot be written: %s; the run continues without it", error
        )
        assert self.file is not None
        with contextlib.suppress(OSError):
            self.file.close()
        self.file = None


def _is_closed(error: BaseException) -> bool:
    """Return whether an engine ends a rollout that waits for a text, after another one has failed;
    otherwise code has raised the error."""
    if isinstance(error, asyncio.CancelledError):
        with contextlib.suppress(RuntimeError):  # without an event loop, nothing is canceled
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
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
    engine: Engine | VLLMEngine
    completions: Completions

    def __init__(self, config: Any):
        super().__init__(config)
        rollout = self.config.rollout
        tokenizer = self.tokenizer
        template = self.dataloader.template
        assert template
        folders = [tokenizer.folder] if tokenizer.folder else []
        self.stop_ids = stop_ids(tokenizer, *folders) | {*Stops(template, tokenizer).ids()}
        self.reader = self.dataloader.image_reader()
        if rollout.engine == "vllm":
            weights = huggingface_weights(self)
            self.engine = VLLMEngine(
                rollout.url, weights, self.stop_ids, rollout.max_rows, self.ranks
            )
        else:
            options = {
                "stop_ids": self.stop_ids,
                "max_rows": rollout.max_rows,
                "group": self.ranks.group,
                "reader": self.reader,
            }
            self.engine = Engine(self.model_parts[0], sampling=Sampling(temperature=1.0), **options)
        self.engine.context = min(self.engine.context, config.training.seq_len + 1)
        self.rollout = rollout.find_function()

    def build_callbacks(self) -> list[Callback]:
        self.completions = Completions(Completions.Config(), trainer=self)
        return [*super().build_callbacks(), self.completions]

    def sample(
        self, load: Callable[[], Iterable[Batch]], phase: str, size: int | None = None
    ) -> list[Group]:
        """Return `size` trajectories, by default `group_size`, of each prompt in the batches that
        `load` returns, held-out ones in the phase "validation". Raise `UserError` if it, a rollout
        or a reward fails on any rank."""
        most = self.config.rollout.max_new_tokens
        size = size or self.config.rollout.group_size
        texts = []
        prompts: list[PromptInBatch] = []
        leader = self.rank - self.parallel_dims.coordinate("tp")

        def read() -> tuple[int, list[int]]:
            prompts.extend(itertools.chain(*map(prompts_in, load())))
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
                    self.engine, self.tokenizer, self.rewards, ids, most, key, images
                )
                texts.append(self.checked_rollout(row, own, where))
            sampled[document] += 1
        with self.mixed_precision():
            trajectories = self.engine.run(texts)
        # The ranks of a tensor-parallel group sample the same tokens, but a reward may draw random
        # numbers.
        rewards = self.ranks.gather([trajectory.reward for trajectory in trajectories])[leader]
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            trajectory.reward = reward
        return [trajectories[start : start + size] for start in range(0, len(trajectories), size)]

    async def checked_rollout(
        self, row: Mapping[str, Any], engine: RolloutEngine, where: str
    ) -> Trajectory:
        """Return a valid trajectory. Raise `UserError` that names the row (`where`) and the
        function that fails."""
        with errors_of(where):
            subject = f"the rollout {self.config.rollout.function or 'single_turn'}"
            try:
                trajectory = await self.rollout(row, engine)
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
            trajectory.check(self.engine.context)
            if self.reader:
                trajectory.images = engine.images_of(trajectory.tokens)
                self.reader.check(trajectory.tokens[:-1], trajectory.images)
            return trajectory

    def packed(self, groups: Iterable[Group], advantages: Sequence[float] = ()) -> list[Batch]:
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

    def measure_trajectories(self, groups: Iterable[Group], percents: Sequence[int] = ()) -> int:
        """Measure `reward`, `length` (sampled tokens), `truncated` (the last token is not in
        `stop_ids`) and percentiles `reward_pN` of the trajectories of all ranks. Return the number
        of their tokens, with prompts."""
        own = itertools.chain(*groups) if self.parallel_dims.is_batch_leader else ()
        rows = [
            (t.reward, sum(t.loss_mask), t.tokens[-1] not in self.stop_ids, len(t.tokens))
            for t in own
        ]
        every = torch.tensor(
            list(itertools.chain(*self.ranks.gather(rows))), dtype=torch.float64
        ).view(-1, 4)
        for name, values in zip(("reward", "length", "truncated"), every.T, strict=False):
            self.measure(name, values.sum(), torch.tensor(len(every)))
        for percent in percents if len(every) else ():
            self.measure(f"reward_p{percent}", every[:, 0].quantile(percent / 100), torch.tensor(1))
        return int(every[:, 3].sum())


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
