"""Configurations of this experiment: every public function without parameters is one."""

import dataclasses

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from .trainer import TemplateTrainer


def template_debugmodel() -> TemplateTrainer.Config:
    """The small Llama 3 on the built-in stories, trained by this experiment's trainer."""
    base = llama3_debugmodel()
    return TemplateTrainer.Config(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})
