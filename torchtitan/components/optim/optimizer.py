"""Optimizers from `torch.optim`, with parameter groups selected by name."""

import contextlib
import functools
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtitan.components.optim.bf16_weights import Rounding
from torchtitan.components.optim.kinds import (
    KINDS,
    OptimizerName,
    Settings,
    is_matrix_of_layer,
    make_adam,
    names_where,
)
from torchtitan.components.optim.optimizer_state import OptimizerState, allocate_moments
from torchtitan.components.optim.rate_points import parse_points
from torchtitan.components.optim.run_sections import RunSections
from torchtitan.components.optim.schedule_free import ScheduleFreeAdamW
from torchtitan.config import Configurable, ParallelismConfig, TrainingConfig
from torchtitan.config.configurable import Section, builds
from torchtitan.config.ranges import check_ranges
from torchtitan.distributed.gradients import by_mesh, redistribute_like, row_norms, total_norm
from torchtitan.distributed.initialize import canonical_name
from torchtitan.distributed.process_group import gather_objects
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger
from torchtitan.tools.patterns import check_pattern, without_numbers
from torchtitan.tools.torch_private import write_count


@dataclass(kw_only=True, slots=True)
class ParamGroup(Section):
    """Settings of the parameters whose names match a pattern."""

    pattern: str
    """Regular expression, searched in the parameter's name (layers.0.attention.wq.weight)."""

    lr: float | None = None
    """Learning rate of these parameters before the schedule. None: the optimizer's."""

    weight_decay: float | None = None
    """Weight decay of these parameters. None: the optimizer's."""

    lr_factor: float = 1.0
    """Factor of the learning rate of these parameters, given here or the optimizer's."""

    weight_decay_factor: float = 1.0
    """Factor of the weight decay of these parameters, given here or the optimizer's."""

    lr_points: list[str] = field(default_factory=list)
    """Further factors of the rate of these parameters, like lr_scheduler.points: 0:0 1000:1 leaves
    them unchanged for 1000 steps."""


def _default_param_groups() -> dict[str, ParamGroup]:
    return {"no_decay": ParamGroup(pattern=r"norm|bias|tok_embeddings", weight_decay=0.0)}


class Optimizer(Configurable):
    """One or more `torch.optim` optimizers over the parameters of all model parts, used as one.
    Hyperparameters always come from the configuration, even on resume; checkpoints contain only the
    moments.

    Args:
        model_parts: the model, or this rank's pipeline stages, materialized; moments are allocated
            on the same devices. Frozen parameters are skipped; raises `UserError` if nothing is
            trained.
        all_names: canonical names of the whole model's trained parameters, if `model_parts` are
            pipeline stages.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Optimizer."""

        name: OptimizerName = "AdamW"
        """AdamW8bit and AdamW4bit keep moments in 8 or 4 bits, and need torchao. AdamWOffload keeps
        moments in CPU memory, and computes updates there. Muon, Dion and SOAP apply to the matrices
        inside the layers, with AdamW for all other parameters. ScheduleFreeAdamW averages weights
        instead of decaying the learning rate, and refuses a decay."""

        lr: float = 8e-4
        """Peak learning rate."""

        beta1: float = 0.9
        """Decay of the first moment (Adam, AdamW, SOAP); for ScheduleFreeAdamW, the part of the
        averages in the weights at which gradients are computed."""

        beta2: float = 0.95
        """Decay of the second moment (Adam, AdamW, ScheduleFreeAdamW, SOAP), and of SOAP's
        statistics."""

        eps: float = 1e-8
        """Added to the root of the second moment (Adam, AdamW, ScheduleFreeAdamW, SOAP)."""

        weight_decay: float = 0.1
        """Weight decay: added to the gradient for Adam and SGD, otherwise decoupled from it."""

        momentum: float | None = None
        """Momentum of SGD, Muon and Dion. None: 0 for SGD, 0.95 for Muon and Dion."""

        rank_fraction: float = 0.25
        """Rank of Dion's updates, as a fraction of a matrix's smaller side."""

        basis_interval: int = 10
        """Steps between SOAP's updates of its bases."""

        implementation: Literal["fused", "foreach", "for-loop"] = "fused"
        """Computation of updates: in one kernel, in batches over parameters, or parameter by
        parameter. SGD uses foreach instead of fused; for Muon, Dion and SOAP, this applies only to
        the parameters of AdamW; for AdamW8bit, AdamW4bit, AdamWOffload, ScheduleFreeAdamW and
        `rounding`, not at all."""

        rounding: Rounding = "nearest"
        """Rounding of updates to weights in bfloat16 (`--training.dtype bfloat16`), which have no
        copy in float32: "nearest" loses updates below half a step of a weight; "stochastic" rounds
        to a random neighbor; "kahan" keeps the rounding error in a second bfloat16 number. The
        moments of AdamW are then in float32. For AdamW, AdamW8bit, AdamW4bit and Muon."""

        param_groups: dict[str, ParamGroup] = field(default_factory=_default_param_groups)
        """Settings of parameters selected by name; a parameter belongs to the first group whose
        pattern matches."""

        early_step_in_backward: bool = False
        """Update each parameter during the backward pass and free its gradient immediately, which
        saves memory. Incompatible with gradient accumulation, clipping and pipeline parallelism."""

        @builds(lambda: Optimizer)
        def build(self) -> object:
            """Build the optimizer of a model's parts."""

        def validate(self) -> None:
            check_ranges("optimizer", self)
            for key, group in self.param_groups.items():
                option = f"param_groups.{key}"
                rates = {
                    f"{option}.lr": group.lr or 0.0,
                    f"{option}.weight_decay": group.weight_decay or 0.0,
                    f"{option}.lr_factor": group.lr_factor,
                    f"{option}.weight_decay_factor": group.weight_decay_factor,
                }
                for name, value in rates.items():
                    valid = 0 <= value < math.inf
                    require(valid, f"--optimizer.{name}", value, "a number of at least 0")
                check_pattern(f"--optimizer.{option}.pattern", group.pattern)
                parse_points(f"--optimizer.{option}.lr_points", group.lr_points)
            kind = KINDS[self.name]
            kind.check(f"--optimizer.name {self.name}")
            if self.momentum is not None and kind.momentum is None:
                names = names_where(lambda kind: kind.momentum is not None)
                raise UserError(
                    f"--optimizer.momentum {self.momentum} is for {names}; for {self.name} set "
                    "--optimizer.beta1"
                )
            if kind.averages and self.beta1 == 0:
                raise UserError(
                    f"--optimizer.beta1 0 leaves no averages in the weights of --optimizer.name "
                    f"{self.name}, from which they are computed; set 0.9"
                )

        def check_run(self, run: RunSections) -> None:
            """Raise `UserError` if the optimizer does not fit other sections of a run, a
            `Trainer.Config`."""
            option, kind = f"--optimizer.name {self.name}", KINDS[self.name]
            training = run.training
            self._check_rounding(training.dtype)
            if not kind.offloads and training.enable_cpu_offload:
                raise UserError(
                    f"{option} cannot be combined with --training.enable_cpu_offload, since it "
                    "communicates on the device; set Muon or AdamW, or disable it"
                )
            if kind.needs_float32 and training.dtype != "float32":
                raise UserError(
                    f"{option} {kind.needs_float32}, for which --training.dtype {training.dtype} "
                    "has too few bits; set float32"
                )
            if not kind.averages:
                return
            if run.ema.decay is not None:
                raise UserError(
                    f"{option} averages the weights already; leave out --ema.decay {run.ema.decay}"
                )
            for converter in run.model_converters:
                if converter._owner.moves_weights:
                    raise UserError(
                        f"{option} computes averages that {converter.option} would not change; "
                        "use one of them"
                    )
            schedule = run.lr_scheduler
            if schedule.points or any(group.lr_points for group in self.param_groups.values()):
                raise UserError(
                    f"{option} needs a constant learning rate after the warm-up; remove "
                    "--lr_scheduler.points, and lr_points of --optimizer.param_groups"
                )
            if schedule.decay_ratio != 0 and schedule.min_lr_factor != 1:
                raise UserError(
                    f"{option} needs a constant learning rate after the warm-up, and "
                    f"--lr_scheduler.decay_ratio is {schedule.decay_ratio}; set it to 0"
                )

        def _check_rounding(self, dtype: str) -> None:
            """Raise `UserError` if `rounding` would do nothing, or the optimizer cannot do it."""
            if self.rounding == "nearest":
                return
            option = f"--optimizer.rounding {self.rounding}"
            if dtype != "bfloat16":
                raise UserError(
                    f"{option} is for weights in bfloat16, and --training.dtype is {dtype}; set "
                    "bfloat16, or nearest"
                )
            if not KINDS[self.name].rounds:
                raise UserError(
                    f"{option} is not supported by --optimizer.name {self.name}; set one of "
                    f"{names_where(lambda kind: kind.rounds)}"
                )

    config: Config

    def __init__(
        self,
        config: Config,
        *,
        model_parts: Sequence[nn.Module],
        all_names: Sequence[str] | None = None,
    ):
        super().__init__(config)
        self.n_updates = 0
        """Number of times that weights have changed in this process."""
        self.model_parts = list(model_parts)
        names = all_names or [name for part in self.model_parts for name in trained_names(part)]
        if not names:
            raise UserError("nothing to train: all parameters of the model are frozen")
        self._warn_of_idle_groups(names)
        self.optimizers_of_part = [
            self.make_optimizers(self._grouped_parameters(part)) for part in self.model_parts
        ]
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]
        for optimizer in self.optimizers:
            allocate_moments(optimizer)
        parts = zip(self.model_parts, self.optimizers_of_part, strict=True)
        # A pipeline stage may be frozen, and PyTorch has no state of a model without optimizers.
        self._states = [
            OptimizerState(part, *optimizers) for part, optimizers in parts if optimizers
        ]
        self._row_norms: list[Tensor] = []
        self._updated_early: set[nn.Parameter] = set()
        if config.early_step_in_backward:
            for optimizer in self.optimizers:
                for index, group in enumerate(optimizer.param_groups):
                    for parameter in group["params"]:
                        hook = functools.partial(self._use_gradient, optimizer, index)
                        parameter.register_post_accumulate_grad_hook(hook)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The `torch.optim` optimizers, in a fixed order."""
        return [optimizer for optimizers in self.optimizers_of_part for optimizer in optimizers]

    @property
    def param_groups(self) -> Iterable[dict[str, Any]]:
        """Parameter groups of all optimizers; `initial_lr` is the peak learning rate."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def can_skip(self) -> bool:
        """True if `step` can skip an update that only the device knows to be unusable: fused Adam
        and AdamW."""
        # By the configuration, since a stage of a pipeline may have no optimizer, or another one
        # than other ranks.
        has_own = type(self).make_optimizers is not Optimizer.make_optimizers
        return (
            KINDS[self.config.name].skips
            and self.config.implementation == "fused"
            and self.config.rounding == "nearest"
            and not has_own
        )

    def step(self, skip: Tensor | None = None) -> None:
        """Update the parameters that have gradients; parameters updated in the backward pass have
        none. `skip`, a float32 scalar on the device, keeps weights and moments if it is 1, not 0;
        it needs `can_skip`."""
        self.n_updates += 1
        for optimizer in self.optimizers:
            if skip is not None or self.can_skip:
                optimizer.found_inf = skip  # type: ignore[attr-defined]  # read by the step, as for a `GradScaler`
            optimizer.step()

    def versions(self) -> list[int]:
        """Return how often each parameter was changed in place, by this class or other code.
        PyTorch does not count changes through `Tensor.data`."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [write_count(parameter) for group in groups for parameter in group["params"]]

    @contextlib.contextmanager
    def evaluating(self, follow: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Replace the trained weights by the weights to evaluate in the block, if they differ
        (ScheduleFreeAdamW), and restore the exact values afterwards. `follow` refreshes state
        derived from the weights. A checkpoint that is saved in the block contains both."""
        averaging = [each for each in self.optimizers if isinstance(each, ScheduleFreeAdamW)]
        if not averaging:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.callback(follow)  # after the weights are back
            for optimizer in averaging:
                stack.enter_context(optimizer.evaluating())
            follow()
            yield

    def zero_grad(self) -> None:
        self._row_norms.clear()
        self._updated_early.clear()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def warn_of_idle_parameters(self) -> None:
        """Warn about trained parameters without a gradient on any rank. A collective; call it
        before `zero_grad`."""
        named = [pair for part in self.model_parts for pair in part.named_parameters()]
        local_names = [
            canonical_name(name) for name, parameter in named if self._is_idle(parameter)
        ]
        if idle := sorted({name for names in gather_objects(local_names) for name in names}):
            logger.warning(
                "trained parameters without a gradient: %s", ", ".join(without_numbers(idle))
            )

    def _is_idle(self, parameter: nn.Parameter) -> bool:
        return (
            parameter.requires_grad
            and parameter.grad is None
            and parameter not in self._updated_early
        )

    def early_grad_norm(self) -> Tensor:
        """Return the total norm of the gradients used in the backward pass since the last
        `zero_grad`, a scalar tensor. It replaces `clip_grad_norm` with `early_step_in_backward`. A
        collective."""
        return total_norm(self._row_norms)

    @torch.no_grad()
    def _use_gradient(
        self, optimizer: torch.optim.Optimizer, group_index: int, parameter: nn.Parameter
    ) -> None:
        """Update one parameter from its final gradient, and free the gradient."""
        assert parameter.grad is not None
        self.n_updates += 1
        parameter.grad = redistribute_like(parameter.grad, parameter)
        self._row_norms.append(row_norms(parameter.grad))
        self._updated_early.add(parameter)
        # Looked up by index, since loading a state replaces the groups.
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[group_index], "params": [parameter]}]
        optimizer.step()
        optimizer.param_groups = groups
        parameter.grad = None

    def make_optimizers(
        self, groups: Mapping[str, list[tuple[str, nn.Parameter]]]
    ) -> list[torch.optim.Optimizer]:
        """Return the `torch.optim` optimizers of one model part, with peak learning rates. `groups`
        maps a group's name ("" for parameters that match no pattern) to (canonical name, parameter)
        pairs. Override this to use another optimizer, with `group_settings`."""
        config, kind = self.config, KINDS[self.config.name]
        hyperparameters = Settings(
            lr=config.lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            momentum=(kind.momentum or 0.0) if config.momentum is None else config.momentum,
            implementation=config.implementation,
            rounding=config.rounding,
            rank_fraction=config.rank_fraction,
            basis_interval=config.basis_interval,
        )
        chosen: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for_adam: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for key, members in groups.items():
            is_chosen = [not kind.for_matrices or is_matrix_of_layer(*member) for member in members]
            chosen[key] = list(itertools.compress(members, is_chosen))
            for_adam[key] = list(itertools.compress(members, map(operator.not_, is_chosen)))
        made = ((kind.make, chosen), (make_adam, for_adam))
        # A stage of a pipeline may be frozen, or have no matrices.
        return [
            make(settings, hyperparameters)
            for make, settings in ((make, self.group_settings(of)) for make, of in made)
            if settings
        ]

    def _group_of(self, name: str) -> str:
        """Return the key of the first group with a pattern that matches the name, or ""."""
        groups = self.config.param_groups.items()
        return next((key for key, group in groups if re.search(group.pattern, name)), "")

    def _grouped_parameters(self, part: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
        groups: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for raw_name, parameter in part.named_parameters():
            if parameter.requires_grad:
                name = canonical_name(raw_name)
                groups[self._group_of(name)].append((name, parameter))
        return groups

    def _warn_of_idle_groups(self, names: Sequence[str]) -> None:
        """Warn about a pattern that matches no trained parameter, except in the default groups."""
        used, default = {self._group_of(name) for name in names}, _default_param_groups()
        for key, group in self.config.param_groups.items():
            if key not in used and group != default.get(key):
                message = (
                    "--optimizer.param_groups.%s is empty: no remaining trained parameter matches "
                    "'%s'"
                )
                logger.warning(message, key, group.pattern)

    def group_settings(
        self, groups: Mapping[str, list[tuple[str, nn.Parameter]]]
    ) -> list[dict[str, object]]:
        """Return the groups of a `torch.optim` optimizer, with rates and weight decays as
        `param_groups` sets them, for `make_optimizers`."""
        settings = []
        for key, members in groups.items():
            if not members:
                continue
            group = self.config.param_groups.get(key) or ParamGroup(pattern="")
            lr = self.config.lr if group.lr is None else group.lr
            decay = self.config.weight_decay if group.weight_decay is None else group.weight_decay
            settings_of_group: dict[str, object] = {
                "lr": lr * group.lr_factor,
                "weight_decay": decay * group.weight_decay_factor,
            }
            if group.lr_points:  # read by the schedule
                settings_of_group["lr_points"] = parse_points("lr_points", group.lr_points)
            for parameters in by_mesh(parameter for _, parameter in members).values():
                settings.append({"params": parameters, **settings_of_group})
        return settings

    def state_dict(self) -> dict[str, Tensor]:
        """Return the moments by canonical parameter name, independent of sharding and parameter
        groups."""
        entries = (entry for state in self._states for entry in state.state_dict().items())
        return {key: value for key, value in entries if key.startswith("state.")}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the moments from `state_dict`; hyperparameters stay as configured."""
        loaded: set[str] = set()
        for state in self._states:
            names = state.state_dict().keys() & state_dict.keys()
            # PyTorch keeps the given tensors, so a parameter that is in two pipeline stages needs
            # its own.
            state.load_state_dict(
                {**state_dict, **{name: state_dict[name].clone() for name in names & loaded}}
            )
            loaded |= names


def check_early_step(
    config: Optimizer.Config,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    data_parallel_degree: int,
) -> None:
    """Raise `UserError` if `early_step_in_backward` is combined with features that need all
    gradients at once."""
    if not config.early_step_in_backward:
        return
    one_pass = training.local_batch_size * data_parallel_degree
    conflicts = {
        f"gradient accumulation (--training.global_batch_size {training.global_batch_size} in "
        f"passes of {one_pass})": (
            training.resolve_global_batch_size(data_parallel_degree) > one_pass
        ),
        "gradient accumulation (--training.batch_schedule)": bool(training.batch_schedule),
        f"clipping (--training.max_norm {training.max_norm}; set inf)": training.max_norm
        < math.inf,
        "--training.on_nonfinite skip, since weights are already updated": training.on_nonfinite
        == "skip",
        f"--parallelism.pipeline_parallel_degree {parallelism.pipeline_parallel_degree}": (
            parallelism.pipeline_parallel_degree > 1
        ),
    }
    for conflict, is_enabled in conflicts.items():
        if is_enabled:
            raise UserError(
                f"--optimizer.early_step_in_backward cannot be combined with {conflict}"
            )


def trained_names(model: nn.Module) -> list[str]:
    """Return the canonical names of a model's trained parameters."""
    return [
        canonical_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
