"""The trainer of direct preference optimization."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.weights.pretrained import internal_source
from torchtitan.tools.errors import UserError
from torchtitan.trainer import RunModel, Trainer


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Frozen model to which the trained model is compared."""

    path: str = ""
    """Checkpoint of the reference, in any format. Empty: the initial weights of the run."""

    offload: bool = False
    """Keep its weights in CPU memory between uses; needs FSDP."""


class DPOTrainer(Trainer):
    """Train the model to prefer chosen answers to rejected ones; see the package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A whole run of direct preference optimization."""

        beta: float = 0.1
        """Scale of the rewards; a smaller value lets the model deviate further from the reference."""

        reference: ReferenceConfig = field(default_factory=ReferenceConfig)
        """Reference model."""

        def validate(self) -> None:
            if type(self.chosen_loss) is not CrossEntropyLoss.Config:
                raise UserError("--config dpo computes log-probabilities by the cross entropy, and takes no other loss")
            if not 0 < self.beta < math.inf:
                raise UserError(f"--beta is {self.beta}, but must be above 0")
            for name in ("context", "pipeline"):
                if (degree := getattr(self.parallelism, f"{name}_parallel_degree")) > 1:
                    raise UserError(
                        f"--parallelism.{name}_parallel_degree {degree} cannot be combined with --config dpo; "
                        "set it to 1"
                    )

        def check(self, world_size: int, *, dry_run: bool = False) -> None:
            Trainer.Config.check(self, world_size, dry_run=dry_run)
            if not self.reference.path:
                return
            tokenizer = self.tokenizer.build(path=self.hf_assets_path)
            try:
                internal_source(self.reference.path, self.resolve(tokenizer).model_spec, added=tokenizer.added)
            except UserError as error:
                raise UserError(f"--reference.path: {error}") from error

    config: Config
    measures_named = ("margin", "preferred", "chosen_reward", "rejected_reward")
    sequences_per_sample = 2

    def build_models(self) -> dict[str, RunModel]:
        config = self.config
        reference = self.build_other_model(
            config.model_spec,
            weights=config.reference.path or config.checkpoint.initial_load_path,
            offloaded=config.reference.offload,
        )
        return {**super().build_models(), "reference": reference}

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch's pairs, and their number."""
        labels_PL = torch.cat([batch["chosen_labels"], batch["rejected_labels"]])
        chosen_B, rejected_B = (self.log_ratios(batch, labels_PL) * self.config.beta).chunk(2)
        is_pair_B = (batch["chosen_labels"] != IGNORE_INDEX).any(dim=1)  # excludes padding of the last batch
        margin_B, n_pairs = chosen_B - rejected_B, is_pair_B.sum()
        values = (margin_B, (margin_B > 0).float(), chosen_B, rejected_B)
        for name, values_B in zip(self.measures_named, values, strict=True):
            self.measure(name, (values_B * is_pair_B).sum(), n_pairs)
        return -(F.logsigmoid(margin_B) * is_pair_B).sum(), n_pairs

    def log_ratios(self, batch: Batch, labels_PL: Tensor) -> Tensor:
        """Return each answer's log-probability under the model minus the reference's, (2 B,): chosen, rejected."""
        # Padding follows the answers, so no mask is needed.
        tokens_PL = torch.cat([batch["chosen_input"], batch["rejected_input"]])
        of_reference, of_model = (  # the reference first, before the model stores activations for its backward pass
            self.models[name](tokens_PL, head=self.log_probabilities, labels_PL=labels_PL)
            for name in ("reference", "model")
        )
        log_ratios: Tensor = of_model - of_reference
        return log_ratios

    def log_probabilities(self, hidden_PLD: Tensor, weight_VD: Tensor, *, labels_PL: Tensor, **inputs: Any) -> Tensor:
        """Return the log-probability of each sequence's labels, (P,), computed by the loss in chunks of tokens."""
        rows = [slice(row, row + 1) for row in range(len(labels_PL))]
        return -torch.stack([self.loss(hidden_PLD[row], weight_VD, labels_PL[row], **inputs) for row in rows])
