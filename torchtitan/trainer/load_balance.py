"""The callback that balances the experts of every run's models."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.components.data.base import Batch
from torchtitan.components.losses.load_balance import LoadBalancer
from torchtitan.protocols.experts import LoadBalanced
from torchtitan.tools.errors import UserError
from torchtitan.trainer.callbacks import Callback
from torchtitan.trainer.run import Run
from torchtitan.trainer.step_result import StepResult


def count_tokens(batch: Batch) -> int:
    """Return the number of a batch's tokens without padding."""
    n_tokens_B = batch["attention"].n_tokens_B if "attention" in batch else None
    return batch["input"].numel() if n_tokens_B is None else int(n_tokens_B.sum())


class LoadBalance(Callback):
    """Callback that runs a `LoadBalancer` through each step. It is separate from the step, so a
    trainer with its own `train_step` also has it. Raises `UserError` for auxiliary losses with a
    loss that is not divided by its tokens beforehand."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        """The balance of experts."""

        def is_on(self, run: Run) -> bool:
            modules = (module for part in run.trained_parts for module in part.modules())
            has_routers = any(isinstance(module, LoadBalanced) for module in modules)
            return has_routers or run.parallel_dims.pp > 1  # another stage may have routers

    config: Config

    def __init__(self, config: Callback.Config, *, trainer: Run):
        super().__init__(config, trainer=trainer)
        self.balancer = LoadBalancer(trainer.trained_parts, trainer.mesh)
        if trainer.has_own_loss and self.balancer.has_losses:
            raise UserError(
                f"{type(trainer).__name__} computes its own loss, which is divided by its weight "
                "after the backward passes, together with auxiliary losses; set the weights in "
                "--model.moe.penalties to 0, or output_router_logits in config.json to false"
            )

    def on_batches(self, micro_batches: Sequence[Batch]) -> None:
        trainer, dims = self.trainer, self.trainer.parallel_dims
        n_tokens = 0
        # A custom loss may pass other tokens, such as sampled answers. Some ranks have parts of the
        # same rows.
        if not trainer.has_own_loss and dims.coordinate("cp") == dims.coordinate("tp") == 0:
            n_tokens = sum(map(count_tokens, micro_batches))
        self.balancer.start_step(n_tokens, dims.gradient_degree, trainer.device)
        if self.balancer.needs_load:
            trainer.watchdog.phase("counting tokens of experts")
            with self.balancer.measuring(), trainer.precision.fixed_weights():
                for batch in micro_batches:
                    with trainer.mixed_precision():
                        trainer.compute_loss(trainer.post_dataloading_process(batch))

    def on_step(self, outcome: StepResult) -> None:
        if self.balancer.has_routers and outcome.is_taken:
            self.balancer.finish_step()
            if self.trainer.metrics.should_log(self.trainer.step):
                self.trainer.metrics.add(self.balancer.watch())
