"""The optimizer: torch's own, over parameter groups that are chosen by name."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtitan.config import Configurable
from torchtitan.config.job_config import require_at_least
from torchtitan.distributed.initialize import canonical_name
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_VOCABULARY_MATRICES = re.compile(r"tok_embeddings|output")
"""Two-dimensional, but tables of vectors rather than maps between spaces: Muon is not for them."""


@dataclass(kw_only=True, slots=True)
class ParamGroup:
    """Settings of the parameters whose name matches a pattern."""

    pattern: str
    """Regular expression, searched in the parameter's name (layers.0.attention.wq.weight)."""

    lr: float | None = None
    """Learning rate of these parameters before the schedule. None: the optimizer's."""

    weight_decay: float | None = None
    """Weight decay of these parameters. None: the optimizer's."""


def _default_param_groups() -> dict[str, ParamGroup]:
    return {"no_decay": ParamGroup(pattern=r"norm|bias|tok_embeddings", weight_decay=0.0)}


class Optimizer(Configurable):
    """One or more `torch.optim` optimizers over the parameters of all model parts, used as one.

    Hyper-parameters always come from the configuration, on resuming too; a checkpoint holds the moments only.

    Args:
        config: which optimizer, and its hyper-parameters.
        model_parts: the model, or the pipeline stages of it that this rank holds.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Optimizer."""

        name: Literal["AdamW", "Adam", "SGD", "Muon"] = "AdamW"
        """Muon applies to the matrices inside the layers, with AdamW for all other parameters."""

        lr: float = 8e-4
        """Peak learning rate."""

        beta1: float = 0.9
        """Decay of the first moment (Adam, AdamW)."""

        beta2: float = 0.95
        """Decay of the second moment (Adam, AdamW)."""

        eps: float = 1e-8
        """Added to the root of the second moment (Adam, AdamW)."""

        weight_decay: float = 0.1
        """Decoupled from the gradient for AdamW and Muon, added to it for Adam and SGD."""

        momentum: float | None = None
        """Momentum of SGD and Muon. None: 0 for SGD, 0.95 for Muon."""

        implementation: Literal["fused", "foreach", "for-loop"] = "fused"
        """How an update is computed: in one kernel, one operation at a time over all parameters, or one parameter
        at a time. SGD has no fused one, and takes foreach; Muon's own part has one implementation."""

        param_groups: dict[str, ParamGroup] = field(default_factory=_default_param_groups)
        """Settings for some parameters by name; the first group whose pattern matches takes a parameter."""

        def validate(self) -> None:
            """Raise `UserError` for values that the optimizers refuse."""
            require_at_least(
                0, optimizer__lr=self.lr, optimizer__weight_decay=self.weight_decay, optimizer__eps=self.eps
            )
            for name in ("beta1", "beta2"):
                if not 0 <= getattr(self, name) < 1:
                    raise UserError(f"--optimizer.{name} is {getattr(self, name)}, and must be in [0, 1)")
            for group_name, group in self.param_groups.items():
                try:
                    re.compile(group.pattern)
                except re.error as error:
                    option = f"--optimizer.param_groups.{group_name}.pattern"
                    raise UserError(f"{option} '{group.pattern}' is no regular expression: {error}") from error

    config: Config

    def __init__(self, config: Config, *, model_parts: Sequence[nn.Module]):
        super().__init__(config)
        self.model_parts = list(model_parts)
        self.optimizers_of_part = [self.make_optimizers(self._grouped_parameters(part)) for part in self.model_parts]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers, in a fixed order."""
        return [optimizer for optimizers in self.optimizers_of_part for optimizer in optimizers]

    @property
    def param_groups(self) -> Iterable[dict[str, Any]]:
        """The parameter groups of all of them; each has its peak rate under `initial_lr`."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Update the parameters from their gradients."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def make_optimizers(self, groups: Mapping[str, list[tuple[str, nn.Parameter]]]) -> list[torch.optim.Optimizer]:
        """The torch optimizers for one model part.

        Args:
            groups: group name ("" for parameters that no pattern matches) → (canonical name, parameter) pairs.
        """
        config = self.config
        if config.name == "Muon":
            muon, rest = self._split_for_muon(groups)
            momentum = 0.95 if config.momentum is None else config.momentum
            made: list[torch.optim.Optimizer] = []
            if muon:
                # Scaled so that its updates have AdamW's size, and one learning rate serves both.
                made.append(torch.optim.Muon(muon, lr=config.lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
            return made + ([self._make_adam(torch.optim.AdamW, rest)] if rest else [])
        settings = self._group_settings(groups)
        if config.name == "SGD":
            momentum = config.momentum or 0.0
            # Not fused in any case: torch 2.13 has no fused SGD for sharded parameters.
            foreach = config.implementation != "for-loop"
            return [torch.optim.SGD(settings, lr=config.lr, momentum=momentum, foreach=foreach)]
        return [self._make_adam(torch.optim.AdamW if config.name == "AdamW" else torch.optim.Adam, settings)]

    def _make_adam(
        self, kind: type[torch.optim.AdamW] | type[torch.optim.Adam], groups: list[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        betas = (self.config.beta1, self.config.beta2)
        chosen = self.config.implementation
        switches = {"fused": chosen == "fused", "foreach": chosen == "foreach"}
        return kind(groups, lr=self.config.lr, betas=betas, eps=self.config.eps, **switches)

    def _grouped_parameters(self, part: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
        groups: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for raw_name, parameter in part.named_parameters():
            if not parameter.requires_grad:
                continue
            name = canonical_name(raw_name)
            patterns = self.config.param_groups.items()
            group = next((key for key, settings in patterns if re.search(settings.pattern, name)), "")
            groups[group].append((name, parameter))
        for key, settings in self.config.param_groups.items():
            if key not in groups:
                logger.warning("optimizer.param_groups.%s: '%s' matches no parameter", key, settings.pattern)
        return groups

    def _group_settings(self, groups: Mapping[str, list[tuple[str, nn.Parameter]]]) -> list[dict[str, Any]]:
        settings = []
        for key, members in groups.items():
            group = self.config.param_groups.get(key)
            lr = self.config.lr if group is None or group.lr is None else group.lr
            decay = self.config.weight_decay if group is None or group.weight_decay is None else group.weight_decay
            parameters = [parameter for _, parameter in members]
            settings.append({"params": parameters, "lr": lr, "initial_lr": lr, "weight_decay": decay})
        return settings

    def _split_for_muon(
        self, groups: Mapping[str, list[tuple[str, nn.Parameter]]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        muon: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        rest: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for key, members in groups.items():
            for name, parameter in members:
                is_matrix = parameter.ndim == 2 and not _VOCABULARY_MATRICES.search(name)
                (muon if is_matrix else rest)[key].append((name, parameter))
        return self._group_settings(muon), self._group_settings(rest)

    def state_dict(self) -> dict[str, Tensor]:
        """The moments under canonical parameter names, whatever the order or grouping: they can be resharded."""
        return {key: value for key, value in self._full_state().items() if key.startswith("state.")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over moments as `state_dict` gave them; hyper-parameters stay as configured."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        merged = {**self._full_state(), **state_dict}
        for part, optimizers in zip(self.model_parts, self.optimizers_of_part, strict=True):
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            set_optimizer_state_dict(part, optimizers, merged, options=options)

    def _full_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state: dict[str, Any] = {}
        for part, optimizers in zip(self.model_parts, self.optimizers_of_part, strict=True):
            state.update(get_optimizer_state_dict(part, optimizers, options=options))
        return state
