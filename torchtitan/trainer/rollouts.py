"""Rollouts of trainers: sampling with the run's own weights, by the engine that the configuration names."""

import itertools
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, cast

import torch

from torchtitan.components.checkpoint.state import ModelState
from torchtitan.components.data import PromptDataLoader
from torchtitan.components.generation import Engine, Sampling, stop_ids
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.components.rollout.rollout import Group, Rollouts, SamplingEngine
from torchtitan.components.rollout.vllm import VLLMEngine, check_server
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.views import ExternalView, LiveSource, PlainView
from torchtitan.protocols.conversion import converted_model
from torchtitan.protocols.tensor_source import TensorSource
from torchtitan.tools.errors import UserError
from torchtitan.trainer.trainer import Trainer


def check_rollouts(config: Any) -> None:
    """Raise `UserError` for a run that cannot sample with its section `rollout`."""
    rollout, parallelism, most = config.rollout, config.parallelism, config.training.seq_len
    rollout.validate()
    training = config.training
    in_tokens = any("t:" in change for change in training.batch_schedule)
    for option, is_set in (
        ("--lr_scheduler.unit tokens", config.lr_scheduler.unit == "tokens"),
        ("--training.batch_schedule in tokens", in_tokens),
        ("--training.seq_len_schedule", bool(training.seq_len_schedule)),
    ):
        if is_set:
            raise UserError(f"{option} needs a known number of tokens per step, which rollouts do not have; use steps")
    parallelism.require_one("context", "pipeline", user="rollouts, which the run's own weights generate")
    if rollout.max_new_tokens > most:
        raise UserError(
            f"--rollout.max_new_tokens is {rollout.max_new_tokens}, but a window of --training.seq_len {most} must "
            "also hold the prompt; decrease it, or increase --training.seq_len"
        )
    if rollout.engine == "vllm":  # whose processes of a tensor-parallel group would get different tokens
        parallelism.require_one("tensor", user="--rollout.engine vllm")
        check_server(rollout.url)


def build_rollouts(trainer: Trainer, rewards: Rewards) -> Rollouts:
    """Return the rollouts of a trainer whose configuration has the section `rollout`, and whose data are prompts."""
    config, tokenizer, template = trainer.config, trainer.tokenizer, cast(PromptDataLoader, trainer.dataloader).template
    rollout: Rollouts.Config = cast(Any, config).rollout
    assert template
    end, folders = template.end_of_turn_id(tokenizer), [tokenizer.folder] if tokenizer.folder else []
    stops = stop_ids(tokenizer, *folders) | (set() if end is None else {end})
    engine: SamplingEngine
    if rollout.engine == "vllm":
        engine = VLLMEngine(rollout.url, huggingface_weights(trainer), stops, rollout.max_rows, trainer.ranks)
    else:
        options: dict[str, Any] = {"stop_ids": stops, "max_rows": rollout.max_rows, "group": trainer.ranks.group}
        engine = Engine(trainer.model_parts[0], sampling=Sampling(temperature=1.0), **options)
    engine.context = min(engine.context, config.training.seq_len + 1)
    leader = trainer.rank - trainer.parallel_dims.coordinate("tp")
    parts = {"tokenizer": tokenizer, "rewards": rewards, "seed": config.debug.seed}
    return rollout.build(engine=engine, stop_ids=stops, ranks=trainer.ranks, leader=leader, **parts)


def huggingface_weights(trainer: Trainer) -> TensorSource:
    """Return the current weights of a trainer's model under Hugging Face's names, without adapters. Specifications
    have the type of the computation, except that buffers keep theirs."""
    spec, converters, state = trainer.config.model_spec, trainer.converters, ModelState(trainer.model_parts)
    source: TensorSource = LiveSource(state.state_dict())
    if converters:
        source = PlainView(source, converted_model(spec.model, converters), converters)
    dtype, adapter = getattr(torch, trainer.config.training.mixed_precision_param), format_for(spec, "hf").adapter
    view = ExternalView(source, adapter(spec.model))
    view.specs = adapter(spec.model).external_specs(
        {name: given if name in state.buffers else replace(given, dtype=dtype) for name, given in source.specs.items()}
    )
    return view


def measure_trajectories(
    trainer: Trainer, groups: Iterable[Group], ends: AbstractSet[int], percents: Sequence[int] = ()
) -> int:
    """Measure `reward`, `length` (sampled tokens), `truncated` (the last token is not in `ends`) and percentiles
    `reward_pN` of the trajectories of all ranks. Return the number of their tokens, with prompts."""
    own = itertools.chain(*groups) if trainer.parallel_dims.is_batch_leader else ()
    rows = [(t.reward, sum(t.loss_mask), t.tokens[-1] not in ends, len(t.tokens)) for t in own]
    every = torch.tensor(list(itertools.chain(*trainer.ranks.gather(rows))), dtype=torch.float64).view(-1, 4)
    for name, values in zip(("reward", "length", "truncated"), every.T, strict=False):
        trainer.measure(name, values.sum(), torch.tensor(len(every)))
    for percent in percents if len(every) else ():
        trainer.measure(f"reward_p{percent}", every[:, 0].quantile(percent / 100), torch.tensor(1))
    return int(every[:, 3].sum())
