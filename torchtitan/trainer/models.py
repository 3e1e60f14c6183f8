"""`RunModel`: one of the models in a run."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan.components.optim.optimizer import trained_names
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.protocols import BaseModel, ModelSpec
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import allocate


@dataclass(kw_only=True)
class RunModel:
    """A sharded model of a run: a policy, a reference, a teacher, a critic. Call it to run a
    forward pass, which stores nothing for a backward pass if the model is frozen."""

    spec: ModelSpec

    parts: list[nn.Module]
    """The model, or this rank's stages of it under pipeline parallelism; empty once it is no longer
    needed."""

    num_parameters: int
    """Parameters of the plain model, before converters."""

    num_trained: int
    """Parameters that the optimizer updates; 0 if the model is frozen."""

    flops_per_token: float
    """Operations per token of a forward pass, and of a backward pass if the model is trained."""

    trained_names: list[str]
    """Canonical names of the trained parameters of all pipeline stages."""

    weights: str = ""
    """Checkpoint folder of the initial weights, in any format. Empty: initialized with
    `debug.seed`."""

    saved: bool = True
    """True if checkpoints contain the weights; otherwise a resumed run reads them from `weights`
    again."""

    offloaded: bool = False
    """True if FSDP keeps the weights in CPU memory between uses."""

    is_initialized: bool = True
    """False from allocation until every tensor has an initial value or is about to be loaded."""

    def __str__(self) -> str:
        kind = "trained" if self.num_trained else "frozen"
        return f"{self.spec.name} {self.spec.flavor}, {self.num_parameters:,} parameters, {kind}"

    def allocate(self, device: torch.device) -> None:
        """Allocate the weights on a device, or in CPU memory, and set the mode for training or
        inference."""
        for part in self.parts:
            allocate(part, "cpu" if self.offloaded else device)
            part.train(self.num_trained > 0)
        self.is_initialized = False

    def initialize(self, seed: int, *, loaded: Container[str] = ()) -> None:
        """Draw initial values, unless that has been done, except for tensors with canonical names
        in `loaded`, whose values are read from files."""
        if not self.is_initialized:
            for part in self.parts:
                initialize_weights(part, seed, loaded=loaded)
        self.is_initialized = True

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the forward pass; see `torchtitan.models.common.decoder.Decoder.forward`."""
        (model,) = self.parts
        if self.num_trained:
            return model(*args, **kwargs)
        with torch.no_grad():
            output = model(*args, **kwargs)
        free_gathered_weights(model)
        return output


class PlainModel(RunModel):
    """A plain `nn.Module` as a model of a run in a single process. Its class has drawn its
    weights."""

    def __str__(self) -> str:
        (module,) = self.parts
        kind = "trained" if self.num_trained else "frozen"
        return f"{type(module).__name__}, {self.num_parameters:,} parameters, {kind}"

    def allocate(self, device: torch.device) -> None:
        """Move the weights to a device, and set the mode for training or inference."""
        (module,) = self.parts
        module.to(device).train(self.num_trained > 0)

    def initialize(self, seed: int, *, loaded: Container[str] = ()) -> None:
        """Keep the weights."""


def run_models(
    built: object, config: Any, *, n_processes: int, has_own_forward: bool
) -> dict[str, RunModel]:
    """Return the models that `build_models` has returned, each plain `nn.Module` among them as a
    `PlainModel`.

    Raises:
        UserError: for anything else, and for plain modules where a run needs what only a
            `BaseModel` has.
    """
    if not isinstance(built, dict) or "model" not in built:
        kind = type(built).__name__
        raise UserError(
            f"build_models returned {kind}; it must return a dictionary of models, one of them "
            "'model'"
        )
    models: dict[str, RunModel] = {}
    for name, model in built.items():
        if isinstance(model, nn.Module):
            _check_plain(name, model, n_processes)
            model = _plain_model(config.model_spec, model)
        if not isinstance(model, RunModel):
            what = "a RunModel (build_other_model) or an nn.Module"
            raise UserError(
                f"build_models returned {type(model).__name__} as model {name!r}; it must be {what}"
            )
        models[name] = model
    if isinstance(models["model"], PlainModel):
        _check_plain_main(config, has_own_forward)
    return models


def _plain_model(spec: ModelSpec, module: nn.Module) -> PlainModel:
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    num_trained = sum(
        parameter.numel() for parameter in module.parameters() if parameter.requires_grad
    )
    return PlainModel(
        spec=spec,
        parts=[module],
        num_parameters=num_parameters,
        num_trained=num_trained,
        flops_per_token=(6.0 if num_trained else 2.0) * num_parameters,
        trained_names=trained_names(module),
    )


def _check_plain(name: str, module: nn.Module, n_processes: int) -> None:
    subject = f"model {name!r} is a plain nn.Module ({type(module).__name__})"
    if n_processes > 1:
        raise UserError(
            f"{subject}, which is not divided among processes, but this run has {n_processes}; "
            "use one, or build a BaseModel with build_other_model"
        )
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise UserError(f"{subject} on the meta device, so it has no weights; build it on the CPU")


def _check_plain_main(config: Any, has_own_forward: bool) -> None:
    subject = "'model' is a plain nn.Module"
    if not has_own_forward:
        raise UserError(f"{subject}, whose loss the Trainer does not know; override compute_loss")
    unsupported = {
        "--model_converters": bool(config.model_converters),
        "--checkpoint.last_save_in_hf": config.checkpoint.last_save_in_hf,
        "--checkpoint.initial_load_in_hf": config.checkpoint.initial_load_in_hf,
        "--compile.enable": config.compile.enable,
    }
    for option, is_set in unsupported.items():
        if is_set:
            raise UserError(
                f"{subject}, which does not support {option}; unset it, or build a BaseModel"
            )


def summarize(model: BaseModel, seq_len: int) -> dict[str, Any]:
    """Return the fields of a `RunModel` that must be computed before it is sharded."""
    return {
        "num_trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_per_token": model.flops_per_token(seq_len),
        "trained_names": trained_names(model),
    }
