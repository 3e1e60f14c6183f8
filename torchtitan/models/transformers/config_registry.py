"""Training configurations of classes of transformers: `--module transformers --config debugmodel`, and those of
`torchtitan.models.auto` for the model in a folder, `--module transformers --config sft --hf_assets_path DIR`."""

from torchtitan.models.common.recipes import small_run
from torchtitan.models.transformers import model_registry
from torchtitan.trainer import Trainer


def transformers_debugmodel() -> Trainer.Config:
    """A small hybrid of convolutions and attention on the built-in stories, no network."""
    return small_run(model_registry("debugmodel"))


def transformers_debugmodel_dense() -> Trainer.Config:
    """A small model of attention with windows on the built-in stories, which tensor parallelism can split."""
    return small_run(model_registry("debugmodel_dense"))
