"""The trainer of this experiment."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.distributed.gradients import clip_grad_norm
from torchtitan.distributed.process_group import sum_over_ranks
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


class MicroBatchClippingTrainer(Trainer):
    """Clip the gradient of each micro-batch separately; see the package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run, and the norm limit of a micro-batch's gradient."""

        micro_batch_max_norm: float = 1.0
        """Maximum norm of the gradient of a micro-batch's mean loss; larger gradients are scaled
        down to it."""

        def validate(self) -> None:
            if not self.micro_batch_max_norm > 0:
                raise UserError(
                    f"--micro_batch_max_norm is {self.micro_batch_max_norm}, but must be above 0"
                )
            if self.optimizer.early_step_in_backward:
                raise UserError(
                    "--optimizer.early_step_in_backward keeps no gradients for "
                    "gradient_aggregation to clip"
                )

    config: Config

    def forward_backward_step(self, batch: Batch, n_tokens: Tensor) -> Tensor:
        """Add a micro-batch's clipped gradient; return its part of the global batch's mean loss."""
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        earlier_gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        loss = super().forward_backward_step(batch, n_tokens)
        # The gradient is this micro-batch's share of the global mean, so scale the norm limit by
        # the same share.
        share = (self.count_tokens_on_all_ranks(batch) / n_tokens.clamp(min=1)).item()
        clip = self.pipeline.clip_grad_norm if self.pipeline else clip_grad_norm
        clip(parameters, self.config.micro_batch_max_norm * share)
        for parameter, earlier in zip(parameters, earlier_gradients, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        return loss

    def count_tokens_on_all_ranks(self, batch: Batch) -> Tensor:
        """Count a micro-batch's valid tokens over all ranks, without counting replicated tokens
        twice."""
        n_tokens = (batch["labels"] != IGNORE_INDEX).sum().to(self.statistics_dtype)
        is_counting = (
            self.parallel_dims.is_tensor_leader and self.parallel_dims.coordinate("pp") == 0
        )
        return sum_over_ranks(n_tokens if is_counting else n_tokens * 0)
