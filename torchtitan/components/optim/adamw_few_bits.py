"""AdamW with moments in 8 bits (Dettmers et al. 2021, arXiv:2110.02861) or 4 bits (Li et al. 2023,
arXiv:2309.01507), computed by torchao."""

from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.components.optim.bf16_weights import RoundedUpdates, Rounding
from torchtitan.components.optim.own_state import Group, Groups
from torchtitan.distributed.initialize import local_part
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import dtensor_like
from torchtitan.tools.torchao import import_torchao


def make_adamw_few_bits(
    groups: Groups, *, bits: Literal[4, 8], rounding: Rounding, **settings: object
) -> torch.optim.Optimizer:
    """Return torchao's `AdamW8bit` or `AdamW4bit`, with learning rates that are numbers, and
    `rounding` of bfloat16 weights.

    Its state dict has moments in float32, which any layout can load. Each rank quantizes its shard
    again, in blocks of 256 (4 bits: 128) values, to the same codes if the blocks are the same. As
    in torchao, a shard of fewer than 4,096 values, or with an incomplete block, keeps full
    precision.
    """
    base = getattr(import_torchao("torchao.optim"), f"AdamW{bits}bit")

    bases = (base,) if rounding == "nearest" else (_Rounded, base)

    class AdamWFewBits(*bases):  # type: ignore[misc]
        """torchao's optimizer with the corrections above."""

        @staticmethod
        def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> object:
            moment = base._subclass_zeros(p, signed, block_size)
            if signed:
                # in torchao -0.993 (4 bits: -0.8875), which shrinks a negative extreme each time
                moment.qmap[0] = -1.0
            return moment

        def step(self, closure: object = None) -> None:
            from torchtitan.tools.torch_private import disable_cache_limit  # loads the compiler

            rates = [group["lr"] for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                # torchao compiles it as an input
                group["lr"] = torch.as_tensor(rate, dtype=torch.float32)
            parameters = (parameter for group in self.param_groups for parameter in group["params"])
            # On a CPU, compiling would take longer than it saves, and needs a compiler.
            compiles = next(parameters).is_cuda
            stance = torch.compiler.set_stance("default" if compiles else "force_eager")
            with stance, disable_cache_limit():  # each shape is compiled
                super().step(closure)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

        def state_dict(self) -> dict[str, object]:
            document = super().state_dict()
            states = document["state"].items()
            document["state"] = {
                key: {name: _plain(x) for name, x in state.items()} for key, state in states
            }
            return document

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load the moments of all parameters, which must have allocated moments."""
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            moments = [dict(self.state[parameter]) for parameter in parameters]
            super().load_state_dict(state_dict)
            # PyTorch keeps the given tensors, in the type of the parameters.
            keys = [key for group in state_dict["param_groups"] for key in group["params"]]
            for parameter, key, own in zip(parameters, keys, moments, strict=True):
                for name in ("exp_avg", "exp_avg_sq"):
                    local_part(own[name]).copy_(local_part(state_dict["state"][key][name]))
                    self.state[parameter][name] = own[name]

    optimizer: torch.optim.Optimizer = AdamWFewBits(groups, **settings)
    if isinstance(optimizer, RoundedUpdates):
        optimizer.rounding = rounding
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])
    return optimizer


class _Rounded(RoundedUpdates):
    """The step of `RoundedUpdates` with torchao's update and moments."""

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        # In float32, if not in few bits.
        like = parameter.detach().float()
        moments = {"exp_avg": True, "exp_avg_sq": False}
        return {
            "step": torch.tensor(0.0),
            **{name: self._new_buffer(like, signed) for name, signed in moments.items()},  # type: ignore[attr-defined]
        }

    def update_wide(
        self, wide: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Group
    ) -> None:
        update = import_torchao("torchao.optim.adam").single_param_adam
        state["step"] += 1
        moments = (local_part(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        torch.compile(update, fullgraph=True, dynamic=False)(
            *(wide, gradient, state["step"], *moments, None, group["lr"], *group["betas"]),
            *(group["weight_decay"], group["eps"], True, False),
        )


def _plain(value: object) -> object:
    """Return a moment in float32; other values are unchanged."""
    local: object = local_part(value) if isinstance(value, Tensor) else value
    if not hasattr(local, "dequantize") or type(local) is Tensor:
        return value
    plain = local.dequantize(torch.float32)
    return dtensor_like(plain, value) if is_dtensor(value) else plain
