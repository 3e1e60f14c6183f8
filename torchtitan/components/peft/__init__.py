"""Parameter-efficient fine-tuning: a few trained parameters next to frozen weights."""

from torchtitan.components.peft.converter import LoRA as LoRA
from torchtitan.components.peft.converter import QLoRA as QLoRA
