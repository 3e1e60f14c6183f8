"""A run of a few kilobytes, to test checkpoints without a trainer."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint import (
    CheckpointManager,
    ModelState,
    RandomState,
    list_checkpoints,
)

FLATTEN = StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizerState:
    """Optimizer state as the checkpointer expects it: flat, with canonical names."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLATTEN)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=FLATTEN)


class Values:
    """A state of JSON values whose structure may change."""

    def __init__(self, **values: Any):
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)


class Run:
    """A small model that trains on random data, with its checkpoint manager."""

    def __init__(
        self,
        folder: Path,
        /,
        *,
        dim: int = 16,
        seed: int = 0,
        wrap: Callable[[Any], None] | None = None,
        rank_states: dict[str, Any] | None = None,
        **config: Any,
    ):
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(
            nn.Embedding(32, dim), nn.Linear(dim, dim), nn.Linear(dim, 32, bias=False)
        )
        if wrap:
            wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, betas=(0.8, 0.9))
        self.trainer = Values(step=0)
        self.states: dict[str, Any] = {
            "model": ModelState([self.model]),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "trainer": self.trainer,
        }
        self.manager: CheckpointManager = CheckpointManager.Config(
            **{"enable": True, "interval": 1, **config}
        ).build(
            dump_folder=str(folder),
            states=self.states,
            rank_states={"random": RandomState(), **(rank_states or {})},
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            tokens = torch.randint(32, (4, 8))
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.trainer.values["step"] += 1

    def train_and_save(self, steps: int) -> None:
        for _ in range(steps):
            self.train(1)
            self.manager.save(self.trainer.values["step"])
        self.manager.close()

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the whole state, unsharded."""
        model, optimizer = self.states["model"].state_dict(), self.states["optimizer"].state_dict()
        return copy.deepcopy({**unsharded(model | optimizer), **self.trainer.values})


def unsharded(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }


def shard(model: Any) -> None:
    """Apply FSDP over all processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert (
            torch.equal(value, right[name])
            if isinstance(value, torch.Tensor)
            else value == right[name]
        ), name


def steps(folder: Path) -> list[int]:
    """Return the steps with a complete checkpoint."""
    return [info.step for info in list_checkpoints(folder / "checkpoint") if info.is_complete]
