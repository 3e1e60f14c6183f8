"""Training data: documents, their token cache, packing, and the data loaders for pre-training and
fine-tuning."""

from typing import TYPE_CHECKING

from torchtitan.components.data.sources.source import (
    ChatDataset,
    HubDataset,
    register_chat_dataset,
    register_dataset,
)
from torchtitan.tools.deferred import deferred

if TYPE_CHECKING:
    from torchtitan.components.data.base import BaseDataLoader, Batch
    from torchtitan.components.data.dataloader import PretrainDataLoader
    from torchtitan.components.data.finetuning.preference import PreferenceDataLoader
    from torchtitan.components.data.finetuning.prompts import PromptDataLoader
    from torchtitan.components.data.finetuning.sft import SFTDataLoader
    from torchtitan.components.losses.loss import IGNORE_INDEX

__getattr__ = deferred(
    __name__,
    {
        "IGNORE_INDEX": ".losses.loss",
        "BaseDataLoader": "base",
        "Batch": "base",
        "PreferenceDataLoader": "finetuning.preference",
        "PretrainDataLoader": "dataloader",
        "PromptDataLoader": "finetuning.prompts",
        "SFTDataLoader": "finetuning.sft",
    },
)

__all__ = [
    "IGNORE_INDEX",
    "BaseDataLoader",
    "Batch",
    "ChatDataset",
    "HubDataset",
    "PreferenceDataLoader",
]
__all__ += ["PretrainDataLoader", "PromptDataLoader", "SFTDataLoader", "register_chat_dataset"]
__all__ += ["register_dataset"]
