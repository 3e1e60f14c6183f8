"""The trainer with its step written out: forward, backward, clipping, optimizer. Edit it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchtitan.components.data.base import Batch
from torchtitan.tools.errors import UserError
from torchtitan.trainer import StepResult, Trainer


class TemplateTrainer(Trainer):
    """A `Trainer` with its step written out; everything else is inherited, and validation calls
    `compute_loss`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Fields added here are options of the command line: `coefficient: float = 0.1` becomes
        `--coefficient`."""

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Take one optimizer step over the next global batch."""
        self.optimizer.zero_grad()
        self.watchdog.phase("data")  # phases: of times, and of the report on a step that hangs
        micro_batches = self.next_micro_batches(batches)
        # Count over all micro-batches and ranks, so that every valid token of the global batch has
        # the same weight.
        n_tokens = self.count_valid_tokens(micro_batches)

        loss = torch.zeros((), device=self.device)
        if self.pipeline:
            raise UserError(
                "this step is written for a whole model; `Trainer.forward_backward_step` runs "
                "pipelines too"
            )
        (model,) = self.model_parts
        with self.precision.fixed_weights():
            for micro_batch in micro_batches:
                batch = self.post_dataloading_process(micro_batch)
                inputs = batch["input"], batch.get("attention")
                # The loss takes hidden states and output weights, so that no tensor ever holds all
                # logits. For a custom loss on whole logits: `logits = model(*inputs)`.
                with (
                    self.mixed_precision(),
                    self.sample_losses.of(micro_batch),
                    self.dataset_losses.of(micro_batch, self.measures),
                ):
                    self.watchdog.phase("forward")
                    summed_loss = model(*inputs, head=self.loss, labels_BL=batch["labels"])
                    mean_loss = summed_loss / n_tokens.clamp(min=1).float()
                    # Gradients are averaged over the ranks that see different tokens, but the loss
                    # is a sum over them.
                    self.watchdog.phase("backward")
                    (mean_loss * self.parallel_dims.gradient_degree).backward()
                loss += mean_loss.detach()

        self.watchdog.phase("gradient clipping")
        grad_norm = self.clip_gradients()

        # This is the only wait for the device. It reads the loss, the norm, and requests to stop.
        outcome = self.read_result(loss, grad_norm, n_tokens)
        if not outcome.is_taken:
            self.skip_step(outcome, micro_batches)
        elif not outcome.data_exhausted:
            self.watchdog.phase("optimizer step")
            self.optimizer.step()
            self.follow_weights()
        return outcome
