"""The trainer of this experiment."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.gradients import clip_grad_norm
from torchtitan.distributed.process_group import sum_over_ranks
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


class MicroBatchClippingTrainer(Trainer):
    """Clips the gradient of each micro-batch by itself; see the package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run, and how long a micro-batch's gradient may be."""

        micro_batch_max_norm: float = 1.0
        """The gradient of a micro-batch's mean loss is scaled down to this norm when it exceeds it."""

        def validate(self) -> None:
            """Raise `UserError` for a norm that is not positive, and where there are no gradients to clip."""
            if not self.micro_batch_max_norm > 0:
                raise UserError(f"--micro_batch_max_norm is {self.micro_batch_max_norm}, and must be above 0")
            if self.optimizer.early_step_in_backward:
                raise UserError(
                    "--optimizer.early_step_in_backward keeps no gradients for gradient_aggregation to clip"
                )

    config: Config

    def forward_backward_step(self, batch: Batch, n_tokens: Tensor) -> Tensor:
        """Add a micro-batch's gradient, clipped; its part of the global batch's mean loss."""
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        of_earlier_ones = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        loss = super().forward_backward_step(batch, n_tokens)
        # The gradient is that of the micro-batch's share in the global mean, and so is the norm it may have.
        share = (self.count_tokens_of_all(batch) / n_tokens.clamp(min=1)).item()
        pipeline = self.mesh.get_group("pp") if self.mesh and self.pipeline else None
        clip_grad_norm(parameters, self.config.micro_batch_max_norm * share, pipeline)
        for parameter, earlier in zip(parameters, of_earlier_ones, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        return loss

    def count_tokens_of_all(self, batch: Batch) -> Tensor:
        """Valid tokens of a micro-batch over all ranks: those that several ranks have are counted by one."""
        n_tokens = (batch["labels"] != IGNORE_INDEX).sum().to(self.statistics_dtype)
        has_it_first = self.parallel_dims.is_tensor_leader and self.parallel_dims.coordinate("pp") == 0
        return sum_over_ranks(n_tokens if has_it_first else n_tokens * 0)
