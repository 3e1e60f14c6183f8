"""`RunState`: what the checkpoints of a run contain, and what it starts from."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.components.checkpoint import CheckpointManager, ModelState, RandomState
from torchtitan.components.checkpoint.identity import RunIdentity, identify_content
from torchtitan.components.optim.ema import WeightAverage
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.components.optim.spikes import SpikeGuard
from torchtitan.components.weights.assets import CheckpointAssets, files_in, read_converters
from torchtitan.components.weights.export import export_huggingface
from torchtitan.components.weights.pretrained import frozen_weights, load_initial_weights
from torchtitan.components.weights.sources import base_weights
from torchtitan.protocols import ModelConverter
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import is_url
from torchtitan.trainer.builder import RunBuilder
from torchtitan.trainer.data_progress import DataProgress
from torchtitan.trainer.models import PlainModel, RunModel

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # takes a second to import


class RunState(RunBuilder):
    """Base class with the state that a run saves, loads and is identified by. `Trainer` adds the loop."""

    step: int
    n_tokens_seen: int
    run_length: DataProgress
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    spikes: SpikeGuard
    ema: WeightAverage

    def build_checkpointer(self) -> CheckpointManager:
        """Build the checkpointer of everything that a resumed run needs."""
        config, spec = self.config, self.config.model_spec
        assets = self.tokenizer.folder
        data_files = {name: text.encode() for name, text in self.dataloader.assets().items()}
        changed_files = {**self.tokenizer.changed_files, **data_files}
        files = files_in(assets) if config.checkpoint.saves else {}
        export = partial(
            export_huggingface,
            spec=spec,
            assets=assets,
            changed_files=changed_files,
            converters=self.converters,
            dtype=getattr(torch, dtype) if (dtype := config.checkpoint.export_dtype) and self.converters else None,
        )
        return config.checkpoint.build(
            dump_folder=config.dump_folder,
            states=self.states(),
            rank_states={"dataloader": self.dataloader, "random": RandomState()},
            initial_loads=self.initial_loads(),
            assets=CheckpointAssets.of(spec, {**files, **changed_files}, converters=config.model_converters),
            export=export if "hf" in spec.formats else None,
            base_model=frozen_weights(config.checkpoint, config.debug.seed),
            identity=self.identity,
        )

    def states(self) -> dict[str, "Stateful"]:
        """Return the states that checkpoints of the run contain, by name."""
        names = ["optimizer", "lr_scheduler", "spikes", *(["ema"] if self.config.ema.decay is not None else [])]
        own: dict[str, Stateful] = {"trainer": self, **{name: getattr(self, name) for name in names}}
        if taken := {*own, "ema", "dataloader", "random"} & self.models.keys():
            raise UserError(f"a model cannot be named {min(taken)}, the name of another state in checkpoints")
        return {name: ModelState(model.parts) for name, model in self.models.items() if model.saved} | own

    def initial_loads(self) -> dict[str, Callable[[], None]]:
        """Return model name → function that loads its initial weights, also when resuming if checkpoints lack them."""
        config = self.config.checkpoint
        loads = {
            name: self._initial_load(model, model.weights, [])
            for name, model in self.models.items()
            if name != "model" and model.weights and model.parts
        }
        if self.config.ema.decay is not None:
            loads["ema"] = self.ema.reset
        path = config.initial_load_path
        is_other = path and not is_url(path) and (self.tokenizer.added or read_converters(path))
        if not (config.initial_load_in_hf or is_other or self.converters or config.save_trainable_only):
            return loads  # the checkpointer loads a matching DCP checkpoint itself
        return {"model": self._initial_load(self.models["model"], path, self.converters), **loads}

    def _initial_load(self, model: RunModel, path: str, converters: list[ModelConverter]) -> Callable[[], None]:
        initialize, added = partial(model.initialize, self.config.debug.seed), self.tokenizer.added
        source = (path, model.spec, model.parts, converters)
        return partial(load_initial_weights, *source, added=added, initialize=initialize)

    def identity(self) -> RunIdentity:
        """Return the properties that must stay the same when the run resumes."""
        identity = self.config.identity(self.tokenizer)
        properties = dict(identity.properties)
        for name, model in self.models.items():
            if isinstance(model, PlainModel):
                shapes = {key: list(value.shape) for key, value in model.parts[0].state_dict().items()}
                properties[f"architecture of {name}"] = identify_content(str(model), json.dumps(shapes))
            elif name != "model" and (model.weights or not model.saved):
                drawn = identify_content(f"drawn with --debug.seed {self.config.debug.seed} (Philox)", "")
                properties[f"weights of {name}"] = base_weights(model.weights) if model.weights else drawn
        return dataclasses.replace(identity, properties=properties)

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's own state. A subclass adds the state that it needs to resume."""
        return {"step": self.step, "n_tokens_seen": self.n_tokens_seen, **self.run_length.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.step, self.n_tokens_seen = state_dict["step"], state_dict["n_tokens_seen"]
        self.run_length.load_state_dict(state_dict)
