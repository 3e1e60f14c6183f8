"""Content of a run's checkpoints, the weights that it starts from, and the run's identity."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from torchtitan.components.checkpoint import CheckpointManager, ModelState, RandomState
from torchtitan.components.checkpoint.identity import RunIdentity, identify_content
from torchtitan.components.checkpoint.resume import StartDecision
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.components.weights.assets import CheckpointAssets, files_in, read_converters
from torchtitan.components.weights.export import export_huggingface, exported_bytes
from torchtitan.components.weights.pretrained import frozen_weights, load_initial_weights
from torchtitan.components.weights.sources import base_weights
from torchtitan.protocols import ModelConverter
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import is_url
from torchtitan.trainer.callbacks import Callback, CallbackStates
from torchtitan.trainer.config import RunConfig
from torchtitan.trainer.models import PlainModel, RunModel
from torchtitan.trainer.run import Run

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # takes a second to import


class StoredRun(Run, Protocol):
    """A `Trainer` as the functions here see it."""

    converters: list[ModelConverter]
    start: StartDecision | None
    callbacks: list[Callback]

    @property
    def config(self) -> RunConfig: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> None: ...

    def states(self) -> "dict[str, Stateful]": ...

    def initial_loads(self) -> dict[str, Callable[[], None]]: ...

    def identity(self) -> RunIdentity: ...


def build_checkpointer(trainer: StoredRun) -> CheckpointManager:
    """Build the checkpointer of everything that a resumed run of a `Trainer` needs."""
    config = trainer.config
    spec = config.model_spec
    tokenizer = trainer.tokenizer
    data_files = {name: text.encode() for name, text in trainer.dataloader.assets().items()}
    changed_files = {**tokenizer.changed_files, **data_files}
    files = files_in(tokenizer.folder) if config.checkpoint.saves else {}
    dtype = config.checkpoint.export_dtype
    export = partial(
        export_huggingface,
        spec=spec,
        assets=tokenizer.folder,
        changed_files=changed_files,
        converters=trainer.converters,
        dtype=getattr(torch, dtype) if dtype and trainer.converters else None,
    )
    checkpointer: CheckpointManager = config.checkpoint.build(
        dump_folder=config.dump_folder,
        states=trainer.states(),
        rank_states={"dataloader": trainer.dataloader, "random": RandomState()},
        initial_loads=trainer.initial_loads(),
        assets=CheckpointAssets.of(
            spec, {**files, **changed_files}, converters=config.model_converters
        ),
        export=export if "hf" in spec.formats else None,
        exported_bytes=_exported_bytes(trainer),
        base_model=frozen_weights(config.checkpoint, config.debug.seed),
        identity=trainer.identity,
        decision=trainer.start,
    )
    return checkpointer


def _exported_bytes(trainer: StoredRun) -> int | None:
    """Return the size of the weights that the last save exports; None: the trained weights'."""
    checkpoint = trainer.config.checkpoint
    if not (trainer.converters and checkpoint.saves and checkpoint.last_save_in_hf):
        return None
    return exported_bytes(
        trainer.config.model_spec,
        trainer.converters,
        training_dtype=getattr(torch, trainer.config.training.dtype),
        dtype=getattr(torch, checkpoint.export_dtype) if checkpoint.export_dtype else None,
    )


def states_of(trainer: StoredRun, models: Mapping[str, RunModel]) -> "dict[str, Stateful]":
    """Return the states that checkpoints contain, by name: saved models, then a `Trainer`'s own.
    Raise `UserError` if a model has the name of another state."""
    own: dict[str, Stateful] = {
        "trainer": trainer,
        "optimizer": trainer.optimizer,
        "lr_scheduler": trainer.lr_scheduler,
        "spikes": trainer.spikes,
    }
    if trainer.loss_scale.is_on:
        own["loss_scale"] = trainer.loss_scale
    if trainer.config.ema.decay is not None:
        own["ema"] = trainer.ema
    if any(config.has_state for config in trainer.config.callbacks):
        own["callbacks"] = CallbackStates(lambda: trainer.callbacks)
    if taken := {*own, "loss_scale", "ema", "callbacks", "dataloader", "random"} & models.keys():
        raise UserError(
            f"a model cannot be named {min(taken)}, the name of another state in checkpoints"
        )
    return {name: ModelState(model.parts) for name, model in models.items() if model.saved} | own


def initial_loads(trainer: StoredRun) -> dict[str, Callable[[], None]]:
    """Return model name → function that loads its initial weights, also when resuming if
    checkpoints lack them."""
    config, converters = trainer.config.checkpoint, trainer.converters
    loads = {
        name: initial_load(trainer, model, model.weights, [])
        for name, model in trainer.models.items()
        if name != "model" and model.weights and model.parts
    }
    if trainer.loss_scale.is_on:  # turned on later, it begins with its first value
        loads["loss_scale"] = lambda: None
    if trainer.config.ema.decay is not None:
        loads["ema"] = trainer.ema.reset
    if any(callback.has_state for callback in trainer.config.callbacks):
        loads["callbacks"] = lambda: None  # turned on later, they keep their first state
    path = config.initial_load_path
    is_other = path and not is_url(path) and (trainer.tokenizer.added or read_converters(path))
    if not (config.initial_load_in_hf or is_other or converters or config.save_trainable_only):
        return loads  # the checkpointer loads a matching DCP checkpoint itself
    return {"model": initial_load(trainer, trainer.models["model"], path, converters), **loads}


def initial_load(
    trainer: StoredRun, model: RunModel, path: str, converters: list[ModelConverter]
) -> Callable[[], None]:
    """Return a function that loads the weights in `path` into a model, and draws what they lack."""
    return partial(
        load_initial_weights,
        path,
        model.spec,
        model.parts,
        converters,
        added=trainer.tokenizer.added,
        initialize=partial(model.initialize, trainer.config.debug.seed),
    )


def identify(
    config: RunConfig, tokenizer: Tokenizer, models: Mapping[str, RunModel]
) -> RunIdentity:
    """Return the properties that must stay the same when the run resumes."""
    identity = config.identity(tokenizer)
    properties = dict(identity.properties)
    for name, model in models.items():
        if isinstance(model, PlainModel):
            shapes = {key: list(value.shape) for key, value in model.parts[0].state_dict().items()}
            properties[f"architecture of {name}"] = identify_content(str(model), json.dumps(shapes))
        elif name != "model" and (model.weights or not model.saved):
            drawn = identify_content(f"drawn with --debug.seed {config.debug.seed} (Philox)", "")
            properties[f"weights of {name}"] = (
                base_weights(model.weights) if model.weights else drawn
            )
    return dataclasses.replace(identity, properties=properties)
