"""AdamW with its moments in CPU memory, and its updates computed there."""

from typing import Any, Unpack, cast

import torch
from torch import Tensor

from torchtitan.components.optim.own_state import AdamSettings, Group, Groups
from torchtitan.distributed.initialize import local_part
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import dtensor_like, write_count


class AdamWOffload(torch.optim.AdamW):
    """`torch.optim.AdamW` that copies each gradient to pinned CPU memory and each new weight back,
    so that a GPU holds neither moments nor temporaries of the update. Copies overlap with the
    updates of other parameters.

    torchao's `CPUOffloadOptimizer` (0.18) copies gradients in the backward pass, before they are
    clipped, and weights when it is built, before a checkpoint is loaded; its state belongs to its
    copies and not to the model's parameters.
    """

    def __init__(self, groups: Groups, **settings: Unpack[AdamSettings]):
        super().__init__(groups, **settings)
        self._hosts: dict[Tensor, _Host] = {}

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        queue = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter not in self._hosts:
                        self._hosts[parameter] = _Host(parameter)
                    queue.append((self._hosts[parameter], parameter, group))
        copied = [host.fetch(parameter) for host, parameter, _ in queue]
        for event, (host, parameter, group) in zip(copied, queue, strict=True):
            if event:
                event.synchronize()
            host.update(parameter, cast(Group, group))
            self.state[parameter] = host.state(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the moments of parameters that have allocated moments."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                local_part(self._hosts[parameter].state(parameter)[name]).copy_(local_part(value))
        # PyTorch would copy the moments to the GPU
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(
            {parameter: host.state(parameter) for parameter, host in self._hosts.items()}
        )


class _Host:
    """Weight, gradient and moments of a parameter's shard in CPU memory."""

    def __init__(self, parameter: Tensor):
        local = local_part(parameter)
        self.weight, self.weight.grad = (
            torch.empty_like(local, device="cpu", pin_memory=local.is_cuda) for _ in range(2)
        )
        self.written = -1
        self.optimizer = torch.optim.AdamW([self.weight], fused=True)

    def fetch(self, parameter: Tensor) -> "torch.cuda.Event | None":
        """Copy the gradient, and the weight if anything but `update` has changed it, without
        waiting."""
        local, gradient = local_part(parameter), parameter.grad
        assert gradient is not None and self.weight.grad is not None
        if write_count(local) != self.written:
            self.weight.copy_(local, non_blocking=True)
        self.weight.grad.copy_(local_part(gradient), non_blocking=True)
        return torch.cuda.current_stream(local.device).record_event() if local.is_cuda else None

    def update(self, parameter: Tensor, group: Group) -> None:
        """Compute the update with a group's settings, and start to copy the weight."""
        (own,) = self.optimizer.param_groups
        own |= {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self.optimizer.step()
        local = local_part(parameter)
        local.copy_(self.weight, non_blocking=True)
        self.written = write_count(local)

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return step and moments, in the layout of the parameter."""
        return {
            name: dtensor_like(value, parameter)
            if is_dtensor(parameter) and name != "step"
            else value
            for name, value in self.optimizer.state[self.weight].items()
        }
