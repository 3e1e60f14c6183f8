"""Configurations of this experiment: every public function without parameters is one."""

from torchtitan.models.common.recipes import small_run
from torchtitan.models.llama3 import model_registry

from .trainer import TemplateTrainer


def template_debugmodel() -> TemplateTrainer.Config:
    """Train the small Llama 3 on the built-in stories with this experiment's trainer."""
    return small_run(model_registry("debugmodel"), TemplateTrainer.Config)
